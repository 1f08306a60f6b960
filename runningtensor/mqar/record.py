"""What a run is and what it found, and both as one line of JSON."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from runningtensor.bench.provenance import finite
from runningtensor.mqar.data import Task
from runningtensor.mqar.mixers import MIXERS

SCHEDULES = ("constant", "cosine")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Run:
    """Everything that decides the result."""

    mixer: str  # a key of MIXERS, or package.module:name
    options: dict[str, object]  # of the mixer
    tasks: tuple[Task, ...]  # each training batch is of one of them; one that is there twice is drawn twice as often
    test: Task
    d_model: int = 128
    layers: int = 2
    mlp: int = 3  # width of the SwiGLU, in d_model
    embedding_std: float = 0.02
    # Of matrices, and divided by √(2·layers) where they write into the residual stream; None: as each layer draws them.
    matrix_std: float | None = None
    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float = 1.0
    batch: int = 128  # sequences
    steps: int = 1000
    test_every: int = 50
    test_count: int = 512
    stop_at: float = 1.0  # accuracy, in all tests
    seed: int = 0
    tokens_a_step: int | None = None  # instead of batch: tokens_a_step // length sequences
    schedule: str = "constant"  # or "cosine", to zero, after a linear warm-up
    dtype: str = "auto"  # of the matrices: bfloat16 on CUDA, else float32. The optimizer's are float32 always
    also: tuple[Task, ...] = ()  # tested too
    # What the last norm's weights begin with: tied embeddings as many times larger then give the same logits at first.
    last_gain: float = 1.0
    warm_up: int | None = None  # steps, of a cosine; None: 100, or a tenth of all if that is less

    def __post_init__(self) -> None:
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in self.options.items()}  # as JSON has them
        object.__setattr__(self, "options", options)
        for name, value, known in (
            *([("mixer", self.mixer, MIXERS)] if ":" not in self.mixer else []),  # which may not be here
            ("schedule", self.schedule, SCHEDULES),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, but was {value!r}")
        if not self.tasks:
            raise ValueError("tasks must hold what to train on, but were empty")
        if others := {task.vocab_size for task in (*self.tasks, *self.also)} - {self.test.vocab_size}:
            raise ValueError(f"vocab_size must be {self.test.vocab_size} in all tasks, as in test, but was {others}")
        longest = max(task.length for task in (*self.tasks, *self.tests))
        if self.tokens_a_step is not None and self.tokens_a_step < longest:
            raise ValueError(
                f"tokens_a_step must be at least the longest length, {longest}, but was {self.tokens_a_step}"
            )
        for name in ("d_model", "layers", "batch", "steps", "test_every", "test_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but was {getattr(self, name)}")
        if abs(self.seed) >= 2**53:  # batches are drawn with a thousand times as much
            raise ValueError(f"seed must be less than 2**53, but was {self.seed}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, but was {getattr(self, name)}")
        for name in ("embedding_std", "matrix_std", "weight_decay"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, but was {getattr(self, name)}")
        if not 0 <= self.stop_at <= 2:
            raise ValueError(f"stop_at must be from 0 to 1, or at most 2 for never, but was {self.stop_at}")
        if self.warm_up is not None and self.warm_up < 1:
            raise ValueError(f"warm_up must be at least 1, or None, but was {self.warm_up}")

    @property
    def layer(self) -> str:
        return f"{self.mixer} {json.dumps(self.options)}" if self.options else self.mixer

    @property
    def tests(self) -> tuple[Task, ...]:
        return (self.test, *self.also)

    def sequences(self, task: Task) -> int:
        """Of a batch."""
        return self.batch if self.tokens_a_step is None else self.tokens_a_step // task.length

    def tested_at_once(self, task: Task) -> int:
        """Sequences: of about as many tokens as there are in training, where a test may be far longer."""
        longest = max(self.tasks, key=lambda task: task.length)
        tokens = self.sequences(longest) * longest.length
        if self.tokens_a_step is not None:
            tokens = max(tokens, 65536)  # steps of few tokens are a choice about learning, not about memory
        return max(1, tokens // task.length)

    def rate(self, step: int) -> float:
        """The learning rate of a step; the first is 1."""
        if self.schedule == "constant":
            return self.lr
        warm_up = min(100, 1 + self.steps // 10) if self.warm_up is None else self.warm_up
        return self.lr * min(1.0, step / warm_up) * (1 + math.cos(math.pi * (step - 1) / self.steps)) / 2


@dataclass
class Score:
    accuracy: float  # which is micro-F1 here: one prediction for each label
    macro_f1: float  # mean over the classes that occur as labels


@dataclass
class Point:
    step: int
    loss: float
    accuracy: float
    seconds: float
    macro_f1: float = math.nan
    also: list[Score] = field(default_factory=list)


@dataclass
class Result:
    run: Run
    parameters: int  # without embeddings, a layer
    state_floats: int | None  # a layer; None: it grows
    validation: str = ""  # hashes of the sets of all tests
    curve: list[Point] = field(default_factory=list)
    model_parameters: int = 0  # without embeddings
    dtype: str = ""
    graph: bool = False  # steps were CUDA graphs
    ms_a_step: float | None = None  # median of steps after the first ones, data included, tests not
    peak_mib: float | None = None  # None: not on CUDA
    # commit, device, versions; at_once: runs of the sweep; interrupted: the commit of each part before the last
    origin: dict[str, Any] = field(default_factory=dict)
    finished: str = ""  # UTC; empty: not yet
    failed: str = ""  # why it ended before it should have

    @property
    def best(self) -> Point | None:
        return max(self.curve, key=lambda point: point.accuracy, default=None)

    @property
    def accuracy(self) -> float:
        return self.best.accuracy if self.best else 0.0

    def steps_to(self, accuracy: float) -> int | None:
        return next((point.step for point in self.curve if point.accuracy >= accuracy), None)

    def at(self, length: int) -> Score | None:
        """The best score in the test of this length; None: there is none."""
        at = [task.length for task in self.run.tests].index(length)
        scores = [[Score(point.accuracy, point.macro_f1), *point.also][at] for point in self.curve]
        return max(scores, key=lambda score: score.accuracy, default=None)


def told_apart(runs: Sequence[Run]) -> list[str]:
    """Each in words: what they are, and whatever else not all of them share."""
    often = ("mixer", "options", "test", "lr", "seed")
    differ = [f.name for f in fields(Run) if f.name not in often and len({repr(getattr(x, f.name)) for x in runs}) > 1]

    def word(value: object) -> str:
        if not isinstance(value, tuple):
            return str(value)
        zeros = "" if all(task.random_filler for task in value) else " between zeros"
        return ",".join(f"{task.length}/{task.pairs}" for task in value) + zeros

    return [
        " · ".join(
            (
                *(run.layer, word((run.test,)), f"lr {run.lr:g}", f"seed {run.seed}"),
                *(f"{name} {word(getattr(run, name))}" for name in differ),
            )
        )
        for run in runs
    ]


# -- JSON --------------------------------------------------------------------------------------------------------------


def now() -> str:
    """As `finished` has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def identity(run: Run) -> str:
    """The same for runs that are the same, whenever they were written down."""
    return hashlib.sha256(json.dumps(asdict(run), sort_keys=True).encode()).hexdigest()[:16]


def to_json(result: Result) -> str:
    """One line. What it says before `run` is for people: it follows from the rest."""
    best, last = result.best, result.curve[-1] if result.curve else None
    summary = {
        "id": identity(result.run),
        "accuracy": best and best.accuracy,
        "macro_f1": {"best": best and best.macro_f1, "last": last and last.macro_f1},
    }
    return json.dumps(finite(summary | asdict(result)), allow_nan=False)


def from_json(line: str) -> Result:
    record = json.loads(line)
    known = {field.name for field in fields(Result)}
    rest = {name: value for name, value in record.items() if name in known}
    points = [point_from(point) for point in record["curve"]]
    return Result(**rest | {"run": run_from(record["run"]), "curve": points})


def parsed(line: str) -> Result:
    """A line's result; a ValueError, whatever else it is."""
    try:
        return from_json(line)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def run_from(record: dict[str, Any]) -> Run:
    tasks: dict[str, Any] = {
        name: tuple(Task(**task) for task in record[name]) for name in ("tasks", "also") if name in record
    }
    return Run(**record | tasks | {"test": Task(**record["test"])})


def point_from(record: dict[str, Any]) -> Point:
    read: dict[str, Any] = {name: math.nan if value is None else value for name, value in record.items()}
    return Point(**read | {"also": [Score(**score) for score in record["also"]]})
