"""Writing, one token after another: logits to tokens, tokens to text, and a text that can be left and gone on with."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from runningtensor.models import RunningTensorCache, RunningTensorConfig, RunningTensorForCausalLM
from runningtensor.serve.states import check_place, load_state, save_state

PIECE = 2048  # tokens of a prompt that are read at a time: bounds the memory, whatever the prompt
CONTEXT = 8  # tokens, at least, decoded again with new ones: what a token is as text depends on those before it
BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose tokens, and when to end.

    temperature:  0: always the likeliest
    top_p:        of the likeliest tokens, so many that they have this probability together
    stop:         texts that end it; they are not shown themselves
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """A token, of its logits [V]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    # The largest is taken off first: divided by a small temperature it would be infinite.
    probabilities = ((logits.double() - logits.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        likeliest = ordered.cumsum(-1) - ordered < sampling.top_p  # the first always
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered * likeliest)
    return int(probabilities.multinomial(1, generator=generator))


class Decoder:
    """The text of tokens as they come; a character that is yet to be whole is kept back.

    new:  tokens whose text was not shown yet; to be added to
    """

    def __init__(self, tokenizer: Any, before: list[int]) -> None:
        self.tokenizer = tokenizer
        self.new: list[int] = []
        # Those before them, in pieces of whole characters: a run of bytes that begins within one is broken to its end.
        # A character has four bytes at most, so of four places to begin at, one is between two of them.
        last = (before[-n:] for n in range(CONTEXT, CONTEXT + 4))
        self.context = [next((ids for ids in last if BROKEN not in self.decode(ids)), before[-1:])]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def text(self, *, ended: bool) -> str:
        before = [token for piece in self.context for token in piece]
        shown, text = self.decode(before), self.decode(before + self.new)
        if text.endswith(BROKEN) and not ended:
            return ""  # the rest of a character is to come
        text = text[len(shown) :] if text.startswith(shown) else self.decode(self.new)
        self.context.append(self.new)
        self.new = []
        while sum(map(len, self.context[1:])) >= CONTEXT:
            del self.context[0]
        return text


class Writer:
    """Draws tokens and turns them into text, until the model, a stop sequence or the length ends it.

    tokens:  drawn so far
    finish:  None, "stop" or "length", in OpenAI's words
    ended:   the text that ended it and is not shown: the model's last token, or a stop sequence
    """

    def __init__(self, tokenizer: Any, ends: set[int], sampling: Sampling, before: list[int]) -> None:
        self.tokenizer, self.ends, self.sampling = tokenizer, ends, sampling
        self.tokens: list[int] = []
        self.finish: Literal["stop", "length"] | None = None
        self.ended = ""
        self.held = ""  # may be the beginning of a stop sequence
        self.decoder = Decoder(tokenizer, before)
        self.generator = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)

    def write(self, logits: Tensor) -> str:
        """The text that a token more makes sure of; logits: [V], on the CPU."""
        token = draw(logits, self.sampling, self.generator)
        self.tokens.append(token)
        if token in self.ends:
            self.finish, self.ended = "stop", self.tokenizer.decode([token])
        elif len(self.tokens) >= self.sampling.max_new_tokens:
            self.finish = "length"
        if token not in self.ends:
            self.decoder.new.append(token)
        self.held += self.decoder.text(ended=self.finish is not None)
        found = [(self.held.find(stop), stop) for stop in self.sampling.stop if stop in self.held]
        keep = 0
        if found:
            at, _ = min(found)
            self.finish, self.ended = "stop", self.held[at:]
            keep = len(self.ended)
        elif self.finish is None:
            starts = (stop[:n] for stop in self.sampling.stop for n in range(1, len(stop)))
            keep = max((len(start) for start in starts if self.held.endswith(start)), default=0)
        sure = len(self.held) - keep
        text, self.held = self.held[:sure], self.held[sure:]
        return text


@torch.no_grad()
def read(model: RunningTensorForCausalLM, ids: list[list[int]], cache: RunningTensorCache | None) -> Tensor:
    """Reads [B,T] tokens; the logits of what comes next, [B,V], on the CPU."""
    tokens = torch.tensor(ids, device=model.device)
    out = model(tokens, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)
    return out.logits[:, -1].float().cpu()


class Session:
    """A text that goes on. What was read is in the cache; `pending` is what was not, at least the last token."""

    def __init__(self, model: RunningTensorForCausalLM, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.reset()

    def reset(self) -> None:
        self.cache = RunningTensorCache(self.model.config)
        self.pending: list[int] = []

    @property
    def tokens(self) -> int:
        """Of the text so far."""
        return self.cache.get_seq_length() + len(self.pending)

    def add(self, text: str, *, begin: bool = False) -> None:
        """Puts text after what is there; begin: with the special tokens that the tokenizer begins a text with."""
        if self.tokens:
            self.pending += encode_more(self.tokenizer, text)
        else:
            self.pending += encode(self.tokenizer, text, begin=begin)

    def read(self) -> None:
        """Reads what is pending, all but the last token."""
        if not self.pending:
            raise ValueError("prompt must have at least one token where nothing has been read, but had none")
        while len(self.pending) > 1:
            piece = self.pending[:-1][:PIECE]
            read(self.model, [piece], self.cache)
            del self.pending[: len(piece)]

    def write(self, sampling: Sampling) -> Writer:
        """A writer whose text `stream` brings."""
        return Writer(self.tokenizer, ends(self.model), sampling, self.pending)

    def stream(self, writer: Writer) -> Iterator[str]:
        """Text as it is written. It can be left after any piece, and the session goes on from there."""
        self.read()
        while writer.finish is None and writer.sampling.max_new_tokens > 0:
            (logits,) = read(self.model, [self.pending], self.cache)
            text = writer.write(logits)
            self.pending = writer.tokens[-1:]
            yield text

    def save(self, path: str | Path) -> None:
        save_state(path, self.model, self.cache, torch.tensor([self.pending]))

    def load(self, path: str | Path) -> None:
        cache, pending = load_state(path, self.model)
        if len(pending) != 1:
            raise ValueError(f"{path} must be the state of one sequence, but is of {len(pending)}")
        self.cache, self.pending = cache, pending[0].tolist()


def encode(tokenizer: Any, text: str, *, begin: bool) -> list[int]:
    return tokenizer(text, add_special_tokens=begin, return_token_type_ids=False)["input_ids"]


def encode_more(tokenizer: Any, text: str) -> list[int]:
    """Of text in the midst of a text: some tokenizers put a space before whatever they are given."""
    before, both = (encode(tokenizer, x, begin=False) for x in ("\n", f"\n{text}"))
    if both[: len(before)] == before:
        return both[len(before) :]
    return encode(tokenizer, text, begin=False)  # it begins with what a newline is one token with


def ends(model: RunningTensorForCausalLM) -> set[int]:
    """The tokens that end a text."""
    found = model.generation_config.eos_token_id
    return set() if found is None else {found} if isinstance(found, int) else set(found)


def load(model: str, device: str | None) -> tuple[RunningTensorForCausalLM, Any]:
    """A model and its tokenizer, to write with."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(model)
    if not isinstance(config, RunningTensorConfig):
        raise ValueError(
            f"{model} must be a model of type {RunningTensorConfig.model_type!r}, not {config.model_type!r}"
        )
    tokenizer = AutoTokenizer.from_pretrained(model)
    if len(tokenizer) > config.vocab_size:  # on a GPU, one token too high ends the process
        raise ValueError(
            f"{model} must have a token for each of its tokenizer's {len(tokenizer)}, not {config.vocab_size}"
        )
    return AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device).eval(), tokenizer


def generate(
    model: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    device: str | None,
    load_state: Path | None,
    save_state: Path | None,
) -> None:
    """`runningtensor generate`: of our models from a state, to a state, or both; of any without one."""
    if load_state is None and save_state is None:
        return generate_any(model, prompt, max_new_tokens, temperature, device)
    if save_state is not None:
        check_place(save_state)  # before anything is written that could not be kept
    session = Session(*load(model, device))
    if load_state is not None:
        session.load(load_state)
    session.add(prompt, begin=load_state is None)
    print(prompt, end="", flush=True)
    writer = session.write(Sampling(max_new_tokens=max_new_tokens, temperature=temperature))
    for text in session.stream(writer):
        print(text, end="", flush=True)
    print()
    if save_state is not None:
        session.save(save_state)


def generate_any(model: str, prompt: str, max_new_tokens: int, temperature: float, device: str | None) -> None:
    """By transformers' own `generate`, which needs no cache."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0}  # of all tokens, as everywhere here
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    net.generate(**inputs, **sampling, max_new_tokens=max_new_tokens, streamer=Printer(tokenizer))
    print()


class Printer(BaseStreamer):
    """Prints text as it is written. transformers' own forgets at each newline that a space may follow it."""

    def __init__(self, tokenizer: Any) -> None:
        self.decoder = Decoder(tokenizer, [])

    def put(self, value: Tensor) -> None:
        self.decoder.new += value.flatten().tolist()
        print(self.decoder.text(ended=False), end="", flush=True)

    def end(self) -> None:
        print(self.decoder.text(ended=True), end="", flush=True)
