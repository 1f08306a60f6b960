"""The tables: what the paper says beside what was found, and their figures. What was not run is shown as not run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from rich.box import MARKDOWN, SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runningtensor.mqar import grids
from runningtensor.mqar.grids import GRIDS, LENGTHS, OF_LAYERS, TIMED_TOKENS, Cell, with_row
from runningtensor.mqar.record import Result, Run, identity
from runningtensor.mqar.sweep import known, read


class Published(NamedTuple):
    f1: tuple[float, float, float]  # in percent, at 1024, 2048 and 4096 tokens
    parameters: str = ""  # a layer
    ms_a_step: float | None = None  # of a GPU that is not named


TABLE1 = {  # as the next from the paper
    "Attention": Published((100.0, 99.9, 100.0), "934k", 333.5),
    "Gated DeltaNet": Published((78.3, 57.2, 48.1), "249k", 261.0),
    "Mamba-2": Published((0.6, 0.1, 0.0), "284k", 252.5),
    "GLA": Published((0.1, 1.9, 0.0), "216k", 267.2),
    "DeltaNet": Published((98.5, 94.5, 100.0), "249k", 355.7),
    "RunningTensor": Published((100.0, 100.0, 100.0), "176k", 311.9),
}
TABLE2 = {
    "tensor + ConcOnlyC + ξ + Δ + g_out@t": Published((100.0, 100.0, 100.0), "176k", 311.9),
    "tensor + ConcOnlyC + Δ + g_out@t": Published((99.9, 100.0, 100.0), "176k", 322.0),
    "tensor + ConcOnlyC + ξ + g_out@t": Published((98.9, 99.0, 97.9), "176k", 257.2),
    "tensor + ConcOnlyC + Δ": Published((99.7, 100.0, 100.0), "175k", 313.7),
    "tensor + ConcOnlyC": Published((99.4, 96.2, 99.8), "175k", 284.7),
    "tensor + ConcOnly": Published((81.5, 75.0, 81.3), "175k", 275.4),
    "tensor + OneLinear": Published((97.2, 98.2, 54.2), "275k", 254.2),
    "matrix + ConcOnlyC": Published((41.4, 22.7, 27.7), "175k", 281.0),
    "matrix + ConcOnly": Published((44.3, 4.9, 13.0), "175k", 268.6),
    "matrix + OneLinear": Published((51.4, 10.0, 19.0), "249k", 260.6),
}
CAPACITY = {  # not the paper's: others', at 131,072 floats of state
    "Gated DeltaNet, 131k state": Published((96.9, 47.6, 7.3)),
    "Flash-VQG, 131k state": Published((95.3, 70.4, 32.6)),
}
PUBLISHED = {
    "table1": TABLE1,
    "table2": TABLE2,
    "capacity": CAPACITY,
    "calibration": TABLE1,
    "changes": {f"{row} · as it stands": known for row, known in TABLE1.items()},
    "speed": {},
}


@dataclass(frozen=True)
class Summary:
    """A cell and what is known of it; None: nothing. Accuracies are in percent."""

    row: str
    length: int
    published: float | None = None
    best: float | None = None  # micro-F1, over learning rates and seeds
    macro_f1: float | None = None  # of the same test as the best
    lr: float | None = None  # of the best
    seeds: tuple[float, ...] = ()  # of each seed, at that learning rate
    ms_a_step: float | None = None
    parameters: int | None = None  # a layer
    state_floats: int | None = None
    runs: int = 0
    failed: int = 0
    planned: int = 0


def published(name: str, row: str, length: int) -> float | None:
    known = said(name, row)
    return known.f1[LENGTHS.index(length)] if known and length in LENGTHS else None


def said(name: str, row: str) -> Published | None:
    known = PUBLISHED[name]
    return known.get(row) or known.get(row.partition(" · ")[0])  # what follows the dot is a variant of the protocol


def summarize(
    name: str, cells: Sequence[Cell], results: Sequence[Result], timed: Sequence[Result] = ()
) -> list[Summary]:
    """timed: runs whose times count; those of the results are of other steps, and often had company."""
    found = {identity(result.run): result for result in results}
    return [
        summary(name, cell, [found[key] for run in cell.runs if (key := identity(run)) in found], timed)
        for cell in cells
    ]


def summary(name: str, cell: Cell, results: Sequence[Result], timed: Sequence[Result] = ()) -> Summary:
    paper = published(name, cell.row, cell.length)
    scored = [(result, score) for result in results if (score := result.at(cell.length)) is not None]
    counts: dict[str, Any] = {
        "runs": len(results),
        "failed": sum(bool(result.failed) for result in results),
        "planned": len(cell.runs),
    }
    if not scored:
        return Summary(cell.row, cell.length, paper, **counts)
    best, score = max(scored, key=lambda both: both[1].accuracy)
    same = [100 * score.accuracy for result, score in scored if result.run.lr == best.run.lr]
    clocked = [x for x in timed if like(x.run, best.run) and x.origin.get("device") == best.origin.get("device")]
    # An interrupted run may have had company before.
    alone = [x for x in clocked if x.origin.get("at_once", 1) == 1 and "interrupted" not in x.origin]
    times = [x.ms_a_step for x in alone if x.ms_a_step is not None]
    return Summary(
        cell.row,
        cell.length,
        paper,
        100 * score.accuracy,
        100 * score.macro_f1,
        best.run.lr,
        tuple(same),
        median(times) if times else None,
        best.parameters,
        best.state_floats,
        **counts,
    )


def like(run: Run, other: Run) -> bool:
    """Whether as many tokens take both as long, in the test's length."""
    return all(getattr(run, x) == getattr(other, x) for x in ("mixer", "options", "test", "dtype"))


def with_others(cells: Sequence[Cell], results: Sequence[Result]) -> list[Cell]:
    """And a row for each other layer that has runs like those of the cells."""
    more, rows = [*cells], [(run.mixer, run.options) for cell in cells for run in cell.runs]
    known_runs = {identity(run) for cell in cells for run in cell.runs}
    first = cells[0].runs[0]
    for run in (result.run for result in results):
        if (run.mixer, run.options) not in rows and identity(
            replace(run, mixer=first.mixer, options=first.options)
        ) in known_runs:
            rows.append((run.mixer, run.options))
            more = with_row(more, run.mixer, run.options)
    return more


def report(
    name: str, out: Path = Path("results/mqar"), console: Console | None = None, markdown: bool = False
) -> list[Summary]:
    """Prints a table and draws it to `out`/name.png; of speed there is nothing to draw."""
    if name not in GRIDS:
        raise ValueError(f"name must be one of {', '.join(GRIDS)}, but was {name!r}")
    console = console or Console()
    cells, path = GRIDS[name](), out / f"{name}.jsonl"
    own, results = read(path), known(path)
    cells = with_others(cells, own) if name in OF_LAYERS else cells
    summaries = summarize(name, cells, results, read(out / "speed.jsonl"))
    if name == "calibration":  # what it might have been is much, and not all of it is worth a run
        summaries = [summary for summary in summaries if summary.runs]
    show(name, summaries, console, markdown)
    planned = {identity(run) for cell in cells for run in cell.runs}
    found = {identity(result.run): result for result in results}  # one that is there twice counts last
    used = [result for key, result in found.items() if key in planned]
    console.print(escape(origin(used) if used else f"Nothing of it is in {path}."), highlight=False)
    if others := {identity(result.run) for result in own} - planned:
        fate = "in the figure alone" if name == "calibration" else "left out"
        console.print(f"{len(others)} results of {escape(str(path))} are of another protocol and are {fate}.")
    if used and name != "speed":
        try:
            if name == "calibration":
                figure = draw_calibration([*own, *(x for x in used if x not in own)], out / f"{name}.png")
            else:
                figure = draw(name, summaries, out / f"{name}.png", origin(used))
            console.print(f"Wrote {escape(str(figure))}")
        except ModuleNotFoundError:
            console.print("For a figure of it, pip install matplotlib")
    return summaries


def show(name: str, summaries: Sequence[Summary], console: Console, markdown: bool) -> None:
    source = "published" if name == "capacity" else "paper"
    headings = ["", "parameters", "state", "T", source, "best", "mean ± std", "macro-F1", "lr", "ms/step", "runs"]
    lines: list[tuple[Sequence[str], bool]] = []  # and whether a row of the paper's table ends here
    by_row = rows(summaries)
    for row, of_row in by_row.items():
        if name == "capacity" and not any(s.runs or s.published for s in of_row):  # the same runs at every length
            lines.append(((row, *[""] * 4, "missing", *[""] * 4, cells_of(of_row[0])[-1]), True))
            continue
        for i, line in enumerate(of_row):
            head = (row, *sizes(of_row)) if i == 0 else (words(said(name, row)) if i == 1 else "", "", "")
            lines.append(((*head, *cells_of(line)), i == len(of_row) - 1))
    alone = [
        row for row in PUBLISHED[name] if name == "capacity" and row not in by_row
    ]  # with nothing of ours beside it
    for row in alone:
        for i, (length, value) in enumerate(zip(LENGTHS, PUBLISHED[name][row].f1, strict=True)):
            lines.append(((row if i == 0 else "", "", "", number(length), f"{value:.1f}", *[""] * 6), False))

    def table(left_out: Sequence[str]) -> Table:
        shown = [i for i, heading in enumerate(headings) if heading not in left_out]
        made = Table(*(headings[i] for i in shown), box=MARKDOWN if markdown else SIMPLE, pad_edge=markdown)
        for column in made.columns[1:]:
            column.justify = "right"
        for line, ends in lines:
            made.add_row(*(line[i] for i in shown), end_section=ends and not markdown)
        return made

    empty = [] if any(s.ms_a_step is not None for s in summaries) else ["ms/step"]
    if name == "speed":  # nothing is learnt in so few steps
        empty += [source, "best", "mean ± std", "macro-F1", "lr"]
    left_out = [*empty]
    spare = ["macro-F1", "lr", "mean ± std", "parameters", "ms/step", "state"]
    unbounded = console.options.update(width=1000)
    while console.measure(table(left_out), options=unbounded).maximum > console.width and spare:
        left_out.append(spare.pop(0))
    console.print(table(left_out))
    meaning = {
        "best": "micro-F1 in percent over learning rates and seeds, a cell ends at 99.95",
        "mean ± std": "over the seeds that were run to their end at the learning rate of the best",
        "ms/step": f"of training with {number(TIMED_TOKENS)} tokens, alone on the GPU (mqar sweep speed); "
        "the paper's is of validation",
    }
    console.print("; ".join(f"{word}: {said}" for word, said in meaning.items() if word not in left_out) + ".")
    if narrow := [word for word in left_out if word not in empty]:
        console.print(f"For {', '.join(narrow)}, make this terminal wider.")


def rows(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The cells of each."""
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary.row, []).append(summary)
    return found


def cells_of(s: Summary) -> list[str]:
    paper = "" if s.published is None else f"{s.published:.1f}"
    runs = f"{s.runs} of {s.planned}"
    runs += f", {s.failed} failed" if s.failed else ""
    if s.best is None or s.macro_f1 is None:
        return [number(s.length), paper, "missing", "", "", "", "", runs]
    spread = f" ± {stdev(s.seeds):.2f}" if len(s.seeds) > 1 else ""
    around = f"{mean(s.seeds):.2f}{spread} ({len(s.seeds)})"
    time = "" if s.ms_a_step is None else f"{s.ms_a_step:.1f}"
    return [number(s.length), paper, f"{s.best:.2f}", around, f"{s.macro_f1:.2f}", f"{s.lr:g}", time, runs]


def number(n: int | None) -> str:
    return "" if n is None else f"{n:,}"


def words(known: Published | None) -> str:
    return f"  paper: {known.parameters}, {known.ms_a_step} ms" if known and known.ms_a_step else ""


def sizes(lines: Sequence[Summary]) -> tuple[str, str]:
    """Parameters and state of a row, as its runs had them."""
    known = [s for s in lines if s.parameters is not None]
    if not known:
        return "", ""
    return number(known[0].parameters), "grows" if known[0].state_floats is None else number(known[0].state_floats)


def origin(results: Sequence[Result]) -> str:
    """Where the numbers come from, the most frequent first."""

    def all_of(name: str) -> str:
        counts = Counter(str(result.origin[name]) for result in results if name in result.origin)
        return ", ".join(value for value, _ in counts.most_common())

    return f"{len(results)} runs on {all_of('device')}, torch {all_of('torch')}, commit {all_of('commit')}"


def draw(name: str, summaries: Sequence[Summary], figure: Path, caption: str) -> Path:
    from runningtensor.mqar.figures import plot_capacity, plot_recall

    if name != "capacity":
        lines = [(s.row, s.length, s.published, s.best, s.seeds) for s in summaries]
        plot_recall(lines, figure, "Recall (micro-F1, %), the best run of each", caption)
        return figure
    points = [(series(s.row), s.length, s.state_floats, s.seeds) for s in summaries if s.seeds and s.state_floats]
    others = [
        (f"{row.partition(',')[0]}, published", length, 131_072, (value,))
        for row, known in CAPACITY.items()
        for length, value in zip(LENGTHS, known.f1, strict=True)
    ]
    plot_capacity([*points, *others], {series(s.row) for s in summaries if not s.seeds}, figure, caption)
    return figure


def draw_calibration(results: Sequence[Result], figure: Path) -> Path:
    """All that was tried at the shortest length, and what was chosen."""
    from runningtensor.mqar.figures import plot_calibration

    curves, drawn = {}, list[Result]()
    for name in grids.CALIBRATED_ON:
        row = grids.TABLE1[name]
        chosen = grids.cell(name, *row, LENGTHS[0], grids.PROTOCOL).runs
        mine = [x for x in results if (x.run.mixer, x.run.options) == row and x.run.test == chosen[0].test]
        drawn += mine
        curves[name] = [
            (
                x.run in chosen,
                [100 * point.step / x.run.steps for point in x.curve],
                [100 * point.accuracy for point in x.curve],
            )
            for x in mine
        ]
    published = {name: TABLE1[name].f1[0] for name in curves}
    plot_calibration(curves, published, figure, origin(drawn))
    return figure


def series(row: str) -> str:
    """The curve a row is a point of."""
    name = row.partition(", keys of")[0]
    whole = {"RunningTensor": "order 3", "RunningTensor, sigmoid gate": "order 3, sigmoid gate"}  # the paper's size
    return whole.get(name, name)
