"""The tables: what the paper says beside what was found, and their figures. What was not run is shown as not run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from rich.box import SIMPLE
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
    "calibration": {row: Published(known.f1) for row, known in TABLE1.items()},
    "changes": {f"{row} · as it stands": Published(known.f1) for row, known in TABLE1.items()},
    "sizes": {},
    "gate": {},
    "speed": {},
}


NAME = 18  # columns that a row's name has at least


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
    stop_at: float = grids.GOOD_ENOUGH  # accuracy at which its runs end


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
        "stop_at": cell.runs[0].stop_at,
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
        summaries = [cell for of_row in rows(summaries).values() if any(x.runs for x in of_row) for cell in of_row]
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
            elif name == "gate":
                figure = draw_gates(used, out / f"{name}.png")
            else:
                figure = draw(name, summaries, out / f"{name}.png", origin(used))
            console.print(f"Wrote {escape(str(figure))}")
        except ModuleNotFoundError:
            console.print("For a figure of it, pip install matplotlib")
    return summaries


def show(name: str, summaries: Sequence[Summary], console: Console, markdown: bool = False) -> None:
    headings, lines = laid_out(name, summaries)
    if markdown:
        for line in (headings, ["---"] * len(headings), *lines):
            print("|", " | ".join(line).replace("\n", "<br>").replace("  ", " "), "|", file=console.file)
        print(file=console.file)
    else:
        show_fitted(headings, lines, console)
    console.print(legend(name, summaries), highlight=False)
    if nothing := [row for row, cells in rows(summaries).items() if not begun(cells)]:
        console.print(escape(f"Not run: {'; '.join(nothing)}."), highlight=False)


def laid_out(name: str, summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: a row of the paper's table is one, with its lengths beside each other."""
    by_row = {row: cells for row, cells in rows(summaries).items() if begun(cells)}
    for row in CAPACITY if name == "capacity" else ():  # others' that nothing of ours stands beside
        by_row.setdefault(row, [Summary(row, *both) for both in zip(LENGTHS, CAPACITY[row].f1, strict=True)])
    headings = ["", "parameters", "state", "ms/step", "runs", "lr"]
    headings += [f"{number(length)} tokens" for length in dict.fromkeys(x.length for x in summaries)]
    lines = []
    for row, cells in by_row.items():
        published, (parameters, state) = said(name, row) or Published((0, 0, 0)), sizes(cells)
        times = once(f"{x.ms_a_step:.1f}" for x in cells if x.ms_a_step is not None)
        line = [row, beside(parameters, published.parameters, "\n"), state, beside(times, published.ms_a_step, "\n")]
        line += [runs_of(cells), once(f"{x.lr:g}" for x in cells if x.lr is not None)]
        lines.append([*line, *map(time_of if name == "speed" else recall_of, cells)])
    unsaid = ("ms/step", "lr") if name == "speed" else ()  # nothing is learnt in so few steps
    shown = [i for i, x in enumerate(headings) if not i or (x not in unsaid and any(line[i] for line in lines))]
    return [headings[i] for i in shown], [[line[i] for i in shown] for line in lines]


def show_fitted(headings: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> None:
    """Names may be broken, and numbers may not: where there is no room for all columns, some are left out."""
    spare = [x for x in ("lr", "runs", "parameters", "ms/step", "state") if x in headings]
    spilt = max([0, *(len(line[0]) - NAME for line in lines)])  # of names, if they are broken
    unbounded = console.options.update(width=1000)
    left_out: list[str] = []
    while True:
        table = Table(box=SIMPLE, pad_edge=False, show_lines=True)
        shown = [i for i, heading in enumerate(headings) if heading not in left_out]
        for i in shown:
            table.add_column(headings[i], justify="right" if i else "left", no_wrap=i > 0)
        for line in lines:
            table.add_row(*(escape(line[i]) for i in shown))
        if not spare or console.measure(table, options=unbounded).maximum - spilt <= console.width:
            break
        left_out.append(spare.pop(0))
    console.print(table)
    if left_out:
        console.print(f"For {', '.join(left_out)}, make this terminal wider.")


def legend(name: str, summaries: Sequence[Summary]) -> str:
    time = f"of training with {number(TIMED_TOKENS)} tokens, alone on the GPU"
    if name == "speed":
        return f"Milliseconds of a step {time}."
    whose = "published elsewhere" if name == "capacity" else "the paper's"
    end = max((x.stop_at for x in summaries), default=grids.GOOD_ENOUGH)
    said = [f"A cell: the best micro-F1 of its runs in percent, which end at {100 * end:g}"]
    said[0] += f", in brackets {whose}" if any(x.published is not None for x in summaries) else ""
    if any(len(x.seeds) > 1 for x in summaries):
        said.append("below it mean ± std of (so many) seeds that were run to their end at the rate of the best")
    if apart := [abs(x.best - x.macro_f1) for x in summaries if x.best is not None and x.macro_f1 is not None]:
        said.append(f"macro-F1 differs by {max(apart):.1f} at most")
    if any(x.ms_a_step is not None for x in summaries):
        said.append(f"ms/step: {time}, the paper's of validation")
    return "; ".join(said) + "."


def rows(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The cells of each."""
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary.row, []).append(summary)
    return found


def begun(cells: Sequence[Summary]) -> bool:
    """Whether there is anything to show of a row."""
    return any(x.runs or x.published is not None for x in cells)


def recall_of(s: Summary) -> str:
    best = f"{s.best:.2f}" if s.best is not None else "not run" if s.planned else ""
    spread = f"\n{mean(s.seeds):.2f} ± {stdev(s.seeds):.2f} ({len(s.seeds)})" if len(s.seeds) > 1 else ""
    return beside(best, None if s.published is None else f"{s.published:.1f}") + spread


def time_of(s: Summary) -> str:
    return "not run" if s.ms_a_step is None else f"{s.ms_a_step:.1f}"


def runs_of(cells: Sequence[Summary]) -> str:
    if not cells[0].planned:
        return ""
    failed = sum(x.failed for x in cells)
    return once(str(x.runs) for x in cells) + f" of {cells[0].planned}" + (f"\n{failed} failed" if failed else "")


def beside(ours: str, published: object, between: str = " ") -> str:
    return ours if published in (None, "") else f"{ours}{between}({published})".strip()


def once(values: Iterable[str]) -> str:
    """All, or one where all are alike."""
    found = [*values]
    return ", ".join(found if len(set(found)) > 1 else found[:1])


def number(n: int | None) -> str:
    return "" if n is None else f"{n:,}"


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

    if name not in ("capacity", "sizes"):
        shown = [s for cells in rows(summaries).values() if begun(cells) for s in cells]
        lines = [(s.row, s.length, s.published, s.best, s.seeds) for s in shown]
        plot_recall(lines, figure, "Recall (micro-F1, %), the best run of each", caption)
        return figure
    points = [(series(s.row), s.length, s.state_floats, s.seeds) for s in summaries if s.seeds and s.state_floats]
    others = [
        (f"{row.partition(',')[0]}, published", length, 131_072, (value,))
        for row, known in PUBLISHED[name].items()
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


def draw_gates(results: Sequence[Result], figure: Path) -> Path:
    """Of each model and rate a panel; what has the paper's gate and another change is of one kind."""
    from runningtensor.mqar.figures import plot_gates

    found = {identity(result.run): result for result in results}
    panels: dict[str, list[tuple[str, list[int], list[float]]]] = {}
    for cell in grids.gate():
        model, _, change = cell.row.partition(", ")
        kind = change if change.endswith("gate") else "SiLU gate" + (", otherwise changed" if change else "")
        for run in sorted(cell.runs, key=lambda run: -run.lr):
            runs = panels.setdefault(f"{model}, lr {run.lr:g}", [])
            if (result := found.get(identity(run))) and (curve := result.curve):
                runs.append((kind, [point.step for point in curve], [100 * point.accuracy for point in curve]))
    plot_gates(panels, figure, origin(results))
    return figure


def series(row: str) -> str:
    """The curve a row is a point of."""
    name = row.partition(", keys of")[0]
    whole = {"RunningTensor": "order 3", "RunningTensor, sigmoid gate": "order 3, sigmoid gate"}  # the paper's size
    return whole.get(name, name)
