"""The table of errors: it measures what it says, and says what is wrong."""

import csv

import pytest
import torch

from runningtensor.bench import errors
from runningtensor.bench.provenance import provenance
from runningtensor.ops import chunk
from runningtensor.ops.selfcheck import Case

CPU = torch.device("cpu")
DTYPES = ((torch.bfloat16, False), (torch.float16, False), (torch.float32, True), (torch.float32, False))


def tiny(dtype=torch.bfloat16, tf32=False, **options):
    return Case(dtype, (5, 3), 4, True, True, packed=False, T=70, H=2, tf32=tf32, **options)


def verdicts(case, found):
    return errors.judge(case, found, provenance(CPU))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(errors, "default_device", lambda: CPU)


@pytest.mark.parametrize(("dtype", "tf32"), DTYPES)
def test_the_torch_backend_is_within_its_bounds(dtype, tf32):
    case = tiny(dtype, tf32)
    found = errors.measure(case, CPU)
    assert set(found) == {errors.TORCH, errors.ROUNDED}
    names = {"out", "final_state", "dq0", "dk0", "dq1", "dk1", "dv", "dbeta", "dlog_decay", "dinitial_state"}
    assert set(found[errors.TORCH]) == names
    assert all(row.right for row in verdicts(case, found))


@pytest.mark.parametrize(("dtype", "tf32"), DTYPES)
def test_rounded_operands_are_seen_in_every_result_but_not_in_float32(dtype, tf32):
    case = tiny(dtype, tf32)
    found = errors.measure(case, CPU)
    plain, rounded = found[errors.TORCH], found[errors.ROUNDED]
    if dtype == torch.float32 and not tf32:
        assert plain == rounded
    else:
        # 11 bits of a mantissa, or 8: no result, forward or backward, is as exact as without. The state is the best
        # witness, being float32: its error is that of its operands.
        assert all(rounded[name] > plain[name] for name in plain)
        unit = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
        assert unit / 10 < rounded["final_state"] < unit * 10


def test_rounding_ends_where_it_should():
    before = chunk.forward, chunk.backward
    with pytest.raises(ZeroDivisionError), errors.rounded_products(tiny()):
        assert chunk.forward is not before[0]
        _ = 1 / 0
    assert (chunk.forward, chunk.backward) == before


def test_tf32_keeps_ten_bits_and_rounds_to_even():
    mode = errors.Rounding(torch.float32, True)
    x = torch.tensor([1.0, -1 - 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, 0.0])
    assert mode.rounded(x).tolist() == [1.0, -1 - 2**-10, 1.0, 1 + 2**-9, 1 + 2**-10, 0.0]


@pytest.mark.parametrize("broken", ("forward", "backward"))
def test_a_wrong_result_exceeds_its_bound(broken, monkeypatch, tmp_path, capsys):
    right = getattr(chunk, broken)

    def wrong(*arguments):
        first, *rest = right(*arguments)
        return first * 1.02, *rest

    monkeypatch.setattr(chunk, broken, wrong)
    case = tiny()
    exceeding = {row.tensor for row in verdicts(case, errors.measure(case, CPU)) if not row.right}
    # The forward's outputs are scaled, or the gradient of the first query.
    assert exceeding == {"out" if broken == "forward" else "dq0"}
    assert errors.main(tmp_path, [[case]]) is False
    assert "exceeded" in capsys.readouterr().out


def test_the_kernels_are_held_to_the_errors_of_rounded_operands():
    case = tiny()
    measured = {"out": 1e-3, "dv": 1e-3}
    found = {errors.KERNELS: {"out": 2.1e-3, "dv": 2.9e-3}, errors.TORCH: measured, errors.ROUNDED: measured}
    exceeding = {(row.backend, row.tensor) for row in verdicts(case, found) if not row.right}
    assert exceeding == {(errors.KERNELS, "out")}


def test_nan_exceeds_every_bound():
    case = tiny()
    found = {errors.TORCH: {"out": float("nan")}, errors.ROUNDED: {"out": 1e-3}}
    assert [row.right for row in verdicts(case, found)] == [False, True]


def test_the_table_is_written_as_it_grows_and_all_of_it(tmp_path):
    written = []

    def groups():
        yield [tiny()]
        with (tmp_path / "errors_cpu.csv").open() as file:
            written.extend(csv.DictReader(file))
        yield [tiny(torch.float32)]

    assert errors.main(tmp_path, groups())
    assert {row["dtype"] for row in written} == {"bfloat16"}
    with (tmp_path / "errors_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[: len(written)] == written and {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    assert all(row["commit"] and row["torch"] == torch.__version__ for row in rows)


def test_every_shape_dtype_and_rule_is_measured():
    found = [case for group in errors.cases(CPU) for case in group]
    assert len(found) == len(errors.SHAPES) * len(errors.DTYPES) * len(errors.RULES) == 96
