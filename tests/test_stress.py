"""Float32 where it is hardest: repeated keys, zeros, large values, long sequences, strong decay.

The bound is ten times what a float32 sum over so many terms may lose. Float64 stands for the exact result: step by step
where that is quick, else by the chunk form, which other tests hold to the recurrence.
"""

import pytest
import torch
from helpers import gradients, make, near, op, recurrent

BOUND = 1e-4


def equal_keys(x):
    return x.but(keys=tuple(k[:, :1].expand_as(k).contiguous() for k in x.keys), beta=torch.ones_like(x.beta))


def equal_keys_and_queries(x):
    x = equal_keys(x)
    return x.but(queries=x.keys)


def keys_in_turn(x):
    """Two keys that alternate, with β = 1: each write erases the one before last."""
    return x.but(keys=tuple(k[:, :2].repeat(1, k.shape[1] // 2, 1, 1) for k in x.keys), beta=torch.ones_like(x.beta))


def zero_keys(x):
    return x.but(keys=tuple(map(torch.zeros_like, x.keys)))


def padding(x):
    """Every other token is all zeros."""
    kept = torch.arange(x.values.shape[1]) % 2

    def padded(y):
        return y * kept.reshape(1, -1, *[1] * (y.ndim - 2))

    return x.but(initial_state=None).map(padded).but(initial_state=x.initial_state)


def all_zero(x):
    return x.map(torch.zeros_like)


def large_values(x):
    return x.but(values=x.values * 1e4)


def large_values_at_equal_keys(x):
    return large_values(equal_keys(x))


def overshooting(x):
    return x.but(beta=torch.full_like(x.beta, 2.0))  # β = 2 reflects: the state neither grows nor shrinks along κ


def mild_decay(x):
    return x.but(log_decay=torch.full_like(x.values[..., 0], -1e-3))


CASES = (
    equal_keys,
    equal_keys_and_queries,
    keys_in_turn,
    zero_keys,
    padding,
    all_zero,
    large_values,
    large_values_at_equal_keys,
    overshooting,
    mild_decay,
)


@pytest.mark.parametrize("change", CASES)
def test_float32_stays_near_the_float64_recurrence(change):
    x = change(make(T=512, widths=(5, 3), V=3, decay=False, dtype=torch.float32))
    near(op(x), recurrent(x.double()), BOUND)
    near(gradients(op, x), gradients(recurrent, x.double()), BOUND)


@pytest.mark.parametrize("change", CASES)
def test_float32_stays_near_float64_over_32768_tokens(change):
    x = change(make(B=1, T=32768, H=1, widths=(5, 3), V=3, decay=False, dtype=torch.float32))
    near(op(x), op(x.double()), BOUND)
    near(gradients(op, x), gradients(op, x.double()), BOUND)


@pytest.mark.parametrize("change", (lambda x: x, large_values), ids=("plain", "large values"))
def test_float32_sums_stay_near_float64_over_32768_tokens(change):
    # Additive, so nothing is ever erased, and all keys equal, so everything lands on the same place.
    x = change(make(B=1, T=32768, H=1, widths=(5, 3), V=3, delta=False, decay=False, dtype=torch.float32))
    x = x.but(keys=tuple(k[:, :1].expand_as(k) for k in x.keys))
    near(op(x), op(x.double()), BOUND)
    near(gradients(op, x), gradients(op, x.double()), BOUND)


def test_the_chunk_form_is_the_recurrence_over_32768_tokens():
    x = make(B=1, T=32768, H=1, widths=(5, 3), V=3)
    with torch.no_grad():
        near(op(x), recurrent(x), 1e-12)


def every(n, d, strong, weak=-0.01):
    return torch.where(torch.arange(d.shape[1])[:, None] % n == n // 2, strong, weak).expand_as(d).contiguous()


DECAYS = {
    "strong": lambda d: torch.full_like(d, -50.0),  # over a chunk of 64 the decay is e^-3200: float32 ends at e^-103
    "beyond float32": lambda d: torch.full_like(d, -200.0),  # even one step decays to exactly zero
    "extreme": lambda d: torch.full_like(d, -1e30),
    "now and then": lambda d: every(7, d, -50.0),
    "reset": lambda d: every(50, d, -1e4),  # what follows a reset is small beside it, and must not drown in it
    "hard reset": lambda d: every(50, d, -1e30),
    "rising": lambda d: torch.full_like(d, 0.02),  # α > 1, as the paper's gate has it where g rises
}


@pytest.mark.parametrize("C", (1, 16, 64, 256))
@pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay_is_finite_and_right(decay, delta, C):
    x = make(T=200, widths=(5, 3), V=3, delta=delta, dtype=torch.float32)
    x = x.but(log_decay=DECAYS[decay](x.log_decay))
    near(op(x, chunk_size=C), recurrent(x.double()), BOUND)
    # What e^-50 leaves of a gradient need not be right to its last digit beside others of size one.
    near(gradients(lambda x: op(x, chunk_size=C), x), gradients(recurrent, x.double()), BOUND, floor=1.0)


@pytest.mark.parametrize("C", (1, 16, 64, 256))
@pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
def test_the_small_gradient_of_a_firm_decay_is_not_lost_in_larger_ones(delta, C):
    # At α = e^-10 all that depends on log α is 5e-5 of the rest: a sum of which the rest is then subtracted loses it.
    x = make(T=200, widths=(5, 3), V=3, delta=delta, dtype=torch.float32)
    x = x.but(log_decay=torch.full_like(x.log_decay, -10.0))
    near(gradients(lambda x: op(x, chunk_size=C), x), gradients(recurrent, x.double()), BOUND)


def test_a_decay_to_nothing_forgets_everything_but_the_last_token():
    x = make(T=100, delta=False, dtype=torch.float32)
    x = x.but(log_decay=torch.full_like(x.log_decay, -1e4))
    (q, u), (k, r) = x.double().queries, x.double().keys
    alone = ((q * k).sum(-1) * (u * r).sum(-1))[..., None] * x.values.double()
    near(op(x)[:1], (alone,), 1e-6)


def test_the_gradient_of_the_last_output_reaches_the_first_token_through_all_chunks():
    x = make(B=1, T=4096, H=1, widths=(5, 3), V=3, dtype=torch.float32)
    x = x.but(beta=x.beta * 1e-2, log_decay=x.log_decay * 1e-3)  # little is erased on the way

    def last(x):
        return (op(x)[0][:, -1],)

    want = gradients(last, x.double())
    assert want["values"][:, 0].norm() > 1e-4 * want["values"].norm()
    near(gradients(last, x), want, BOUND)
