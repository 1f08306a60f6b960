"""What the rule becomes when a part of it is trivial. Every formula is written out here, for one head."""

from itertools import product

import pytest
import torch
from helpers import WIDTHS, Inputs, make, near, op, recurrent, rel, upstream

from runningtensor.ops import reference
from runningtensor.ops.chunk import kron

RULES = pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))


def head(x, b, h):
    return x[b, :, h]


def linear_attention(q, k, v):
    """o_t = Σ_{s≤t} (q_t·k_s) v_s"""
    return (q @ k.T).tril() @ v


def deltanet(q, k, v, beta):
    """S_t = S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ and o_t = S_t q_t, with S [V,K]"""
    S, outs = torch.zeros(v.shape[-1], k.shape[-1], dtype=v.dtype), []
    for q_t, k_t, v_t, beta_t in zip(q, k, v, beta, strict=True):
        S = S @ (torch.eye(len(k_t), dtype=v.dtype) - beta_t * torch.outer(k_t, k_t)) + beta_t * torch.outer(v_t, k_t)
        outs.append(S @ q_t)
    return torch.stack(outs)


def by_head(f, *tensors):
    B, _, H, _ = tensors[0].shape
    heads = [[f(*(head(x, b, h) for x in tensors)) for h in range(H)] for b in range(B)]
    return torch.stack([torch.stack(row, 1) for row in heads])


def test_order_two_without_beta_is_linear_attention():
    x = make(T=70, widths=(5,), delta=False, decay=False, initial=False)
    assert rel(op(x)[0], by_head(linear_attention, x.queries[0], x.keys[0], x.values)) < 1e-12


def test_order_two_with_beta_is_deltanet():
    x = make(T=70, widths=(5,), decay=False, initial=False)
    assert rel(op(x)[0], by_head(deltanet, x.queries[0], x.keys[0], x.values, x.beta)) < 1e-12


def test_order_three_with_unit_scalars_as_second_mode_is_linear_attention():
    x = make(T=70, widths=(5,), delta=False, decay=False, initial=False)
    one = torch.ones_like(x.keys[0][..., :1])  # u = r = 1, R = 1
    out, _ = op(x.but(queries=(*x.queries, one), keys=(*x.keys, one)))
    assert rel(out, by_head(linear_attention, x.queries[0], x.keys[0], x.values)) < 1e-12


@RULES
def test_order_three_is_order_two_on_kronecker_keys(delta):
    x = make(T=70, delta=delta)
    flat = x.but(queries=(kron(*x.queries),), keys=(kron(*x.keys),), initial_state=x.initial_state.flatten(2, 3))
    out, state = op(x)
    near((out, state.flatten(2, 3)), op(flat), 1e-12)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("order", (2, 3, 4))
def test_beta_zero_leaves_the_state_exactly_unchanged(order, dtype):
    x = make(T=70, widths=WIDTHS[order], decay=False, dtype=dtype)
    x = x.but(beta=torch.zeros_like(x.beta))
    for C in (1, 16, 64):
        assert op(x, chunk_size=C)[1].equal(x.initial_state)
    assert op(x, backend="recurrent")[1].equal(x.initial_state)


def test_beta_zero_reads_the_initial_state_alone():
    x = make(T=70, decay=False)
    read = torch.einsum("bhijv,bthi,bthj->bthv", x.initial_state, *x.queries)
    assert rel(op(x.but(beta=torch.zeros_like(x.beta)))[0], read) < 1e-12


def test_beta_one_stores_a_value_that_its_own_key_reads_back():
    x = make(T=70)
    out, _ = op(x.but(beta=torch.ones_like(x.beta), queries=x.keys))
    assert rel(out, x.values) < 1e-12


@RULES
def test_a_decay_of_one_is_no_decay(delta):
    x = make(T=70, delta=delta, decay=False)
    near(op(x.but(log_decay=torch.zeros_like(x.values[..., 0]))), op(x), 1e-14)


def test_with_a_common_key_the_decay_is_a_moving_average():
    # One key, one query: S_t = α S_{t-1} + v_t, so that o_t = Σ α^{t-s} v_s.
    x = make(T=70, widths=(1, 1), delta=False, initial=False)
    one = torch.ones_like(x.keys[0])
    x = x.but(queries=(one, one), keys=(one, one), log_decay=torch.full_like(x.log_decay, -0.1))
    t = torch.arange(70, dtype=torch.float64)
    weights = torch.exp(-0.1 * (t[:, None] - t)).tril()
    assert rel(op(x)[0], torch.einsum("ts,bshv->bthv", weights, x.values)) < 1e-12


# -- The paper's forget gate: g_t = logσ(a_t)/τ is the cumulative log decay itself, so that it folds into the values. --

FORMS = {
    "recurrent": recurrent,
    "chunk": lambda x: op(x, chunk_size=16),
    "one chunk": lambda x: op(x, chunk_size=128),
    "parallel": lambda x: (reference.parallel(x.queries, x.keys, x.values, log_decay=x.log_decay),),
}


def gated(form, x: Inputs, logits):
    _, log_decay = reference.telescoping_gate(logits)
    return form(x.but(log_decay=log_decay))


def folded(form, x: Inputs, logits):
    """No decay: v e^{-g} goes in, and what comes out is multiplied by e^{g}, the state by that of the last token."""
    g, _ = reference.telescoping_gate(logits)
    out, *state = form(x.but(values=x.values * (-g).exp()[..., None]))
    return out * g.exp()[..., None], *(s * g[:, -1].exp()[..., None, None, None] for s in state)


OPTIONS = list(product(("recurrent", "chunk", "one chunk"), (False, True), (False, True)))


@pytest.mark.parametrize(("form", "delta", "initial"), [*OPTIONS, ("parallel", False, False)])
def test_the_telescoping_gate_folds_into_values_and_outputs(form, delta, initial):
    x = make(T=70, delta=delta, decay=False, initial=initial)
    logits = 3 * torch.randn(2, 70, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results, grads = [], []
    for way in (gated, folded):
        leaves, a = x.leaves(), logits.clone().requires_grad_()
        got = way(FORMS[form], leaves, a)
        results.append(got)
        grads.append(torch.autograd.grad(got, [a, *leaves.named().values()], upstream(got)))
    near(*results, 1e-12)
    near(*grads, 1e-12)


def test_the_telescoping_gate_starts_at_zero_and_accumulates_to_the_log_sigmoid():
    logits = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    g, log_decay = reference.telescoping_gate(logits, tau=4.0)
    assert rel(g, -torch.log1p(torch.exp(-logits)) / 4) < 1e-12
    assert rel(log_decay.cumsum(1), g) < 1e-12
    assert log_decay[:, 0].equal(g[:, 0])
