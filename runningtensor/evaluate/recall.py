"""Recall on real text: a statement that was read is begun again, and is to be completed as it was.

A statement is a sentence of a held-out document with a name or a number that occurs once in all of the documents. Its
words up to that one are the cue, that one is the answer. A prompt is

    the text before · the statement · the text after · the cue

all of it tokens of the documents as they follow one another, so many that from the answer in the statement to the
answer to be given there are exactly `distance` tokens. Prompts of all distances have the same statements, and the
shorter are parts of the longer. The answer is right if every token of it is the likeliest: what greedy generation would
write. The control is the same prompt with more of the text before in place of the statement: what can be guessed.

The same documents give perplexity by position in the context.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress

from runningtensor.evaluate.measures import Measure, measure

VERSION = 1
DISTANCES = (256, 512, 1024, 2048, 4096, 8192, 16384)
LEAD = 128  # tokens of a prompt before the answer in the statement, the cue among them
STATEMENTS, SEQUENCES = 200, 32  # at most: of recall, of perplexity
CHARACTERS = 2**23  # of the documents that are read: about 2 million tokens
ANSWER = 32  # tokens at most
LEAST, MOST = (distance + LEAD + ANSWER for distance in (DISTANCES[0], DISTANCES[-1]))  # tokens that a model is shown
WORD = re.compile(r"\w+(?:[-'’]\w+)*")
Ints = npt.NDArray[np.int64]


# -- Text --------------------------------------------------------------------------------------------------------------


def documents(path: Path) -> list[str]:
    """Texts of a file or a folder, or of the validation split of what `runningtensor data prepare` made."""
    from runningtensor.pretrain.data import find, texts

    chosen, size = [], 0
    for text in (
        held_out(path) if (path / "meta.json").is_file() else (t for f, _ in find([str(path)]) for t in texts(f))
    ):
        if text.strip():
            chosen.append(text.strip()[: CHARACTERS - size])
            size += len(chosen[-1])
        if size >= CHARACTERS:
            break
    if not chosen:
        raise ValueError(f"texts must hold documents, but {path} has none")
    return chosen


def held_out(folder: Path) -> Iterator[str]:
    from transformers import AutoTokenizer

    from runningtensor.pretrain.data import Shards

    if not (folder / "tokenizer").is_dir():
        raise FileNotFoundError(
            f"there is no {folder / 'tokenizer'}, which would tell what the tokens of {folder} mean"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    shards = Shards(folder, "validation")
    if not shards.tokens:
        raise ValueError(f"{folder} holds out no documents: prepare it with a larger --validation")
    tokens = shards.read(0, min(shards.tokens, CHARACTERS))  # a token has at least one character, but for some bytes
    for part in np.split(tokens, np.flatnonzero(tokens == shards.eos) + 1):
        yield tokenizer.decode(part[part != shards.eos].tolist())


@dataclass(frozen=True)
class Statement:
    document: int
    start: int  # characters
    cue: int  # where the cue ends; the answer begins with the space after it
    answer: int  # where the answer ends
    end: int


def statements(texts: Sequence[str], seed: int) -> list[Statement]:
    """All statements, in an order drawn by the seed."""
    counts = Counter(word.group().lower() for text in texts for word in WORD.finditer(text))
    found = []
    for number, text in enumerate(texts):
        for sentence in re.finditer(r"\S[^\n]*?(?:[.!?](?=\s)|$|(?=\n))", text):
            words = list(WORD.finditer(text, sentence.start(), sentence.end()))
            for word in words[5:]:
                name = word.group()[0].isupper() and len(word.group()) >= 4
                rare = counts[word.group().lower()] == 1 and (name or re.fullmatch(r"\d{3,}", word.group()))
                if rare and text[word.start() - 1] == " " and text[word.start() - 2] != " ":
                    found.append(Statement(number, sentence.start(), word.start() - 1, word.end(), sentence.end()))
                    break
    random.Random(seed).shuffle(found)
    return found


# -- Tokens ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A statement in tokens, with as much of the text around it as the longest prompt has."""

    before: Ints
    cue: Ints
    answer: Ints
    rest: Ints  # of the statement
    after: Ints
    gap: Ints  # between the text after and the cue
    first: Ints  # <s>, where the tokenizer writes it

    def prompt(self, distance: int, control: bool = False) -> Ints:
        """[LEAD + distance] tokens, of which the next should be the answer."""
        said = np.concatenate((self.cue, self.answer, self.rest))
        before = LEAD - len(self.first) - len(self.cue)
        if control:
            before, said = before + len(said), said[:0]
        after = distance - len(self.cue) - len(self.answer) - len(self.rest) - len(self.gap)
        lead = self.before[len(self.before) - before :]
        return np.concatenate((self.first, lead, said, self.after[:after], self.gap, self.cue))


class Tokens:
    """The documents in the tokens of a model."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts, self.tokenizer = texts, tokenizer
        self.gap = self.encode("\n\n")
        self.documents = [self.encode(text) for text in texts]
        sample = tokenizer("a")["input_ids"]
        self.first = np.array(sample[: sample[0] == tokenizer.bos_token_id], np.int64)
        self.total = sum(len(tokens) + len(self.gap) for tokens in self.documents)

    def encode(self, text: str) -> Ints:
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)

    def example(self, statement: Statement, distance: int) -> Example | None:
        """None where tokens do not end with the words, and where the answer or the cue is somewhere else too."""
        text = self.texts[statement.document]
        said = self.encode(text[statement.start : statement.end])
        upto = self.encode(text[statement.start : statement.answer])
        cue = self.encode(text[statement.start : statement.cue])
        answer = upto[len(cue) :]
        whole = np.array_equal(said[: len(upto)], upto) and np.array_equal(upto[: len(cue)], cue)
        fits = len(said) + len(self.gap) <= DISTANCES[0] and len(cue) + len(self.first) <= LEAD
        if not whole or not fits or not 0 < len(answer) <= ANSWER:
            return None
        n = len(self.documents)
        others = [(statement.document + i) % n for i in range(1, n)]
        # A token seldom has more than 16 characters; where many do, the next document begins early.
        after = self.encode(text[statement.end : statement.end + 16 * distance])
        before = self.encode(text[max(0, statement.start - 16 * DISTANCES[0]) : statement.start])
        afters = self.joined([after, *(self.documents[i] for i in others)], distance)
        befores = self.joined([before, *(self.documents[i] for i in others[::-1])], LEAD + len(said))[::-1]
        example = Example(
            np.concatenate(befores), cue, answer, said[len(upto) :], np.concatenate(afters), self.gap, self.first
        )
        prompt, without = example.prompt(distance), example.prompt(distance, control=True)
        enough = len(prompt) == len(without) == LEAD + distance <= self.total
        once = places(prompt, answer) == [LEAD] and not places(without, answer)
        return example if enough and once and len(places(prompt, cue)) == 2 else None

    def joined(self, parts: Iterable[Ints], count: int) -> list[Ints]:
        """As many parts as have `count` tokens, with gaps after them."""
        taken: list[Ints] = []
        for part in parts:
            taken += [part, self.gap]
            if (count := count - len(part) - len(self.gap)) <= 0:
                break
        return taken

    def windows(self, length: int, count: int) -> Ints:
        """[≤ count, length]: the documents one after another, each window beginning with <s> where there is one."""
        step = length - len(self.first)
        stream = np.concatenate(self.joined(self.documents, step * count))
        rows = [stream[i * step : (i + 1) * step] for i in range(min(count, len(stream) // step))]
        return np.stack([np.concatenate((self.first, row)) for row in rows])


def places(tokens: Ints, part: Ints) -> list[int]:
    """Where a part begins in tokens."""
    starts = np.flatnonzero(tokens[: len(tokens) - len(part) + 1] == part[0])
    return [int(i) for i in starts if np.array_equal(tokens[i : i + len(part)], part)]


# -- Models ------------------------------------------------------------------------------------------------------------


def identity(texts: Sequence[str], seed: int) -> dict[str, Any]:
    """What a result follows from, besides the model and what it is shown."""
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "replace"))
    return {"version": VERSION, "data": digest.hexdigest()[:16], "seed": seed}


def run(
    model: Any, tokenizer: Any, texts: Sequence[str], *, shown: int, limit: int | None, batch: int, seed: int
) -> dict[str, Measure]:
    """recall/distance, control/distance, and perplexity/end of positions, which begin where the last ones end."""
    tokens = Tokens(texts, tokenizer)
    distances = [d for d in DISTANCES if d + LEAD + ANSWER <= min(shown, tokens.total)]
    examples: list[Example] = []
    for statement in statements(texts, seed) if distances else ():
        if example := tokens.example(statement, distances[-1]):
            examples.append(example)
        if len(examples) == min(limit or STATEMENTS, STATEMENTS):
            break
    if not examples:
        raise ValueError(
            f"texts must hold {LEAST} tokens or more, and sentences with names or numbers that occur once, "
            f"but of {tokens.total:,} tokens none can be asked for"
        )
    windows = tokens.windows(distances[-1], min(limit or SEQUENCES, SEQUENCES))
    measures = {}
    work = 2 * sum(distances) * len(examples) + windows.size
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("recall", total=work)
        for distance, kind in product(distances, ("recall", "control")):
            progress.update(bar, description=f"{kind} after {distance:,} tokens")
            right = []
            for i in range(0, len(examples), batch):
                part = examples[i : i + batch]
                prompts = np.stack([example.prompt(distance, kind == "control") for example in part])
                right += recalled(model, prompts, [example.answer for example in part])
                progress.advance(bar, distance * len(part))
            measures[f"{kind}/{distance}"] = measure(kind, right)
        progress.update(bar, description="perplexity by position")
        losses = []
        for window in windows:
            losses.append(position_losses(model, window))
            progress.advance(bar, len(window))
    for begin, end in zip((0, *distances[:-1]), distances, strict=True):
        likelihoods = [
            -float(loss[max(0, begin - 1) : end - 1].mean()) for loss in losses
        ]  # of tokens from the second on
        measures[f"perplexity/{end}"] = measure("perplexity", likelihoods)
    return measures


@torch.no_grad()
def recalled(model: Any, prompts: Ints, answers: Sequence[Ints]) -> list[bool]:
    """Whether every token of the answer is the likeliest, of prompts that are all of the same length."""
    keeps = "logits_to_keep" in signature(model.forward).parameters
    width = max(map(len, answers))
    # Zeros after the answers: a model that reads from left to right does not see them where it matters.
    tails = np.stack([np.pad(answer, (0, width - len(answer))) for answer in answers])
    ids = torch.from_numpy(np.concatenate((prompts, tails[:, :-1]), 1)).to(model.device)
    logits = model(ids, use_cache=False, **({"logits_to_keep": width} if keeps else {})).logits[:, -width:]
    said = logits.argmax(-1).cpu().numpy()
    return [np.array_equal(row[: len(answer)], answer) for row, answer in zip(said, answers, strict=True)]


@torch.no_grad()
def position_losses(model: Any, window: Ints) -> npt.NDArray[np.float64]:
    """[length − 1]: losses of all tokens but the first."""
    ids = torch.from_numpy(window)[None].to(model.device)
    logits = model(ids[:, :-1], use_cache=False).logits[0]
    parts = zip(logits.split(1024), ids[0, 1:].split(1024), strict=True)  # in float32 only a part at a time
    losses = [torch.nn.functional.cross_entropy(x.float(), y, reduction="none") for x, y in parts]
    return torch.cat(losses).double().cpu().numpy()
