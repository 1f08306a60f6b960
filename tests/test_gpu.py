"""What only a GPU shows: the kernels compiled, in bfloat16, again and again, in graphs, and on very large tensors."""

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from helpers import Inputs, bounds, everything, gradients, make, near, op, rel, upstream
from test_stress import equal_keys

from runningtensor import running_tensor, running_tensor_step
from runningtensor.ops import interface

pytestmark = pytest.mark.gpu

SHAPES = {  # (K_1, …), V
    "order 2": ((128,), 128),
    "order 3, the paper's": ((25, 25), 48),
    "order 3, powers of two": ((16, 16), 64),
    "order 4": ((5, 5, 25), 48),
    "order 3, narrow": ((6, 6), 8),
}
LENGTHS = (0, 1, 130, 0, 64, 105)
T = sum(LENGTHS)
RULES = {  # delta, decay, lengths
    "delta": (True, False, None),
    "delta, decay, packed": (True, True, LENGTHS),
    "additive, decay": (False, True, None),
    "additive, packed": (False, False, LENGTHS),
}
# Relative errors: outputs and states; gradients; gradients of the gates, which are sums of many products.
BOUNDS = {
    torch.bfloat16: (5e-3, 8e-3, 1e-2),
    torch.float16: (1e-3, 2e-3, 2e-3),
    torch.float32: (1e-5, 1e-5, 1e-5),
}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
PACKING = pytest.mark.parametrize("lengths", (None, LENGTHS), ids=("batch", "packed"))


def made(lengths: tuple[int, ...] | None = None, **sizes: object) -> Inputs:
    shape = {"B": 2, "T": T} if lengths is None else {"B": 1, "T": T, "sequences": len(lengths)}
    return make(**(shape | sizes)).map(torch.Tensor.cuda)


def packing(lengths: tuple[int, ...] | None) -> torch.Tensor | None:
    return None if lengths is None else bounds(lengths).cuda()


def step(x: Inputs, state: torch.Tensor) -> torch.Tensor:
    return running_tensor_step(x.queries, x.keys, x.values, state, beta=x.beta, log_decay=x.log_decay)


CASES = [
    pytest.param(*shape, *rule, dtype, id=f"{shape_name}, {rule_name}, {dtype}")
    for shape_name, shape in SHAPES.items()
    for rule_name, rule in RULES.items()
    for dtype in BOUNDS
    # Each case compiles its kernels: all rules in bfloat16, the fullest in the others.
    if dtype == torch.bfloat16 or rule_name == "delta, decay, packed"
]


@pytest.mark.parametrize(("widths", "V", "delta", "decay", "lengths", "dtype"), CASES)
def test_the_kernels_are_near_float64(widths, V, delta, decay, lengths, dtype):
    near_float64(made(lengths, widths=widths, V=V, delta=delta, decay=decay, dtype=dtype), lengths)


def near_float64(x: Inputs, lengths: tuple[int, ...] | None = None) -> None:
    cu_seqlens, dtype = packing(lengths), x.values.dtype
    got = everything(x, backend="triton", cu_seqlens=cu_seqlens)
    want = everything(x.double(), dtype, backend="torch", cu_seqlens=cu_seqlens)
    assert got.keys() == want.keys()
    results, grads, gates = BOUNDS[dtype]
    limits = {"out": results, "state": results, "d beta": gates, "d log_decay": gates}
    errors = {name: rel(got[name], want[name]) for name in want}
    far = {name: error for name, error in errors.items() if not error <= limits.get(name, grads)}
    assert not far, f"of {errors}"


@pytest.mark.parametrize(("widths", "V"), (((25, 25), 48), ((24, 24), 48), ((16, 16), 64), ((25, 25), 64)))
@pytest.mark.parametrize("initial", (False, True), ids=("fresh", "continued"))
def test_many_heads_which_take_wider_blocks_are_near_float64(widths, V, initial):
    x = made(T=150, H=80, widths=widths, V=V, initial=initial, dtype=torch.bfloat16)
    got, want = everything(x, backend="triton"), everything(x.double(), torch.bfloat16, backend="torch")
    near(got, want, max(BOUNDS[torch.bfloat16]))


# Each write takes back the one before: a chunk's sum telescopes, and the roundings of all 64 remain.
@pytest.mark.parametrize(("dtype", "bound"), ((torch.bfloat16, 4e-2), (torch.float16, 5e-3), (torch.float32, 1e-5)))
@pytest.mark.parametrize("widths", ((25, 25), (9, 5)), ids=str)
def test_equal_keys_are_right(widths, dtype, bound):
    x = equal_keys(made(widths=widths, V=48, decay=False, dtype=dtype))
    near(everything(x, backend="triton"), everything(x.double(), dtype, backend="torch"), bound)


def test_auto_takes_the_kernels():
    x = made(dtype=torch.bfloat16)
    assert interface.available_backends(x.values.device, x.values.dtype)[0] == "triton"
    near(op(x), op(x, backend="triton"), 0)


def repeatedly(x: Inputs, cu_seqlens: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Outputs, final state and all gradients, anew each time."""
    x = x.leaves()
    tensors, starts = list(x.named().values()), None
    while True:
        results = op(x, backend="triton", cu_seqlens=cu_seqlens)
        starts = starts or upstream(results)
        yield [y.detach() for y in results] + list(torch.autograd.grad(results, tensors, starts))


# Few heads and many take blocks of different sizes.
HEADS = pytest.mark.parametrize("H", (2, 80), ids=("few heads", "many heads"))
# The paper's shape, which has kernels of its own on Hopper, and one that takes those for any shape.
BOTH = pytest.mark.parametrize(("widths", "V"), (((25, 25), 48), ((13, 7), 40)), ids=("25x25x48", "13x7x40"))


@HEADS
@PACKING
@BOTH
def test_a_thousand_runs_are_equal_bit_for_bit(widths, V, lengths, H):
    x = made(lengths, H=H, widths=widths, V=V, dtype=torch.bfloat16)
    runs = repeatedly(x, packing(lengths))
    first = next(runs)
    for i, again in enumerate(islice(runs, 999)):
        assert all(a.equal(b) for a, b in zip(again, first, strict=True)), f"run {i} differs"
    assert all(y.isfinite().all() for y in first)


@HEADS
@PACKING
@BOTH
def test_nothing_is_read_that_was_not_written(widths, V, lengths, H, monkeypatch):
    """New tensors hold whatever was there before: NaN, here."""
    x = made(lengths, H=H, widths=widths, V=V, dtype=torch.bfloat16)
    want = next(repeatedly(x, packing(lengths)))
    poisoned = 0

    def poisoning(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*arguments: object, **options: object) -> torch.Tensor:
            nonlocal poisoned
            y = f(*arguments, **options)
            if y.is_cuda and y.is_floating_point():
                poisoned += 1
                y.fill_(float("nan"))
            return y

        return allocate

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
    got = next(repeatedly(x, packing(lengths)))
    monkeypatch.undo()
    assert poisoned >= 10
    assert all(a.isfinite().all() and a.equal(b) for a, b in zip(got, want, strict=True))


def test_memory_of_a_training_step():
    """Above the inputs, the outputs' gradient and the gradients themselves."""
    x = made(B=8, T=4096, H=32, widths=(25, 25), V=48, decay=False, initial=False, dtype=torch.bfloat16).leaves()
    dout, tensors = torch.randn_like(x.values), list(x.named().values())

    def train() -> tuple[torch.Tensor, ...]:
        out, _ = running_tensor(x.queries, x.keys, x.values, beta=x.beta, backend="triton")
        return torch.autograd.grad(out, tensors, dout)

    train()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = train()
    extra = torch.cuda.max_memory_allocated() - before - sum(y.nbytes for y in grads)
    assert extra < 3 * 2**30, f"{extra / 2**30:.2f} GiB"


@PACKING
@pytest.mark.parametrize("widths", ((25, 25), (5, 5, 25)), ids=("order 3", "order 4"))
def test_compiled_it_is_one_graph_and_equal(widths, lengths):
    x = made(lengths, widths=widths, V=48, dtype=torch.bfloat16)
    cu_seqlens = packing(lengths)

    def f(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return op(x, cu_seqlens=cu_seqlens)

    compiled = torch.compile(f, fullgraph=True)
    near(compiled(x), f(x), 0)
    # From order 4 on, the gradient of k_1 ⊗ k_2 is contracted by torch, compiled or not.
    near(gradients(compiled, x), gradients(f, x), 0 if len(widths) == 2 else 4e-3)


@pytest.mark.parametrize(("widths", "V"), SHAPES.values(), ids=SHAPES)
@DTYPES
def test_steps_are_the_whole_run(widths, V, dtype):
    x = made(widths=widths, V=V, dtype=dtype, T=20)
    want, final = op(x.double(), backend="torch")
    state = x.initial_state.clone()
    outs = torch.stack([step(x.tokens(t), state) for t in range(20)], 1)
    assert rel(outs, want) < BOUNDS[dtype][0] and rel(state, final) < 2e-6


def test_a_captured_step_replays_on_new_tokens():
    x = made(widths=(25, 25), V=48, dtype=torch.bfloat16, T=10)
    token, state = x.tokens(0).map(torch.clone), x.initial_state.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles the kernel, which a capture cannot
        step(token, state)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(token, state)
    state.copy_(x.initial_state)
    outs = []
    for t in range(10):
        for into, y in zip(token.named().values(), x.tokens(t).named().values(), strict=True):
            into.copy_(y)
        graph.replay()
        outs.append(out.clone())
    want = x.initial_state.clone()
    near(outs, [step(x.tokens(t), want) for t in range(10)], 0)
    assert state.equal(want)


def test_more_sequences_than_a_grid_is_high():
    # 65,535 blocks along y; along x there may be 2^31 - 1.
    x = make(B=2, T=3, H=2, widths=(3, 2), V=4, dtype=torch.float32)
    x = x.map(lambda y: y.repeat(20_000, *[1] * (y.ndim - 1)).cuda())
    got = everything(x, backend="triton")
    assert all(y.isfinite().all() for y in got.values())
    near((got["out"][-2:], got["state"][-2:]), op(x.map(lambda y: y[-2:]), backend="triton"), 0)
    token, state = x.tokens(0), x.initial_state.clone()
    out, last = step(token, state), x.initial_state[-2:].clone()
    near((out[-2:], state[-2:]), (step(token.map(lambda y: y[-2:]), last), last), 0)


@pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))
def test_tensors_of_more_than_2_to_the_31_elements_are_right_to_the_end(packed):
    N, T, H, V = 65, 4096, 64, 128
    assert N * T * H * V > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 48 * 2**30:
        pytest.skip("needs 48 GiB of GPU memory")

    def random(*shape: int) -> torch.Tensor:
        tokens = (1, N * T) if packed else (N, T)
        return torch.randn(*tokens, *shape, device="cuda", dtype=torch.bfloat16)

    (q, k), (u, r), v = (random(H, 3) for _ in "qk"), (random(H, 2) for _ in "ur"), random(H, V)
    x = Inputs((q / 3, u / 3), (k / 3, r / 3), v, random(H).sigmoid(), -random(H).sigmoid())
    last = x.map(lambda y: y[:, -T:] if packed else y[-1:])

    def run(x: Inputs) -> dict[str, torch.Tensor]:
        x = x.leaves()
        cu_seqlens = torch.arange(0, x.values.shape[1] + 1, T, device="cuda") if packed else None
        options = {"beta": x.beta, "log_decay": x.log_decay, "cu_seqlens": cu_seqlens, "backend": "triton"}
        out, _ = running_tensor(x.queries, x.keys, x.values, **options)
        names = x.named()
        grads = torch.autograd.grad(out, list(names.values()), x.values.detach())
        results = zip(("out", *names), (out.detach(), *grads), strict=True)
        return {name: y[-1:, -T:].clone() for name, y in results}

    near(run(x), run(last), 0)


def test_states_of_more_than_2_to_the_31_elements_are_right_to_the_end():
    """The paper's shape: the states that the backward keeps are the largest tensors."""
    B, T, H, widths, V = 8, 4096, 144, (25, 25), 48
    assert B * T // 64 * H * 25 * 25 * V > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 48 * 2**30:
        pytest.skip("needs 48 GiB of GPU memory")
    x = made(B=1, T=T, H=H, widths=widths, V=V, initial=False, dtype=torch.bfloat16)
    last = next(repeatedly(x, None))
    # The same sequence again and again. Its last copy is judged, whose states lie at the end.
    many = x.map(lambda y: y.repeat(B, *[1] * (y.ndim - 1))).leaves()
    tensors, results = list(many.named().values()), op(many, backend="triton")
    starts = upstream(op(x, backend="triton"))
    starts = [y.repeat(B, *[1] * (y.ndim - 1)) for y in starts]
    got = [*results, *torch.autograd.grad(results, tensors, starts)]
    near([y[-1:] for y in got], last, 0)
