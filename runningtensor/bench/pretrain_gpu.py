"""Training throughput of the 0.6B models of the recipe `paper_600m` on this machine's NVIDIA GPU.

python -m runningtensor.bench.pretrain_gpu [--no-peers] [--resume] [--report] [--out FOLDER]

Whole steps of the engine, optimiser and all, compiled, on random tokens without the ends of documents: attention is
given no shorter sequences than it says. Gated DeltaNet is our baseline, on our kernels, not fla's. Each case has a
process of its own, and all are compiled before, side by side; what has been measured is in `pretrain_gpu.partial.csv`
at once.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from runningtensor.bench import gpu
from runningtensor.bench.gpu import SEED, Found, Measured, Verdict, console, text, verdict_table
from runningtensor.bench.provenance import Provenance, provenance, read

MODULE, CSV = "runningtensor.bench.pretrain_gpu", "pretrain_gpu.csv"
WARM_UPS, STEPS = 4, 8
TOKENS = 65_536  # of a step; half of them where the memory does not suffice
OURS, ATTENTION, GATED = "running-tensor", "attention", "gated-deltanet"


@dataclass(frozen=True)
class Case:
    implementation: str  # a model of the recipes
    length: int
    heads: int  # of RunningTensor; of the others they fix the number of parameters
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class PretrainRow(Measured):
    implementation: str
    length: int
    heads: int
    key_dim: int
    value_dim: int
    seed: int
    sequences: int = 0  # a step
    parameters: int = 0
    mlp: int = 0
    ms_a_step: float = math.nan
    tokens_a_second: float = math.nan
    mfu: float = math.nan  # of useful work, see `flops_a_token`
    peak_gib: float = math.nan
    note: str = ""

    @property
    def case(self) -> Case:
        return Case(*(getattr(self, field.name) for field in fields(Case)))


# Heads, key and value widths; 24 is the paper's, 15 is 16 with the skip slot. The MLP makes the parameters equal.
SHAPES = ((8, 15, 128), (16, 15, 64), (32, 24, 48))
MLPS = {SHAPES[2]: 3072}
LENGTHS = (4096, 16_384)
CASES = [Case(OURS, length, *shape) for shape in SHAPES for length in LENGTHS]
CASES += [Case(model, length, *SHAPES[0]) for model in (ATTENTION, GATED) for length in LENGTHS]


class Noise:
    """As `Shards`: random tokens, none of which ends a document."""

    eos = 2

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def batch(self, position: int, sequences: int, length: int, *, rank: int = 0, ranks: int = 1) -> Tensor:
        draw = torch.Generator().manual_seed(position)
        return torch.randint(self.eos + 1, self.vocab_size, (sequences, length + 1), generator=draw)


def measure(case: Case) -> Found:
    sequences = TOKENS // case.length
    try:
        return measured(case, sequences)
    except torch.OutOfMemoryError:
        if sequences == 1:
            raise
    gc.collect()  # a sharded model is a cycle, and still there
    torch.cuda.empty_cache()
    torch.compiler.reset()  # else the second shape is compiled for all shapes
    return measured(case, sequences // 2)


def recipe_of(case: Case, sequences: int) -> Any:
    from runningtensor.pretrain.recipes import paper_600m

    paper = paper_600m()
    return replace(
        paper, model=case.implementation, heads=case.heads, key_dims=(case.key_dim,) * 2, value_dim=case.value_dim,
        mlp=MLPS.get((case.heads, case.key_dim, case.value_dim), paper.mlp), seed=SEED, length=case.length,
        batch=sequences, sequences=sequences, compile=True,
    )  # fmt: skip


@contextmanager
def trainer_of(recipe: Any) -> Iterator[Any]:
    from runningtensor.pretrain.engine import Trainer, process_group

    noise: Any = Noise(recipe.vocab_size)
    with process_group(recipe) as (device, mesh):
        yield Trainer(recipe, noise, WARM_UPS + STEPS, device, mesh)


def warm(case: Case) -> None:
    """Leaves on disk what is compiled for a case: it is the same for two layers as for all."""
    with trainer_of(replace(recipe_of(case, TOKENS // case.length), layers=2)) as trainer:
        for step in range(2):
            trainer.launch(step, False)


def measured(case: Case, sequences: int) -> Found:
    from runningtensor.models.costs import flops_a_token
    from runningtensor.pretrain.progress import peak

    with trainer_of(recipe_of(case, sequences)) as trainer:
        device = trainer.device
        torch.cuda.reset_peak_memory_stats(device)
        launched = [trainer.launch(step, False) for step in range(WARM_UPS + STEPS)]
        seconds = median(step.read()[1] for step in launched[WARM_UPS:])
        (loss, *_), _ = launched[-1].read()
        if not math.isfinite(loss):
            return {"note": f"failed: the loss was {loss}"}
        speed = sequences * case.length / seconds
        work, full = 3 * flops_a_token(trainer.config, case.length), peak(device, torch.bfloat16)
        return {
            "sequences": sequences,
            "parameters": sum(p.numel() for p in trainer.parameters.values()),
            "mlp": trainer.config.intermediate_size,
            "ms_a_step": 1e3 * seconds,
            "tokens_a_second": speed,
            "mfu": math.nan if full is None else work * speed / full,
            "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        }


# The process that runs these.


def in_processes(cases: list[Case]) -> Iterator[tuple[Case, Found]]:
    for case in cases:
        yield from gpu.in_process(MODULE, [case], {})


def warm_all(cases: list[Case], progress: Progress) -> None:
    gpu.compile_families(MODULE, cases, progress, shares=1, what="the models")


def main(out: Path = Path("results/bench"), peers: bool = True, resume: bool = False) -> list[PretrainRow]:
    """Measures, prints a table and writes `pretrain_gpu.csv`."""
    path = out / CSV
    origin = provenance(torch.device("cuda"))
    console.print(f"{origin.device}, torch {origin.torch}, triton {origin.triton}, commit {origin.commit}, bfloat16")
    rows = gpu.collect(
        path,
        PretrainRow,
        [case for case in CASES if peers or case.implementation == OURS],
        gpu.measured_before((path, gpu.partial_of(path)), origin, PretrainRow) if resume else [],
        lambda case: True,
        warm_all,
        in_processes,
        partial(make_row, origin),
        one_line,
    )
    report(path)
    return rows


def make_row(origin: Provenance, case: Case, found: Found) -> PretrainRow:
    return PretrainRow(**asdict(origin), **asdict(case), seed=SEED, **gpu.rounded(found))


def name(case: Case) -> str:
    modes = f", {case.heads} heads of {case.key_dim}/{case.key_dim}/{case.value_dim}"
    return case.implementation + (modes if case.implementation == OURS else "")


def one_line(row: PretrainRow) -> str:
    numbers = f"{row.tokens_a_second:,.0f} tokens/s, MFU {100 * row.mfu:.1f}%, {row.peak_gib:.1f} GiB"
    return f"{name(row.case)}, {row.length:,} tokens: {row.note or numbers}"


def report(path: Path) -> None:
    rows = read(path, PretrainRow)
    headings = ("", "parameters", "length", "sequences", "ms a step", "tokens/s", "over attention", "MFU", "GiB", "")
    table = Table(*headings, box=SIMPLE, pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            name(row.case),
            f"{row.parameters / 1e6:,.1f}M",
            f"{row.length:,}",
            str(row.sequences),
            text(row.ms_a_step, ".1f"),
            text(row.tokens_a_second, ",.0f"),
            text(over_attention(rows, row), ".2f"),
            text(100 * row.mfu, ".1f"),
            text(row.peak_gib, ".1f"),
            row.note,
        )
    console.print(table, verdict_table(verdicts(rows)))


def over_attention(rows: list[PretrainRow], row: PretrainRow) -> float:
    """At the same length, by the same code: a file may hold rows of several runs."""
    beside = (ATTENTION, row.length, row.commit)
    same = [x.tokens_a_second for x in rows if (x.implementation, x.length, x.commit) == beside]
    return row.tokens_a_second / same[0] if same else math.nan


def verdicts(rows: list[PretrainRow]) -> list[Verdict]:
    found = []
    for row in rows:
        if row.implementation == OURS:
            wanted, ratio = {4096: 0.9, 16_384: 1.5}[row.length], over_attention(rows, row)
            what = f"{name(row.case)}, {row.length:,} tokens: "
            found.append(Verdict(what + "tokens/s over attention", f"≥ {wanted}", ratio, math.nan, ratio >= wanted))
            found.append(Verdict(what + "MFU, %", "≥ 35", 100 * row.mfu, math.nan, row.mfu >= 0.35))
    return found


if __name__ == "__main__":
    about = "Training throughput on this machine's GPU."

    def not_needed(case: Case) -> Any:
        raise ValueError("there are no kernels to choose from beforehand")

    gpu.command(about, CSV, Case, measure, not_needed, (), report, main, warm)
