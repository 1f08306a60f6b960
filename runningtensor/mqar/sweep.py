"""Runs a grid: several runs at once, each in a process of its own, each finished one a line in a file.

The file is all that is known: a sweep that was killed goes on from it. Only the sweep writes it, whole lines at a time.
Runs under way write what they need to go on into the folder `running` beside it.
"""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from runningtensor.bench.provenance import commit, cores
from runningtensor.mqar.grids import GOOD_ENOUGH, GRIDS, Cell
from runningtensor.mqar.record import Result, Run, from_json, identity, run_from, to_json
from runningtensor.mqar.resume import NOTE, forget

PROGRESS, RESULT = "PROGRESS ", "RESULT "  # begin the lines of a worker that are not a library's chatter
PAUSE = 0.05  # seconds between looks at the workers
GRACE = 30.0  # seconds for a run that is asked to stop; it may have to finish a test first


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
            if not (torn.startswith(b'{"id"') and isinstance(error, json.JSONDecodeError)):
                raise ValueError(f"{self.path} must hold results, but its last line is none: {error}") from error
            self.file.truncate(self.file.seek(0, os.SEEK_END) - len(torn))
        self.file.flush()

    def add(self, result: Result) -> None:
        self.file.write(to_json(result).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.found[identity(result.run)] = result

    def close(self) -> None:
        self.file.close()


def parsed(line: str) -> Result:
    """A line's result; a ValueError, whatever else it is."""
    try:
        return from_json(line)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


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
    """Those of other grids in the folder, and then a grid's own: a run that several have is done once."""
    others = [path.with_name(f"{name}.jsonl") for name in GRIDS]
    return [result for file in (*(other for other in others if other != path), path) for result in read(file)]


# -- One run in a process ----------------------------------------------------------------------------------------------


def work() -> None:
    """The process: a job on its standard input, progress and the result on its standard output."""
    job = json.loads(sys.stdin.readline())
    Thread(target=leave_with_parent, daemon=True).start()
    import torch

    from runningtensor.mqar.train import train

    asked = Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    device = torch.device(job["device"]) if job["device"] else None
    kept = Path(job["kept"]) if job["kept"] else None
    for result in train(run_from(job["run"]), device, kept=kept, stop=asked.is_set):
        for point in result.curve[-1:]:
            print(f"{PROGRESS}{point.step} {point.accuracy}", flush=True)
    print(f"\n{RESULT}{to_json(result)}", flush=True)  # on a line of its own, whatever was printed before


def leave_with_parent() -> None:
    """The input ends when the sweep does, even if it was killed; nobody wants the result then, but the next goes on."""
    while os.read(0, 1):  # not sys.stdin: Python could not end while a thread waits in it
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def kept(running: Path | str, key: str) -> Path:
    """Where a run has what it needs to go on."""
    return Path(running) / f"{key}.pt"


class Job(Protocol):
    """A run under way."""

    def poll(self) -> Result | None: ...  # once it has ended; not finished: it was stopped, and can go on
    def progress(self) -> tuple[int, float]: ...
    def stop(self) -> None: ...  # soon, when it has written what it needs to go on
    def kill(self) -> None: ...


class Worker:
    """A run in a process of this machine."""

    def __init__(
        self, run: Run, device: str | None = None, threads: int = 1, *, running: Path | str | None = None
    ) -> None:
        self.run = run
        job = {"run": asdict(run), "device": device, "kept": running and str(kept(running, identity(run)))}
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runningtensor.mqar.sweep"],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            start_new_session=True,  # an interrupt is for the sweep, which then stops its workers
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once, which poll will find
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self) -> list[str]:
        """All it has said; by pread, for the process writes at the position of the same file."""
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), size, 0).decode(errors="replace").splitlines()

    def progress(self) -> tuple[int, float]:
        """Step and accuracy."""
        with suppress(ValueError, OSError, IndexError):  # it is asked while it ends, or in the middle of a line
            said = [line.removeprefix(PROGRESS).split() for line in self.lines() if line.startswith(PROGRESS)]
            return (int(said[-1][0]), float(said[-1][1])) if said else (0, 0.0)
        return 0, 0.0

    def poll(self) -> Result | None:
        code = self.process.poll()
        if code is None:
            return None
        lines = self.lines()
        self.close()
        for line in lines:
            if line.startswith(NOTE):
                print(line.removeprefix(NOTE))
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        if found := [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]:
            try:
                return parsed(found[-1])
            except ValueError as error:  # it died in the middle of it
                return failure(self.run, f"{why}: its result cannot be read: {error}")
        words = [line.strip() for line in lines if line.strip() and not line.startswith((PROGRESS, NOTE))]
        return failure(self.run, ": ".join((why, *words[-1:])))

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.output.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()


def failure(run: Run, why: str) -> Result:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Result(run, 0, None, origin={"commit": commit()}, finished=now, failed=" ".join(why.split())[:300])


# -- Runs elsewhere ----------------------------------------------------------------------------------------------------


def elsewhere(line: str, device: str | None, running: str) -> str:
    """What a machine of a Ray cluster does: the same as this one would. If it has the folder, runs go on there too."""
    worker = Worker(run_from(json.loads(line)), device, running=running)
    while (result := worker.poll()) is None:
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # Ray's way to cancel
            worker.stop()
    if result.finished and result.curve:
        forget(kept(running, identity(result.run)))
    return to_json(result)


class Cluster:
    """Starts runs on a Ray cluster: RAY_ADDRESS's, or the one that runs here, or a new one of this machine alone."""

    def __init__(self, jobs: int, device: str | None, running: Path) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError("ray must be installed for --ray: pip install 'runningtensor[ray]'") from error
        self.ray, self.device, self.running = ray, device, str(running)
        ray.init(log_to_driver=False, logging_level="warning", include_dashboard=False)
        gpus = int(ray.cluster_resources().get("GPU", 0)) if device in (None, "cuda") else 0
        self.jobs = jobs * max(1, gpus)
        # A run that fails is not tried again elsewhere: the sweep writes down why.
        self.elsewhere = ray.remote(num_cpus=1, num_gpus=1 / jobs if gpus else 0, max_retries=0)(elsewhere)

    def start(self, run: Run) -> "RemoteWorker":
        reference = self.elsewhere.remote(json.dumps(asdict(run)), self.device, self.running)
        return RemoteWorker(self.ray, run, reference)

    def close(self) -> None:
        self.ray.shutdown()


class RemoteWorker:
    """A run somewhere on the cluster."""

    def __init__(self, ray: Any, run: Run, reference: Any) -> None:
        self.ray, self.run, self.reference = ray, run, reference

    def progress(self) -> tuple[int, float]:
        return 0, 0.0

    def poll(self) -> Result | None:
        ready, _ = self.ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            return from_json(self.ray.get(self.reference))
        except Exception as error:  # whatever became of the machine
            return failure(self.run, f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        self.ray.cancel(self.reference)

    def kill(self) -> None:
        self.ray.cancel(self.reference, force=True)


# -- The sweep ---------------------------------------------------------------------------------------------------------


def ordered(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Run]]:
    """Length by length; there the first run of every cell before the second of any, in case it is cut off."""
    for length in dict.fromkeys(cell.length for cell in cells):
        same = [cell for cell in cells if cell.length == length]
        for runs in zip_longest(*(cell.runs for cell in same)):
            yield from ((cell, run) for cell, run in zip(same, runs, strict=True) if run is not None)


class Plan:
    """Which runs of a grid are still to be done, first things first."""

    def __init__(self, cells: Sequence[Cell], found: dict[str, Result], *, all_runs: bool, retry: bool) -> None:
        self.found, self.all_runs = found, all_runs
        # One that came as far as a test has failed for good: its loss was no number, and will be none again.
        self.tried = {key for key, result in found.items() if not (retry and result.failed and not result.curve)}
        self.runs: dict[str, Run] = {}  # by identity: what two cells share is done once
        self.cells: dict[str, list[tuple[str, int]]] = {}  # of a run
        self.members: dict[tuple[str, int], list[str]] = {}  # of a cell
        for cell, run in ordered(cells):
            key, of = identity(run), (cell.row, cell.length)
            self.runs[key] = run
            self.cells.setdefault(key, []).append(of)
            self.members.setdefault(of, []).append(key)

    def settled(self, cell: tuple[str, int]) -> bool:
        """Whether a run of it was good enough."""
        scores = [self.found[key].at(cell[1]) for key in self.members[cell] if key in self.found]
        return any(score is not None and score.accuracy >= GOOD_ENOUGH for score in scores)

    def left(self) -> list[str]:
        open_cells = {cell for cell in self.members if self.all_runs or not self.settled(cell)}
        return [key for key in self.runs if key not in self.tried and open_cells.intersection(self.cells[key])]

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
    runs: int | None = None,
    ray: bool = False,
    device: str | None = None,
    all_runs: bool = False,
    retry: bool = False,
    console: Console | None = None,
) -> int:
    """Runs what is left of a grid, into `out`/name.jsonl, and returns how many runs are left after it.

    Of the grid, cells of these lengths, or of all, and those whose row has the words `only` in it; of each cell, the
    first so many runs, or all.
    """
    if name not in GRIDS:
        raise ValueError(f"name must be one of {', '.join(GRIDS)}, but was {name!r}")
    for what, count in (("jobs", jobs), ("runs", runs)):
        if count is not None and count < 1:
            raise ValueError(f"{what} must be at least 1, but was {count}")
    grid = GRIDS[name]()
    cells = [
        replace(cell, runs=cell.runs[:runs])
        for cell in grid
        if (not lengths or cell.length in lengths) and only in cell.row
    ]
    if not cells:
        rows = "; ".join(dict.fromkeys(cell.row for cell in grid))
        raise ValueError(f"lengths and only must fit some cell, but were {lengths} and {only!r}; there are rows {rows}")
    running = out.resolve() / "running"
    cluster = Cluster(jobs, device, running) if ray else None
    threads = max(1, cores() // jobs)
    try:
        return run_cells(
            cells,
            out / f"{name}.jsonl",
            cluster.start if cluster else partial(Worker, device=device, threads=threads, running=running),
            minutes=minutes,
            jobs=cluster.jobs if cluster else jobs,
            all_runs=all_runs,
            retry=retry,
            console=console,
        )
    finally:
        if cluster:
            cluster.close()


def run_cells(
    cells: Sequence[Cell],
    path: Path,
    start: Callable[[Run], Job],
    *,
    minutes: float | None = None,
    jobs: int = 1,
    all_runs: bool = False,  # a cell goes on after a run that is good enough
    retry: bool = False,  # runs whose process died are run again
    console: Console | None = None,
) -> int:
    deadline = time.monotonic() + 60 * minutes if minutes is not None else math.inf
    console = console or Console()
    active: dict[str, Job] = {}
    with closing(Store(path)) as store:
        plan = Plan(cells, store.found, all_runs=all_runs, retry=retry)
        board = Board(plan, active, deadline)
        running = path.parent / "running"
        running.mkdir(parents=True, exist_ok=True)  # here, so that other machines save where they share it

        def drop_needless() -> None:
            for key in active.keys() - set(plan.left()):  # a better run has made it so
                active.pop(key).kill()
                forget(kept(running, key))

        def collect(stopping: bool = False) -> None:
            for key, result in [(key, result) for key, job in active.items() if (result := job.poll()) is not None]:
                del active[key]
                if not result.finished or (stopping and result.failed):  # stopped, perhaps before it could listen
                    continue
                result.origin["at_once"] = jobs
                store.add(result)
                plan.tried.add(key)
                if result.curve:  # else its process died, and can go on if it is tried again
                    forget(kept(running, key))
                console.print(board.line(key, result), highlight=False, soft_wrap=True)

        def stop() -> None:
            drop_needless()
            for job in active.values():
                job.stop()
            patience = time.monotonic() + GRACE
            while active and time.monotonic() < patience:
                time.sleep(PAUSE)
                collect(stopping=True)

        console.print(f"{len(plan.runs)} runs, {len(plan.left())} of them left; results in {escape(str(path))}")
        live = Live(get_renderable=board.show, console=console, transient=True)
        try:
            with live if console.is_terminal else nullcontext():
                while (left := plan.left()) and time.monotonic() < deadline:
                    drop_needless()
                    for key in [key for key in left if key not in active][: jobs - len(active)]:
                        active[key] = start(plan.runs[key])
                    time.sleep(PAUSE)
                    collect()
        finally:  # out of time, or interrupted
            try:
                stop()
            finally:
                for job in active.values():
                    job.kill()
            left = plan.left()
            waiting = sum(kept(running, key).exists() for key in left)
            console.print(f"{len(left)} runs left" + (f", {waiting} of them wait to go on" if left else ""))
        return len(left)


class Board:
    """What a person sees of it."""

    def __init__(self, plan: Plan, active: dict[str, Job], deadline: float) -> None:
        self.plan, self.active, self.deadline = plan, active, deadline
        self.started = time.monotonic()

    def line(self, key: str, result: Result) -> str:
        if result.failed:
            return f"[red]failed[/] {self.plan.name(key)}: {escape(result.failed)}"
        scores = [result.at(task.length) for task in result.run.tests]
        found = " ".join(f"{100 * score.accuracy:.2f}" for score in scores if score)
        return f"{found:>6} {self.plan.name(key)}: {result.curve[-1].step:,} steps, {result.ms_a_step:.1f} ms each"

    def show(self) -> Group:
        table = Table("running", "step", "accuracy", box=SIMPLE, pad_edge=False)
        for key, job in list(self.active.items()):
            step, accuracy = job.progress()
            steps = self.plan.runs[key].steps
            table.add_row(self.plan.name(key), f"{step:,} of {steps:,}", f"{100 * accuracy:.2f}" if step else "")
        now = time.monotonic()
        until = "" if self.deadline == math.inf else f", {(self.deadline - now) / 60:.1f} minutes left"
        done, left = len(self.plan.tried & self.plan.runs.keys()), len(self.plan.left())
        return Group(table, f"{done} runs done, {left} to do, {(now - self.started) / 60:.1f} minutes so far{until}")


if __name__ == "__main__":
    work()
