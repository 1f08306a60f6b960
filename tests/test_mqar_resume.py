"""A run that is stopped, or killed at any moment, goes on as if it had never stopped."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from runningtensor.mqar import resume
from runningtensor.mqar import train as training
from runningtensor.mqar.record import from_json, to_json
from runningtensor.mqar.train import Batch, Clock, Recall, Trainer, train
from runs import CPU, EASY, LONGER, last, losses, run

MIXED = {"tasks": (EASY, LONGER), "also": (LONGER,), "schedule": "cosine", "weight_decay": 0.1, "steps": 8}


def scores(result):
    return [replace(point, seconds=0.0) for point in result.curve]


def stopped_after(steps, how, path, **options):
    """After so many steps, wherever it began."""
    left = iter([False] * (steps - 1) + [True])
    return last(train(how, options.pop("device", CPU), kept=path, stop=lambda: next(left, True), **options))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "running").mkdir()
    return tmp_path / "running" / "run.pt"


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("steps", (1, 3, 5))  # in a part; tests are at 3, 6 and 8
def test_a_run_that_was_stopped_and_went_on_is_the_run_that_never_stopped(steps, dtype, path):
    how, parts = run(**MIXED, dtype=dtype), 0
    whole = last(train(how, CPU))
    while not (result := stopped_after(steps, how, path)).finished:
        parts += 1
    assert scores(result) == scores(whole) and len(scores(whole)) == 3
    assert len(result.origin["interrupted"]) == parts == -(-8 // steps) - 1
    assert "interrupted" not in whole.origin and from_json(to_json(result)) == result
    seconds = [point.seconds for point in result.curve]
    assert seconds == sorted(seconds)


DRAWS = """
from torch import nn


class Layer(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.out, self.drop, self.norm = nn.Linear(d_model, d_model), nn.Dropout(0.3), nn.BatchNorm1d(d_model)

    def forward(self, x):
        return self.norm(self.drop(self.out(x.cumsum(1))).mT).mT
"""


def test_a_layer_of_ones_own_that_draws_and_keeps_averages_goes_on_too(path, monkeypatch):
    (path.parent / "own_that_draws.py").write_text(DRAWS)
    monkeypatch.syspath_prepend(path.parent)
    how = run(**MIXED, mixer="own_that_draws:Layer", options={})
    whole = last(train(how, CPU))
    while not (result := stopped_after(3, how, path)).finished:
        torch.manual_seed(7)  # whatever was drawn in between
    assert scores(result) == scores(whole)


def test_a_run_that_is_not_asked_to_stop_has_what_it_needs_after_every_test(path):
    how, steps = run(**MIXED), []
    for _ in train(how, CPU, kept=path):
        steps.append(torch.load(path, weights_only=True)["step"])
    assert steps == [3, 6, 6]  # after the last there is nothing to go on with


def test_what_a_run_goes_on_from_has_12_bytes_a_parameter(path):
    stopped_after(1, how := run(d_model=96), path)
    assert path.stat().st_size == pytest.approx(12 * sum(p.numel() for p in Recall(how).parameters()), rel=0.2)


def test_times_of_all_parts_count_and_first_steps_of_each_do_not(path, monkeypatch):
    clocks = []
    monkeypatch.setattr(training, "Clock", lambda device: clocks.append(Clock(device)) or clocks[-1])
    how = run(steps=14, test_every=14)
    stopped_after(7, how, path)
    result = last(train(how, CPU, kept=path))
    first, second = clocks
    assert len(first.ms) == 3 and second.ms[:3] == first.ms and len(second.ms) == 6 and len(second.first_ms) == 8
    assert result.ms_a_step == median(second.ms)


def test_a_loss_that_was_not_finite_before_the_stop_is_not_forgotten(path):
    how = run(lr=1e38, steps=30, test_every=10)
    stopped_after(6, how, path)
    result = last(train(how, CPU, kept=path))
    assert result.failed == last(train(how, CPU)).failed != ""


def test_tensors_that_a_graph_would_read_are_not_replaced(path):
    stopped_after(1, run(), path)
    trainer = Trainer(run(), CPU, graph=True)
    held = (trainer.rate, trainer.healthy, trainer.healthy_steps, *trainer.masters, *trainer.grads, *trainer.parameters)
    before = [x.data_ptr() for x in held]
    trainer.load(torch.load(path, weights_only=True))
    moments = [x.data_ptr() for state in trainer.optimizer.state.values() for x in state.values()]
    trainer.step(Batch(EASY, 4, CPU), 1e-3)
    assert [x.data_ptr() for x in held] == before and trainer.optimizer.param_groups[0]["lr"] is trainer.rate
    assert [x.data_ptr() for state in trainer.optimizer.state.values() for x in state.values()] == moments


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path):
    path.write_bytes(b"")


def blotted(path):
    content, half = path.read_bytes(), path.stat().st_size // 2
    path.write_bytes(content[:half] + bytes(256) + content[half + 256 :])


def of_another_version(path):
    torch.save(torch.load(path, weights_only=True) | {"format": resume.FORMAT + 1}, path)


def of_another_run(path):
    path.unlink()
    stopped_after(2, run(seed=1), path)


@pytest.mark.parametrize("wrong", (truncated, emptied, blotted, of_another_version, of_another_run))
def test_a_file_that_cannot_be_used_is_ignored_and_the_run_begins_anew(wrong, path, capsys):
    stopped_after(4, run(), path)
    wrong(path)
    result = last(train(run(), CPU, kept=path))
    assert scores(result) == scores(last(train(run(), CPU))) and "interrupted" not in result.origin
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"{path} is ignored, and its run begins anew" in said


def test_a_run_whose_state_cannot_be_written_goes_on(tmp_path, capsys):
    (tmp_path / "running").write_text("not a folder")
    result = last(train(run(), CPU, kept=tmp_path / "running" / "run.pt"))
    assert result.finished and "cannot be written" in capsys.readouterr().out


def test_a_full_disk_does_not_become_fuller(path, monkeypatch, capsys):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    assert last(train(run(), CPU, kept=path)).finished
    assert not list(path.parent.iterdir()) and "no space left" in capsys.readouterr().out


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_mqar_resume import CPU, MIXED, run, train
replace, saves = os.replace, []
def die(*names):  # between the write and the renaming
    saves.append(names)
    os.kill(os.getpid(), signal.SIGKILL) if len(saves) == 2 else replace(*names)
os.replace = die
list(train(run(**MIXED), CPU, kept=Path({path!r})))
"""


def test_a_run_that_is_killed_in_the_middle_of_a_save_goes_on_from_the_one_before(path):
    program = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert torch.load(path, weights_only=True)["step"] == 3 and len(list(path.parent.iterdir())) == 2
    result = last(train(run(**MIXED), CPU, kept=path))
    assert scores(result) == scores(last(train(run(**MIXED), CPU))) and len(result.origin["interrupted"]) == 1
    resume.forget(path)
    assert not list(path.parent.iterdir())


@pytest.mark.gpu
def test_a_run_of_graphs_that_was_stopped_and_went_on_is_the_run_that_never_stopped(path):
    how = run(options={}, tasks=(EASY, LONGER), d_model=128, steps=48, test_every=12, lr=1e-3, schedule="cosine")
    cuda = torch.device("cuda")
    whole = last(train(how, cuda))
    assert not stopped_after(20, how, path, device=cuda).finished  # captured by then, and between two tests
    result = last(train(how, cuda, kept=path))
    assert result.graph and len(result.origin["interrupted"]) == 1
    assert losses(result) == pytest.approx(losses(whole), rel=2e-2)
    assert result.ms_a_step == pytest.approx(whole.ms_a_step, rel=0.5)  # no time of a capture is among them
