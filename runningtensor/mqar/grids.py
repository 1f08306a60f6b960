"""The paper's tables as Python functions: each gives its cells, and a cell its runs, in the order to run them in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runningtensor.mqar.data import Task
from runningtensor.mqar.record import Run


@dataclass(frozen=True)
class Protocol:
    """What the paper leaves open. Every row of every table has it from here."""

    pairs: int = 64  # in the test
    vocab_size: int = 8192
    d_model: int = 128
    # Trained on these, tokens and pairs, and on the test's pairs in lengths doubled from `doubled_from` to its own.
    short: tuple[tuple[int, int], ...] = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))
    doubled_from: int = 512
    random_filler: bool = True
    steps: int = 16000
    tokens_a_step: int = 16384
    schedule: str = "cosine"
    weight_decay: float = 0.1
    embedding_std: float = 0.02
    matrix_std: float | None = None  # as each layer draws its own
    learning_rates: tuple[float, ...] = (1e-3, 1e-2, 1e-4)  # first the one at which most rows learn
    seeds: tuple[int, ...] = (0, 1, 2)
    test_every: int = 800
    test_count: int = 512
    dtype: str = "auto"

    def tasks(self, length: int) -> tuple[Task, ...]:
        lengths, at = [], self.doubled_from
        while at < length:
            lengths.append(at)
            at *= 2
        longer = ((at, self.pairs) for at in (*lengths, length))
        return tuple(self.task(*both) for both in (*self.short, *longer))

    def task(self, length: int, pairs: int) -> Task:
        return Task(length, pairs, self.vocab_size, random_filler=self.random_filler)

    @property
    def trials(self) -> list[tuple[int, float]]:
        """Seeds and learning rates. Each rate once before any again; the smallest, at which little is learnt, last."""
        every = [(seed, lr) for seed in self.seeds for lr in self.learning_rates]
        return sorted(every, key=lambda trial: trial[1] == min(self.learning_rates))


PROTOCOL = Protocol()
GOOD_ENOUGH = 0.9995  # accuracy: a cell that has a run this good needs no other, and such a run no more steps
LENGTHS = (1024, 2048, 4096)
TIMED_TOKENS = 65_536  # of a step whose time is taken: a GPU has enough to do then

Options = tuple[str, dict[str, object]]  # a mixer and its options

BARE: dict[str, object] = {"gate_conv": False, "query_skip": False, "delta": False}
MATRIX = {**BARE, "key_dims": (24,)}
SIGMOID: dict[str, object] = {"output_gate": "sigmoid"}  # a SiLU is of either sign at first
GATED_131K: Options = ("gated_deltanet", {"num_heads": 2, "head_dim": 256, "expand_v": 1.0})

TABLE1: dict[str, Options] = {
    "Attention": ("attention", {}),
    "Gated DeltaNet": ("gated_deltanet", {}),
    "Mamba-2": ("mamba2", {}),
    "GLA": ("gla", {}),
    "DeltaNet": ("deltanet", {}),
    "RunningTensor": ("running_tensor", {}),
    "Gated DeltaNet, 131k state": GATED_131K,  # not in the paper's, as the next
    "RunningTensor, r = k, u = q": ("running_tensor_tied", {}),
}
ABLATIONS: dict[str, dict[str, object]] = {
    "tensor + ConcOnlyC + ξ + Δ + g_out@t": {},
    "tensor + ConcOnlyC + Δ + g_out@t": {"query_skip": False},
    "tensor + ConcOnlyC + ξ + g_out@t": {"delta": False},
    "tensor + ConcOnlyC + Δ": {"gate_conv": False, "query_skip": False},
    "tensor + ConcOnlyC": BARE,
    "tensor + ConcOnly": {**BARE, "projection": "conconly"},
    "tensor + OneLinear": {**BARE, "projection": "linear"},
    "matrix + ConcOnlyC": MATRIX,
    "matrix + ConcOnly": {**MATRIX, "projection": "conconly"},
    "matrix + OneLinear": {**MATRIX, "projection": "linear"},
}
TABLE2: dict[str, Options] = {name: ("running_tensor", options) for name, options in ABLATIONS.items()}
# Of a key mode, for states up to about 131k floats.
SIZES = {2: (24, 96, 384, 624), 3: (8, 12, 16, 20), 4: (4, 5, 6, 8)}
CAPACITY: dict[str, Options] = {
    "RunningTensor": TABLE1["RunningTensor"],
    "Gated DeltaNet, 131k state": GATED_131K,
    "RunningTensor, r = k, u = q": TABLE1["RunningTensor, r = k, u = q"],
    "RunningTensor, sigmoid gate": ("running_tensor", SIGMOID),
    "Gated DeltaNet, 131k state, sigmoid gate": (GATED_131K[0], GATED_131K[1] | SIGMOID),
    "Gated DeltaNet, 131k state, no gate": (GATED_131K[0], GATED_131K[1] | {"output_gate": "none"}),  # the published
    **{
        f"order {order}{gate}, keys of {width}": ("running_tensor", {"key_dims": (width,) * (order - 1)} | more)
        for gate, more in (("", {}), (", sigmoid gate", SIGMOID))
        for order, widths in SIZES.items()
        for width in widths
    },
}
SMALL_SIZES: dict[str, Options] = {  # for a CPU; with a sigmoid, ours start early
    **{
        f"order {order}, sigmoid gate, keys of {width}": (
            "running_tensor",
            {"num_heads": 2, "key_dims": (width,) * (order - 1), "value_dim": 24} | SIGMOID,
        )
        for order, widths in {2: (12, 24, 48, 96, 168), 3: (3, 5, 8, 12), 4: (2, 3, 4, 5)}.items()
        for width in widths
    },
    **{
        f"Gated DeltaNet, no gate, keys of {width}": (
            "gated_deltanet",
            {"num_heads": 2, "head_dim": width, "output_gate": "none"},
        )
        for width in (16, 32, 48)
    },
}
NEAREST = "Gated DeltaNet, 131k state, no gate"  # to the published, which began and was rounded otherwise
CONTROLS: dict[str, dict[str, Any]] = {"matrices of 0.02": {"matrix_std": 0.02}, "float32": {"dtype": "float32"}}
VARIANTS = {  # of the protocol, one change each: to see what it depends on
    "as it stands": PROTOCOL,
    "half the steps": replace(PROTOCOL, steps=PROTOCOL.steps // 2),
    "half the tokens a step": replace(PROTOCOL, tokens_a_step=PROTOCOL.tokens_a_step // 2),
    "embeddings of 0.1": replace(PROTOCOL, embedding_std=0.1),
    "no weight decay": replace(PROTOCOL, weight_decay=0.0),
    "matrices of 0.02": replace(PROTOCOL, matrix_std=0.02),
    "constant rate": replace(PROTOCOL, schedule="constant"),
    "zeros as filler": replace(PROTOCOL, random_filler=False),
    "shorter sequences": replace(PROTOCOL, short=((32, 2), (32, 4), (64, 8), (128, 16), (128, 32), (256, 64))),
}
# Of RunningTensor at the longest length, long after the protocol was fixed: options of the layer, and the protocol.
ONE = replace(PROTOCOL, learning_rates=(1e-3,), seeds=(0,))
CHANGES: dict[str, tuple[dict[str, object], Protocol]] = {
    **{
        how: ({}, replace(VARIANTS[how], learning_rates=ONE.learning_rates, seeds=ONE.seeds))
        for how in ("as it stands", "embeddings of 0.1", "matrices of 0.02", "no weight decay")
    },
    "twice the steps": ({}, replace(ONE, steps=2 * ONE.steps)),
    "a rate of 3e-3": ({}, replace(ONE, learning_rates=(3e-3,))),
    "no lengths between": ({}, replace(ONE, doubled_from=max(LENGTHS))),
    "no forgetting": ({"forget": "none"}, ONE),
    "sigmoid gate": (SIGMOID, ONE),
    "float32": ({}, replace(ONE, dtype="float32")),
}
# Small enough for a CPU: what a model of the paper's layer waits for before it begins to learn.
SMALL = Protocol(
    pairs=8,
    vocab_size=512,
    d_model=64,
    short=((32, 2), (48, 4)),
    doubled_from=64,
    steps=1000,
    tokens_a_step=4096,
    learning_rates=(3e-3, 1e-2, 1e-3),
    test_every=50,
    test_count=128,
)
SMALL_ENOUGH = 0.99  # accuracy at which such a run ends: it is the way there that counts
SMALL_HEADS: dict[str, dict[str, object]] = {
    "RunningTensor": {"num_heads": 2, "key_dims": (12, 12), "value_dim": 24},
    "Gated DeltaNet": {"num_heads": 2, "head_dim": 16},
}
GATE: dict[str, tuple[dict[str, object], Protocol]] = {  # options of the layer, and the protocol
    "RunningTensor": ({}, SMALL),
    "RunningTensor, sigmoid gate": (SIGMOID, SMALL),
    "RunningTensor, OneLinear": ({"projection": "linear"}, SMALL),
    "RunningTensor, no forgetting": ({"forget": "none"}, SMALL),
    "RunningTensor, embeddings of 0.1": ({}, replace(SMALL, embedding_std=0.1)),
    "RunningTensor, matrices of 0.02": ({}, replace(SMALL, matrix_std=0.02)),
    "Gated DeltaNet": ({}, SMALL),
    "Gated DeltaNet, sigmoid gate": (SIGMOID, SMALL),
    "Gated DeltaNet, no gate": ({"output_gate": "none"}, SMALL),
}
BEGINNINGS = ("as it stands", "embeddings of 0.1", "matrices of 0.02")  # of all rows: what helps one may help another
CALIBRATED_ON = ("Attention", "Gated DeltaNet", "DeltaNet")  # no tensor state: that is what is to be tested


@dataclass(frozen=True)
class Cell:
    """One number of a table: the best of its runs, in the test of this length."""

    row: str
    length: int
    runs: tuple[Run, ...]


def table1(protocol: Protocol = PROTOCOL, lengths: Sequence[int] = LENGTHS) -> list[Cell]:
    return [cell(name, *row, length, protocol) for length in lengths for name, row in TABLE1.items()]


def table2(protocol: Protocol = PROTOCOL, lengths: Sequence[int] = LENGTHS) -> list[Cell]:
    return [cell(name, *row, length, protocol) for length in lengths for name, row in TABLE2.items()]


def calibration(lengths: Sequence[int] = LENGTHS) -> list[Cell]:
    """The protocol and what it might have been, one change at a time, on rows of the paper whose numbers are known."""
    return [
        cell(f"{name} · {how}", *TABLE1[name], length, replace(variant, seeds=variant.seeds[:1]))
        for length in lengths
        for how, variant in VARIANTS.items()
        for name in CALIBRATED_ON
    ]


def changes() -> list[Cell]:
    """What recall at the longest length depends on, one change at a time: RunningTensor's on many things, the others'
    on how models begin, and on the gate where they have it too."""
    asked = {"RunningTensor": tuple(CHANGES)}
    for row, (mixer, _) in TABLE1.items():
        if not mixer.startswith("running_tensor"):
            asked[row] = (*BEGINNINGS, "sigmoid gate") if mixer == "gated_deltanet" else BEGINNINGS
    return [changed(row, how) for row, hows in asked.items() for how in hows]


def changed(row: str, how: str) -> Cell:
    (mixer, options), (more, protocol) = TABLE1[row], CHANGES[how]
    return cell(f"{row} · {how}", mixer, options | more, max(LENGTHS), protocol)


def gate() -> list[Cell]:
    """When models begin to learn a small task, by their output gates and by what else may delay them."""
    cells = []
    for name, (more, protocol) in GATE.items():
        row = name.partition(",")[0]
        cells.append(cell(name, TABLE1[row][0], SMALL_HEADS[row] | more, 64, protocol))
    return [replace(cell, runs=tuple(replace(run, stop_at=SMALL_ENOUGH) for run in cell.runs)) for cell in cells]


def speed() -> list[Cell]:
    """A few large steps of every row of both tables, for their times. Several may compile at once; their steps come one
    run after another."""
    return [
        Cell(
            name,
            length,
            (replace(run, tasks=(run.test,), tokens_a_step=TIMED_TOKENS, steps=60, test_every=60, test_count=64),),
        )
        for length in LENGTHS
        for name, row in (TABLE1 | TABLE2).items()
        for run in cell(name, *row, length, PROTOCOL).runs[:1]
    ]


def capacity() -> list[Cell]:
    """Zoology's mix, on short sequences only, tested on far longer ones: the same runs at every length."""
    counts = {(64, 4): 5, (128, 8): 1, (256, 16): 1, (256, 32): 1, (256, 64): 1}  # in 20,000 sequences
    tasks = tuple(Task(*both) for both, count in counts.items() for _ in range(count))
    batch, epochs = 256, 4
    steps = epochs * 20_000 * sum(counts.values()) // batch
    rates = (1e-2, 2.15e-3, 1e-3, 4.64e-4)  # zoology's, with 1e-3 in place of 1e-4
    cells = beyond(CAPACITY, tasks, LENGTHS, rates, batch=batch, steps=steps)
    controls = [
        Cell(f"{NEAREST}, {how}", cell.length, tuple(replace(run, **change) for run in cell.runs))
        for cell in cells
        if cell.row == NEAREST
        for how, change in CONTROLS.items()
    ]
    return [*cells, *controls]


def sizes() -> list[Cell]:
    """The same on a CPU, in minutes a run: trained on 16 pairs at most, tested on up to 128."""
    vocab_size = 512
    tasks = tuple(Task(*both, vocab_size) for both in ((32, 2), (48, 4), (64, 8), (64, 16)))
    lengths, rates = (128, 256, 512), (1e-2, 3e-3)
    return beyond(SMALL_SIZES, tasks, lengths, rates, d_model=64, tokens_a_step=4096, steps=1000)


def beyond(
    rows: dict[str, Options],
    tasks: tuple[Task, ...],
    lengths: Sequence[int],
    rates: Sequence[float],
    *,
    steps: int,
    **settings: Any,
) -> list[Cell]:
    """Tested on more pairs than trained on, one for every four tokens: the same runs at every length."""
    test, *also = (Task(length, length // 4, tasks[0].vocab_size) for length in lengths)
    run = Run(
        "running_tensor",
        {},
        tasks,
        test,
        also=tuple(also),
        steps=steps,
        schedule=PROTOCOL.schedule,
        weight_decay=PROTOCOL.weight_decay,
        embedding_std=PROTOCOL.embedding_std,
        matrix_std=PROTOCOL.matrix_std,
        test_every=steps // 8,
        test_count=128,
        stop_at=GOOD_ENOUGH,
        **settings,
    )
    trials = [(seed, lr) for seed in PROTOCOL.seeds for lr in rates]
    return [
        Cell(name, length, tuple(replace(run, mixer=mixer, options=options, lr=lr, seed=seed) for seed, lr in trials))
        for length in lengths
        for name, (mixer, options) in rows.items()
    ]


def cell(name: str, mixer: str, options: dict[str, object], length: int, protocol: Protocol) -> Cell:
    runs = tuple(
        Run(
            mixer,
            options,
            protocol.tasks(length),
            protocol.task(length, protocol.pairs),
            d_model=protocol.d_model,
            lr=lr,
            seed=seed,
            steps=protocol.steps,
            tokens_a_step=protocol.tokens_a_step,
            schedule=protocol.schedule,
            weight_decay=protocol.weight_decay,
            embedding_std=protocol.embedding_std,
            matrix_std=protocol.matrix_std,
            test_every=protocol.test_every,
            test_count=protocol.test_count,
            stop_at=GOOD_ENOUGH,
            dtype=protocol.dtype,
        )
        for seed, lr in protocol.trials
    )
    return Cell(name, length, runs)


def with_row(cells: Sequence[Cell], mixer: str, options: dict[str, object]) -> list[Cell]:
    """And a row more, of another layer: in each length's runs, it is in the place of that of the first row."""
    more = []
    for length in dict.fromkeys(cell.length for cell in cells):
        first = next(cell for cell in cells if cell.length == length)
        runs = tuple(replace(run, mixer=mixer, options=options) for run in first.runs)
        more.append(Cell(runs[0].layer, length, runs))
    return [*cells, *more]


GRIDS: dict[str, Callable[[], list[Cell]]] = {
    "table1": table1,
    "table2": table2,
    "capacity": capacity,
    "sizes": sizes,
    "calibration": calibration,
    "changes": changes,
    "gate": gate,
    "speed": speed,
}
ON_A_CPU = ("sizes", "gate")  # minutes a run
OF_LAYERS = ("table1", "table2", "capacity", "sizes", "speed")  # rows differ in their layer alone: another can be added
