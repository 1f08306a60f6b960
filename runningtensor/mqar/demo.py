"""A race on two CPU cores: RunningTensor, the same layer with a matrix state, and Gated DeltaNet learn to recall.

Each trains in a process of its own on one core, from the same batches, and takes its next steps when all have taken
their last: however fast the machine is and whenever it ends, all have had the same number of steps.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from runningtensor.bench.provenance import Provenance, provenance, write
from runningtensor.mqar.data import Task
from runningtensor.mqar.train import Result, Run, train
from runningtensor.plots import plot_demo

# The test has 12 pairs and random filler. On that alone, nothing leaves chance for a long time: batches of fewer pairs
# make learning start. Zeros for filler, in half of the batches, make it finish: without them, some seeds stand
# still at 50 to 80% for hundreds of steps.
TASKS = tuple(
    Task(length=48, pairs=pairs, vocab_size=128, random_filler=random_filler)
    for random_filler in (False, True)
    for pairs in (2, 4, 8, 12)
)
TENSOR = Run(
    mixer="running_tensor",
    options={"num_heads": 2, "key_dims": (12, 12), "value_dim": 24},
    tasks=TASKS,
    test=TASKS[-1],
    d_model=64,
    embedding_std=0.1,
    lr=5e-3,
    batch=128,
    test_every=20,
    test_count=256,
    stop_at=2.0,  # never: the race says when it is over
)
RUNS = {
    "RunningTensor": TENSOR,
    # 24 key channels a head, as many as 12 and 12, but not multiplied with one another; 8 parameters a layer fewer.
    "the same, matrix state": replace(TENSOR, options={"num_heads": 2, "key_dims": (24,), "value_dim": 24}),
    "Gated DeltaNet": replace(TENSOR, mixer="gated_deltanet", options={"num_heads": 2, "head_dim": 12}),
}
GOOD, TESTS = 0.99, 3  # the race is over when the first model was this good in so many tests, one after another
# Freed memory is kept for the next step: glibc would give it back, to be faulted in again in a fifth of a step's time.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": 2**32, "MALLOC_TRIM_THRESHOLD_": 2**33, "MALLOC_TOP_PAD_": 2**28}
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Row(Provenance):
    """A test of a model."""

    model: str
    parameters: int  # a layer
    state_floats: int  # a layer
    length: int
    pairs: int
    seed: int
    validation: str
    step: int
    accuracy: float
    loss: float
    seconds: float


def demo(out: Path, console: Console, *, steps: int, minutes: float, seed: int = 0) -> list[Result]:
    """Runs the race, shows it, and writes its curves and their figure: of what there is, if it is cut short."""
    if not minutes > 0:
        raise ValueError(f"minutes must be positive, but was {minutes}")
    out.mkdir(parents=True, exist_ok=True)  # before minutes of training, whose results it gets
    race = Race({name: replace(run, steps=steps, seed=seed) for name, run in RUNS.items()}, minutes)
    live = Live(get_renderable=race.board, console=console, refresh_per_second=2, transient=True)
    console.print(
        f"{len(RUNS)} models learn to recall {TENSOR.test.pairs} pairs from {TENSOR.test.length} tokens, "
        f"on the same batches, in at most {minutes:g} minutes.",
        soft_wrap=True,
    )
    try:
        with live if console.is_terminal else nullcontext(), closing(race.rounds()) as rounds:
            for _ in rounds:
                if not console.is_terminal:
                    console.print(race.line(), soft_wrap=True)
    except KeyboardInterrupt:
        console.print("Interrupted.")
    except Died as error:
        if not race.results:
            raise
        console.print(f"[red]{error}[/]; this is how far all had come.")
    if race.results:
        for name, result in race.named():
            if result.failed:
                console.print(f"[red]{name}: {result.failed}[/]")
        console.print(race.summary())
        table, figure = out / "demo.csv", out / "demo.png"
        write(table, race.rows(), Row)
        try:
            plot_demo(table, figure)
            console.print(f"The curves: {figure}, {table}")
        except ModuleNotFoundError:
            console.print(f"The curves: {table}; for a figure of them, pip install matplotlib")
    return race.results


def lane(run: Run, pipe: Connection) -> None:
    """Trains a model in a process of its own, and waits at each test until it is told to go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who shows the results
    torch.set_num_threads(1)  # the other cores have models of their own
    for result in train(run, torch.device("cpu")):
        pipe.send(result)
        pipe.recv()


class Died(RuntimeError):
    """A model's process is no more."""


class Race:
    """The models, how far they are, and how that looks."""

    def __init__(self, runs: dict[str, Run], minutes: float) -> None:
        self.runs, self.minutes = runs, minutes
        self.steps = next(iter(runs.values())).steps
        self.results: list[Result] = []  # one a model, or none yet
        self.started = self.tested = time.perf_counter()

    def rounds(self) -> Generator[None]:
        """One test more of every model each time, until the race is over."""
        context = multiprocessing.get_context("spawn")
        for name, size in KEEPING.items():
            os.environ.setdefault(name, str(size))  # which the processes read when they start
        pipes, processes = [], []
        try:
            for run in self.runs.values():
                ours, theirs = context.Pipe()
                pipes.append(ours)
                processes.append(context.Process(target=lane, args=(run, theirs), daemon=True))
                processes[-1].start()
                theirs.close()  # if it were open here too, the death of the process would not be heard
            while not self.over:
                try:
                    for pipe in pipes if self.results else ():
                        pipe.send("go on")
                    self.results = [pipe.recv() for pipe in pipes]
                except (EOFError, ConnectionError):  # a broken pipe is one of the latter
                    raise Died("A model's process has died") from None
                self.tested = time.perf_counter()
                yield
        finally:
            for process in processes:
                process.terminate()
                process.join()

    @property
    def step(self) -> int:
        return self.results[0].curve[-1].step if self.results else 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def over(self) -> bool:
        if not self.results:
            return False
        last = self.results[0].curve[-TESTS:]
        good = len(last) == TESTS and min(point.accuracy for point in last) >= GOOD
        failed = any(result.failed for result in self.results)  # it has ended, and would answer no more
        return good or failed or self.step >= self.steps or self.seconds > 60 * self.minutes

    def progress(self) -> str:
        if not self.results:
            return f"starting, {clock(self.seconds)}"
        rest = (self.tested - self.started) / self.step * self.steps - self.seconds
        rest = max(0.0, min(rest, 60 * self.minutes - self.seconds))
        return f"step {self.step}, {clock(self.seconds)}, at most {clock(rest)} left"

    def line(self) -> str:
        """For a log."""
        each = (f"{name} {percent(result)} loss {result.curve[-1].loss:.2f}" for name, result in self.named())
        return " | ".join((self.progress(), *each))

    def board(self) -> Table:
        """For a terminal."""
        table = Table("", "accuracy", "loss", "", box=SIMPLE, pad_edge=False, caption=self.progress())
        for name in () if self.results else self.runs:
            table.add_row(name)
        for name, result in self.named():
            curve = "".join(SPARKS[int(point.accuracy * (len(SPARKS) - 0.01))] for point in result.curve)
            table.add_row(name, percent(result), f"{result.curve[-1].loss:.2f}", curve)
        return table

    def summary(self) -> Table:
        table = Table("", box=SIMPLE, pad_edge=False)
        for column in (f"accuracy, all after {self.step} steps", f"steps to {GOOD:.0%}", "parameters", "state floats"):
            table.add_column(column, justify="right")
        for name, result in self.named():
            steps = result.steps_to(GOOD)
            table.add_row(
                name,
                percent(result),
                "not reached" if steps is None else str(steps),
                f"{result.parameters:,}",
                f"{result.state_floats:,}",
            )
        table.caption = "parameters and state are those of one of two layers, for one sequence"
        return table

    def named(self) -> Iterator[tuple[str, Result]]:
        return zip(self.runs, self.results, strict=bool(self.results))

    def rows(self) -> list[Row]:
        here = asdict(provenance(torch.device("cpu")))
        return [
            Row(
                **here,
                model=name,
                parameters=result.parameters,
                state_floats=result.state_floats or 0,
                length=result.run.test.length,
                pairs=result.run.test.pairs,
                seed=result.run.seed,
                validation=result.validation,
                step=point.step,
                accuracy=point.accuracy,
                loss=point.loss,
                seconds=point.seconds,
            )
            for name, result in self.named()
            for point in result.curve
        ]


def percent(result: Result) -> str:
    return f"{result.curve[-1].accuracy:.1%}"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
