"""What of the benchmark on a GPU needs none: what is asked for, kept, judged and drawn."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runningtensor.bench import ops_gpu as bench
from runningtensor.bench.provenance import Provenance, append, read, write

ORIGIN = Provenance("2026-01-01T00:00Z", "abc1234", "NVIDIA H200", 16, "2.11.0", "3.7.1", "")
MS = {  # forward, forward and backward: all targets are met
    bench.OURS: (0.3, 1.0),
    bench.GATED: (0.5, 1.5),
    bench.DELTA: (0.4, 1.0),
    bench.POWER: (1.0, 3.0),
    bench.SDPA: (1.0, 3.0),
    bench.STEP: (0.1, math.nan),
    bench.COPY: (0.6, math.nan),
    bench.FIRST: (math.nan, 12_000.0),
}
CASES = bench.chosen(quick=False, peers=True)


def found(case: bench.Case) -> dict[str, Any]:
    forward, total = MS[case.implementation]
    times = {"ms_forward": forward, "ms_total": total, "gpu_ms_forward": forward, "gpu_ms_total": total}
    return {**times, "repetitions": 30, "extra_peak_mib": 100.0}


ROWS = [bench.make_row(ORIGIN, case, found(case)) for case in CASES]


def missed(rows: list[bench.GpuRow]) -> set[str]:
    return {verdict.target for verdict in bench.verdicts(rows) if not verdict.met}


def changed(case: bench.Case, **columns: Any) -> list[bench.GpuRow]:
    return [replace(row, **columns) if row.case == case else row for row in ROWS]


def test_what_is_measured() -> None:
    assert len(set(CASES)) == len(CASES)
    assert {case for group in bench.GROUPS for case in group} == set(CASES)
    ours = bench.chosen(quick=False, peers=False)
    assert {case.implementation for case in ours} == {bench.OURS, bench.STEP, bench.FIRST, bench.COPY}
    quick = bench.chosen(quick=True, peers=True)
    assert len(bench.verdicts([row for row in ROWS if row.case in quick])) == len(bench.verdicts(ROWS))
    assert not missed([row for row in ROWS if row.case in quick])
    assert len(ours) < len(quick) < len(CASES)


def test_all_targets_met() -> None:
    assert not missed(ROWS)
    rate = next(verdict for verdict in bench.verdicts(ROWS) if "TFLOP/s" in verdict.target)
    assert rate.measured == pytest.approx(6 * 8 * 4096 * 32 * 25 * 25 * 48 / 0.3e-3 / 1e12)


@pytest.mark.parametrize(
    ("case", "columns", "targets"),
    [
        (bench.SHORT[0], {"ms_forward": 0.51}, {"over fla-gated-deltanet", "over fla-deltanet"}),
        (bench.SHORT[0], {"ms_total": 1.4}, {"over fla-deltanet"}),
        (bench.MEDIUM[0], {"ms_forward": 0.6}, {"over torch-sdpa"}),
        (bench.MEDIUM[0], {"ms_total": 2.5}, {"over torch-sdpa", "over power-retention"}),
        (bench.MANY_HEADS[0], {"ms_forward": 1.0}, {"aim: B8 T4096 H32 25×25×48: TFLOP/s forward"}),
        (bench.MANY_HEADS[0], {"ms_total": 11.0}, {"ms forward and backward"}),
        (bench.MANY_HEADS[0], {"extra_peak_mib": 4000.0}, {"GiB above inputs and gradients"}),
        (bench.SQUARE[0], {"ms_forward": 0.5}, {"H16 16×16×64: TFLOP/s forward"}),
        (bench.CURVES[3][0], {"ms_total": 1.7}, {"shortest time, forward and backward"}),
        (bench.DECODING[0], {"ms_forward": 0.2}, {"part of the bandwidth of a copy"}),
        (bench.COMPILING[0], {"ms_total": 21_000.0}, {"seconds of the first forward and backward, nothing compiled"}),
    ],
)
def test_a_target_missed(case: bench.Case, columns: dict[str, float], targets: set[str]) -> None:
    got = missed(changed(case, **columns))
    assert len(got) == len(targets)
    assert all(any(target.endswith(end) for target in got) for end in targets)


def test_what_failed_is_not_met_and_does_not_stop_the_tables() -> None:
    gone = [bench.make_row(ORIGIN, case, {"note": "failed: out of memory"}) for case in CASES]
    for rows in ([], gone, changed(bench.SHORT[0], ms_forward=math.nan, ms_total=math.nan, note="failed: wrong")):
        assert missed(rows)
        with bench.console.capture() as text:
            bench.console.print(bench.measurements(rows), bench.verdict_table(bench.verdicts(rows)))
        assert "not measured" in text.get()


def test_csv_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write(path, ROWS[1:3], bench.GpuRow)
    append(path, ROWS[3])
    assert read(path, bench.GpuRow) == ROWS[1:4]
    append(path, failed := bench.make_row(ORIGIN, ROWS[4].case, {"note": 'failed: a, "b"'}))
    again = read(path, bench.GpuRow)[-1]
    assert again.failed and again.note == failed.note and math.isnan(again.ms_total)
    path.write_text(path.read_text()[:-40])  # cut off within the last line
    assert read(path, bench.GpuRow) == ROWS[1:4]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bench.Case]:
    """Stands in for the processes that measure, and says what they were asked."""
    cases: list[bench.Case] = []

    def pretend(some: list[bench.Case]) -> Iterator[tuple[bench.Case, dict[str, Any]]]:
        for case in some:
            cases.append(case)
            yield case, found(case)

    monkeypatch.setattr(bench, "in_processes", pretend)
    monkeypatch.setattr(bench, "compile_peers", lambda *_: None)
    monkeypatch.setattr(bench, "provenance", lambda _: ORIGIN)
    for module in (bench, bench.gpu):
        monkeypatch.setattr(module, "find_spec", lambda _: None)  # no peers here, no figure
    return cases


def test_resume(asked: list[bench.Case], tmp_path: Path) -> None:
    ours = [case for case in CASES if case.implementation not in bench.PACKAGES]
    rows = [row for row in ROWS if row.case in ours]
    failed = replace(rows[2], note="failed: once")
    other = replace(rows[3], commit="0000000")
    write(tmp_path / "ops_gpu.partial.csv", [rows[0], rows[1], failed, other], bench.GpuRow)
    assert [row.case for row in bench.main(tmp_path, resume=True)] == ours
    assert asked == ours[2:]
    assert {row.case: row.commit for row in read(tmp_path / "ops_gpu.csv", bench.GpuRow)} == dict.fromkeys(
        ours, ORIGIN.commit
    )
    assert not (tmp_path / "ops_gpu.partial.csv").exists()

    asked.clear()
    bench.main(tmp_path, resume=True)  # all is there
    assert not asked
    bench.main(tmp_path)
    assert asked == ours


@pytest.mark.parametrize("commit", ["abc1234+", "unknown"])
def test_nothing_is_resumed_of_code_nobody_knows(commit: str, tmp_path: Path) -> None:
    write(path := tmp_path / "rows.csv", [replace(row, commit=commit) for row in ROWS], bench.GpuRow)
    assert bench.measured_before([path], replace(ORIGIN, commit=commit)) == []


def test_cut_off_keeps_what_was_measured(
    asked: list[bench.Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cut(some: list[bench.Case]) -> Iterator[tuple[bench.Case, dict[str, Any]]]:
        for case in some[:3]:
            yield case, found(case)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "in_processes", cut)
    with pytest.raises(KeyboardInterrupt):
        bench.main(tmp_path)
    assert [row.case for row in read(tmp_path / "ops_gpu.partial.csv", bench.GpuRow)] == CASES[:3]


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from runningtensor.plots import plot_ops_gpu

    write(path := tmp_path / "ops_gpu.csv", ROWS, bench.GpuRow)
    plot_ops_gpu(path, tmp_path / "ops_gpu.png")
    assert (tmp_path / "ops_gpu.png").read_bytes().startswith(b"\x89PNG")
