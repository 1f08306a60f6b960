"""The benchmark of training: what it measures is a step of the engine, and what it says follows from that."""

import json
import subprocess
import sys
from dataclasses import astuple, replace

import pytest

pytest.importorskip("transformers", reason="transformers comes with the extra hf")

import torch
from rich.console import Console
from rich.progress import Progress

from runningtensor.bench import gpu
from runningtensor.bench import pretrain_gpu as bench
from runningtensor.bench.provenance import provenance, write
from runningtensor.pretrain import recipes
from runningtensor.pretrain.engine import Trainer


@pytest.fixture
def small(monkeypatch):
    """A model that a CPU trains in no time, in place of the paper's."""
    tiny = replace(recipes.tiny_cpu(), vocab_size=64, hidden_size=64, mlp=384)
    monkeypatch.setattr(recipes, "paper_600m", lambda: tiny)
    monkeypatch.setattr(bench, "TOKENS", 256)
    monkeypatch.setattr(bench, "STEPS", 2)
    monkeypatch.setattr(bench, "WARM_UPS", 1)
    for name, found in ("reset_peak_memory_stats", None), ("max_memory_allocated", 2**30), ("empty_cache", None):
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)


@pytest.mark.parametrize("model", (bench.OURS, bench.ATTENTION, bench.GATED))
def test_a_step_of_each_model_is_measured(small, model):
    found = bench.measure(bench.Case(model, 128, 2, 8, 16))
    assert found["sequences"] == 2 and found["peak_gib"] == 1
    assert found["tokens_a_second"] == pytest.approx(256e3 / found["ms_a_step"])


@pytest.mark.parametrize(("length", "all_of_them", "fewer"), ((4096, 16, 8), (16_384, 4, 2)))
def test_where_memory_does_not_suffice_half_of_the_sequences_are_taken(monkeypatch, length, all_of_them, fewer):
    def measured(case, sequences):
        if sequences == all_of_them:
            raise torch.OutOfMemoryError
        return {"sequences": sequences}

    monkeypatch.setattr(bench, "measured", measured)
    assert bench.measure(replace(bench.CASES[0], length=length)) == {"sequences": fewer}


def test_all_models_have_as_many_parameters():
    counts = [recipes.count(recipes.configuration(bench.recipe_of(case, 1), 32_000)) for case in bench.CASES]
    assert all(abs(count / counts[0] - 1) < 0.005 for count in counts)


def test_what_is_compiled_beforehand_is_the_step_that_is_measured_with_fewer_layers(small, monkeypatch):
    case, launched = bench.Case(bench.OURS, 128, 2, 8, 16), []
    monkeypatch.setattr(Trainer, "launch", lambda self, step, stop: launched.append(self.recipe))
    monkeypatch.setattr(sys, "argv", ["bench", "--compile", json.dumps([astuple(case), 0, 1])])
    gpu.command("", bench.CSV, bench.Case, bench.measure, None, (), bench.report, bench.main, bench.warm)
    assert launched and set(launched) == {replace(bench.recipe_of(case, 2), layers=2)}


def test_a_model_that_cannot_be_compiled_beforehand_stops_nothing(monkeypatch, capfd):
    fails = [sys.executable, "-c", "raise SystemExit(1)"]
    monkeypatch.setattr(gpu, "start", lambda *_: subprocess.Popen(fails))
    with Progress(console=Console(width=160)) as progress:
        bench.warm_all(bench.CASES[:2], progress)
    assert "of the processes 0 were stopped and 2 failed" in capfd.readouterr().out


def test_noise_never_ends_a_document():
    noise = bench.Noise(32)
    batch = noise.batch(3, 4, 100)
    assert batch.shape == (4, 101) and (batch != noise.eos).all() and (batch < 32).all()
    assert torch.equal(batch, noise.batch(3, 4, 100)) and not torch.equal(batch, noise.batch(4, 4, 100))


def test_the_targets_are_ratios_to_attention_at_the_same_length(tmp_path, capsys):
    origin = provenance(torch.device("cpu"))
    speeds = {(bench.OURS, 4096): 95.0, (bench.OURS, 16_384): 80.0, (bench.ATTENTION, 4096): 100.0}
    speeds |= {(bench.ATTENTION, 16_384): 50.0}
    rows = [
        bench.make_row(origin, bench.Case(model, length, 32, 24, 48), {"tokens_a_second": speed, "mfu": 0.3})
        for (model, length), speed in speeds.items()
    ]
    found = bench.verdicts(rows)
    assert [(verdict.measured, verdict.met) for verdict in found] == [
        (pytest.approx(0.95), True), (30.0, False), (pytest.approx(1.6), True), (30.0, False),
    ]  # fmt: skip
    write(tmp_path / "x.csv", rows, bench.PretrainRow)
    bench.report(tmp_path / "x.csv")
    assert "1.60" in capsys.readouterr().out
