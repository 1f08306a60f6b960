"""Writes the tables of README.md and docs/*.md: all between `<!-- name -->` and `<!-- end -->` is made from results/.

python docs/tables.py, or make tables. What has no results yet is empty, its heading included. Figures of models that
were pretrained are drawn anew.
"""

import io
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from runningtensor.bench import errors, layers_gpu, ops, ops_gpu, pretrain_gpu, provenance
from runningtensor.bench.pretrain_gpu import ATTENTION, GATED, OURS
from runningtensor.mqar import demo, grids, report, sweep
from runningtensor.mqar.record import Result, identity
from runningtensor.plots import plot_evaluation, plot_pretraining
from runningtensor.pretrain import progress
from runningtensor.pretrain.recipes import Recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"<!-- (\w+) -->(?:(?!<!--).)*<!-- end -->", re.DOTALL)
VARIED = 800  # steps of the longest runs of RunningTensor changed
Text = tuple[str, str, Sequence[Any]]  # a table, what is said after it, and the rows it is made from


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(cells)} |".replace("  ", " ") for cells in (headings, *lines)]
    return "\n".join([rows[0], "|---" * len(headings) + "|", *rows[1:]])


def source(file: str, rows: Sequence[Any]) -> str:
    origins = [getattr(row, "origin", None) or vars(row) for row in rows]
    origins = [x for x in origins if "device" in x]  # a run whose process died does not say
    devices = [x["device"] + ("" if "NVIDIA" in x["device"] else f" ({x['cores']} cores)") for x in origins]
    found = (devices, *([x[name] for x in origins] for name in ("torch", "commit")))
    return "From `results/{}`: {}, torch {}, commit {}.".format(file, *(", ".join(dict.fromkeys(x)) for x in found))


def scientific(x: float, digits: int) -> str:
    return f"{x:.{digits}e}".replace("e-0", "e-")


def times(rows: Sequence[Any], *columns: str) -> list[str]:
    """Milliseconds, a row's columns with strokes between them; the shortest of a column is bold."""
    texts = [[f"{x:.2f}" if x < 20 else f"{x:.1f}" for x in (getattr(row, c) for c in columns)] for row in rows]
    best = [min((x for x in column if x != "nan"), key=float, default="") for column in zip(*texts, strict=True)]
    bold = [[f"**{x}**" if x == y and len(rows) > 1 else x for x, y in zip(row, best, strict=True)] for row in texts]
    return [" / ".join(row).replace("nan", "–") for row in bold]


def both_clocks(rows: Sequence[Any]) -> list[tuple[str, str]]:
    """Forward / both ways, as Python sees it and of the GPU alone."""
    return list(zip(times(rows, "ms_forward", "ms_total"), times(rows, "gpu_ms_forward", "gpu_ms_total"), strict=True))


def ops_cpu(rows: list[provenance.Row]) -> Text:
    at = {(row.implementation, row.T): row for row in rows}
    ours, longer = at[ops.OURS, ops.T], at[ops.OURS, ops.LONG]
    names = {
        ops.OURS: "`running_tensor`",
        ops.PEER: "transformers' chunked delta rule on multiplied-out keys",
        ops.PEER_KEEPING: "the same, with malloc told to keep memory",
        ops.RECURRENT: "the recurrence, step by step",
    }
    lines = []
    for row in (at[name, ops.T] for name in names):
        time, memory = row.ms_total / ours.ms_total, row.extra_peak_mib / ours.extra_peak_mib
        sizes = f"{row.ms_total:,.0f} ms", f"{time:.3g}×", f"{row.extra_peak_mib:,.0f} MiB", f"{memory:.3g}×"
        lines.append((names[row.implementation], *sizes))
    more = (
        "The second row is what one sees; the third is what its arithmetic costs, for most of the difference is page "
        f"faults. From {ops.T:,} to {ops.LONG:,} tokens our time grew {longer.ms_total / ours.ms_total:.1f} times and "
        f"our memory {longer.extra_peak_mib / ours.extra_peak_mib:.1f} times."
    )
    return table((f"T = {ops.T}", "time", "", "extra memory", ""), lines), more, rows


def ops_on_gpu(rows: list[ops_gpu.GpuRow]) -> Text:
    at = {row.case: row for row in rows}
    names = {
        ops_gpu.GATED: "Gated DeltaNet, {0.K}×{0.V} (fla {0.version})",
        ops_gpu.DELTA: "DeltaNet, {0.K}×{0.V} (fla {0.version})",
        ops_gpu.POWER: "power retention {0.version}, degree 2, {0.K}×{0.V}",
        ops_gpu.SDPA: "attention, {0.H} heads of {0.K}",
    }
    lines = []
    for group in (ops_gpu.SHORT, ops_gpu.MEDIUM, ops_gpu.MANY_HEADS, ops_gpu.SQUARE, ops_gpu.CURVES[-1]):
        (mine, ours), *others = zip(
            found := [at[case] for case in group if case in at], both_clocks(found), strict=True
        )
        beside = [(names[x.implementation].format(x), *cells) for x, cells in others] or [("", "", "")]
        rate = f"{ops_gpu.rate(mine, mine.ms_forward):.0f}"
        lines.append((ops_gpu.shape(mine.case), rate, *ours, *("<br>".join(x) for x in zip(*beside, strict=True))))
    large, first_call = at[ops_gpu.MANY_HEADS[0]], at[ops_gpu.COMPILING[0]]
    step, copy = (at[case] for case in ops_gpu.DECODING)
    share = ops_gpu.rate(step, 1) / ops_gpu.rate(copy, 1)  # of what is moved; a rate is that by time
    more = (
        f"B{large.B} T{large.T} H{large.H} needs {large.extra_peak_mib / 1024:.1f} GiB above its inputs and gradients, "
        f"in proportion to T. Its first call compiles for {first_call.ms_total / 1e3:.0f} s. A decoding step of "
        f"{step.B} sequences moves the state at {share * copy.ms_forward / step.ms_forward:.0%} of the bandwidth of a "
        f"copy, {share * copy.gpu_ms_forward / step.gpu_ms_forward:.0%} without Python."
    )
    return table(("", "TFLOP/s", "ours", "the GPU alone", "beside it", "its time", "the GPU alone"), lines), more, rows


def largest_errors(rows: list[errors.Row]) -> Text:
    rows = [row for row in rows if row.backend == errors.KERNELS]

    def line(name: str, gradients: bool) -> tuple[str, ...]:
        mine = [row for row in rows if (row.tensor in ("out", "final_state")) != gradients]
        return name, *(scientific(max(x.error for x in mine if x.dtype == dtype), 1) for dtype in dtypes)

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    return table(("", *dtypes), (line("outputs and states", False), line("gradients", True))), "", rows


def layers(rows: list[layers_gpu.LayerRow]) -> Text:
    at = {row.case: row for row in rows if row.task == layers_gpu.LAYER}
    lines = []
    for mine, *_, theirs in ([at[case] for case in group] for group in layers_gpu.LAYERS):
        heads = f"{mine.H} heads" + ("" if mine.H == theirs.H else f", theirs {theirs.H} of {theirs.K}×{theirs.V}")
        (ours, alone), others = both_clocks([mine, theirs])
        lines.append((f"{mine.D:,} wide, B{mine.B} T{mine.T}, {heads}", ours, alone, *others))
    return table(("", "ours", "the GPU alone", f"fla {theirs.version}", "the GPU alone"), lines), "", list(at.values())


def decoding(rows: list[layers_gpu.LayerRow]) -> Text:
    at = {row.case: row for row in rows if row.task == layers_gpu.DECODE}
    lines = []
    for B, groups in layers_gpu.DECODING.items():
        found = zip(*(times([at[case] for case in group], "ms_forward") for group in groups), strict=True)
        for name, cells in zip(("RunningTensor", "attention"), found, strict=True):
            lines.append(
                (f"{name}, {B} sequence{'s' * (B > 1)}", *(cell.replace("–", "does not fit") for cell in cells))
            )
    return table(("", *(f"after {context:,} tokens" for context in layers_gpu.CONTEXTS)), lines), "", list(at.values())


def throughput(rows: list[pretrain_gpu.PretrainRow]) -> Text:
    lines = []
    for row in rows:
        name = pretrain_gpu.name(row.case)
        if row.failed:
            lines.append((name, "", f"{row.length:,}", row.note, *[""] * 4))
            continue
        size = f"{row.parameters / 1e6:,.0f}M", f"{row.sequences} × {row.length:,}"
        over = f"{pretrain_gpu.over_attention(rows, row):.2f}×".replace("nan×", "")
        days = f"{1e11 / row.tokens_a_second / 86400:.1f} days"
        speed = f"{row.tokens_a_second:,.0f}", over, f"{row.mfu:.1%}", f"{row.peak_gib:.0f} GiB", days
        lines.append((name, *size, *speed))
    headings = ("", "parameters", "a step", "tokens a second", "over attention", "MFU", "memory", "100BT")
    more = (
        "`runningtensor bench pretrain`: whole steps of `paper_600m` on one GPU, compiled, on random tokens. The last "
        "column is what 10¹¹ tokens take at that speed on this one GPU; on many, divide by their number and add what "
        "they wait for each other, which was not measured. A ratio is to attention by the same code. "
        "Gated DeltaNet is ours, on our kernels: flash-linear-attention's are faster."
    )
    return f"## How fast\n\n{table(headings, lines)}", more, rows


@dataclass(frozen=True)
class Pretrained:
    """A folder of results/pretrain: the run's log and, where it was evaluated, its recall."""

    name: str
    lines: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]

    @property
    def origin(self) -> dict[str, Any]:
        return self.lines[0]["origin"]

    @property
    def last(self) -> int:
        return self.lines[-1]["step"]

    @property
    def losses(self) -> dict[int, float]:
        """Of validation, by step."""
        return {x["step"]: x["validation_loss"] for x in self.lines if "validation_loss" in x}

    @staticmethod
    def read(folder: Path) -> "list[Pretrained]":
        logs = sorted(folder.glob(f"*/{progress.LOG}"))
        others = [log.with_name("recall.json") for log in logs]
        found = [json.loads(other.read_text())["results"] if other.exists() else [] for other in others]
        return [Pretrained(x.parent.name, progress.read(x), y) for x, y in zip(logs, found, strict=True)]


def pretrained(rows: list[Pretrained]) -> Text:
    """Validation losses of those that were trained to the end, and what they recall."""
    whole = trained(rows)
    steps, places = (200, 400, 800, whole[0].last), (256, 2048, 16_384)
    lines = []
    for row in whole:
        measures = {name: found["value"] for name, found in row.evaluated[0]["measures"].items()}
        recalled = " / ".join(f"{measures[f'recall/{n}']:.1%} ({measures[f'control/{n}']:.1%})" for n in places[:2])
        perplexities = " / ".join(f"{measures[f'perplexity/{n}']:.1f}" for n in places)
        lines.append((row.name, *(f"{row.losses[step]:.3f}" for step in steps), recalled, perplexities))
    headings = (
        "",
        *(f"after {step:,} steps" for step in steps),
        "recalled (guessed) after 256 / 2,048 tokens",
        "perplexity at 256 / 2,048 / 16,384",
    )
    return table(headings, lines), "", rows


def trained(rows: list[Pretrained]) -> list[Pretrained]:
    """Those that were evaluated, the best first."""
    return sorted((row for row in rows if row.evaluated), key=lambda row: row.losses[row.last])


def varied(rows: list[Pretrained]) -> list[Pretrained]:
    """RunningTensor as it is and changed, with two others to see it beside, all as far as the changed ones went."""
    rows = [row for row in rows if row.name.startswith(OURS) or row.name in (ATTENTION, GATED)]
    rows = [replace(row, lines=[x for x in row.lines if x.get("step", 0) <= VARIED]) for row in rows]
    return sorted(rows, key=lambda row: row.losses[100], reverse=True)


def variants(rows: list[Pretrained]) -> Text:
    steps, lines = (100, 200, 300, 400, VARIED), []
    for row in (rows := varied(rows)):
        recipe = Recipe(**row.lines[0]["recipe"])
        widths = "/".join(map(str, (*recipe.key_dims, recipe.value_dim)))
        ours = f"{recipe.heads} of {widths}", recipe.projection, recipe.forget
        losses = (f"{row.losses[step]:.3f}" if step in row.losses else "" for step in steps)
        lines.append((recipe.model, *(ours if recipe.model == OURS else [""] * 3), *losses))
    headings = ("", "heads", "`projection`", "`forget`", *(f"after {step} steps" for step in steps))
    return table(headings, lines), "", rows


def pretrained_short(rows: list[Pretrained]) -> Text:
    rows = trained(rows)
    lines = [(row.name, f"{row.losses[row.last]:.3f}") for row in rows]
    tokens = rows[0].lines[-1]["tokens"]
    headings = ("50M parameters", f"validation loss after {tokens / 1e6:.0f}M tokens of text")
    return table(headings, lines), "", rows


def race(rows: list[demo.Row]) -> Text:
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        *_, last = mine = [row for row in rows if row.model == model]
        good = next((f"{row.step} steps" for row in mine if row.accuracy >= demo.GOOD), "–")
        lines.append((model, f"{last.parameters:,}", f"{last.state_floats:,}", good, f"{last.accuracy:.1%}"))
    took = "{} min {} s".format(*divmod(round(max(row.seconds for row in rows)), 60))
    headings = ("", "parameters a layer", "state", f"{demo.GOOD:.0%} after", f"after {last.step} steps, {took}")
    return table(headings, lines), "", rows


def planned(name: str, results: list[Result]) -> list[Result]:
    wanted = {identity(run) for cell in grids.GRIDS[name]() for run in cell.runs}
    return [result for result in results if identity(result.run) in wanted]  # not those of another protocol or grid


def recall(results: list[Result]) -> Text:
    results, lines = planned("table1", results), []
    summaries = report.summarize("table1", grids.table1(), results)
    for row, cells in report.rows(summaries).items():
        found = ["not run" if x.best is None else f"{x.best:.2f}" for x in cells]
        paper = ["" if x.published is None else f" ({x.published:.1f})" for x in cells]
        lines.append((row, *report.sizes(cells), *map("".join, zip(found, paper, strict=True))))
    runs = [x.runs for x in summaries]
    more = (
        "Micro-F1 in percent, of 64 pairs; in brackets the paper's. A number is the best of the runs so far, "
        f"{min(runs)} to {max(runs)} of {summaries[0].planned}; the first that reaches 99.95 ends them. State: numbers "
        "that a layer keeps for a sequence."
    )
    headings = ("", "parameters a layer", "state", *(f"{length:,} tokens" for length in grids.LENGTHS))
    return table(headings, lines), more, results


def done(results: list[Result]) -> Text:
    """How much of the paper's grids there is."""
    titles = {"table1": "Table 1", "table2": "Table 2", "capacity": "recall against size"}
    lines, used = [], {}
    for name, title in titles.items():
        grid, found = grids.GRIDS[name](), {identity(result.run): result for result in results if result.curve}
        wanted = {identity(run) for cell in grid for run in cell.runs}
        mine = {key: result for key, result in found.items() if key in wanted}
        cells = report.summarize(name, grid, [*mine.values()])
        begun = sum(x.best is not None for x in cells)
        complete = sum((x.best or 0) >= 100 * grids.GOOD_ENOUGH for x in cells)
        lines.append((title, f"{len(mine)} of {len(wanted)}", f"{begun} of {len(cells)}", str(complete)))
        used |= mine
    headings = ("", "runs", "cells with a run", "cells with one of 99.95, which need no more")
    return table(headings, lines), "", [*used.values()]


def reported(name: str, title: str, results: list[Result]) -> Text:
    """As `runningtensor mqar report` has it, with its figure."""
    printed, results = io.StringIO(), planned(name, results)
    summaries = report.summarize(name, grids.GRIDS[name](), results, sweep.read(RESULTS / "mqar/speed.jsonl"))
    report.show(name, summaries, Console(file=printed, width=1000, force_terminal=False), markdown=True)
    lines, _, legend = printed.getvalue().partition("\n\n")
    figure = f"\n\n![{title}](../results/mqar/{name}.png)" if (RESULTS / f"mqar/{name}.png").exists() else ""
    return f"## {title}\n\n" + lines + figure, legend, results


def calibration(results: list[Result]) -> Text:
    """A line for runs that differ in learning rate and seed alone; other settings have a column where they differ."""
    rows = {(mixer, str(options)): name for name, (mixer, options) in grids.TABLE1.items()}
    found: dict[tuple[tuple[str, str], ...], dict[float, str]] = {}
    for x in sorted((x for x in results if x.curve), key=lambda x: x.run.seed):
        run, curve = x.run, [100 * point.accuracy for point in x.curve]
        model = rows.get((run.mixer, str(run.options))) or rows[run.mixer, "{}"]  # of a small task, smaller heads
        paper = report.published("table1", model, run.test.length)
        settings = {
            "": model,
            "the paper": "" if paper is None else paper,
            **vars(run),
            **vars(run.test),
            "tasks": len(run.tasks),
        }
        settings["matrix_std"] = run.matrix_std or "as layers draw them"
        for name in ("mixer", "options", "lr", "seed", "test", "also", "test_every"):  # said otherwise, or no matter
            del settings[name]
        key = tuple((name.replace("_", " "), str(value)) for name, value in settings.items())
        rising = ", rising" if curve[-1] == max(curve) > curve[-2:][0] + 0.5 else ""
        cells = found.setdefault(key, {})
        cells[run.lr] = (f"{cells[run.lr]}; " if run.lr in cells else "") + f"{max(curve):.2f}{rising}"
    rates = sorted({lr for cells in found.values() for lr in cells}, reverse=True)
    shown = [i for i, pairs in enumerate(zip(*found, strict=True)) if i == 0 or len(set(pairs)) > 1]
    headings = [*(next(iter(found))[i][0] for i in shown), *(scientific(lr, 0) for lr in rates)]
    lines = [
        [*(key[i][1] for i in shown), *(cells.get(lr, "") for lr in rates)] for key, cells in sorted(found.items())
    ]
    seeds = "" if len({x.run.seed for x in results}) == 1 else "Several numbers: one for each seed. "
    more = f"What is no column was the same in all. {seeds}Rising: by more than half a point in the last test."
    return table(headings, lines), more, results


def gates(results: list[Result]) -> Text:
    """A column a learning rate, in it every seed."""
    found = {identity(result.run): result for result in results}
    rates = sorted(grids.SMALL.learning_rates, reverse=True)
    lines, used = [], list[Result]()
    for cell in grids.gate():
        mine = [x for run in cell.runs if (x := found.get(identity(run)))]
        used += mine
        lines.append(
            (cell.row, *("; ".join(f"{100 * x.accuracy:.1f}" for x in mine if x.run.lr == lr) for lr in rates))
        )
    more = f"Micro-F1 in percent, of each seed the best test; runs end at {100 * grids.SMALL_ENOUGH:g}."
    return table(("", *(scientific(lr, 0) for lr in rates)), lines), more, used


def csv(kind: type) -> Callable[[Path], list[Any]]:
    return partial(provenance.read, kind=kind)


TABLES: dict[str, tuple[str, Callable[[Path], list[Any]], Callable[[Any], Text]]] = {  # file, its reader, what is made
    "demo": ("mqar/demo.csv", csv(demo.Row), race),
    "recall": ("mqar/table1.jsonl", sweep.known, recall),
    "progress": ("mqar/table1.jsonl", sweep.known, done),
    "ops_cpu": ("bench/ops_cpu.csv", csv(provenance.Row), ops_cpu),
    "ops_gpu": ("bench/ops_gpu.csv", csv(ops_gpu.GpuRow), ops_on_gpu),
    "errors": ("bench/errors_gpu.csv", csv(errors.Row), largest_errors),
    "layers": ("bench/layers_gpu.csv", csv(layers_gpu.LayerRow), layers),
    "decoding": ("bench/layers_gpu.csv", csv(layers_gpu.LayerRow), decoding),
    "throughput": ("bench/pretrain_gpu.csv", csv(pretrain_gpu.PretrainRow), throughput),
    "pretrained": ("pretrain/50m", Pretrained.read, pretrained),
    "variants": ("pretrain/50m", Pretrained.read, variants),
    "pretrained_short": ("pretrain/50m", Pretrained.read, pretrained_short),
    "calibration": ("mqar/calibration.jsonl", sweep.read, calibration),
    "initialisation": ("mqar/initialisation.jsonl", sweep.read, calibration),
    "gate": ("mqar/gate.jsonl", sweep.read, gates),
    "table1": ("mqar/table1.jsonl", sweep.known, partial(reported, "table1", "Table 1")),
    "table2": ("mqar/table2.jsonl", sweep.known, partial(reported, "table2", "Table 2")),
    "changes": ("mqar/changes.jsonl", sweep.known, partial(reported, "changes", "One change at a time")),
    "capacity": (
        "mqar/capacity.jsonl",
        sweep.known,
        partial(reported, "capacity", "Recall against the size of the state"),
    ),
    "sizes": ("mqar/sizes.jsonl", sweep.known, partial(reported, "sizes", "The same on a CPU")),
}


def made(place: re.Match[str]) -> str:
    file, read, text = TABLES[place[1]]
    path = RESULTS / file
    rows = read(path) if path.exists() else []
    shown, more, used = text(rows) if rows else ("", "", [])
    where = str(Path(file).parent) if read is sweep.known else file  # which has those of other grids
    last = "\n".join(filter(None, (textwrap.fill(more, 124), used and source(where, used))))
    return f"<!-- {place[1]} -->" + (f"\n{shown}\n\n{last} " if used else "") + "<!-- end -->"


def filled(page: str) -> str:
    return PLACE.sub(made, page)


if __name__ == "__main__":
    for page in PAGES:
        if (text := filled(before := page.read_text())) != before:
            page.write_text(text)
            print(f"wrote {page.relative_to(ROOT)}")
    shown = trained(runs := Pretrained.read(RESULTS / "pretrain/50m"))
    plot_pretraining({row.name: row.lines for row in shown}, RESULTS / "pretrain/50m.png")
    drawn = [row for row in varied(runs) if row.last == VARIED]
    plot_pretraining({row.name: row.lines for row in drawn}, RESULTS / "pretrain/50m-variants.png")
    plot_evaluation({row.name: row.evaluated for row in shown}, RESULTS / "pretrain/50m-recall.png")
