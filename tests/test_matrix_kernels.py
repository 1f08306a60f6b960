"""The kernels for matrix states in Triton's interpreter: the recurrence of order 2, in chunks of 64."""

import pytest
import torch
from helpers import bounds, everything, gradients, make, near, op
from test_kernels import DECAYING, DTYPES, RULES, check, pytestmark  # noqa: F401
from test_stress import CASES, DECAYS, equal_keys

from runningtensor.ops.triton import launch, matrix_launch

LENGTHS = (0, 1, 130, 64, 0, 65)


@pytest.fixture(autouse=True)
def only_these(monkeypatch):
    """Whatever is launched here is theirs."""
    monkeypatch.setattr(launch, "scan", None)


@DTYPES
@DECAYING
@RULES
def test_they_are_the_recurrence(delta, decay, dtype):
    check(make(T=150, widths=(21,), V=20, delta=delta, decay=decay, dtype=dtype))


@DTYPES
@DECAYING
@RULES
def test_packed_sequences_are_the_recurrence_of_each(delta, decay, dtype):
    x = make(1, sum(LENGTHS), 1, widths=(9,), V=7, delta=delta, decay=decay, dtype=dtype, sequences=len(LENGTHS))
    check(x, cu_seqlens=bounds(LENGTHS))


@pytest.mark.parametrize(("K", "V"), ((1, 1), (16, 16), (70, 33), (130, 20), (256, 8), (20, 130)))
def test_any_width_is_the_recurrence(K, V):
    check(make(1, T=70, H=1, widths=(K,), V=V, dtype=torch.float32), floor=1.0 if K == 1 else 0.0)


def test_wider_keys_are_left_to_the_general_kernels():
    v = torch.zeros(1, 1, 1, 8)
    assert launch.on_matrix(matrix_launch.WIDEST, 1, 64, v) and not launch.on_matrix(matrix_launch.WIDEST + 1, 1, 64, v)
    assert not launch.on_matrix(16, 16, 64, v) and not launch.on_matrix(16, 1, 32, v)


@DTYPES
@pytest.mark.parametrize("widths", ((5, 1), (3, 2, 1)))
def test_a_last_mode_of_width_one_is_multiplied_into_the_others(widths, dtype):
    check(make(1, T=70, H=1, widths=widths, V=7, dtype=dtype))


@RULES
def test_states_may_be_left_out(delta):
    x = make(1, T=70, H=1, widths=(5,), V=7, delta=delta, dtype=torch.float32, initial=False)
    for results in (slice(0, 1), slice(1, 2)):  # the outputs alone, the final state alone
        got = gradients(lambda x, these=results: op(x, backend="triton")[these], x)
        near(got, gradients(lambda x, these=results: op(x, backend="torch")[these], x.double()), 1e-5)


@RULES
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay_is_finite_and_right(decay, delta):
    x = make(1, T=100, H=1, widths=(7,), V=3, delta=delta, dtype=torch.float32)
    check(x.but(log_decay=DECAYS[decay](x.log_decay)), floor=1.0)


def test_the_small_gradient_of_a_firm_decay_is_not_lost_in_larger_ones():
    x = make(1, T=70, H=1, widths=(5,), V=3, dtype=torch.float32)
    check(x.but(log_decay=torch.full_like(x.log_decay, -10.0)))


@pytest.mark.parametrize("change", CASES)
def test_repeated_keys_zeros_and_large_values_are_right(change):
    check(change(make(1, T=130, H=1, widths=(7,), V=3, decay=False, dtype=torch.float32)))


def test_equal_keys_in_half_precision_are_right():
    check(equal_keys(make(1, T=200, H=2, widths=(45,), V=20, decay=False, dtype=torch.float16)), bound=4e-3)


@pytest.mark.parametrize("second", (-150, -250))
def test_an_inverse_too_large_for_float16_is_found_in_other_ways(second):
    # The second key is against the first and far longer than one: it takes 45,000 or 75,000 times what the first wrote.
    x = make(1, T=64, H=1, widths=(4,), V=3, decay=False, dtype=torch.float16)
    keys = torch.zeros_like(x.keys[0])
    keys[:, 0, :, 0], keys[:, 1, :, 0] = 300, second
    small = {"queries": (x.queries[0] / 1e3,), "values": x.values / 1e3}
    x = x.but(keys=(keys,), beta=torch.ones_like(x.beta), initial_state=None, **small)
    near(op(x, backend="triton"), op(x.double(), backend="recurrent"), 2e-3)


@pytest.mark.parametrize("lengths", (None, LENGTHS), ids=("batch", "packed"))
@pytest.mark.parametrize(("delta", "decay", "initial"), ((False, False, False), (True, True, True)))
def test_every_number_returned_was_written_and_none_was_read_before(delta, decay, initial, lengths, memory_full_of_nan):
    sizes = {"B": 2, "T": 70} if lengths is None else {"B": 1, "T": sum(lengths), "sequences": len(lengths)}
    x = make(**sizes, H=1, widths=(9,), V=7, delta=delta, decay=decay, initial=initial, dtype=torch.float32)
    for name, y in everything(x, backend="triton", cu_seqlens=None if lengths is None else bounds(lengths)).items():
        assert y.isfinite().all(), name


def test_repeated_runs_are_equal_bit_for_bit():
    x = make(1, sum(LENGTHS), H=1, widths=(9,), V=7, dtype=torch.float16, sequences=len(LENGTHS))
    options = {"backend": "triton", "cu_seqlens": bounds(LENGTHS)}
    near(everything(x, **options), everything(x, **options), 0)
