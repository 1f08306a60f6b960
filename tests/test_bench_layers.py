"""What of the benchmark of layers and decoding needs no GPU: cases, verdicts, tables, figure, a step of decoding."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runningtensor.bench import layers_gpu as bench
from runningtensor.bench.provenance import Provenance, read, write

ORIGIN = Provenance("2026-01-01T00:00Z", "abc1234", "NVIDIA H200", 16, "2.11.0", "3.7.1", "")
CASES = bench.chosen(peers=True)
MS = {bench.OURS: (0.4, 1.2), bench.COMPILED: (0.3, 1.1), bench.GATED: (0.5, 1.5)}  # all targets are met


def found(case: bench.Case) -> dict[str, Any]:
    if case.task == bench.DECODE:
        if case.implementation == bench.ATTENTION and case.B * case.T > 2**16:
            return {"note": "skipped: keys and values are 768 GiB, of which 130 are free", "parameters": 10}
        slower = case.T / 2**14 if case.implementation == bench.ATTENTION else case.T / 2**26
        return {"ms_forward": 2 + slower + case.B / 10, "repetitions": 50, "parameters": 10, "note": "emulated"}
    forward, total = (ms * case.D / 128 for ms in MS[case.implementation])
    times = {"ms_forward": forward, "ms_total": total, "gpu_ms_forward": forward, "gpu_ms_total": total}
    return {**times, "repetitions": 30, "extra_peak_mib": 100.0, "parameters": 10}


ROWS = [bench.make_row(ORIGIN, case, found(case)) for case in CASES]


def missed(rows: list[bench.LayerRow]) -> list[str]:
    return [verdict.target for verdict in bench.verdicts(rows) if not verdict.met]


def changed(case: bench.Case, **columns: Any) -> list[bench.LayerRow]:
    return [replace(row, **columns) if row.case == case else row for row in ROWS]


def test_what_is_measured() -> None:
    assert len(set(CASES)) == len(CASES)
    assert {case for group in bench.GROUPS for case in group} == set(CASES)
    assert {case.implementation for case in bench.chosen(peers=False)} == {bench.OURS, bench.COMPILED}


def test_what_is_decoded_is_what_its_rows_say() -> None:
    config = pytest.importorskip("runningtensor.models").RunningTensorConfig(**bench.DECODED)
    for groups in bench.DECODING.values():
        for ours, attention in groups:
            layer = (config.hidden_size, config.num_heads, *config.key_dims, config.value_dim)
            assert layer == (ours.D, ours.H, ours.K, ours.R, ours.V)
            layer = (config.hidden_size, config.num_attention_heads, config.head_dim)
            assert layer == (attention.D, attention.H, attention.K)


def test_all_targets_met() -> None:
    assert not missed(ROWS)
    assert len(bench.verdicts(ROWS)) == 2 * len(bench.LAYERS) + len(bench.BATCHES)


@pytest.mark.parametrize(
    ("case", "columns", "end"),
    [
        (bench.LAYERS[0][0], {"ms_forward": 0.51}, ": forward, over fla-gated-deltanet"),
        (bench.LAYERS[1][0], {"ms_total": 1.51}, ": forward and backward, over fla-gated-deltanet"),
        (bench.LAYERS[2][2], {"ms_total": 1.0}, ": forward and backward, over fla-gated-deltanet"),
        (bench.LAYERS[2][2], {"ms_total": math.nan, "note": "failed: once"}, "over fla-gated-deltanet"),
        (bench.DECODING[64][2][0], {"ms_forward": 9.0}, ": longest over shortest time"),
        (bench.DECODING[1][1][0], {"ms_forward": 1.9}, ": longest over shortest time"),
        (bench.DECODING[1][0][0], {"ms_forward": math.nan, "note": "failed: once"}, ": longest over shortest time"),
    ],
)
def test_a_target_missed(case: bench.Case, columns: dict[str, Any], end: str) -> None:
    (target,) = missed(changed(case, **columns))
    assert target.endswith(end)
    assert (
        f"batch {case.B}," if case.task == bench.DECODE else bench.shape(replace(case, H=0)).split(" H")[0]
    ) in target


def test_tables_of_nothing_and_of_failures() -> None:
    gone = [bench.make_row(ORIGIN, case, {"note": "failed: out of memory"}) for case in CASES]
    for rows in ([], gone, ROWS):
        with bench.console.capture() as text:
            tables = bench.layer_table(rows), bench.decoding_table(rows)
            bench.console.print(*tables, bench.verdict_table(bench.verdicts(rows)))
        assert ("not measured" in text.get()) == (rows is not ROWS)
        for row in rows:
            assert bench.one_line(row)
    assert "skipped" in text.get()


def test_resume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[bench.Case] = []

    def pretend(some: list[bench.Case]) -> Iterator[tuple[bench.Case, dict[str, Any]]]:
        for case in some:
            asked.append(case)
            yield case, found(case)

    monkeypatch.setattr(bench, "in_processes", pretend)
    monkeypatch.setattr(bench, "compile_peers", lambda *_: None)
    monkeypatch.setattr(bench, "provenance", lambda _: ORIGIN)
    for module in (bench, bench.gpu):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name in ("fla", "matplotlib") else name)
    cases = [case for case in CASES if case.implementation != bench.GATED]
    rows = [row for row in ROWS if row.case in cases]
    write(tmp_path / "layers_gpu.partial.csv", [*rows[:2], replace(rows[2], note="failed: once")], bench.LayerRow)
    assert [row.case for row in bench.main(tmp_path, resume=True)] == cases
    assert asked == cases[2:]
    again = read(tmp_path / "layers_gpu.csv", bench.LayerRow)
    assert [row.case for row in again] == cases and again[0] == rows[0]
    assert not (tmp_path / "layers_gpu.partial.csv").exists()


@pytest.mark.parametrize("some", [ROWS, [row for row in ROWS if row.task == bench.LAYER], []])
def test_figure(some: list[bench.LayerRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from runningtensor.plots import plot_layers_gpu

    write(path := tmp_path / "layers_gpu.csv", some, bench.LayerRow)
    plot_layers_gpu(path, figure := tmp_path / "layers_gpu.png")
    assert figure.exists() == bool(some)
    assert not some or figure.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module", params=[bench.OURS, bench.ATTENTION])
def model(request: pytest.FixtureRequest) -> Any:
    """Small ones of what is decoded."""
    models = pytest.importorskip("runningtensor.models")
    from transformers import AutoModelForCausalLM

    ours = models.RunningTensorConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_heads=2, key_dims=(4, 3),
        value_dim=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(bench.configuration(request.param, ours), attn_implementation="sdpa").eval()


def test_a_step_decodes_and_feeds_back_its_token(model: Any) -> None:
    decode = bench.decode_ours if model.config.model_type == "running_tensor" else bench.decode_attention
    decoder = decode(model, B=3, context=16)
    where = [x.data_ptr() for x in (decoder.token, *decoder.memory)]
    before = [x.clone() for x in decoder.memory]
    for _ in range(2):
        logits = decoder.step()
        assert logits.shape == (3, 1, 61) and logits.isfinite().all()
        assert torch.equal(decoder.token, logits.argmax(-1))
    assert where == [x.data_ptr() for x in (decoder.token, *decoder.memory)]  # as a graph needs it
    assert not any(torch.equal(x, old) for x, old in zip(decoder.memory, before, strict=True))
    if decode is bench.decode_ours:
        assert int(decoder.memory[0]) == 18


@pytest.mark.parametrize("model", [bench.ATTENTION], indirect=True)
def test_the_keys_and_values_are_attention_s_own(model: Any) -> None:
    """Filled from transformers' cache, ours gives its logits: the last token sees all others, in its place."""
    tokens = torch.randint(61, (2, 9))
    with torch.no_grad():
        truth = model(tokens).logits[:, -1:]
        past = model(tokens[:, :-1], use_cache=True).past_key_values
        kept = bench.KeyValues(model.config, 2, 9, model.device, model.dtype)
        assert bench.KeyValues.bytes(model.config, 2, 9) * 2 == sum(x.nbytes for pair in kept.layers for x in pair)
        for (keys, values), layer in zip(kept.layers, past.layers, strict=True):
            keys[:, :, :-1], values[:, :, :-1] = layer.keys, layer.values
        got = model(
            tokens[:, -1:],
            past_key_values=kept,
            position_ids=torch.tensor([[8]]),
            attention_mask={"full_attention": None},
        ).logits
    assert torch.allclose(got, truth, atol=1e-5)


def test_a_layer_is_held_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = bench.RunningTensor(16, 2, (4, 3), 5)
    inputs = [torch.randn(2, 12, 16, requires_grad=True), *layer.parameters()]
    monkeypatch.setattr(bench, "CHECKED", 7)
    assert bench.wrong(layer, lambda x, *_: layer(x)[0], inputs) is None
    assert "outputs off" in (bench.wrong(layer, lambda x, *_: layer(x)[0] * 1.1, inputs) or "")
