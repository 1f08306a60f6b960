"""What the scans on Hopper GPUs need of a chunk and can have without a state, laid out in the steps of hopper.py.

Of κ and φ: multipliers, a row each; bases, a row a token, with decays folded in. And the inverse, and PM.
"""

import triton
import triton.language as tl

from runningtensor.ops.triton.forward import decays, invert_by_doubling, load_rows, locate, within


@triton.jit
def store_multipliers(into, k, k24, r24, K: tl.constexpr, W: tl.constexpr):
    """The multipliers of a chunk's keys or queries, a row each: k [64,W] transposed, then the last k and r."""
    i = tl.arange(0, 64)[:, None]
    w = tl.arange(0, W)[None, :]
    if K == 25:
        k = tl.where(w < 26, k, tl.where(w < 28, k24[:, None], r24[:, None]))
    tl.store(into + tl.trans(w) * 128 + tl.trans(i), tl.trans(k))


@triton.jit
def store_bases(into, k, r, scale, W: tl.constexpr, BASES: tl.constexpr, DECAY: tl.constexpr):
    """The bases of a chunk's keys or queries, a row a token, each times its scale: T0, T1, E0 and E1."""
    i = tl.arange(0, 64)[:, None]
    w = tl.arange(0, W)[None, :]
    if DECAY:
        k = (k * scale[:, None]).to(k.dtype)
        r = (r * scale[:, None]).to(r.dtype)
    into += i * BASES + w
    tl.store(into, r, mask=w < 24)
    if BASES > 16:
        tl.store(into + 8, r, mask=(w >= 16) & (w < 24))
    if BASES > 32:
        tl.store(into + 32, k)


@triton.jit(do_not_specialize=["T", "N"])
def pack_kernel(
    q,
    k,
    u,
    r,
    beta,
    log_decay,
    multipliers,  # [M,H,FACTORS,128]
    rows,  # [M,H,128,BASES], times exp(g_t)
    late,  # DECAY: [M,H,64,BASES], times exp(g_C - g_t)
    mixed,  # PM, or P without the delta rule [M,H,64,64]
    scales,  # DECAY: exp(g_t), exp(g_C - g_t) [M,H,2,64] float32
    gamma,  # GAMMA: exp(g_i - g_j) [M,H,64,64]
    inverse,  # [·,H,64], written if SOLVE, else read
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BASES: tl.constexpr,
    FACTORS: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    SOLVE: tl.constexpr,
    GAMMA: tl.constexpr,
):
    """Everything of a chunk that needs no state. Decays are folded into the bases."""
    m, h = tl.program_id(0), tl.program_id(1)
    start, end, exists = locate(cu_seqlens, chunk_starts, m, T, N, 64, PACKED)
    if not exists:
        return
    dt = k.dtype.element_ty
    i = tl.arange(0, 64)
    inside = start + i < end
    row = i * H
    first = start * H + h
    q, k, u, r = q + first * K, k + first * K, u + first * R, r + first * R
    d, before, after, _ = decays(log_decay, first, row, i, end - start, H, 64, DECAY)
    at = m.to(tl.int64) * H + h
    multipliers += at * (FACTORS * 128)
    rows += at * (128 * BASES)
    W: tl.constexpr = FACTORS
    ck, cq = load_rows(k, row, inside, K, W), load_rows(q, row, inside, K, W)
    cr, cu = load_rows(r, row, inside, R, W), load_rows(u, row, inside, R, W)
    k24, r24, q24, u24 = before, before, before, before
    if K == 25:
        k24, r24 = tl.load(k + row * K + 24, mask=inside, other=0.0), tl.load(r + row * R + 24, mask=inside, other=0.0)
        q24, u24 = tl.load(q + row * K + 24, mask=inside, other=0.0), tl.load(u + row * R + 24, mask=inside, other=0.0)
    store_multipliers(multipliers, ck, k24, r24, K, W)
    store_multipliers(multipliers + 64, cq, q24, u24, K, W)
    store_bases(rows, ck, cr, before, W, BASES, DECAY)
    store_bases(rows + 64 * BASES, cq, cu, before, W, BASES, DECAY)
    if DECAY:
        tl.store(scales + at * 128 + i, before)
        tl.store(scales + at * 128 + 64 + i, after)
        store_bases(late + at * (64 * BASES), ck, cr, after, W, BASES, DECAY)

    saved = first * 64 + row[:, None] * 64 + i[None, :]
    if SOLVE:
        b = tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)
        L = tl.dot(ck, tl.trans(ck)) * tl.dot(cr, tl.trans(cr))
        L = within(L, d, i, False, True, DECAY) * b[:, None]
        M = invert_by_doubling(L, i, "fp16").to(dt)
        tl.store(inverse + saved, M, mask=inside[:, None])
    P = tl.dot(cq, tl.trans(ck)) * tl.dot(cu, tl.trans(cr))
    P = within(P, d, i, False, False, DECAY).to(dt)
    if DELTA:
        if not SOLVE:
            M = tl.load(inverse + saved, mask=inside[:, None], other=0.0)
        P = tl.dot(P, M).to(dt)
    if GAMMA:
        G = within(tl.full([64, 64], 1.0, tl.float32), d, i, False, False, DECAY)
        tl.store(gamma + at * 4096 + i[:, None] * 64 + i[None, :], G.to(dt))
    tl.store(mixed + at * 4096 + i[:, None] * 64 + i[None, :], P)
