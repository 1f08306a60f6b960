"""The mixing of channels and the gated norm of the layer as Triton kernels."""

import triton
import triton.language as tl

from runningtensor.layers.front_kernels import silu_gradient


@triton.jit
def load_row(x, i, d, rows, D: tl.constexpr, X: tl.constexpr):
    """Columns d, counted around, of rows i of x [rows,X]."""
    at = i[:, None] * X + ((d + D) % D)[None, :]
    return tl.load(x + at, mask=(i < rows)[:, None] & (d <= D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_column(x, i, c, rows, X: tl.constexpr):
    return tl.load(x + i * X + c, mask=i < rows, other=0.0).to(tl.float32)


@triton.jit
def mix_kernel(x, taps, out, rows, D: tl.constexpr, LAST: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr):
    """ConcOnlyC.compact [rows,D+2]: each channel with its neighbours, then the first and the last of d_fused."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, DP)
    w0, w1, w2 = tl.load(taps).to(tl.float32), tl.load(taps + 1).to(tl.float32), tl.load(taps + 2).to(tl.float32)
    dt = out.dtype.element_ty
    y = (
        w0 * load_row(x, i, d - 1, rows, D, D)
        + w1 * load_row(x, i, d, rows, D, D)
        + w2 * load_row(x, i, d + 1, rows, D, D)
    )
    tl.store(out + i[:, None] * (D + 2) + d[None, :], y.to(dt), mask=(i < rows)[:, None] & (d < D)[None, :])
    first = w1 * load_column(x, i, 0, rows, D) + w2 * load_column(x, i, 1 % D, rows, D)
    last = w0 * load_column(x, i, (LAST - 1) % D, rows, D) + w1 * load_column(x, i, LAST % D, rows, D)
    tl.store(out + i * (D + 2) + D, first.to(dt), mask=i < rows)
    tl.store(out + i * (D + 2) + D + 1, last.to(dt), mask=i < rows)


@triton.jit
def mix_gradients_kernel(
    x, taps, dout, dx, dtaps, rows, D: tl.constexpr, LAST: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr
):
    """dtaps [blocks,3] float32."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, DP)
    w0, w1, w2 = tl.load(taps).to(tl.float32), tl.load(taps + 1).to(tl.float32), tl.load(taps + 2).to(tl.float32)
    dy = load_row(dout, i, d, rows, D, D + 2) * (d < D)[None, :]
    first = load_column(dout, i, D, rows, D + 2)
    last = load_column(dout, i, D + 1, rows, D + 2)
    y = w1 * dy + w0 * load_row(dout, i, d + 1, rows, D, D + 2) + w2 * load_row(dout, i, d - 1, rows, D, D + 2)
    y += first[:, None] * (tl.where(d == 0, w1, 0.0) + tl.where(d == 1 % D, w2, 0.0))[None, :]
    y += last[:, None] * (tl.where(d == (LAST - 1) % D, w0, 0.0) + tl.where(d == LAST % D, w1, 0.0))[None, :]
    tl.store(dx + i[:, None] * D + d[None, :], y.to(dx.dtype.element_ty), mask=(i < rows)[:, None] & (d < D)[None, :])
    d0 = tl.sum(dy * load_row(x, i, d - 1, rows, D, D)) + tl.sum(last * load_column(x, i, (LAST - 1) % D, rows, D))
    d1 = tl.sum(dy * load_row(x, i, d, rows, D, D)) + tl.sum(last * load_column(x, i, LAST % D, rows, D))
    d1 += tl.sum(first * load_column(x, i, 0, rows, D))
    d2 = tl.sum(dy * load_row(x, i, d + 1, rows, D, D)) + tl.sum(first * load_column(x, i, 1 % D, rows, D))
    dtaps += tl.program_id(0).to(tl.int64) * 3
    tl.store(dtaps, d0)
    tl.store(dtaps + 1, d1)
    tl.store(dtaps + 2, d2)


@triton.jit
def norm_kernel(
    x, gate, scale, weight, out, rows, eps, SILU: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, VP: tl.constexpr
):
    """RMSNorm(scale x) ⊙ SiLU(gate), or σ(gate), of BR rows of V."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o = tl.arange(0, VP)
    at = i[:, None] * V + o[None, :]
    both = (i < rows)[:, None] & (o < V)[None, :]
    y = tl.load(x + at, mask=both, other=0.0).to(tl.float32)
    if scale is not None:
        y *= tl.load(scale + i, mask=i < rows, other=0.0).to(tl.float32)[:, None]
    y *= tl.rsqrt(tl.sum(y * y, 1) / V + eps)[:, None]
    y *= tl.load(weight + o, mask=o < V, other=0.0).to(tl.float32)[None, :]
    g = tl.load(gate + at, mask=both, other=0.0).to(tl.float32)
    y *= g * tl.sigmoid(g) if SILU else tl.sigmoid(g)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=both)


@triton.jit
def norm_gradients_kernel(
    x,
    gate,
    scale,
    weight,
    dout,
    dx,
    dgate,
    dscale,
    dweight,  # [blocks,V] float32
    rows,
    eps,
    SILU: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    VP: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o = tl.arange(0, VP)
    at = i[:, None] * V + o[None, :]
    both = (i < rows)[:, None] & (o < V)[None, :]
    given = tl.load(x + at, mask=both, other=0.0).to(tl.float32)
    s = tl.full([BR], 1.0, tl.float32)
    if scale is not None:
        s = tl.load(scale + i, mask=i < rows, other=0.0).to(tl.float32)
    y = given * s[:, None]
    norm = tl.rsqrt(tl.sum(y * y, 1) / V + eps)
    g = tl.load(gate + at, mask=both, other=0.0).to(tl.float32)
    w = tl.load(weight + o, mask=o < V, other=0.0).to(tl.float32)
    d = tl.load(dout + at, mask=both, other=0.0).to(tl.float32)
    n = y * norm[:, None]
    dg, opened = d * n * w[None, :], tl.sigmoid(g)
    dg = silu_gradient(dg, g) if SILU else dg * opened * (1 - opened)
    tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=both)
    d *= g * opened if SILU else opened
    tl.store(dweight + tl.program_id(0).to(tl.int64) * V + o, tl.sum(d * n, 0), mask=o < V)
    d *= w[None, :]
    d = norm[:, None] * (d - n * (tl.sum(d * n, 1) / V)[:, None])
    if scale is not None:
        tl.store(dscale + i, tl.sum(d * given, 1).to(dscale.dtype.element_ty), mask=i < rows)
    tl.store(dx + at, (d * s[:, None]).to(dx.dtype.element_ty), mask=both)
