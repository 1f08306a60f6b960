"""Decoding: one step after another is the same function."""

import pytest
import torch
from helpers import ORDERS, WIDTHS, make, near, op, recurrent, rel

from runningtensor import running_tensor_step

RULES = pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
DECAYS = pytest.mark.parametrize("decay", (False, True), ids=("lasting", "decaying"))
LONGEST = 130


def step(x, t, state):
    now = x.tokens(t)
    return running_tensor_step(now.queries, now.keys, now.values, state, beta=now.beta, log_decay=now.log_decay)


@pytest.mark.parametrize("initial", (False, True), ids=("fresh", "continued"))
@DECAYS
@RULES
@pytest.mark.parametrize("order", ORDERS)
def test_steps_alone_are_the_whole_run(order, delta, decay, initial):
    x = make(T=LONGEST, widths=WIDTHS[order], delta=delta, decay=decay, initial=initial)
    want, final = op(x)
    state = torch.zeros_like(final) if x.initial_state is None else x.initial_state.clone()
    outs = [step(x, t, state) for t in range(LONGEST)]
    near((torch.stack(outs, 1), state), (want, final), 1e-12)


@DECAYS
@RULES
@pytest.mark.parametrize("order", (2, 3, 4))
def test_a_step_after_a_prefill_of_any_length_is_the_whole_run(order, delta, decay):
    x = make(B=1, T=LONGEST, widths=WIDTHS[order], delta=delta, decay=decay)
    outs, _ = recurrent(x)
    state = x.initial_state  # after T tokens, by the recurrence alone
    for T in range(1, LONGEST + 1):
        _, prefilled = op(x.tokens(slice(T - 1)).but(initial_state=x.initial_state))
        out = step(x, T - 1, prefilled)
        _, state = recurrent(x.tokens(slice(T - 1, T)).but(initial_state=state))
        near((out, prefilled), (outs[:, T - 1], state), 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), ((torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 2e-6)))
@pytest.mark.parametrize("order", (2, 3, 4))
def test_low_precision_steps_keep_a_float32_state(order, dtype, bound):
    x = make(T=40, widths=WIDTHS[order], dtype=dtype)
    want, final = recurrent(x.double())
    state = x.initial_state.clone()
    outs = torch.stack([step(x, t, state) for t in range(40)], 1)
    assert outs.dtype == dtype and state.dtype == torch.float32
    assert rel(outs, want) < bound
    assert rel(state, final) < 2e-6  # the inputs are rounded, the state is not


def test_a_step_writes_into_the_state_it_is_given_and_into_nothing_else():
    x = make(T=1)
    copies = x.map(torch.clone)
    state = x.initial_state.clone()
    address = state.data_ptr()
    step(x, 0, state)
    assert state.data_ptr() == address and not state.equal(x.initial_state)
    assert all(a.equal(b) for a, b in zip(x.named().values(), copies.named().values(), strict=True))


def test_a_step_with_beta_zero_leaves_the_state_exactly_unchanged():
    x = make(T=1, decay=False)
    state = x.initial_state.clone()
    step(x.but(beta=torch.zeros_like(x.beta)), 0, state)
    assert state.equal(x.initial_state)


def test_a_step_takes_non_contiguous_inputs():
    x = make(T=3)
    strided = x.map(lambda y: torch.stack((y, y), -1)[..., 0]).but(initial_state=None)
    states = x.initial_state.clone(), x.initial_state.clone()
    assert rel(step(strided, 1, states[0]), step(x.map(torch.clone), 1, states[1])) < 1e-14
    assert rel(*states) < 1e-14


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_parameters_that_require_grad_may_decode_without_gradients(context):
    x = make(T=1).leaves()
    with context():
        state = x.initial_state.clone()
        out = step(x, 0, state)
        near((out[:, None], state), recurrent(x), 1e-12)
    assert not out.requires_grad


def test_autocast_does_not_lower_the_precision_of_a_step():
    x = make(T=1, dtype=torch.float32)
    states = x.initial_state.clone(), x.initial_state.clone()
    with torch.autocast("cpu", torch.bfloat16):
        out = step(x, 0, states[0])
    near((out, states[0]), (step(x, 0, states[1]), states[1]), 0)


@pytest.mark.parametrize("empty", ("B", "H", "V"))
def test_nothing_is_a_step_too(empty):
    B, H, V = (0 if name == empty else 2 for name in "BHV")
    q, k, u, r = (torch.ones(B, H, 3) for _ in range(4))
    out = running_tensor_step((q, u), (k, r), torch.ones(B, H, V), torch.zeros(B, H, 3, 3, V), beta=torch.ones(B, H))
    assert out.shape == (B, H, V)
