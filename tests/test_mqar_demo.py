"""The demo, cut short: it trains three models in step with each other, tells what came out, and draws it."""

import csv
import io
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.mqar import demo as module
from runningtensor.mqar.demo import RUNS, Race, demo
from runningtensor.mqar.train import Point, Result


@pytest.fixture
def short(monkeypatch):
    runs = {name: replace(run, test_every=2, test_count=16, batch=8) for name, run in RUNS.items()}
    monkeypatch.setattr(module, "RUNS", runs)


def told(width=160, **kind):
    return Console(file=io.StringIO(), width=width, **kind)


def test_the_demo_runs_from_end_to_end(short, tmp_path):
    console, out = told(), tmp_path / "not" / "there"
    results = demo(out, console, steps=4, minutes=5)
    assert [[point.step for point in result.curve] for result in results] == [[2, 4]] * 3
    assert results[0].state_floats == 2 * 13 * 13 * 24 and results[1].state_floats == 2 * 25 * 24
    assert results[0].parameters - results[1].parameters == 8  # of the short convolution of one gate channel a head
    text = console.file.getvalue()
    assert text.count("left | RunningTensor") == 2  # one line a test, where there is no terminal
    for word in (*RUNS, "all after 4 steps", "not reached", "8,112", "1,200", "demo.png"):
        assert word in text
    assert (out / "demo.png").stat().st_size > 10_000
    with (out / "demo.csv").open(newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == [name for name in RUNS for _ in range(2)]


def test_an_interrupted_demo_tells_what_there_is(monkeypatch, tmp_path):
    def rounds(race):
        race.results = [result(run, 0.5) for run in race.runs.values()]
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(Race, "rounds", rounds)
    console = told(force_terminal=True)
    assert len(demo(tmp_path, console, steps=9, minutes=1)) == 3
    assert "Interrupted" in console.file.getvalue() and "50.0%" in console.file.getvalue()
    assert (tmp_path / "demo.png").exists()


def test_a_folder_that_cannot_be_made_is_said_before_the_race_and_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["demo", "--steps", "4", "--out", str(tmp_path / "file")])
    assert done.exit_code == 1 and "file" in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize("minutes", (0, -3, float("nan")))
def test_a_race_takes_some_time(minutes, tmp_path):
    with pytest.raises(ValueError, match=f"minutes must be positive, but was {minutes}"):
        demo(tmp_path, told(), steps=4, minutes=minutes)


def leaves(run, pipe):
    pipe.send(result(run, 0.5))


def test_a_demo_whose_processes_die_tells_what_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "lane", leaves)
    console = told()
    assert len(demo(tmp_path, console, steps=100, minutes=1)) == 3
    assert "has died" in console.file.getvalue() and "50.0%" in console.file.getvalue()
    assert (tmp_path / "demo.csv").exists() and (tmp_path / "demo.png").exists()


def test_no_model_stops_before_the_race_does():
    assert all(run.stop_at > 1 for run in RUNS.values())


def test_the_race_is_over_when_a_model_has_failed():
    race = Race(RUNS, minutes=1)
    race.results = [result(run, 0.1) for run in RUNS.values()]
    assert not race.over
    race.results[2].failed = "the loss was not finite"
    assert race.over


def result(run, *accuracies):
    return Result(run, 1, 1, "", [Point(20 * (i + 1), 1.0, accuracy, 1.0) for i, accuracy in enumerate(accuracies)])


@pytest.mark.parametrize(
    ("accuracies", "over"),
    (
        ((), False),
        ((1.0, 1.0), False),
        ((0.1, 0.991, 0.99, 1.0), True),
        ((0.996, 0.997, 0.98, 1.0), False),
        ((0.1,) * 5, True),  # all its steps
    ),
)
def test_the_race_is_over_when_the_tensor_state_has_stayed_good_or_had_all_its_steps(accuracies, over):
    runs = {name: replace(run, steps=100) for name, run in RUNS.items()}
    race = Race(runs, minutes=1)
    race.results = [result(run, *accuracies) for run in runs.values()] if accuracies else []
    assert race.over is over


def test_the_race_is_over_when_the_time_is_up():
    race = Race(RUNS, minutes=0)
    assert not race.over  # before the first test
    race.results = [result(run, 0.1) for run in RUNS.values()]
    assert race.over
