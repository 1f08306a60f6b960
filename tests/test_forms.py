"""The recurrent, the parallel and the chunk form are one function."""

import pytest
import torch
from helpers import ORDERS, WIDTHS, call, make, near, op, recurrent, rel

from runningtensor import running_tensor
from runningtensor.ops import reference

LENGTHS = (1, 2, 15, 63, 64, 65, 130)


def chunk_sizes(T: int) -> list[int]:
    return sorted({1, 16, 64, T})


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("initial", (False, True), ids=("fresh", "continued"))
@pytest.mark.parametrize("decay", (False, True), ids=("lasting", "decaying"))
@pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
@pytest.mark.parametrize("order", ORDERS)
def test_the_chunk_form_is_the_recurrence(order, delta, decay, initial, T):
    x = make(T=T, widths=WIDTHS[order], delta=delta, decay=decay, initial=initial)
    want = recurrent(x)
    for C in chunk_sizes(T):
        near(op(x, chunk_size=C), want, 1e-12)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("decay", (False, True), ids=("lasting", "decaying"))
@pytest.mark.parametrize("order", ORDERS)
def test_the_parallel_form_is_the_additive_recurrence_and_the_chunk_form(order, decay, T):
    x = make(T=T, widths=WIDTHS[order], delta=False, decay=decay, initial=False)
    out = reference.parallel(x.queries, x.keys, x.values, log_decay=x.log_decay)
    assert rel(out, recurrent(x)[0]) < 1e-12
    for C in chunk_sizes(T):
        assert rel(op(x, chunk_size=C)[0], out) < 1e-12


@pytest.mark.parametrize("backend", ("auto", "torch", "recurrent"))
def test_every_backend_computes_the_same(backend):
    x = make(T=70)
    near(op(x, backend=backend), recurrent(x), 1e-12)


@pytest.mark.parametrize("backend", ("auto", "torch", "recurrent"))
def test_the_final_state_comes_only_on_request_and_does_not_change_the_outputs(backend):
    x = make(T=70)
    out, state = call(running_tensor, x, backend=backend)
    assert state is None
    assert rel(out, op(x, backend=backend)[0]) < 1e-14


def test_the_same_inputs_give_the_same_bits():
    x = make(T=130)
    (out, state), (out2, state2) = op(x), op(x)
    assert out.equal(out2) and state.equal(state2)


def test_bounds_that_are_known_are_not_read_again():
    from runningtensor.ops.interface import check_packing, known_packing

    unreadable = torch.empty(3, dtype=torch.int64, device="meta")
    assert check_packing(known_packing(unreadable, torch.tensor([0, 2, 5])), 5) == [0, 2, 5]
    with pytest.raises(ValueError, match="decreasing from 7 to 5"):
        known_packing(unreadable, torch.tensor([0, 7, 5]))
