"""What `runningtensor inspect` and `export` do."""

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from runningtensor.models import RunningTensorConfig
from runningtensor.models import export as code
from runningtensor.models.configuration_running_tensor import attention_of
from runningtensor.models.costs import Block, blocks

CONTEXTS = {"1K": 2**10, "32K": 2**15, "1M": 2**20}


def export(model: str, folder: Path) -> None:
    net = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # a model may have none
        tokenizer = None
    code.export(net, folder, tokenizer)


def inspect(model: str, console: Console) -> None:
    config = AutoConfig.from_pretrained(model)
    if not isinstance(config, RunningTensorConfig):
        raise SystemExit(f"{model} is of type {config.model_type!r}, not {RunningTensorConfig.model_type!r}")
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("layers", "heads", "state", "params", "FLOPs", *(f"at {name}" for name in CONTEXTS)):
        table.add_column(header, justify="left" if header in ("layers", "heads") else "right", no_wrap=True)

    def add(layers: str, kind: str, rows: list[Block], cached: bool = config.has_cache) -> None:
        total = {name: sum(getattr(row, name) for row in rows) for name in ("state_floats", "parameters", "flops")}
        growing = sum(row.flops_per_context for row in rows)
        table.add_row(
            layers,
            kind,
            short(total["state_floats"]),
            short(total["parameters"]),
            short(total["flops"]) + f"+{short(growing)}·L" * (growing > 0),
            *(size(sum(row.cache(tokens) for row in rows)) if cached else "–" for tokens in CONTEXTS.values()),
        )

    rows = list(blocks(config))
    for block, run in groupby(enumerate(rows), key=lambda row: row[1]):  # layers in a row that are alike: one line
        places = [i for i, _ in run]
        each = f"{places[0]}–{places[-1]} each" if len(places) > 1 else str(places[0])
        add(each, block.kind, [block])
    table.add_section()
    add("all", "", rows)
    heads = {} if "full_attention" in config.layer_types else attention_of(config.hidden_size)
    alike = replace(config, layer_types=["full_attention"] * len(rows), **heads)
    add("all if", next(blocks(alike)).kind, list(blocks(alike)), cached=True)
    console.print(table)
    embeddings = short(config.vocab_size * config.hidden_size)
    without = "" if config.has_cache else f" A model of {config.mixer} has none."
    console.print(
        f"Each layer with its MLP; besides, embeddings of {embeddings} parameters, "
        f"{'tied' if config.tie_word_embeddings else 'twice'}. State: floats of all heads. FLOPs: of a token decoded "
        "after L others. At 1K to 1M tokens: bytes of the cache of one sequence (K is 1024), states in float32."
        + without
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
