"""Precision is float32 or better inside, whatever comes in; memory layout does not matter; inputs stay as they were."""

import pytest
import torch
from helpers import WIDTHS, bounds, gradients, make, near, op, recurrent, rel, upstream

LOW = ((torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 2e-6))
BACKENDS = pytest.mark.parametrize("backend", ("torch", "recurrent"))
RULES = pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))


@BACKENDS
@RULES
@pytest.mark.parametrize("order", (2, 3, 4))
@pytest.mark.parametrize(("dtype", "bound"), LOW)
def test_outputs_have_the_dtype_of_values_and_the_state_is_float32(dtype, bound, order, delta, backend):
    x = make(T=130, widths=WIDTHS[order], delta=delta, dtype=dtype)
    out, state = op(x, backend=backend)
    assert out.dtype == dtype and state.dtype == torch.float32
    want = recurrent(x.double())
    assert rel(out, want[0]) < bound
    assert rel(state, want[1]) < 2e-6  # the state never passes through the dtype of the inputs


@RULES
@pytest.mark.parametrize("order", (2, 3, 4))
@pytest.mark.parametrize(("dtype", "bound"), LOW)
def test_every_gradient_has_the_dtype_of_its_input(dtype, bound, order, delta):
    x = make(T=130, widths=WIDTHS[order], delta=delta, dtype=dtype)
    out, state = op(x)
    rounded = upstream((out, state))  # the reference gets the same upstream gradients, rounded as these are

    def exact(x):
        x = x.double().leaves()
        named = x.named()
        grads = torch.autograd.grad(recurrent(x), list(named.values()), [g.double() for g in rounded])
        return dict(zip(named, grads, strict=True))

    got = gradients(op, x)
    assert {name: grad.dtype for name, grad in got.items()} == {name: y.dtype for name, y in x.named().items()}
    near(got, exact(x), 2 * bound)


@BACKENDS
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gates_may_be_float32_beside_low_precision_values(dtype, backend):
    x = make(T=130, dtype=dtype)
    x = x.but(beta=make(T=130).beta.float(), log_decay=make(T=130).log_decay.float())
    near(op(x, backend=backend), recurrent(x.double()), dict(LOW)[dtype])
    grads = gradients(lambda x: op(x, backend=backend), x)
    assert grads["beta"].dtype == grads["log_decay"].dtype == torch.float32
    assert grads["values"].dtype == dtype


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_autocast_does_not_lower_the_precision_inside(dtype):
    x = make(T=130, dtype=dtype)
    want, want_grads = op(x), gradients(op, x)
    with torch.autocast("cpu", torch.bfloat16):
        near(op(x), want, 0)
        near(gradients(op, x), want_grads, 0)


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided(x):
    return torch.stack((x, -x), -1)[..., 0]


def shared(x):
    return x[:, :, :1].expand(x.shape)  # one for all heads


@pytest.mark.parametrize("layout", (transposed, strided, shared))
@pytest.mark.parametrize("order", (2, 3, 4))
def test_layout_in_memory_does_not_matter(order, layout):
    x = make(T=40, widths=WIDTHS[order]).map(layout)
    assert not any(y.is_contiguous() for y in x.named().values())
    plain = x.map(torch.Tensor.contiguous)
    near(op(x, chunk_size=16), op(plain, chunk_size=16), 1e-14)

    def laid_out(x):
        return op(x.map(layout), chunk_size=16)

    def laid_out_plainly(x):
        return op(x.map(lambda y: layout(y).contiguous()), chunk_size=16)

    near(gradients(laid_out, x), gradients(laid_out_plainly, x), 1e-14)


def test_upstream_gradients_may_be_expanded():
    x = make(T=40).leaves()
    out, state = op(x, chunk_size=16)
    one = torch.ones((), dtype=out.dtype)
    leaves = list(x.named().values())
    got = torch.autograd.grad((out, state), leaves, (one.expand_as(out), one.expand_as(state)), retain_graph=True)
    near(got, torch.autograd.grad((out, state), leaves, (torch.ones_like(out), torch.ones_like(state))), 1e-14)


@pytest.mark.parametrize("C", (16, 64))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_inputs_and_upstream_gradients_are_never_modified(dtype, C):
    # In these dtypes nothing is converted on the way in, so an update in place could reach the caller's tensors.
    x = make(B=1, T=40, sequences=3, dtype=dtype).leaves()
    cu_seqlens = bounds((1, 30, 9))
    results = op(x, chunk_size=C, cu_seqlens=cu_seqlens)
    start = upstream(results)
    torch.autograd.grad(results, list(x.named().values()), start)
    near(x.named(), make(B=1, T=40, sequences=3, dtype=dtype).named(), 0)
    near(start, upstream(results), 0)
    assert cu_seqlens.tolist() == [0, 1, 31, 40]


@BACKENDS
@pytest.mark.parametrize("T", (0, 1, 40))
def test_the_final_state_is_a_contiguous_tensor_of_its_own(T, backend):
    # A decoding step then overwrites it, and must not reach the state the caller began with.
    x = make(T=T)
    x = x.but(initial_state=x.initial_state.mT.contiguous().mT)
    _, state = op(x, backend=backend)
    assert state.is_contiguous()
    assert state.untyped_storage().data_ptr() != x.initial_state.untyped_storage().data_ptr()
