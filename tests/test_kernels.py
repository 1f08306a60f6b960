"""The Triton kernels in Triton's interpreter, which runs them on a CPU and rounds as a GPU does.

Never in bfloat16: the interpreter multiplies matrices of it wrongly. What it cannot show, a race or a miscompilation,
is left to test_gpu.py.
"""

import os

import pytest
import torch
import triton
import triton.language as tl
from helpers import Inputs, bounds, everything, gradients, make, near, op, recurrent, rel
from test_stress import CASES, DECAYS, equal_keys
from torch.library import opcheck

import runningtensor.ops.step
from runningtensor import running_tensor, running_tensor_step
from runningtensor.ops.interface import two_modes
from runningtensor.ops.triton import launch
from runningtensor.ops.triton.forward import rounded

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, which is set where there is no GPU"
)
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", BOUND, ids=("float32", "float16"))
RULES = pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
DECAYING = pytest.mark.parametrize("decay", (False, True), ids=("lasting", "decaying"))
WIDTHS = {2: (21,), 3: (9, 5), 4: (3, 5, 6)}  # from order 3 on more than one slab of features in float32
V = 20
LENGTHS = (0, 1, 33, 0, 16)


def check(
    x: Inputs, bound: float | None = None, floor: float = 0.0, cu_seqlens: torch.Tensor | None = None, C: int = 64
) -> None:
    """The kernels are the recurrence in float64 on the same rounded inputs: results and gradients."""
    dtype = x.values.dtype
    # Without a token the recurrence returns what nothing leads to; the chunk form has gradients, of zero.
    reference = "recurrent" if x.values.numel() else "torch"
    got = everything(x, backend="triton", cu_seqlens=cu_seqlens, chunk_size=C)
    want = everything(x.double(), dtype, backend=reference, cu_seqlens=cu_seqlens)
    near(got, want, BOUND[dtype] if bound is None else bound, floor)


# -- Outputs, states and gradients -------------------------------------------------------------------------------------


@DTYPES
@DECAYING
@RULES
def test_the_kernels_are_the_recurrence(delta, decay, dtype):
    check(make(T=41, widths=WIDTHS[3], V=V, delta=delta, decay=decay, dtype=dtype), C=32)


@DTYPES
@DECAYING
@RULES
def test_packed_sequences_are_the_recurrence_of_each(delta, decay, dtype):
    cu_seqlens = bounds(LENGTHS)
    x = make(1, 50, widths=WIDTHS[3], V=V, delta=delta, decay=decay, dtype=dtype, sequences=len(LENGTHS))
    check(x, C=16, cu_seqlens=cu_seqlens.to(torch.int32 if delta else torch.int64))


@pytest.mark.parametrize("C", (16, 32, 64))
@DTYPES
@pytest.mark.parametrize("order", WIDTHS)
def test_every_order_and_chunk_is_the_recurrence(order, dtype, C):
    check(make(1, T=70, H=1, widths=WIDTHS[order], V=V, dtype=dtype), C=C)


@pytest.mark.parametrize("T", (1, 15, 16, 17, 64, 65, 130))
def test_any_length_is_the_recurrence(T):
    check(make(1, T, H=1, widths=(5, 3), V=7, dtype=torch.float32))


@pytest.mark.parametrize(("C", "used"), ((1, 16), (31, 16), (40, 32), (1000, 64)))
def test_a_chunk_size_the_kernels_lack_is_rounded_to_one_they_have(C, used):
    x = make(1, T=70, H=1, widths=(5, 3), V=7, dtype=torch.float32)
    near(op(x, backend="triton", chunk_size=C), op(x, backend="triton", chunk_size=used), 0)


SHAPES = {  # (K_1, …), V, dtype
    "the paper's": ((25, 25), 48, torch.float16),
    "more keys and values than a block has": ((70, 3), 70, torch.float32),
    "more keys and values than a block has, halved": ((70, 3), 70, torch.float16),
    "one block of many values": ((6, 5), 50, torch.float32),
    "two blocks of many values": ((6, 5), 120, torch.float16),
    "linear attention": ((128,), 128, torch.float16),
    "the widest last mode": ((3, 128), 5, torch.float32),
    "a last mode that leaves most of its slab empty": ((3, 66), 5, torch.float16),
    "a last mode of one": ((5, 1), 7, torch.float16),
}


@pytest.mark.parametrize(("widths", "V", "dtype"), SHAPES.values(), ids=SHAPES)
def test_any_shape_is_the_recurrence(widths, V, dtype):
    check(make(1, T=37, H=1, widths=widths, V=V, dtype=dtype), C=32)


@RULES
def test_every_width_may_be_one(delta):
    x = make(T=37, widths=(1, 1), V=1, delta=delta, dtype=torch.float32)
    check(x, C=32, floor=1.0)  # a unit key of width one erases all: little is left of the gradient of the state


@pytest.mark.parametrize("final", (False, True), ids=("no final state", "final state"))
@pytest.mark.parametrize("initial", (False, True), ids=("fresh", "continued"))
@RULES
def test_states_may_be_left_out(delta, initial, final):
    x = make(1, T=37, H=1, widths=(5, 3), V=7, delta=delta, dtype=torch.float32, initial=initial)

    def results(x: Inputs, backend: str) -> tuple:
        gates = {"beta": x.beta, "log_decay": x.log_decay, "initial_state": x.initial_state}
        out, state = running_tensor(
            x.queries, x.keys, x.values, **gates, output_final_state=final, chunk_size=16, backend=backend
        )
        assert (state is None) == (not final)
        return (out, state) if final else (out,)

    near(results(x, "triton"), results(x.double(), "recurrent"), BOUND[torch.float32])
    got, want = gradients(lambda x: results(x, "triton"), x), gradients(lambda x: results(x, "recurrent"), x.double())
    near(got, want, BOUND[torch.float32])


@RULES
def test_gradients_flow_from_the_final_state_alone(delta):
    x = make(1, T=37, H=1, widths=(5, 3), V=7, delta=delta, dtype=torch.float32)
    got = gradients(lambda x: op(x, chunk_size=16, backend="triton")[1:], x)
    near(got, gradients(lambda x: op(x, backend="torch")[1:], x.double()), BOUND[torch.float32])


def test_gates_may_be_float32_beside_half_values():
    x = make(1, T=37, H=2, widths=(5, 3), V=7, dtype=torch.float16)
    x = x.but(beta=x.beta.float() * 0.999, log_decay=x.log_decay.float() * 0.999)
    assert everything(x, backend="triton", chunk_size=16)["d beta"].dtype == torch.float32
    check(x, C=16)


def test_non_contiguous_inputs_are_the_same_inputs():
    x = make(T=20, widths=(5, 3), dtype=torch.float32)
    strided = x.map(lambda y: y.transpose(0, 2).contiguous().transpose(0, 2))  # leaves() keeps these strides
    assert not any(y.is_contiguous() for y in strided.leaves().named().values())
    near(everything(strided, backend="triton"), everything(x, backend="triton"), 0)


def test_the_initial_state_is_left_as_it_was():
    x = make(1, T=20, H=1, dtype=torch.float32)
    before = x.initial_state.clone()
    everything(x, backend="triton")
    assert x.initial_state.equal(before)


# -- Where it is hardest -----------------------------------------------------------------------------------------------


@RULES
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay_is_finite_and_right(decay, delta):
    x = make(1, T=70, H=1, widths=(5, 3), V=3, delta=delta, dtype=torch.float32)
    x = x.but(log_decay=DECAYS[decay](x.log_decay))
    # What e^-50 leaves of a gradient need not be right to its last digit beside others of size one.
    check(x, C=32, floor=1.0)


@RULES
def test_the_small_gradient_of_a_firm_decay_is_not_lost_in_larger_ones(delta):
    x = make(1, T=70, H=1, widths=(5, 3), V=3, delta=delta, dtype=torch.float32)
    check(x.but(log_decay=torch.full_like(x.log_decay, -10.0)), C=32)


def test_a_reset_in_half_precision_is_finite_and_right():
    x = make(1, T=70, H=1, widths=(5, 3), V=3, dtype=torch.float16)
    check(x.but(log_decay=DECAYS["reset"](x.log_decay)), floor=1.0)


@pytest.mark.parametrize("change", CASES)
def test_repeated_keys_zeros_and_large_values_are_right(change):
    x = change(make(1, T=130, H=1, widths=(5, 3), V=3, decay=False, dtype=torch.float32))
    check(x)


def test_equal_keys_in_half_precision_are_right():
    # Their Gram matrix is all ones, whose inverse a less careful method loses. Each write takes back the one before, so
    # that a chunk's sum telescopes and the roundings of all 64 remain.
    x = equal_keys(make(1, T=130, H=1, widths=(5, 3), V=3, decay=False, dtype=torch.float16))
    check(x, bound=4e-3)


def test_equal_keys_do_not_gather_the_rounding_of_the_inverse():
    # Its entries repeat too: rounded to TF32 all err alike, and the gradient a chunk passes on is off by their sum, so
    # that d values and d beta are off by 4e-3 to 1e-2.
    x = equal_keys(make(1, T=200, H=2, widths=(9, 5), V=V, decay=False, dtype=torch.float16))
    check(x, bound=3e-3)


@pytest.mark.parametrize("lengths", (None, LENGTHS), ids=("batch", "packed"))
@pytest.mark.parametrize(("delta", "decay", "initial"), ((False, False, False), (True, True, True)))
def test_every_number_returned_was_written_and_none_was_read_before(delta, decay, initial, lengths, memory_full_of_nan):
    sizes = {"B": 2, "T": 21} if lengths is None else {"B": 1, "T": sum(lengths), "sequences": len(lengths)}
    x = make(**sizes, widths=WIDTHS[3], V=V, delta=delta, decay=decay, initial=initial, dtype=torch.float32)
    cu_seqlens = None if lengths is None else bounds(lengths)
    for name, y in everything(x, backend="triton", chunk_size=16, cu_seqlens=cu_seqlens).items():
        assert y.isfinite().all(), name


@DTYPES
def test_repeated_runs_are_equal_bit_for_bit(dtype):
    x = make(1, 50, H=1, widths=WIDTHS[3], V=V, dtype=dtype, sequences=len(LENGTHS))
    options = {"backend": "triton", "chunk_size": 32, "cu_seqlens": bounds(LENGTHS)}
    near(everything(x, **options), everything(x, **options), 0)


# -- Nothing in, nothing out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initial", (False, True), ids=("fresh", "continued"))
@pytest.mark.parametrize("order", WIDTHS)
def test_no_tokens_leave_the_state_as_it_was(order, initial):
    x = make(T=0, widths=WIDTHS[order], V=V, dtype=torch.float16, initial=initial)
    out, state = op(x, backend="triton")
    assert out.shape == x.values.shape and out.dtype == torch.float16
    assert state.equal(x.initial_state if initial else torch.zeros_like(state))
    check(x, bound=0)


@pytest.mark.parametrize("N", (0, 1, 3))
def test_packed_sequences_without_tokens_leave_their_states_as_they_were(N):
    x = make(B=1, T=0, sequences=N, dtype=torch.float32)
    check(x, cu_seqlens=torch.zeros(N + 1, dtype=torch.int64), bound=0)


def test_an_empty_sequence_among_others_keeps_its_state_bit_for_bit():
    x = make(B=1, T=9, H=1, sequences=3, dtype=torch.float32)
    _, state = op(x, cu_seqlens=torch.tensor([0, 4, 4, 9]), backend="triton")
    assert state[1].equal(x.initial_state[1])


EMPTY = {"B": {"B": 0}, "H": {"H": 0}, "K": {"widths": (0, 3)}, "R": {"widths": (3, 0)}, "V": {"V": 0}}


@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_any_other_dimension_may_be_empty_too(sizes):
    x = make(T=5, dtype=torch.float32, **sizes)
    out, state = op(x, backend="triton")
    assert out.shape == x.values.shape and state.shape == x.initial_state.shape
    assert (out == 0).all()
    check(x)


# -- One step ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stepping_by_kernel(monkeypatch):
    """`running_tensor_step` chooses as on a GPU."""
    monkeypatch.setattr(runningtensor.ops.step, "choose", lambda *_: "triton")


def step(x: Inputs, t: int, state: torch.Tensor) -> torch.Tensor:
    now = x.tokens(t)
    return running_tensor_step(now.queries, now.keys, now.values, state, beta=now.beta, log_decay=now.log_decay)


# Steps multiply no matrices, so that bfloat16 is right here too.
@pytest.mark.parametrize(("dtype", "bound"), ((torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 2e-6)))
@DECAYING
@RULES
def test_the_step_kernel_is_the_step_of_torch(delta, decay, dtype, bound):
    x = make(3, T=1, widths=(9, 5), V=V, delta=delta, decay=decay, dtype=dtype).map(torch.clone)
    want_state, state = x.initial_state.clone(), x.initial_state.clone()
    want = step(x, 0, want_state)
    now = x.tokens(0).map(torch.clone)
    (q, u), (k, r) = now.queries, now.keys
    out = launch.step(q, k, u, r, now.values, now.beta, now.log_decay, state)
    assert out.dtype == dtype and rel(out, want) < bound
    assert rel(state, want_state) < 2e-6


@pytest.mark.parametrize(("widths", "V"), (((5,), 7), ((25, 25), 48), ((3, 5, 6), 20), ((3, 5, 3, 6), 7), ((1,), 1)))
@RULES
def test_steps_by_kernel_alone_are_the_whole_run(widths, V, delta, stepping_by_kernel):
    x = make(1, T=6, H=3, widths=widths, V=V, delta=delta, dtype=torch.float32)
    state = x.initial_state.clone()
    outs = torch.stack([step(x, t, state) for t in range(6)], 1)
    near((outs, state), recurrent(x.double()), 2e-6)


def test_steps_by_kernel_of_any_order_keep_a_float32_state_in_half_precision(stepping_by_kernel):
    x = make(1, T=6, widths=(3, 5, 6), dtype=torch.float16)
    state = x.initial_state.clone()
    outs = torch.stack([step(x, t, state) for t in range(6)], 1)
    want, final = recurrent(x.double())
    assert outs.dtype == torch.float16 and rel(outs, want) < 1e-3
    assert rel(state, final) < 2e-6


def test_a_step_by_kernel_writes_into_the_state_it_is_given_and_into_nothing_else(stepping_by_kernel):
    x = make(1, T=1, dtype=torch.float32)
    copies, state = x.map(torch.clone), x.initial_state.clone()
    address = state.data_ptr()
    step(x, 0, state)
    assert state.data_ptr() == address and not state.equal(x.initial_state)
    assert all(a.equal(b) for a, b in zip(x.named().values(), copies.named().values(), strict=True))


def test_a_step_by_kernel_takes_one_token_of_many_sequences_where_it_lies(stepping_by_kernel):
    x = make(3, T=4, dtype=torch.float32)
    now = x.tokens(2)
    assert not now.values.is_contiguous()
    state = x.initial_state.clone()
    out = step(x, 2, state)
    want = recurrent(x.tokens(slice(2, 3)).but(initial_state=x.initial_state).double())
    near((out[:, None], state), want, 2e-6)
    assert out.is_contiguous()


@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_a_step_by_kernel_may_be_empty(sizes, stepping_by_kernel):
    x = make(T=1, dtype=torch.float32, **sizes)
    state = x.initial_state.clone()
    near((step(x, 0, state)[:, None], state), recurrent(x.double()), 2e-6)


# -- What torch.compile sees -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", (None, (3, 0, 4)), ids=("batch", "packed"))
@pytest.mark.parametrize(("widths", "dtype"), (((3, 2), torch.float32), ((3, 2, 4), torch.float16)))
@RULES
def test_the_results_of_the_ops_are_those_inferred(delta, widths, dtype, lengths):
    N = 1 if lengths is None else len(lengths)
    x = make(1, T=7, H=1, widths=widths, V=2, dtype=dtype, delta=delta, decay=delta, sequences=N)
    (q, u), (k, r) = two_modes(x.queries), two_modes(x.keys)
    initial_state = x.initial_state.reshape(N, 1, k.shape[-1], r.shape[-1], 2)
    cu_seqlens = None if lengths is None else bounds(lengths)
    inputs = (q, k, u, r, x.values, x.beta, x.log_decay, initial_state, cu_seqlens)
    checks = ("test_schema", "test_faketensor")
    opcheck(torch.ops.runningtensor.forward.default, (*inputs, 16, True, "triton"), test_utils=checks)
    out, state, inverse = torch.ops.runningtensor.forward(*inputs, 16, True, "triton")
    arguments = (torch.ones_like(out), torch.ones_like(state), *inputs, inverse, 16, "triton")
    opcheck(torch.ops.runningtensor.backward.default, arguments, test_utils=checks)


def test_the_step_op_is_what_its_schema_says():
    x = make(1, T=1, dtype=torch.float32).tokens(0)
    (q, u), (k, r) = x.queries, x.keys
    state = torch.zeros(1, 2, 5, 3, 7)
    arguments = (q, k, u, r, x.values, x.beta, x.log_decay, state)
    opcheck(torch.ops.runningtensor.step.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("widths", "dtype"), (((5, 3), torch.float32), ((3, 2, 4), torch.float16)))
def test_compiled_it_is_one_graph_and_the_same(widths, dtype):
    x = make(1, T=20, H=1, widths=widths, dtype=dtype)

    def f(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return op(x, backend="triton", chunk_size=16)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    near(compiled(x), f(x), 0)
    near(gradients(compiled, x), gradients(f, x), 0)


# -- Rounding ----------------------------------------------------------------------------------------------------------


@triton.jit
def rounding_kernel(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, rounded(tl.load(x + i)))


def test_rounding_to_tf32_leaves_what_is_no_number_so():
    x = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)  # 3 NaN, infinity
    y = torch.empty_like(x)
    rounding_kernel[(1,)](x, y, 4)
    assert y[:3].isnan().all() and y[3] == torch.inf
