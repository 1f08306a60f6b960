"""What of the Hopper kernels runs without a Hopper GPU: the kernels in plain Triton, and the layout of the features.

`pack_kernel` and `decay_kernel` run in Triton's interpreter, launched by hopper_launch.py. There is no Gluon in it;
but the functions that say where a feature lies are ordinary Python beneath, and run on torch tensors once shared memory
and `gl` are replaced by what they mean. Layouts of registers mean nothing there: test_gpu.py is left with those.
"""

import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers import bounds, make, near, rel
from torch import Tensor
from torch.nn.functional import normalize, pad

from runningtensor.ops.chunk import Inputs
from runningtensor.ops.triton import forward, hopper, hopper_gradients, hopper_launch
from runningtensor.ops.triton.shape import Shape

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, which is set where there is no GPU"
)
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3}  # of a number that is computed in float32 and rounded
INVERSE = 1e-3  # of one that went through products in float16
BATCH, LENGTHS = (2, 70), (0, 1, 65, 0, 64, 13)
DTYPES = pytest.mark.parametrize("dtype", BOUND, ids=("float32", "float16"))
WIDTHS = pytest.mark.parametrize("width", [K for K, _ in hopper.SHAPES])
RULES = pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
DECAYING = pytest.mark.parametrize("decay", (False, True), ids=("lasting", "decaying"))
PACKED = pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """A GPU to launch for; and what is allocated and not yet written reads as NaN."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_inputs(width: int, packed: bool = False, H: int = 2, **options: object) -> tuple[Inputs, Tensor | None]:
    """q, k, u, r, v, β and log α as the launcher has them, and cu_seqlens."""
    B, T = (1, sum(LENGTHS)) if packed else BATCH
    x = make(B, T, H, widths=(width, width), V=16, initial=False, **options)
    inputs = (x.queries[0], x.keys[0], x.queries[1], x.keys[1], x.values, x.beta, x.log_decay)
    return inputs, bounds(LENGTHS) if packed else None


def spans(x: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """The first row and the end of every chunk of x [B,T,…], with the rows of a batch one after another."""
    B, T = x.shape[:2]
    edges = [T * b for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    return [(at, min(at + 64, end)) for start, end in pairwise(edges) for at in range(start, end, 64)]


def chunked(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B,T,H,…] as float64 chunks [M,H,64,…], zero where there is no token."""
    rows = x.double().flatten(0, 1)
    padded = [torch.cat((rows[a:b], rows.new_zeros(64 - (b - a), *rows.shape[1:]))) for a, b in spans(x, cu_seqlens)]
    return torch.stack(padded).transpose(1, 2)


def kron(k: Tensor, r: Tensor) -> Tensor:
    return (k[..., :, None] * r[..., None, :]).flatten(-2)


def multipliers(k: Tensor, r: Tensor, rows: int) -> Tensor:
    """[M,H,rows,64]"""
    x = pad(k, (0, rows - k.shape[-1]))
    if k.shape[-1] == 25:
        x = torch.cat((x[..., :26], k[..., 24:].expand(*k.shape[:-1], 2), r[..., 24:].expand(*r.shape[:-1], 4)), -1)
    return x.mT


def bases(k: Tensor, r: Tensor, columns: int) -> Tensor:
    """[M,H,64,columns]"""
    return torch.cat((r[..., :24], r[..., 16:24], pad(k, (0, 32 - k.shape[-1]))), -1)[..., :columns]


def expected(inputs: Inputs, cu_seqlens: Tensor | None, inverse: Tensor | None = None) -> dict[str, Tensor]:
    """The formulas of the op's README in float64; or with another inverse than that of I + L."""
    K = inputs[1].shape[-1]
    _, _, _, columns, rows = hopper.SHAPES[K, K]
    q, k, u, r, _, beta, d = (None if x is None else chunked(x, cu_seqlens) for x in inputs)
    found = {"multipliers": torch.cat((multipliers(k, r, rows), multipliers(q, u, rows)), -1)}
    g = q.new_zeros(q.shape[:3]) if d is None else d.cumsum(-1)
    before, after = g.exp(), (g[..., -1:] - g).exp()
    gamma = (g[..., :, None] - g[..., None, :]).exp().tril()
    found["rows"] = torch.cat([bases(x, y, columns) * before[..., None] for x, y in ((k, r), (q, u))], -2)
    if d is not None:
        found["late"] = bases(k, r, columns) * after[..., None]
        found["scales"] = torch.stack((before, after), -2)
        found["gamma"] = gamma
    found["mixed"] = kron(q, u) @ kron(k, r).mT * gamma
    if beta is not None:
        L = (kron(k, r) @ kron(k, r).mT * gamma * beta[..., None]).tril(-1)
        one = torch.eye(64, dtype=L.dtype)
        found["inverse"] = torch.linalg.solve_triangular(one + L, one, upper=False, unitriangular=True)
        if inverse is not None:
            found["inverse"] = chunked(inverse, cu_seqlens)
        found["mixed"] = found["mixed"] @ found["inverse"]
    return found


def pack(
    inputs: Inputs, cu_seqlens: Tensor | None, inverse: Tensor | None = None, backward: bool = False
) -> dict[str, Tensor]:
    """What `pack_kernel` writes, and of the inverse what it wrote or was given."""
    shape = Shape.make(inputs, cu_seqlens, 64)
    v = inputs[4]
    if inverse is None and shape.delta:
        inverse = v.new_empty(*v.shape[:3], 64)
    packed = hopper_launch.pack(inputs, shape, inverse, backward)
    names = ("multipliers", "rows", "late", "mixed", "scales", "gamma", "inverse")
    arrays = zip(names, (*packed.arrays, packed.gamma, inverse), strict=True)
    return {name: x for name, x in arrays if x is not None}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], cu_seqlens: Tensor | None, bounds: dict[str, float]):
    M = len(want["mixed"])
    want = {name: x for name, x in want.items() if name in got}
    assert got.keys() == want.keys()
    for name in got:
        x, y = got[name], want[name]
        if name == "inverse":  # which has no rows but those of tokens
            there = chunked(x.new_ones(x.shape[:3]), cu_seqlens)
            x, y = chunked(x, cu_seqlens), y * there[..., None]
        else:
            assert x[M:].isnan().all()  # no such chunk: left alone
            x = x[:M]
        assert rel(x, y) <= bounds[name], name


@pytest.mark.parametrize("backward", (False, True), ids=("forward", "backward"))
@PACKED
@DTYPES
@DECAYING
@RULES
@WIDTHS
def test_a_chunk_is_packed_as_the_formulas_say(width, delta, decay, dtype, packed, backward):
    inputs, cu_seqlens = make_inputs(width, packed, dtype=dtype, delta=delta, decay=decay)
    inverse = None
    if backward and delta:  # any will do: it is read and not solved for
        inverse = torch.randn(*inputs[4].shape[:3], 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = expected(inputs, cu_seqlens, inverse)
    got = pack(inputs, cu_seqlens, None if inverse is None else inverse.clone(), backward)
    assert ("gamma" in got) == (backward and decay)
    rounded = BOUND[dtype]
    limits = {name: rounded for name in want} | {"multipliers": 0.0}
    if delta:
        limits["inverse"] = 0.0 if backward else INVERSE
        limits["mixed"] = rounded if backward else 2 * INVERSE
    compare(got, want, cu_seqlens, limits)


# -- The inverse outside of float16 ------------------------------------------------------------------------------------


@pytest.fixture
def inversions(monkeypatch):
    """Grows by one with every chunk that is inverted again."""
    calls, invert = [], forward.invert
    monkeypatch.setattr(forward, "invert", lambda *arguments: calls.append(arguments) or invert(*arguments))
    return calls


def equal_keys(length: float) -> tuple[Inputs, None]:
    """Their Gram matrix is length² everywhere, β is 1, and there is no decay."""
    (q, k, u, r, v, beta, _), _ = make_inputs(16, H=1, dtype=torch.float32, decay=False)
    k = k[:, :1].expand_as(k).contiguous() * length
    r = normalize(r[:, :1], dim=-1).expand_as(r).contiguous()
    return (q, k, u, r, v, torch.ones_like(beta), None), None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what overflows
def test_an_inverse_beyond_float16_is_found_in_float32(inversions):
    inputs, _ = equal_keys(2.0)
    got, want = pack(inputs, None), expected(inputs, None)
    full = [b - a for a, b in spans(inputs[4], None)].count(64)
    assert len(inversions) == full  # the six tokens of the other chunks reach 324
    for m in range(full):
        M = want["inverse"][2 * m, 0]
        assert M.abs().max() > 1e29
        # Every number, not only the largest; and the zeros are zero.
        torch.testing.assert_close(got["inverse"][m, :64, 0].double(), M, rtol=1e-5, atol=0)
        assert rel(got["mixed"][2 * m, 0], want["mixed"][2 * m, 0]) < 1e-5


@pytest.mark.parametrize("length", (0.0, 0.5, 1.0, 1.1))
def test_an_inverse_within_float16_is_not_inverted_twice(inversions, length):
    inputs, _ = equal_keys(length)
    compare(pack(inputs, None), expected(inputs, None), None, dict.fromkeys(expected(inputs, None), 5 * INVERSE))
    assert not inversions


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_inverse_that_float16_makes_nan_is_found_in_float32(inversions):
    inputs, _ = equal_keys(300.0)  # L is 90,000, infinite in float16, and an infinity times zero is NaN
    inputs[5].zero_()[:, 40] = 1.0  # one row of L, so that the inverse is I - L
    got, want = pack(inputs, None), expected(inputs, None)
    assert len(inversions) == 2
    compare(got, want, None, dict.fromkeys(want, 1e-5))


# -- Where the features are --------------------------------------------------------------------------------------------


class Shared:
    """A tensor with the methods of shared memory."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def index(self, i: int) -> "Shared":
        return Shared(self.x[i])

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.x.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.x.permute(order))

    def load(self, layout: object) -> Tensor:
        return self.x


@pytest.fixture
def on_tensors(monkeypatch):
    """hopper.py's device functions, for tensors of torch."""
    gl = SimpleNamespace(
        arange=lambda start, end, layout: torch.arange(start, end),
        where=torch.where,
        expand_dims=lambda x, dim: x.unsqueeze(dim),
        convert_layout=lambda x, layout: x,
        SliceLayout=lambda dim, layout: None,
    )
    monkeypatch.setattr(hopper, "gl", gl)
    names = ("row_step", "column_base", "column_tile", "feature")
    return SimpleNamespace(**{name: getattr(hopper, name).fn for name in names})


def features_of(on_tensors: SimpleNamespace, K: int) -> tuple[Tensor, Tensor]:
    """Of every row of the state's tiles: its feature, and whether it is one."""
    ones, steps, tiles, _, _ = hopper.SHAPES[K, K]
    found = [on_tensors.feature(torch.arange(128), tile, K, K, ones, steps) for tile in range(tiles)]
    return torch.cat([f for f, _ in found]), torch.cat([real for _, real in found])


def arrange(x: Tensor, features: Tensor, real: Tensor) -> Tensor:
    """κ [64,K·R] in the order of the state's rows, zero where there is no feature."""
    return torch.where(real, x[:, features.where(real, 0)], 0)


@WIDTHS
def test_every_feature_has_one_row_of_the_state(on_tensors, width):
    features, real = features_of(on_tensors, width)
    assert features[real].sort().values.equal(torch.arange(width * width))
    steps = hopper.SHAPES[width, width][1]
    assert not real[steps * 16 :].any()  # and it is in a step that is taken


@DECAYING
@WIDTHS
def test_steps_and_tiles_are_the_products_of_keys(on_tensors, width, decay):
    inputs, _ = make_inputs(width, dtype=torch.float32, decay=decay)
    got = pack(inputs, None)
    features, real = features_of(on_tensors, width)
    ones, steps, tiles, _, factors = hopper.SHAPES[width, width]
    q, k, u, r, _, _, d = (chunked(x, None) if x is not None else None for x in inputs)
    g = q.new_zeros(q.shape[:3]) if d is None else d.cumsum(-1)
    before, after = g.exp()[..., None], (g[..., -1:] - g).exp()[..., None]

    def rows(bases: Tensor, lines: Tensor, line: int, each: int) -> Tensor:
        T0 = bases[:, :16]
        found = [on_tensors.row_step(T0, Shared(bases), Shared(lines), line, j, each, ones, None) for j in range(steps)]
        return pad(torch.cat(found, -1), (0, tiles * 128 - steps * 16))

    def columns(bases: Tensor, keys: Tensor) -> Tensor:
        """κᵀ, transposed."""
        b0 = on_tensors.column_base(Shared(bases), 0)
        b1 = on_tensors.column_base(Shared(bases), 16) if bases.shape[1] > 16 else b0
        found = [
            on_tensors.column_tile(b0, b1, Shared(bases), Shared(keys), i, width, ones, None) for i in range(tiles)
        ]
        return torch.cat(found).T

    for m, h in ((0, 0), (1, 1), (2, 1)):
        keys, queries = (arrange(kron(x[m, h], y[m, h]), features, real) for x, y in ((k, r), (q, u)))
        lines, bases = got["multipliers"][m, h], got["rows"][m, h]
        late, decayed = (got["late"][m, h], after[m, h]) if decay else (bases[:64], 1.0)
        # As the kernels have them: two chunks at a time, of which the second is this.
        twice = torch.cat((torch.full_like(lines, torch.nan), lines))
        each = {
            "forward, keys and queries": rows(bases, twice, factors, 1),
            "forward, the state": columns(late, lines[:, :64]),
            "backward, keys": rows(late, twice.reshape(-1, 64), 2 * factors, 2),
            "backward, the state from keys": columns(bases[:64], lines[:, :64]),
            "backward, the state from queries": columns(bases[64:], lines[:, 64:]),
        }
        want = {
            "forward, keys and queries": torch.cat((keys, queries)) * before[m, h].repeat(2, 1),
            "forward, the state": keys * decayed,
            "backward, keys": keys * decayed,
            "backward, the state from keys": keys * before[m, h],
            "backward, the state from queries": queries * before[m, h],
        }
        for name in want:
            # Every number; exp(g) of g down to -16 has lost some of float32's digits.
            torch.testing.assert_close(each[name].double(), want[name], rtol=1e-5, atol=0, msg=name)


# -- The gradient of the decay -----------------------------------------------------------------------------------------


@PACKED
@DTYPES
def test_the_gradient_of_the_decay_is_the_sum_over_its_paths(dtype, packed):
    inputs, cu_seqlens = make_inputs(16, packed, dtype=dtype)
    inputs = (*inputs[:-1], inputs[-1] / 16)  # so that something passes through a chunk
    shape = Shape.make(inputs, cu_seqlens, 64)
    log_decay = inputs[-1]
    generator = torch.Generator().manual_seed(0)
    lines = [torch.randn(log_decay.shape, generator=generator) for _ in range(3)]
    passed = torch.randn(shape.chunks, shape.H, generator=generator)
    scales = pack(inputs, cu_seqlens)["scales"]
    dlog = torch.empty_like(log_decay)
    hopper_gradients.decay_kernel[(shape.chunks, shape.H)](
        *lines,
        passed,
        scales,
        dlog,
        shape.cu_seqlens,
        shape.chunk_starts,
        shape.T,
        shape.sequences,
        H=shape.H,
        PACKED=packed,
        num_warps=1,
    )
    met_keys, met_queries, gave, d = (chunked(x, cu_seqlens) for x in (*lines, log_decay))
    later = (met_keys + met_queries).flip(-1).cumsum(-1).flip(-1)
    earlier = gave.cumsum(-1) - gave
    total = d.sum(-1).exp() * passed.double()[: len(d)]
    there = chunked(torch.ones_like(log_decay), cu_seqlens)
    near([chunked(dlog, cu_seqlens)], [(later + earlier + total[..., None]) * there], BOUND[dtype])
