"""The benchmark of training: what it measures is a step of the engine, and what it says follows from that."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers comes with the extra hf")

import torch

from runningtensor.bench import pretrain_gpu as bench
from runningtensor.bench.provenance import provenance, write
from runningtensor.pretrain import recipes


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


def test_where_memory_does_not_suffice_half_as_many_sequences_are_taken(monkeypatch, small):
    def measured(case, sequences):
        if sequences > 1:
            raise torch.OutOfMemoryError
        return {"sequences": sequences}

    monkeypatch.setattr(bench, "measured", measured)
    assert bench.measure(replace(bench.CASES[0], length=128)) == {"sequences": 1}


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
