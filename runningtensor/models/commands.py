"""What `runningtensor generate`, `inspect` and `export` do."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer

from runningtensor.layers.running_tensor import RunningTensor
from runningtensor.models import RunningTensorConfig, RunningTensorForCausalLM
from runningtensor.models import export as code

CONTEXTS = {"1K": 2**10, "32K": 2**15, "1M": 2**20}


def generate(model: str, prompt: str, max_new_tokens: int, temperature: float, device: str | None) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    net.generate(**inputs, **sampling, max_new_tokens=max_new_tokens, streamer=TextStreamer(tokenizer))


def export(model: str, folder: Path) -> None:
    net = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # a model may have none
        tokenizer = None
    code.export(net, folder, tokenizer)


@dataclass(frozen=True)
class Block:
    """One layer of the decoder with its MLP, and what it costs. FLOPs: a multiplication and an addition are two."""

    kind: str
    state_floats: int
    parameters: int
    flops: int  # a token that is decoded; of attention, what does not grow with the context
    flops_per_context: int  # and what does, for each token before
    cache_bytes: int  # a sequence: state in float32 and window
    cache_bytes_per_token: int

    def cache(self, tokens: int) -> int:
        return self.cache_bytes + tokens * self.cache_bytes_per_token


def blocks(config: RunningTensorConfig) -> Iterator[Block]:
    with torch.device("meta"):
        model = RunningTensorForCausalLM(config)
    for layer in model.model.layers:
        mixer = layer.mixer
        matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        parameters = sum(p.numel() for p in layer.parameters())
        if isinstance(mixer, RunningTensor):
            products = 3 if mixer.delta else 2  # with the state: to correct, to write, to read
            modes = "×".join(map(str, (*mixer.widths, mixer.value_dim)))
            window = mixer.projection.compact_width * (mixer.conv.weight.shape[1] - 1)
            yield Block(
                f"{mixer.num_heads} of {modes}",
                mixer.state_floats,
                parameters,
                2 * (matrices + products * mixer.state_floats),
                0,
                4 * mixer.state_floats + itemsize(config) * window,
                0,
            )
        else:
            kind = f"attention {config.num_attention_heads}×{config.head_dim}"
            growing = 4 * config.num_attention_heads * config.head_dim  # scores, and their sum of values
            yield Block(kind, 0, parameters, 2 * matrices, growing, 0, kv_bytes(config))


def itemsize(config: RunningTensorConfig) -> int:
    """Of keys, values and windows: as the weights are; bfloat16 where the configuration does not say."""
    return (config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16).itemsize


def kv_bytes(config: RunningTensorConfig) -> int:
    """What an attention layer keeps of a token."""
    return 2 * config.num_key_value_heads * config.head_dim * itemsize(config)


def inspect(model: str, console: Console) -> None:
    config = AutoConfig.from_pretrained(model)
    if not isinstance(config, RunningTensorConfig):
        raise SystemExit(f"{model} is of type {config.model_type!r}, not {RunningTensorConfig.model_type!r}")
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("layers", "heads", "state", "params", "FLOPs", *(f"at {name}" for name in CONTEXTS)):
        table.add_column(header, justify="left" if header in ("layers", "heads") else "right", no_wrap=True)

    def add(layers: str, kind: str, rows: list[Block]) -> None:
        total = {name: sum(getattr(row, name) for row in rows) for name in ("state_floats", "parameters", "flops")}
        growing = sum(row.flops_per_context for row in rows)
        table.add_row(
            layers,
            kind,
            short(total["state_floats"]),
            short(total["parameters"]),
            short(total["flops"]) + f"+{short(growing)}·L" * (growing > 0),
            *(size(sum(row.cache(tokens) for row in rows)) for tokens in CONTEXTS.values()),
        )

    rows = list(blocks(config))
    for block, run in groupby(enumerate(rows), key=lambda row: row[1]):  # layers in a row that are alike: one line
        places = [i for i, _ in run]
        each = f"{places[0]}–{places[-1]} each" if len(places) > 1 else str(places[0])
        add(each, block.kind, [block])
    table.add_section()
    add("all", "", rows)
    alike = replace(config, layer_types=["full_attention"] * len(rows))
    add("all if", next(blocks(alike)).kind, list(blocks(alike)))
    console.print(table)
    embeddings = short(config.vocab_size * config.hidden_size)
    console.print(
        f"Each layer with its MLP; besides, embeddings of {embeddings} parameters, "
        f"{'tied' if config.tie_word_embeddings else 'twice'}. State: floats of all heads. FLOPs: of a token decoded "
        "after L others. At 1K to 1M tokens: bytes of the cache of one sequence (K is 1024), states in float32."
    )


def replace(config: RunningTensorConfig, **changes: Any) -> RunningTensorConfig:
    return RunningTensorConfig(**{**config.to_dict(), **changes})


def short(count: float) -> str:
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}G"


def size(count: float) -> str:
    for unit in ("", "K", "M"):
        if count < 1024:
            return f"{count:.3g}{unit}"
        count /= 1024
    return f"{count:,.0f}G" if count >= 100 else f"{count:.3g}G"
