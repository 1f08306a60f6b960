"""A sweep runs the part of a grid that is asked for, and a row of one's own beside it."""

import math
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from runningtensor.mqar import sweep as sweeping
from runningtensor.mqar.grids import CONTROLS, GRIDS, OF_LAYERS, ON_A_CPU, TABLE1, TABLE2
from runningtensor.mqar.sweep import sweep


def test_a_part_of_a_grid_can_be_run(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sweeping, "run_cells", lambda *_, wanted, **__: seen.append({(cell.row, cell.length) for cell in wanted})
    )
    sweep("table1", lengths=(1024,), only="Delta", out=tmp_path)
    sweep("table1", lengths=(2048, 4096), out=tmp_path)
    names = ("Gated DeltaNet", "DeltaNet", "Gated DeltaNet, 131k state")
    assert seen == [{(name, 1024) for name in names}, {(name, at) for name in TABLE1 for at in (2048, 4096)}]
    with pytest.raises(
        ValueError, match="must fit some cell, but were 512 and ''; there are lengths 1024, 2048, 4096 and"
    ):
        sweep("table1", lengths=(512,), out=tmp_path)


@pytest.mark.parametrize("name", GRIDS)
def test_a_sweep_without_a_gpu_says_so_unless_it_is_made_for_a_cpu(tmp_path, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    console = Console(file=StringIO(), width=200)
    sweep(name, minutes=0, out=tmp_path, console=console)
    assert ("no GPU here" in console.file.getvalue()) == (name not in ON_A_CPU)


def test_a_row_can_be_run_alone_though_others_have_its_name_in_theirs(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sweeping, "run_cells", lambda *_, wanted, **__: seen.extend(cell.row for cell in wanted))
    sweep("table1", lengths=(1024,), only="DeltaNet", out=tmp_path)
    assert seen == ["DeltaNet"]


def test_a_row_of_ones_own_has_the_runs_of_the_others(tmp_path, monkeypatch):
    seen, mine = [], {"mixer": "deltanet", "options": {"num_heads": 2}}
    monkeypatch.setattr(sweeping, "run_cells", lambda grid, *_, wanted, **__: seen.append((grid, wanted)))
    for name in OF_LAYERS:
        sweep(name, **mine, out=tmp_path)
        grid, wanted = seen.pop()
        assert [cell.row for cell in wanted] == ['deltanet {"num_heads": 2}'] * 3
        assert grid == [*GRIDS[name](), *wanted]
        for cell in wanted:
            for other in (other for other in GRIDS[name]() if other.length == cell.length):
                alike = cell.runs == tuple(replace(run, **mine) for run in other.runs)
                assert alike is not other.row.endswith((*CONTROLS,))  # which are as others have it
    sweep("table1", **mine, lengths=(2048,), rates=(1e-2,), runs=1, out=tmp_path)
    ((_, (cell,)),) = seen
    assert [(run.test.length, run.lr, run.seed) for run in cell.runs] == [(2048, 1e-2, 0)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"name": "changes", "mixer": "deltanet"},
            "mixer must be without only, and with table1, .*, but was 'deltanet'",
        ),
        ({"mixer": "deltanet", "only": "GLA"}, "mixer must be without only"),
        ({"mixer": "lstm"}, "mixer must be one of running_tensor, .*, but was 'lstm'"),
        ({"mixer": "deltanet", "options": {"nonsense": 1}}, "options must fit deltanet"),
        ({"options": {"num_heads": 2}}, "options must be those of a mixer, and none was named"),
    ],
)
def test_what_cannot_be_a_row_is_refused(given, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        sweep(**{"name": "table1", "out": tmp_path} | given)


def test_results_are_in_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out must be a folder"):
        sweep("table1", out=tmp_path / "file")


def test_where_there_is_no_gpu_it_is_said_what_that_means(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = StringIO()
    for device in ("cpu", None):  # who asks for a CPU knows
        assert "no GPU" not in said.getvalue()
        sweep("table1", minutes=0, out=tmp_path, device=device, console=Console(file=said))
    assert "no GPU" in said.getvalue()


def test_the_first_runs_of_each_cell_can_be_run_alone(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sweeping, "run_cells", lambda *_, wanted, **__: seen.extend(wanted))
    sweep("table1", lengths=(1024,), runs=2, out=tmp_path)
    assert [cell.row for cell in seen] == list(TABLE1)
    assert {tuple((run.lr, run.seed) for run in cell.runs) for cell in seen} == {((1e-3, 0), (1e-2, 0))}
    with pytest.raises(ValueError, match="runs must be at least 1, but was 0"):
        sweep("table1", runs=0, out=tmp_path)
    with pytest.raises(ValueError, match="minutes must not be negative, but was nan"):
        sweep("table1", math.nan, out=tmp_path)


def test_runs_at_one_learning_rate_can_be_run_alone(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sweeping, "run_cells", lambda *_, wanted, **__: seen.extend(wanted))
    sweep("table2", lengths=(1024,), rates=(1e-2,), runs=2, out=tmp_path)
    assert [cell.row for cell in seen] == list(TABLE2)
    assert {tuple((run.lr, run.seed) for run in cell.runs) for cell in seen} == {((1e-2, 0), (1e-2, 1))}
    with pytest.raises(ValueError, match=r"lr must be that of some run, but was 0.5; there are 0.001, 0.01, 0.0001"):
        sweep("table2", rates=(1e-2, 0.5), out=tmp_path)


def test_a_grid_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name must be one of table1"):
        sweep("table3", out=tmp_path)
