"""Runs a grid: several runs at once, each finished one a line in a file.

The file is all that is known: a sweep that was killed goes on from it. Only the sweep writes it, whole lines at a time.
Runs under way write what they need to go on into the folder `running` beside it.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from runningtensor.bench.provenance import cores
from runningtensor.mqar.grids import GOOD_ENOUGH, GRIDS, OF_LAYERS, ON_A_CPU, Cell, with_row
from runningtensor.mqar.mixers import mixer as built
from runningtensor.mqar.record import Result, Run, identity, parsed, to_json
from runningtensor.mqar.resume import forget
from runningtensor.mqar.workers import GRACE, PAUSE, Cluster, Job, Worker, kept

PATIENCE = 120.0  # seconds: who compiles kernels notices a fault of the GPU no sooner
SETTLE = 15.0  # seconds: MPS takes nobody new before the last that it had is gone, of other sweeps too

# -- The file ----------------------------------------------------------------------------------------------------------


class Store:
    """The finished runs of a grid, in a file that no other sweep has open; a run that is there twice counts last."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.file = path, path.open("a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it, however this ends
        except BlockingIOError:
            self.file.close()
            raise ValueError(f"results must be written by one sweep at a time, but another has {path} open") from None
        try:
            self.found = {identity(result.run): result for result in known(path)}
            self.mend()
        except BaseException:
            self.close()
            raise

    def mend(self) -> None:
        """Of a last line that was cut off, nothing is left, unless only its end is missing; all others are results."""
        self.file.seek(0)
        *_, torn = self.file.read().split(b"\n")
        if not torn:
            return
        try:
            parsed(torn.decode(errors="replace"))
            self.file.write(b"\n")
        except ValueError as error:
            begun = b'{"id"'.startswith(torn[:5]) or not torn.strip(b"\0")  # zeros: the power failed
            if not (begun and isinstance(error, json.JSONDecodeError)):
                raise ValueError(f"{self.path} must hold results, but its last line is none: {error}") from error
            self.file.truncate(self.file.seek(0, os.SEEK_END) - len(torn))
        self.file.flush()

    def add(self, result: Result) -> None:
        try:
            self.file.write(to_json(result).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            print(to_json(result))  # or it would be lost
            raise ValueError(f"{self.path} cannot be written, so its result is printed: {error}") from error
        self.found[identity(result.run)] = result

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been said
            self.file.close()


def read(path: Path) -> list[Result]:
    """What was finished, in the order it was; a last line that was cut off is left out."""
    if not path.exists():
        return []
    results = []
    *lines, last = path.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate([*lines, last], 1):
        try:
            results.extend([parsed(line)] if line else [])
        except ValueError as error:
            if number <= len(lines):
                raise ValueError(
                    f"{path} must hold a result in each line, but line {number} is none: {error}"
                ) from error
    return results


def known(path: Path) -> list[Result]:
    """Those of other grids in the folder, and then a grid's own: a run that several have is done once. The last counts,
    so those whose process died come first: another may have finished them."""
    others = [path.with_name(f"{name}.jsonl") for name in GRIDS]
    files = (*(other for other in others if other != path), path)
    done = [result for file in files for result in read(file) if result.finished]
    return sorted(done, key=lambda result: not died(result))


def died(result: Result) -> bool:
    """Of the machine perhaps, so that every sweep tries it anew. One that came to a test has failed for good: its loss
    was no number, and will be none again."""
    return bool(result.failed) and not result.curve


# -- The sweep ---------------------------------------------------------------------------------------------------------


def ordered(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Run]]:
    """Length by length; there the first run of every cell before the second of any, in case it is cut off."""
    for length in dict.fromkeys(cell.length for cell in cells):
        same = [cell for cell in cells if cell.length == length]
        for runs in zip_longest(*(cell.runs for cell in same)):
            yield from ((cell, run) for cell, run in zip(same, runs, strict=True) if run is not None)


class Plan:
    """Which runs of the cells that are wanted are still to be done, first things first.

    What the others of the grid have found, or need, counts too.
    """

    def __init__(
        self, grid: Sequence[Cell], wanted: Sequence[Cell], found: dict[str, Result], *, all_runs: bool
    ) -> None:
        self.found, self.all_runs = found, all_runs
        self.tried = {key for key, result in found.items() if not died(result)}
        self.members = {(cell.row, cell.length): [identity(run) for run in cell.runs] for cell in grid}
        self.runs: dict[str, Run] = {}  # that are wanted, by identity: what two cells share is done once
        self.cells: dict[str, list[tuple[str, int]]] = {}  # of such a run, those that are wanted
        for cell, run in ordered(wanted):
            key = identity(run)
            self.runs[key] = run
            self.cells.setdefault(key, []).append((cell.row, cell.length))
        self.open_cells = set(filter(self.open, ((cell.row, cell.length) for cell in wanted)))

    def done(self, key: str) -> None:
        """What it found is in `found`. Cells close here alone: what is left is asked for many times a second."""
        self.tried.add(key)
        self.open_cells = set(filter(self.open, self.open_cells))

    def open(self, cell: tuple[str, int]) -> bool:
        """Whether no run of it was good enough, or all are asked for."""
        scores = (self.found[key].at(cell[1]) for key in self.members[cell] if key in self.found)
        return self.all_runs or not any(score and score.accuracy >= GOOD_ENOUGH for score in scores)

    def left(self) -> list[str]:
        return [key for key in self.runs if key not in self.tried and self.open_cells.intersection(self.cells[key])]

    def needless(self, key: str) -> bool:
        """In all of the grid."""
        return not any(key in keys and self.open(cell) for cell, keys in self.members.items())

    def name(self, key: str) -> str:
        run, (row, length) = self.runs[key], self.cells[key][0]
        return f"{row} · {length} · lr {run.lr:g} · seed {run.seed}"


def sweep(
    name: str,
    minutes: float | None = None,
    jobs: int = 1,
    out: Path = Path("results/mqar"),
    *,
    lengths: Sequence[int] = (),
    only: str = "",
    mixer: str = "",
    options: dict[str, object] | None = None,
    rates: Sequence[float] = (),
    runs: int | None = None,
    ray: bool = False,
    device: str | None = None,
    graph: bool = True,
    all_runs: bool = False,
    console: Console | None = None,
) -> int:
    """Runs what is left of a grid, into `out`/name.jsonl, and returns how many runs are left after it.

    Of the grid, cells of these lengths, or of all, and of the row `only`, or those with these words in their name; of
    each cell, the runs at these learning rates, or at all, and of them the first so many, or all. A `mixer` is a row
    more, and then the only one.
    """
    if name not in GRIDS:
        raise ValueError(f"name must be one of {', '.join(GRIDS)}, but was {name!r}")
    for what, count in (("jobs", jobs), ("runs", runs)):
        if count is not None and count < 1:
            raise ValueError(f"{what} must be at least 1, but was {count}")
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"minutes must not be negative, but was {minutes}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, but {out} is none")
    grid, options = GRIDS[name](), options or {}
    if mixer:
        if only or name not in OF_LAYERS:
            raise ValueError(f"mixer must be without only, and with {', '.join(OF_LAYERS)}, but was {mixer!r}")
        grid = with_row(grid, mixer, options)
        only, run = grid[-1].row, grid[-1].runs[0]
        built(run.mixer, run.d_model, run.options)  # what cannot be made is better known now
    elif options:
        raise ValueError(f"options must be those of a mixer, and none was named, but were {options}")
    rows = [cell.row for cell in grid if only in cell.row]
    rows = [only] if only in rows else rows
    chosen = [cell for cell in grid if (not lengths or cell.length in lengths) and cell.row in rows]
    if not chosen:
        raise ValueError(
            f"length and only must fit some cell, but were {listed(lengths) or 'any'} and {only!r}; there are "
            f"lengths {listed(cell.length for cell in grid)} and rows {listed((cell.row for cell in grid), '; ')}"
        )
    there = [run.lr for cell in chosen for run in cell.runs]
    if unknown := set(rates).difference(there):
        raise ValueError(f"lr must be that of some run, but was {listed(unknown)}; there are {listed(there)}")
    wanted = [
        replace(cell, runs=tuple(run for run in cell.runs if not rates or run.lr in rates)[:runs]) for cell in chosen
    ]
    console = console or Console()
    if not (ray or device or name in ON_A_CPU or torch.cuda.is_available()):
        said = "torch finds no GPU here, and on a CPU most of these runs take hours or days each."
        console.print(said, soft_wrap=True)
    running = out.resolve() / "running"
    alone = name == "speed"
    cluster = Cluster(jobs, device, running, alone, graph) if ray else None
    threads = max(1, cores() // jobs)
    try:
        return run_cells(
            grid,
            out / f"{name}.jsonl",
            cluster.start
            if cluster
            else partial(Worker, device=device, threads=threads, running=running, alone=alone, graph=graph),
            minutes=minutes,
            jobs=cluster.jobs if cluster else jobs,
            wanted=wanted,
            all_runs=all_runs,
            console=console,
        )
    finally:
        if cluster:
            cluster.close()


def listed(values: Iterable[object], comma: str = ", ") -> str:
    """Each once, as they come."""
    return comma.join(dict.fromkeys(str(value) for value in values))


def run_cells(
    grid: Sequence[Cell],
    path: Path,
    start: Callable[[Run], Job],
    *,
    wanted: Sequence[Cell] | None = None,  # of the grid, with some of their runs or all
    minutes: float | None = None,
    jobs: int = 1,
    all_runs: bool = False,  # a cell goes on after a run that is good enough
    console: Console | None = None,
) -> int:
    deadline = time.monotonic() + 60 * minutes if minutes is not None else math.inf
    console = console or Console()
    with closing(Store(path)) as store:
        plan = Plan(grid, grid if wanted is None else wanted, store.found, all_runs=all_runs)
        crew = Crew(plan, store, start, jobs, console)
        console.print(f"{len(plan.runs)} runs, {len(plan.left())} of them left; results in {escape(str(path))}")
        board = Board(plan, crew.active, deadline)
        live = Live(get_renderable=board.show, console=console, transient=True)
        try:
            with live if console.is_terminal else nullcontext():
                while plan.left() and time.monotonic() < deadline:
                    crew.start_some()
                    time.sleep(PAUSE)
                    crew.collect()
        finally:  # out of time, or interrupted
            try:
                crew.stop()
            finally:
                dead = [key for key in crew.dead if not plan.needless(key)]
                left = [*plan.left(), *dead]
                waiting = sum(kept(crew.running, key).exists() for key in left)
                words = [f"{waiting} of them wait to go on"] if left else []
                words += [f"{len(dead)} died and are tried again by the next sweep"] if dead else []
                console.print(", ".join((f"{len(left)} runs left", *words)))
        return len(left)


class Crew:
    """The runs under way: what is started next, and what becomes of those that end."""

    def __init__(self, plan: Plan, store: Store, start: Callable[[Run], Job], jobs: int, console: Console) -> None:
        self.plan, self.store, self.start, self.jobs, self.console = plan, store, start, jobs, console
        self.active: dict[str, Job] = {}
        self.leaving: dict[str, float] = {}  # what nobody needs any more, and how long it may take to end
        self.last = {key for key, result in store.found.items() if died(result)}  # to be run after all others, alone
        self.dead: list[str] = []  # for good, in this sweep
        self.in_a_row = 0  # deaths
        self.beside: set[str] = set()  # runs that others ran beside
        self.suspects: dict[str, tuple[int, float]] = {}  # how far they were when one died beside them
        self.last_death = -math.inf
        self.running = store.path.parent / "running"
        self.running.mkdir(parents=True, exist_ok=True)  # here, so that other machines save where they share it

    def start_some(self) -> None:
        self.drop_needless()
        left = self.plan.left()
        first = [key for key in left if key not in self.last]
        if not self.dying():
            at_once = self.jobs if first else 1
            room = max(0, at_once - len(self.active))  # some may be leaving still
            for key in [key for key in first or left if key not in self.active][:room]:
                self.active[key] = self.start(self.plan.runs[key])
        if len(self.active) > 1:
            self.beside.update(self.active)

    def dying(self) -> bool:
        """Some may be, of what another died of: under MPS a wrong address ends all, who notice it sooner or later, and
        nobody new is let in before they are gone."""
        since = time.monotonic() - self.last_death
        stuck = (self.suspects[key] == job.progress() for key, job in self.active.items() if key in self.suspects)
        return since < SETTLE or (since < PATIENCE and any(stuck))

    def collect(self, stopping: bool = False) -> None:
        for key in [*self.active]:  # one by one: an interrupt between two loses neither
            result = self.active[key].poll()
            if result is None:
                continue
            asked = stopping or key in self.leaving
            if result.finished and not (asked and died(result)):  # else stopped, perhaps before it could listen
                try:
                    self.ended(key, result)
                except ValueError:  # it is in the file, or printed
                    del self.active[key]
                    raise
            del self.active[key]
            if self.leaving.pop(key, None):
                self.forget_needless([key])

    def ended(self, key: str, result: Result) -> None:
        result.origin.setdefault("at_once", 1 if key in self.last else self.jobs)
        self.store.add(result)
        again = died(result) and key in self.beside and key not in self.last
        name, later = self.plan.name(key), " (again when the others are done)" if again else ""
        said = f"[red]failed[/] {name}: {escape(result.failed)}{later}" if result.failed else scored(name, result)
        self.console.print(said, highlight=False, soft_wrap=True)
        if result.curve:  # else its process died, and can go on when it is tried again
            forget(kept(self.running, key))
        self.in_a_row = self.in_a_row + (key not in self.last) if died(result) else 0
        if again:  # it may have died of what another did, or for want of memory
            self.last.add(key)
            self.last_death = time.monotonic()
            known = ((other, job.progress()) for other, job in self.active.items())
            self.suspects.update((other, progress) for other, progress in known if progress is not None)
        else:
            self.plan.done(key)
            self.dead += [key] if died(result) else []
        if self.in_a_row >= self.jobs + 3:
            raise ValueError(
                f"runs must come to their first test, but {self.in_a_row} in a row died: is the machine well? "
                f"The last: {result.failed}"
            )

    def drop_needless(self) -> None:
        """Of which a better run has made them. They are asked to end: whoever is killed in the middle of a kernel may
        take those with it that share a GPU through MPS."""
        for key in self.active.keys() - set(self.plan.left()):
            if key not in self.leaving:
                self.active[key].stop()
                self.leaving[key] = time.monotonic() + GRACE
            elif time.monotonic() > self.leaving[key]:
                self.active.pop(key).kill()
                del self.leaving[key]
                self.forget_needless([key])

    def forget_needless(self, keys: Iterable[str]) -> None:
        for key in keys:
            if kept(self.running, key).exists() and self.plan.needless(key):
                forget(kept(self.running, key))

    def stop(self) -> None:
        wrong: ValueError | None = None
        try:
            self.drop_needless()
            for key in self.active.keys() - self.leaving.keys():
                self.active[key].stop()
            patience = time.monotonic() + GRACE
            while self.active and time.monotonic() < patience:
                time.sleep(PAUSE)
                try:
                    self.collect(stopping=True)
                except ValueError as error:  # the others have results too
                    wrong = error
            self.forget_needless(self.plan.runs)
        finally:
            for job in self.active.values():
                job.kill()
        if wrong:
            raise wrong


def scored(name: str, result: Result) -> str:
    scores = [result.at(task.length) for task in result.run.tests]
    found = " ".join(f"{100 * score.accuracy:.2f}" for score in scores if score)
    return f"{found:>6} {name}: {result.curve[-1].step:,} steps, {result.ms_a_step:.1f} ms each"


class Board:
    """What a person sees of it."""

    def __init__(self, plan: Plan, active: dict[str, Job], deadline: float) -> None:
        self.plan, self.active, self.deadline = plan, active, deadline
        self.started = time.monotonic()

    def show(self) -> Group:
        table = Table("running", "step", "accuracy", box=SIMPLE, pad_edge=False)
        for key, job in list(self.active.items()):
            progress = job.progress()
            step, accuracy = progress or (0, 0.0)
            far = f"{step:,} of {self.plan.runs[key].steps:,}" if progress else "elsewhere"
            table.add_row(self.plan.name(key), far, f"{100 * accuracy:.2f}" if step else "")
        now = time.monotonic()
        until = "" if self.deadline == math.inf else f", {max(0, self.deadline - now) / 60:.1f} minutes left"
        done, left = len(self.plan.tried & self.plan.runs.keys()), len(self.plan.left())
        return Group(table, f"{done} runs done, {left} to do, {(now - self.started) / 60:.1f} minutes so far{until}")
