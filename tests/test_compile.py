"""The op as torch sees it: a schema that is true, shapes that can be inferred, one graph under torch.compile."""

import pytest
import torch
from helpers import WIDTHS, Inputs, bounds, gradients, make, near, op, rel
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

from runningtensor import running_tensor_step

GATES = pytest.mark.parametrize(
    ("delta", "decay", "initial", "keep"),
    (
        (False, False, False, False),
        (True, False, False, True),
        (False, True, True, False),
        (True, True, True, True),
    ),
    ids=("plain", "beta, final state", "decay, initial state", "all"),
)
PACKING = pytest.mark.parametrize("lengths", (None, (3, 0, 4)), ids=("batch", "packed"))


def op_arguments(lengths, delta, decay, initial, dtype=torch.float32):
    """q, k, u, r, v, beta, log_decay, initial_state, cu_seqlens"""
    B, N = (2, 2) if lengths is None else (1, len(lengths))
    x = make(B, T=7, H=2, widths=(3, 2), V=2, delta=delta, decay=decay, initial=initial, sequences=N, dtype=dtype)
    (q, u), (k, r) = x.queries, x.keys
    cu_seqlens = None if lengths is None else bounds(lengths)
    return q, k, u, r, x.values, x.beta, x.log_decay, x.initial_state, cu_seqlens


@PACKING
@GATES
def test_the_forward_op_is_what_its_schema_says(delta, decay, initial, keep, lengths):
    *inputs, cu_seqlens = op_arguments(lengths, delta, decay, initial)
    leaves = [None if x is None else x.requires_grad_() for x in inputs]
    opcheck(torch.ops.runningtensor.forward.default, (*leaves, cu_seqlens, 4, keep))


@PACKING
@GATES
def test_the_backward_op_is_what_its_schema_says(delta, decay, initial, keep, lengths):
    arguments = op_arguments(lengths, delta, decay, initial)
    out, state, inverse = torch.ops.runningtensor.forward(*arguments, 4, keep)
    opcheck(torch.ops.runningtensor.backward.default, (out, state if keep else None, *arguments, inverse, 4))


@pytest.mark.parametrize("T", (0, 7))
def test_the_ops_infer_the_results_of_low_precision_and_of_no_tokens(T):
    q, k, u, r, v, beta, log_decay, initial, _ = op_arguments(None, True, True, True, dtype=torch.bfloat16)
    tokens = [x[:, :T] for x in (q, k, u, r, v, beta, log_decay)]
    arguments = (*tokens, initial.transpose(2, 3).contiguous().transpose(2, 3), None)
    opcheck(torch.ops.runningtensor.forward.default, (*arguments, 4, True))
    out, state, inverse = torch.ops.runningtensor.forward(*arguments, 4, True)
    opcheck(torch.ops.runningtensor.backward.default, (out, state, *arguments, inverse, 4))


def test_a_meta_tensor_has_the_shapes_of_the_result():
    x = make(T=9, dtype=torch.bfloat16)
    got = op(x.map(lambda y: y.to("meta")))
    assert [(y.shape, y.dtype) for y in got] == [(y.shape, y.dtype) for y in op(x)]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f, backend):
    return torch.compile(f, fullgraph=True, backend=backend)


@GATES
@pytest.mark.parametrize("order", (2, 3, 4))
def test_compiled_equals_eager_and_three_lengths_cost_at_most_one_recompile(order, delta, decay, initial, keep):
    counter = CompileCounterWithBackend("aot_eager")

    def f(x: Inputs) -> tuple[torch.Tensor, ...]:
        return op(x) if keep else op(x)[:1]

    g = compiled(f, counter)
    for T in (48, 80, 130):
        x = make(T=T, widths=WIDTHS[order], delta=delta, decay=decay, initial=initial)
        near(g(x), f(x), 1e-13)
    assert 1 <= counter.frame_count <= 2

    counter.clear()
    for T in (48, 80, 130):
        x = make(T=T, widths=WIDTHS[order], delta=delta, decay=decay, initial=initial)
        near(gradients(g, x), gradients(f, x), 1e-13)
    assert 1 <= counter.frame_count <= 2


def test_packed_sequences_of_any_lengths_and_number_cost_at_most_one_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    g = compiled(lambda x, cu_seqlens: op(x, cu_seqlens=cu_seqlens), counter)
    for lengths in ((20, 28), (64, 0, 16), (100, 1, 9, 20)):
        cu_seqlens = bounds(lengths)
        x = make(B=1, T=sum(lengths), sequences=len(lengths))
        got = gradients(lambda x, c=cu_seqlens: g(x, c), x)
        near(got, gradients(lambda x, c=cu_seqlens: op(x, cu_seqlens=c), x), 1e-13)
    assert 1 <= counter.frame_count <= 2


def test_the_default_compiler_fuses_around_the_op_and_changes_nothing():
    def layer(x: Inputs) -> tuple[torch.Tensor, ...]:
        y = x.but(beta=x.beta.sigmoid(), values=torch.nn.functional.silu(x.values))
        out, state = op(y)
        return out.tanh(), state

    x = make(T=80, dtype=torch.float32)
    g = compiled(layer, "inductor")
    near(g(x), layer(x), 1e-6)
    near(gradients(g, x), gradients(layer, x), 1e-6)


def test_a_step_compiles_and_updates_its_state():
    x = make(T=3)
    g = compiled(running_tensor_step, "aot_eager")
    states = x.initial_state.clone(), x.initial_state.clone()
    for t in range(3):
        now = x.tokens(t)
        outs = [
            f(now.queries, now.keys, now.values, state, beta=now.beta, log_decay=now.log_decay)
            for f, state in zip((running_tensor_step, g), states, strict=True)
        ]
        near(outs[1:], outs[:1], 1e-14)
    assert rel(states[1], x.initial_state) > 0.1  # it was written
    near(states[1:], states[:1], 1e-14)


def test_the_kernels_for_hopper_know_widths_that_a_compiler_leaves_open(monkeypatch):
    hopper_launch = pytest.importorskip("runningtensor.ops.triton.hopper_launch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    widths = [mode.from_tensor(torch.empty(width)).shape[0] for width in (25, 26)]
    with mode:
        v = torch.empty(1, 64, 2, 48, dtype=torch.bfloat16, device="cuda")
        assert all(isinstance(width, torch.SymInt) for width in widths)
        assert [hopper_launch.on_hopper(width, width, 64, v) for width in widths] == [True, False]


def test_the_kernels_for_hopper_are_left_alone_with_a_triton_that_they_were_not_tried_with(monkeypatch):
    hopper_launch = pytest.importorskip("runningtensor.ops.triton.hopper_launch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with FakeTensorMode():
        v = torch.empty(1, 64, 2, 48, dtype=torch.bfloat16, device="cuda")
        for version, taken in (((3, 6, 0), True), ((3, 9, 1), True), ((3, 10, 0), False), ((4, 0, 0), False)):
            monkeypatch.setattr(hopper_launch, "VERSION", version)
            assert hopper_launch.on_hopper(25, 25, 64, v) is taken
            assert hopper_launch.takes(25, 25, 64, v) is taken  # what is asked where no assembler is sound
