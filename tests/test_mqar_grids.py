"""The grids are the paper's: their rows, their states, and one protocol for all."""

from dataclasses import replace
from pathlib import Path

import pytest

from runningtensor.mqar.data import Task
from runningtensor.mqar.grids import (
    CALIBRATED_ON,
    CAPACITY,
    CONTROLS,
    GRIDS,
    PROTOCOL,
    SMALL_SIZES,
    TABLE1,
    TABLE2,
    capacity,
    sizes,
    table1,
)
from runningtensor.mqar.mixers import MIXERS
from runningtensor.mqar.record import identity
from runningtensor.mqar.sweep import read

REST = 3 * 128 * 384 + 2 * 128  # parameters of a layer that are not the mixer's
SIZES = {  # parameters of a layer, floats of its state
    "Attention": (934_400, None),
    "Gated DeltaNet": (248_632, 4_608),
    "Mamba-2": (283_696, 32_768),
    "GLA": (216_416, 2_048),
    "DeltaNet": (248_640, 8_192),
    "RunningTensor": (175_475, 120_000),
    "Gated DeltaNet, 131k state": (482_308, 131_072),
    "RunningTensor, r = k, u = q": (174_691, 120_000),
    "tensor + ConcOnlyC + ξ + Δ + g_out@t": (175_475, 120_000),
    "tensor + ConcOnlyC + Δ + g_out@t": (175_475, 110_592),
    "tensor + ConcOnlyC + ξ + g_out@t": (175_475, 120_000),
    "tensor + ConcOnlyC + Δ": (174_707, 110_592),
    "tensor + ConcOnlyC": (174_707, 110_592),
    "tensor + ConcOnly": (174_704, 110_592),
    "tensor + OneLinear": (275_056, 110_592),
    "matrix + ConcOnlyC": (173_907, 4_608),
    "matrix + ConcOnly": (173_904, 4_608),
    "matrix + OneLinear": (248_656, 4_608),
}


@pytest.mark.parametrize(("name", "row"), (TABLE1 | TABLE2).items(), ids=TABLE1 | TABLE2)
def test_rows_have_the_parameters_and_states_of_the_paper(name, row):
    mixer, options = row
    layer = MIXERS[mixer](128, **options)
    assert (sum(p.numel() for p in layer.parameters()) + REST, layer.state_floats) == SIZES[name]


def test_capacity_has_orders_2_3_and_4_up_to_the_same_state():
    states = {name: MIXERS[mixer](128, **options).state_floats for name, (mixer, options) in CAPACITY.items()}
    for order in ("order 2", "RunningTensor", "order 4"):
        largest = max(state for name, state in states.items() if name.startswith(order))
        assert largest == pytest.approx(131_072, rel=0.1)


def test_of_the_small_sizes_matrix_and_tensor_end_at_the_same_state_and_the_others_at_larger_ones():
    states = {name: MIXERS[mixer](64, **options).state_floats for name, (mixer, options) in SMALL_SIZES.items()}
    kinds = ("order 2", "order 3", "Gated DeltaNet", "order 4")
    largest = [max(states[name] for name in states if name.startswith(kind)) for kind in kinds]
    assert largest == [8_112, 8_112, 9_216, 10_368]


def test_small_sizes_are_tested_on_more_pairs_than_they_are_trained_on():
    for run in (run for cell in sizes() for run in cell.runs):
        assert max(task.pairs for task in run.tasks) == 16
        assert [(task.length, task.pairs) for task in run.tests] == [(128, 32), (256, 64), (512, 128)]
        assert run.options.get("output_gate") in ("sigmoid", "none")


def layers_alone(cells):
    """But for those that are there to be like what others published."""
    return [cell for cell in cells if not cell.row.endswith((*CONTROLS,))]


def test_all_rows_have_one_protocol_and_differ_in_nothing_but_the_mixer():
    for grid in (GRIDS["table1"](), GRIDS["table2"](), layers_alone(capacity()), sizes()):
        for length in {cell.length for cell in grid}:
            same = [cell.runs for cell in grid if cell.length == length]
            assert len(same) > 3
            blank = [[replace(run, mixer="gla", options={}) for run in runs] for runs in same]
            assert all(runs == blank[0] for runs in blank)


def test_runs_of_a_table_train_up_to_the_length_they_are_tested_at():
    for cell in table1():
        for run in cell.runs:
            assert run.test == Task(cell.length, PROTOCOL.pairs) and run.test in run.tasks
            assert max(task.length for task in run.tasks) == cell.length
            assert run.tokens_a_step == PROTOCOL.tokens_a_step


def test_every_learning_rate_comes_once_before_any_again_but_the_smallest_of_the_tables_last():
    for cell in (*table1(), *GRIDS["table2"]()):
        assert [(run.lr, run.seed) for run in cell.runs] == [
            *((lr, seed) for seed in (0, 1, 2) for lr in (1e-3, 1e-2)), *((1e-4, seed) for seed in (0, 1, 2)),
        ]  # fmt: skip
    rates = (1e-2, 2.15e-3, 1e-3, 4.64e-4)
    for cell in capacity():
        assert [(run.lr, run.seed) for run in cell.runs] == [(lr, seed) for seed in (0, 1, 2) for lr in rates]


def test_capacity_begins_and_is_trained_as_the_tables_are():
    for name in ("schedule", "weight_decay", "embedding_std", "matrix_std"):
        assert {getattr(run, name) for cell in (*layers_alone(capacity()), *sizes()) for run in cell.runs} == {
            getattr(PROTOCOL, name)
        }


def test_the_shortest_length_comes_first():
    lengths = [cell.length for cell in table1()]
    assert lengths == sorted(lengths) and lengths[0] == 1024


def test_capacity_is_zoologys_mix():
    run = capacity()[0].runs[0]
    drawn = [(task.length, task.pairs) for task in run.tasks]
    assert {shape: drawn.count(shape) for shape in drawn} == {
        (64, 4): 5,
        (128, 8): 1,
        (256, 16): 1,
        (256, 32): 1,
        (256, 64): 1,
    }
    assert [(task.length, task.pairs) for task in run.tests] == [(1024, 256), (2048, 512), (4096, 1024)]
    assert run.steps * run.batch == pytest.approx(4 * 180_000, rel=1e-3)


def test_each_change_is_one_change_of_the_same_run():
    bases = {
        cell.row: run for cell in table1() for run in cell.runs if (cell.length, run.lr, run.seed) == (4096, 1e-3, 0)
    }
    found = {row: [] for row in bases}
    for cell in GRIDS["changes"]():
        row, _, how = cell.row.partition(" · ")
        (run,) = cell.runs
        differ = [name for name, value in vars(run).items() if value != getattr(bases[row], name)]
        assert len(differ) == (how != "as it stands")
        found[row] += [how]
    assert len(found.pop("RunningTensor")) == 10 and not found.pop("RunningTensor, r = k, u = q")
    begins = ["as it stands", "embeddings of 0.1", "matrices of 0.02"]
    for row, hows in found.items():
        assert hows == begins + (["sigmoid gate"] if row.startswith("Gated DeltaNet") else [])


def test_rows_of_the_small_task_are_one_change_each():
    rows = {cell.row: cell.runs for cell in GRIDS["gate"]()}
    for row, runs in rows.items():
        base = rows[row.partition(",")[0]]
        differ = {
            name for x, y in zip(runs, base, strict=True) for name in vars(x) if getattr(x, name) != getattr(y, name)
        }
        assert len(differ) == (runs is not base)
    assert len({tuple(map(identity, runs)) for runs in rows.values()}) == len(rows)


def test_what_is_known_of_the_small_task_counts():
    """A run of long ago is the same as one of this grid: of what the file holds, all but two runs of width 128."""
    planned = {identity(run) for cell in GRIDS["gate"]() for run in cell.runs}
    found = read(Path(__file__).parents[1] / "results/mqar/gate.jsonl")
    assert {result.run.d_model for result in found if identity(result.run) not in planned} == {128}


def test_what_is_nearest_to_the_published_is_run_as_that_was_too():
    rows = {cell.row: cell.runs for cell in capacity()}
    for how, change in (("matrices of 0.02", {"matrix_std": 0.02}), ("float32", {"dtype": "float32"})):
        nearest = rows["Gated DeltaNet, 131k state, no gate"]
        assert rows[f"Gated DeltaNet, 131k state, no gate, {how}"] == tuple(replace(run, **change) for run in nearest)


def test_nothing_with_a_tensor_state_is_calibrated_on():
    rows = {cell.row.partition(" · ")[0] for cell in GRIDS["calibration"]()}
    assert rows == set(CALIBRATED_ON) == {"Attention", "Gated DeltaNet", "DeltaNet"}
