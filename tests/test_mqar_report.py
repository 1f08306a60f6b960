"""A report says what was run, beside what was published, and nothing else."""

import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.mqar import figures
from runningtensor.mqar import sweep as sweeping
from runningtensor.mqar.data import Task
from runningtensor.mqar.grids import (
    LENGTHS,
    TABLE1,
    Cell,
    calibration,
    capacity,
    changes,
    gate,
    sizes,
    speed,
    table1,
    table2,
)
from runningtensor.mqar.record import Point, Result, Run, Score, from_json, now, to_json
from runningtensor.mqar.report import PUBLISHED, Summary, report, series, summarize
from runningtensor.mqar.sweep import Store
from runningtensor.mqar.workers import failure

ORIGIN = {"device": "NVIDIA H200", "torch": "2.13.0", "commit": "abc1234"}


def result(run, *accuracies, macro=0.5, ms=4.0, parameters=100, state_floats=200):
    first, *also = accuracies
    scores = [Score(accuracy, macro) for accuracy in also]
    curve = [Point(1, 3.0, 0.0, 1.0, 0.0, [Score(0.0, 0.0) for _ in also]), Point(2, 1.0, first, 2.0, macro, scores)]
    return Result(run, parameters, state_floats, curve=curve, ms_a_step=ms, origin=ORIGIN, finished=now())


def cell(row, length=1024):
    return next(cell for cell in table1() if (cell.row, cell.length) == (row, length))


def chosen(cell, lr, seed):
    return next(run for run in cell.runs if (run.lr, run.seed) == (lr, seed))


def printed(name, results, out, width=200, **options):
    (out / f"{name}.jsonl").write_text("".join(to_json(result) + "\n" for result in results))
    text = StringIO()
    summaries = report(name, out, Console(file=text, width=width), **options)
    return text.getvalue(), summaries


def test_the_numbers_of_a_cell():
    gated = cell("Gated DeltaNet")
    results = [
        result(chosen(gated, 1e-3, 0), 0.70, macro=0.60, ms=4.0),
        result(chosen(gated, 1e-3, 1), 0.80, macro=0.75, ms=6.0),
        result(chosen(gated, 1e-2, 0), 0.10, ms=5.0),
        failure(chosen(gated, 1e-2, 1), "killed"),
    ]
    (found,) = summarize("table1", [gated], results)
    assert found == Summary(
        "Gated DeltaNet",
        1024,
        published=78.3,
        best=pytest.approx(80),
        macro_f1=pytest.approx(75),
        lr=1e-3,
        seeds=pytest.approx((70, 80)),
        ms_a_step=None,
        parameters=100,
        state_floats=200,
        runs=4,
        failed=1,
        planned=9,
    )


def test_only_a_run_that_had_the_gpu_to_itself_tells_how_long_a_step_takes():
    gated = cell("Gated DeltaNet")
    timed = [result(of.runs[0], 0.0, ms=6.0 + of.length) for of in speed() if of.row == "Gated DeltaNet"]
    for company, want in (({}, 6.0 + 1024), ({"at_once": 9}, None), ({"interrupted": ["abc1234"]}, None)):
        for each in timed:
            each.origin = ORIGIN | company
        (found,) = summarize("table1", [gated], [result(gated.runs[0], 0.7, ms=80.0)], timed)
        assert found.ms_a_step == want


def test_seeds_have_a_mean_and_a_spread_and_one_has_no_spread(tmp_path):
    gla, gated = (cell(name) for name in ("GLA", "Gated DeltaNet"))
    found = [
        result(chosen(gla, 1e-2, 0), 0.5),
        *(result(chosen(gated, 1e-3, seed), 0.7 + seed / 10) for seed in (0, 1)),
    ]
    text, _ = printed("table1", found, tmp_path)
    assert "50.00" in text and "75.00 ± 7.07 (2)" in text and len(re.findall(r"\d ± \d", text)) == 1


def test_what_was_not_run_or_only_failed_is_missing():
    gla, mamba = cell("GLA"), cell("Mamba-2")
    for found in summarize("table1", [gla, mamba], [failure(mamba.runs[0], "killed")]):
        assert found.best is found.macro_f1 is found.parameters is found.ms_a_step is None and not found.seeds


def test_a_run_counts_in_the_cell_it_is_of_and_at_the_length_it_was_tested_at():
    runs = capacity()[0].runs
    cells = [cell for cell in capacity() if cell.row == "RunningTensor"]
    found = summarize("capacity", cells, [result(runs[0], 0.9, 0.5, 0.1)])
    assert [(s.length, s.best) for s in found] == [(1024, 90.0), (2048, 50.0), (4096, 10.0)]


def test_the_table_shows_both_and_says_what_is_missing(tmp_path):
    tensor, timed = (next(x for x in grid if x.row == "RunningTensor") for grid in (table1(), speed()))
    (tmp_path / "speed.jsonl").write_text(to_json(result(timed.runs[0], 0.0, ms=4.0)) + "\n")
    text, _ = printed("table1", [result(tensor.runs[0], 0.98765, parameters=175_475, state_floats=120_000)], tmp_path)
    line = next(line for line in text.splitlines() if line.strip().startswith("RunningTensor "))
    for word in ("175,475", "120,000", "98.77 (100.0)", "0.001", "4.0", "1, 0, 0 of 9", "not run (100.0)"):
        assert word in line
    assert all(f"{length:,} tokens" in text for length in LENGTHS) and "(934k)" in text and "(333.5)" in text
    alone = [row for row in TABLE1 if row not in PUBLISHED["table1"]]
    assert text.count("not run (") == len(LENGTHS) * len(PUBLISHED["table1"]) - 1
    assert f"Not run: {'; '.join(alone)}." in text
    assert "macro-F1 differs by 48.8 at most" in text
    assert "1 runs on NVIDIA H200, torch 2.13.0, commit abc1234" in text


@pytest.mark.parametrize("width", (80, 100, 120, 140))
def test_a_narrow_terminal_has_fewer_columns_and_no_number_is_cut(tmp_path, width):
    text, _ = printed("table1", [result(cell("RunningTensor").runs[0], 0.98765)], tmp_path, width)
    line = next(line for line in text.splitlines() if line.strip().startswith("RunningTensor "))
    shown, heading = line.split()[1:], text.splitlines()[1].split()
    assert "98.77" in shown and "…" not in text and max(map(len, text.splitlines())) <= width
    left_out = [word for word in ("lr", "runs", "parameters", "ms/step", "state") if word not in heading]
    assert bool(left_out) == (width < 140) == ("make this terminal wider" in text)
    assert not left_out or f"For {', '.join(left_out)}, make" in text


def test_a_time_is_of_the_same_layer_in_the_same_dtype(tmp_path):
    timed = next(x for x in speed() if (x.row, x.length) == ("RunningTensor", 4096))
    (tmp_path / "speed.jsonl").write_text(to_json(result(timed.runs[0], 0.0, ms=4.0)) + "\n")
    hows = ("as it stands", "sigmoid gate", "float32")
    found = [result(x.runs[0], 0.9) for x in changes() if x.row in [f"RunningTensor · {how}" for how in hows]]
    _, summaries = printed("changes", found, tmp_path)
    times = {s.row.partition(" · ")[2]: s.ms_a_step for s in summaries if s.best is not None}
    assert times == {"as it stands": 4.0, "sigmoid gate": None, "float32": None}


def test_a_run_that_is_there_twice_is_one_run(tmp_path):
    text, _ = printed("table1", [failure(cell("GLA").runs[0], "killed"), result(cell("GLA").runs[0], 0.9)], tmp_path)
    assert "1 runs on NVIDIA H200" in text


def test_without_matplotlib_there_is_a_table(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text, _ = printed("table1", [result(cell("GLA").runs[0], 0.9)], tmp_path)
    assert "90.00" in text and "pip install matplotlib" in text and not (tmp_path / "table1.png").exists()


def test_results_of_another_protocol_are_left_out_and_this_is_said(tmp_path):
    other = replace(cell("GLA").runs[0], steps=7)
    text, summaries = printed("table1", [result(other, 0.9)], tmp_path)
    assert all(s.best is None for s in summaries)
    assert "1 results of" in text and "another protocol and are left out" in text
    drafts, _ = printed("calibration", [result(replace(cell("Attention").runs[0], steps=7), 0.9)], tmp_path)
    assert "another protocol and are in the figure alone" in drafts


def test_of_the_calibration_what_was_not_tried_is_no_row(tmp_path):
    tried = next(cell for cell in calibration() if cell.row == "Attention · no weight decay" and cell.length == 2048)
    text, summaries = printed("calibration", [result(tried.runs[0], 0.9)], tmp_path)
    assert [s.row for s in summaries] == ["Attention · no weight decay"] * len(LENGTHS)
    assert "90.00 (99.9)" in text and "Not run" not in text


def test_of_speed_nothing_is_said_but_times(tmp_path):
    text, _ = printed("speed", [result(speed()[0].runs[0], 0.07, ms=4.0)], tmp_path)
    assert " 4.0 " in text and "micro-F1" not in text and "lr" not in text and not (tmp_path / "speed.png").exists()


def test_the_published_numbers_are_shown_where_nothing_of_ours_stands_beside_them(tmp_path):
    text, _ = printed("capacity", [], tmp_path)
    assert "Flash-VQG" in text and "32.6" in text


def test_markdown_is_markdown(tmp_path):
    runs = [run for cell in table2()[:1] for run in cell.runs if run.lr == 1e-3]
    text, _ = printed("table2", [result(run, 0.5 + run.seed / 10) for run in runs], tmp_path, markdown=True)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 10 and len({line.count("|") for line in lines}) == 1
    assert "| 70.00 (100.0)<br>60.00 ± 10.00 (3) | not run (100.0) | not run (100.0) |" in lines[2]


@pytest.mark.parametrize("name", ("table1", "capacity", "sizes", "calibration", "gate"))
def test_figures_are_drawn_with_cells_missing(name, tmp_path):
    from runningtensor.mqar.grids import GRIDS

    runs = [cell.runs[0] for cell in GRIDS[name]()[:4]]
    printed(name, [result(run, *[0.5] * len(run.tests)) for run in runs], tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_of_gates_has_a_line_for_each_run_and_no_gate_among_other_changes(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(figures, "plot_gates", lambda *words: given.append(words))
    rows = {cell.row: cell.runs for cell in gate()}
    chosen = ("RunningTensor", "RunningTensor, OneLinear", "Gated DeltaNet, no gate")
    text, _ = printed("gate", [result(rows[row][0], 0.5) for row in chosen], tmp_path)
    assert "which end at 99;" in text and "brackets" not in text
    panels = {name: [kind for kind, _, _ in runs] for name, runs in given[0][0].items() if runs}
    assert panels == {
        "RunningTensor, lr 0.003": ["SiLU gate", "SiLU gate, otherwise changed"],
        "Gated DeltaNet, lr 0.003": ["no gate"],
    }


def test_the_capacity_figure_has_every_seed_and_joins_no_sizes_across_one_that_is_missing(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(figures, "plot_capacity", lambda *words: given.append(words))
    three, two = (
        next(x for x in capacity() if x.row.startswith(row)).runs for row in ("RunningTensor", "order 2, keys")
    )
    printed(
        "capacity",
        [*(result(x, 0.5 + x.seed / 10, 0, 0) for x in three if x.lr == 1e-2), result(two[0], 0.1, 0, 0)],
        tmp_path,
    )
    points, unjoined, *_ = given[0]
    assert points[0][::3] == ("order 3", pytest.approx((50, 60, 70))) and {"order 2", "order 3"} <= unjoined


def test_what_a_change_gives_stands_beside_nothing_the_paper_has():
    found = {each.row.partition(" · ")[::2]: each.published for each in summarize("changes", changes(), [])}
    assert found["RunningTensor", "as it stands"] == 100 and found["DeltaNet", "as it stands"] == 100
    assert not any(published for (_, how), published in found.items() if how != "as it stands")


def test_published_rows_are_rows_of_the_grids():
    from runningtensor.mqar.grids import GRIDS

    for name in ("table1", "table2"):
        assert PUBLISHED[name].keys() <= {cell.row for cell in GRIDS[name]()}


# -- The commands ------------------------------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, ["mqar", *map(str, words)])


SHAPE = ("--length", 16, "--pairs", 2, "--vocab-size", 16, "--d-model", 8, "--layers", 1, "--batch", 2)
SMALL = ("--mixer", "deltanet", *SHAPE, "--device", "cpu")


def test_a_layer_of_ones_own_is_found_where_one_is(tmp_path, monkeypatch):
    (tmp_path / "own_here.py").write_text("from runningtensor.layers.baselines import DeltaNet as Mine\n")
    monkeypatch.setattr(sys, "path", [where for where in sys.path if where])
    monkeypatch.chdir(tmp_path)
    done = command("train", *SHAPE, "--mixer", "own_here:Mine", "--device", "cpu", "--steps", 1, "--test-count", 4)
    assert done.exit_code == 0 and from_json(done.stdout).run.mixer == "own_here:Mine"


def test_the_docs_say_how_a_layer_of_ones_own_has_a_row_of_the_tables(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs/reproduction.md").read_text()
    line = next(x for x in page.splitlines() if x.startswith("runningtensor mqar sweep table1 --mixer mine"))
    (tmp_path / "mine.py").write_text("from runningtensor.layers.baselines import DeltaNet as layer\n")
    wanted = []
    monkeypatch.setattr(sweeping, "run_cells", lambda *_, **given: wanted.extend(given["wanted"]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert command(*line.partition("#")[0].split()[2:]).exit_code == 0
    rows = (cell for cell in table1() if cell.row == "DeltaNet")
    assert [[replace(run, mixer="deltanet") for run in cell.runs] for cell in wanted] == [[*cell.runs] for cell in rows]


def test_a_report_has_rows_of_layers_that_are_in_no_grid(tmp_path):
    mine = replace(cell("DeltaNet").runs[0], mixer="mine:layer", options={"gain": 2})
    other = replace(mine, steps=7)  # of another protocol
    text, found = printed("table1", [result(run, 0.75) for run in (mine, other)], tmp_path)
    rows = [each for each in found if each.row not in TABLE1]
    assert [each.length for each in rows] == [1024, 2048, 4096] and [each.runs for each in rows] == [1, 0, 0]
    assert (rows[0].row, rows[0].best, rows[0].planned) == ('mine:layer {"gain": 2}', 75.0, 9)
    assert "1 results of" in text and "are of another protocol and are left out" in text


def test_a_layer_of_ones_own_is_in_the_figure_of_capacity(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    named = []
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda shape, *_, **__: named.extend(text.get_text() for text in shape.legends[0].get_texts()),
    )
    mine = replace(capacity()[0].runs[0], mixer="mine:layer", options={})
    printed("capacity", [result(mine, 0.75, 0.5, 0.25)], tmp_path)
    assert "mine:layer" in named


def test_train_appends_its_record_to_a_file(tmp_path):
    for seed in (3, 4):
        options = ("--steps", 2, "--test-every", 1, "--test-count", 4, "--lr", 0.01, "--seed", seed)
        done = command("train", *SMALL, *options, "--train-on", "16/2,32/4", "--out", tmp_path / "runs.jsonl")
        assert done.exit_code == 0 and "step" in done.output
    first, second = map(from_json, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert (first.run.seed, second.run.seed) == (3, 4)
    assert first.run.tasks == (Task(16, 2, 16), Task(32, 4, 16))
    assert first.run == Run(
        "deltanet",
        {},
        first.run.tasks,
        Task(16, 2, 16),
        8,
        1,
        lr=0.01,
        batch=2,
        steps=2,
        test_every=1,
        test_count=4,
        seed=3,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    (
        (("train", *SMALL, "--train-on", "16x2"), "train_on must be"),
        (("train", "--mixer", "lstm"), "mixer must be one of"),
        (("train", *SMALL, "--options", "[1]"), "options must be a JSON object"),
        (("train", *SMALL, "--options", "{"), "options must be a JSON object"),
        (("train", *SMALL, "--options", '{"nonsense": 1}'), "nonsense"),
        (("train", *SMALL, "--out", "/dev/null/runs.jsonl"), "/dev/null"),
        (("train", *SMALL, "--seed", str(2**53)), "seed must be less than 2**53, but was 9007199254740992"),
        (("sweep", "table1", "--jobs", "0"), "jobs must be at least 1"),
        (("report", "table1", "--out", "{tmp}"), "line 1 is none"),
    ),
)
def test_wrong_words_are_refused_in_one_line(words, says, tmp_path):
    (tmp_path / "table1.jsonl").write_text("nonsense\n")
    done = command(*(tmp_path if word == "{tmp}" else word for word in words))
    assert done.exit_code == 1 and says in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_a_grid_that_is_not_there_is_no_word():
    done = command("sweep", "table9")
    assert done.exit_code == 2 and "table9" in done.output


def test_train_writes_nothing_but_its_record_to_its_output():
    done = command("train", *SMALL, "--steps", 1, "--test-count", 4)
    assert from_json(done.stdout).run.steps == 1 and "step" in done.stderr


def test_a_run_whose_file_is_taken_at_the_end_is_not_lost(tmp_path, monkeypatch):
    path, kept = tmp_path / "runs.jsonl", []
    monkeypatch.setattr(Store, "close", lambda store: kept.append(store))  # so that the first look has it open still
    done = command("train", *SMALL, "--steps", 1, "--test-count", 4, "--out", path)
    kept[0].file.close()
    assert done.exit_code == 1 and "another has" in done.stderr
    assert from_json(done.stdout).run.steps == 1


def test_report_is_a_command(tmp_path):
    done = command("report", "table1", "--out", tmp_path)
    assert done.exit_code == 0 and "Nothing of it is in" in done.output


def test_every_curve_of_the_capacity_figure_has_a_style():
    from runningtensor.mqar.figures import SERIES

    assert {series(each.row) for each in (*capacity(), *sizes())} < SERIES.keys()


def test_cells_know_their_own_length():
    assert all(isinstance(each, Cell) and each.runs[0].test.length == each.length for each in table1())
