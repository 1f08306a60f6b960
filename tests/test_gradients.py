"""The explicit backward pass is the derivative: of the recurrence by autograd, and by finite differences."""

import pytest
import torch
from helpers import ORDERS, WIDTHS, Inputs, call, gradients, make, near, op, recurrent

from runningtensor import running_tensor

RULES = pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
DECAYS = pytest.mark.parametrize("decay", (False, True), ids=("lasting", "decaying"))
STARTS = pytest.mark.parametrize("initial", (False, True), ids=("fresh", "continued"))


@pytest.mark.parametrize("T", (1, 15, 65))
@STARTS
@DECAYS
@RULES
@pytest.mark.parametrize("order", ORDERS)
def test_every_gradient_of_the_chunk_form_is_that_of_the_recurrence(order, delta, decay, initial, T):
    x = make(T=T, widths=WIDTHS[order], delta=delta, decay=decay, initial=initial)
    want = gradients(recurrent, x)
    for C in sorted({1, 16, 64, T}):
        near(gradients(lambda x, C=C: op(x, chunk_size=C), x), want, 1e-12)


@pytest.mark.parametrize("C", (1, 16, 64, 130))
@RULES
def test_gradients_of_many_chunks_are_those_of_the_recurrence(delta, C):
    # With 130 chunks the backward pass recomputes the states in 12 stretches, the last of them shorter.
    x = make(T=130, delta=delta)
    near(gradients(lambda x: op(x, chunk_size=C), x), gradients(recurrent, x), 1e-12)


@pytest.mark.parametrize("result", (0, 1), ids=("outputs", "final state"))
@STARTS
@DECAYS
@RULES
def test_gradients_through_one_result_alone_are_those_of_the_recurrence(delta, decay, initial, result):
    # For a result that is not used autograd hands over no gradient at all: another path than a gradient of zeros.
    x = make(T=40, delta=delta, decay=decay, initial=initial)

    def through(form):
        leaves = x.leaves()
        named = leaves.named()
        loss = form(leaves)[result].square().sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), grads, strict=True)
        return {name: torch.zeros_like(x) if grad is None else grad for (name, x), grad in pairs}

    for C in (16, 64):
        near(through(lambda x, C=C: op(x, chunk_size=C)), through(recurrent), 1e-12)


@RULES
def test_gradients_without_a_final_state_are_those_of_the_recurrence(delta):
    x = make(T=40, delta=delta)
    for C in (16, 64):
        got = gradients(lambda x, C=C: call(running_tensor, x, chunk_size=C)[:1], x)
        near(got, gradients(lambda x: recurrent(x)[:1], x), 1e-12)


def gradcheck(x: Inputs, **options: object) -> bool:
    """Every input against finite differences, through outputs and final state."""
    x = x.leaves()
    order = len(x.keys)

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, (values, *rest) = tensors[:order], tensors[order : 2 * order], tensors[2 * order :]
        names = [name for name in x.named() if name in ("beta", "log_decay", "initial_state")]
        gates = dict(zip(names, rest, strict=True))
        return running_tensor(queries, keys, values, output_final_state=True, **gates, **options)

    return torch.autograd.gradcheck(f, tuple(x.named().values()))


@pytest.mark.parametrize(("delta", "decay", "initial"), ((True, True, True), (True, False, False), (False, True, True)))
@pytest.mark.parametrize("widths", ((3,), (3, 2), (2, 3, 2)), ids=("order 2", "order 3", "order 4"))
def test_finite_differences_confirm_every_gradient(widths, delta, decay, initial):
    x = make(B=1, T=5, H=2, widths=widths, V=2, delta=delta, decay=decay, initial=initial)
    assert gradcheck(x, chunk_size=2)


@pytest.mark.parametrize("widths", ((3,), (3, 2), (2, 3, 2)), ids=("order 2", "order 3", "order 4"))
def test_finite_differences_confirm_every_gradient_of_packed_sequences(widths):
    x = make(B=1, T=6, H=1, widths=widths, V=2, sequences=4)
    assert gradcheck(x, chunk_size=2, cu_seqlens=torch.tensor([0, 1, 1, 5, 6]))


def test_a_second_derivative_is_refused_rather_than_silently_zero():
    x = make(T=5).leaves()
    (grad,) = torch.autograd.grad(op(x)[0].square().sum(), x.values, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
