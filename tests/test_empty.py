"""Nothing in, nothing out, and the state stays as it was."""

import pytest
import torch
from helpers import WIDTHS, gradients, make, near, op, upstream

BACKENDS = pytest.mark.parametrize("backend", ("auto", "torch", "recurrent"))


@BACKENDS
@pytest.mark.parametrize("order", (2, 3, 4))
@pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
def test_no_tokens_return_no_outputs_and_the_initial_state(order, delta, backend):
    x = make(T=0, widths=WIDTHS[order], delta=delta, decay=delta)
    out, state = op(x, backend=backend)
    assert out.shape == x.values.shape and out.dtype == x.values.dtype
    assert state.equal(x.initial_state)


@BACKENDS
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_no_tokens_and_no_initial_state_return_a_zero_state(dtype, backend):
    x = make(T=0, initial=False, dtype=dtype)
    out, state = op(x, backend=backend)
    assert out.dtype == dtype
    assert state.shape == (2, 2, 5, 3, 7) and state.dtype == torch.promote_types(dtype, torch.float32)
    assert (state == 0).all()


@BACKENDS
def test_without_tokens_the_gradient_flows_from_the_final_to_the_initial_state(backend):
    x = make(T=0).leaves()
    _, state = op(x, backend=backend)
    (start,) = upstream((state,))
    (grad,) = torch.autograd.grad(state, x.initial_state, start)
    assert grad.equal(start)


@BACKENDS
@pytest.mark.parametrize("N", (0, 1, 3))
def test_packed_sequences_without_tokens_return_their_initial_states(N, backend):
    x = make(B=1, T=0, sequences=N, dtype=torch.float32)
    cu_seqlens = torch.zeros(N + 1, dtype=torch.int64)
    out, state = op(x, cu_seqlens=cu_seqlens, backend=backend)
    assert out.shape == (1, 0, 2, 7)
    assert state.shape == (N, 2, 5, 3, 7) and state.equal(x.initial_state)
    out, state = op(x.but(initial_state=None), cu_seqlens=cu_seqlens, backend=backend)
    assert state.shape == (N, 2, 5, 3, 7) and (state == 0).all()


@BACKENDS
def test_packed_sequences_without_tokens_hand_the_gradient_to_their_initial_states(backend):
    x = make(B=1, T=0, sequences=3).leaves()
    _, state = op(x, cu_seqlens=torch.zeros(4, dtype=torch.int64), backend=backend)
    (start,) = upstream((state,))
    (grad,) = torch.autograd.grad(state, x.initial_state, start)
    assert grad.equal(start)


@BACKENDS
def test_an_empty_sequence_among_others_keeps_its_state_bit_for_bit(backend):
    x = make(B=1, T=9, sequences=3)
    _, state = op(x, cu_seqlens=torch.tensor([0, 4, 4, 9]), backend=backend)
    assert state[1].equal(x.initial_state[1])


@BACKENDS
@pytest.mark.parametrize("empty", ("B", "H", "K", "V"))
def test_any_other_dimension_may_be_empty_too(empty, backend):
    sizes = {"B": {"B": 0}, "H": {"H": 0}, "K": {"widths": (0, 3)}, "V": {"V": 0}}
    x = make(T=5, **sizes[empty])
    out, state = op(x, chunk_size=2, backend=backend)
    assert out.shape == x.values.shape and state.shape == x.initial_state.shape
    assert (out == 0).all()
    grads = gradients(lambda x: op(x, chunk_size=2, backend=backend), x)
    near(grads, {name: torch.zeros_like(y) for name, y in x.named().items()}, 0)
