"""The gradients for Hopper GPUs, of keys, queries and gates: those of κ and φ, contracted where they are formed.

`gradients_kernel` takes all chunks at once, keys and queries apart. Of a tile of 128 features it forms
dκ = X dS'ᵀ - dE Sᵀ, or dφ = dO Sᵀ, and where the products leave their results it multiplies by the bases and by the
multipliers of hopper.py's steps: sums over the features of a step are gradients of multipliers, sums over steps are
gradients of bases. `decay_kernel` sums what these brought to the decays.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runningtensor.ops.triton.backward import log_gradient
from runningtensor.ops.triton.forward import locate
from runningtensor.ops.triton.hopper import accumulator, barrier, copy, pieces, swizzled

# Of a product [64 tokens, 128 features] where a thread holds it: [tokens, 8 steps, half of a step, 8 features].
STEPWISE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]],
        [],
        [64, 8, 2, 8],
    )
)


# Its bases [64,16], and its multipliers two a step [64,16].
HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
PAIRED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
)
# One row of up to 32 columns a warp.
ROWWISE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def load_values(a_s, a, left, H: gl.constexpr, V: gl.constexpr, WIDTH: gl.constexpr):
    """64 rows of a [·,H,V] tensor into shared memory."""
    layout: gl.constexpr = pieces(WIDTH, 4)
    t = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    o = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    a_s.store(gl.load(a + t * (H * V) + o, mask=t < left, other=0.0))


@gluon.jit
def scale_rows(a_s, scale, WIDTH: gl.constexpr):
    """What shared memory [64,WIDTH] holds, times a number for each row."""
    layout: gl.constexpr = pieces(WIDTH, 4)
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout))
    a_s.store((a_s.load(layout) * scale[:, None]).to(a_s.dtype))


@gluon.jit
def load_keys(k_s, k, left, H: gl.constexpr, W: gl.constexpr):
    """64 rows of a [·,H,W] tensor into shared memory [64,32]."""
    t = gl.arange(0, 64, gl.SliceLayout(1, ROWWISE))[:, None]
    c = gl.arange(0, 32, gl.SliceLayout(0, ROWWISE))[None, :]
    k_s.store(gl.load(k + t * (H * W) + c, mask=(t < left) & (c < W), other=0.0))


@gluon.jit
def store_keys(dk, x, left, H: gl.constexpr, W: gl.constexpr):
    t = gl.arange(0, 64, gl.SliceLayout(1, ROWWISE))[:, None]
    c = gl.arange(0, 32, gl.SliceLayout(0, ROWWISE))[None, :]
    gl.store(dk + t * (H * W) + c, x.to(dk.dtype.element_ty), mask=(t < left) & (c < W))


@gluon.jit
def value_gram(a1, a2, b1, b2, V2: gl.constexpr, BLOCKS: gl.constexpr):
    """A Bᵀ [64,64] over all value columns."""
    x = gl.zeros([64, 64], gl.float32, accumulator(64, 64, 4))
    for n in gl.static_range(BLOCKS):
        x = warpgroup_mma(a1.index(n), b1.index(n).permute((1, 0)), x, is_async=True)
        if V2 > 0:
            x = warpgroup_mma(a2.index(n), b2.index(n).permute((1, 0)), x, is_async=True)
    return warpgroup_mma_wait(0, [x])


@gluon.jit
def key_gram(q_s, k_s):
    """Q Kᵀ [64,64]."""
    x = gl.zeros([64, 64], gl.float32, accumulator(64, 64, 4))
    x = warpgroup_mma(q_s, k_s.permute((1, 0)), x, is_async=True)
    return warpgroup_mma_wait(0, [x])


@gluon.jit
def add_product(x, k_s, acc):
    """acc + x K, with x [64,64] in float32."""
    left: gl.constexpr = gl.DotOperandLayout(0, accumulator(64, 32, 4), 2)
    return warpgroup_mma(gl.convert_layout(x.to(k_s.dtype), left), k_s, acc, is_async=True)


@gluon.jit
def halves(r_s, START: gl.constexpr):
    """16 columns of shared memory [64,·], as the features of a step: [64,2,8] float32."""
    x = r_s.slice(START, 16, 1).load(HALVES).to(gl.float32).reshape([64, 2, 8])
    return gl.convert_layout(x, gl.SliceLayout(1, STEPWISE))


@gluon.jit
def add_to(s, x, layout: gl.constexpr):
    s.store(s.load(layout) + gl.convert_layout(x, layout))


@gluon.jit
def copy_piece(
    shared,
    along,
    beside,
    p: gl.constexpr,
    V: gl.constexpr,
    V1: gl.constexpr,
    V2: gl.constexpr,
    BLOCKS: gl.constexpr,
    BOTH: gl.constexpr,
):
    """Starts the copies of one tile of the states and some value columns of it."""
    s1_s, s2_s, z1_s, z2_s = shared
    offset = p // BLOCKS * (128 * V) + p % BLOCKS * (V1 + V2)
    copy(s1_s.index(p % 2), along + offset, V, 128, 128, V1, 4)
    if V2 > 0:
        copy(s2_s.index(p % 2), along + offset + V1, V, 128, 128, V2, 4)
    if BOTH:
        copy(z1_s.index(p % 2), beside + offset, V, 128, 128, V1, 4)
        if V2 > 0:
            copy(z2_s.index(p % 2), beside + offset + V1, V, 128, 128, V2, 4)


@gluon.jit
def met_now(base0, D0, base1, D1, PAIRS: gl.constexpr):
    """rowsum(R ⊙ dR) [64], but for the last column."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, STEPWISE)))
    x = gl.convert_layout(gl.sum(gl.sum(base0 * D0, axis=2), axis=1), layout)
    if PAIRS:
        x += gl.convert_layout(gl.sum(base1 * D1, axis=1), layout)
    return x


@gluon.jit
def row_products(x, y, z, first, left, H: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """rowsum(X ⊙ (Y - Z)) [64] of [·,H,V] tensors; Z may be None."""
    LAYOUT: gl.constexpr = pieces(16, 4)
    t = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LAYOUT))
    for n in gl.static_range(V // 16):
        at = first * V + t * (H * V) + c + n * 16
        b = gl.load(y + at, mask=t < left, other=0.0).to(gl.float32)
        if z is not None:
            b -= gl.load(z + at, mask=t < left, other=0.0).to(gl.float32)
        total += gl.sum(gl.load(x + at, mask=t < left, other=0.0).to(gl.float32) * b, 1)
    return gl.convert_layout(total, layout)


@gluon.jit(do_not_specialize=["T", "N"])
def gradients_kernel(
    q,
    k,
    u,
    r,
    v,
    beta,
    multipliers,
    gamma,  # DECAY: exp(g_i - g_j) [M,H,64,64]
    scales,  # DECAY: exp(g_t), exp(g_C - g_t) [M,H,2,64]
    dout,
    states,
    dstates,
    recalled,
    writes,
    solved,
    given,
    dv,
    dk,  # or dq
    dr,  # or du
    dbeta,
    met,  # DECAY: what comes to a row, and KEYS what it gives [·,H] float32
    gave,
    passed,  # KEYS and DECAY: sum of S dS' [M,H]
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    V1: gl.constexpr,
    V2: gl.constexpr,
    ONES: gl.constexpr,
    TILES: gl.constexpr,
    FACTORS: gl.constexpr,
    KEYS: gl.constexpr,
    DELTA: gl.constexpr,
    DECAY: gl.constexpr,
    PACKED: gl.constexpr,
):
    """The gradients of k and r, or of q and u, of a chunk."""
    dt: gl.constexpr = v.dtype.element_ty
    wide: gl.constexpr = accumulator(64, 128, 4)
    square: gl.constexpr = accumulator(64, 64, 4)
    narrow: gl.constexpr = accumulator(64, 32, 4)
    by_step: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, STEPWISE))  # [64,8]
    by_feature: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, STEPWISE))  # [64,8]
    by_token: gl.constexpr = gl.SliceLayout(1, by_step)  # [64]
    single: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    PAIRS: gl.constexpr = TILES * 8 > ONES
    BLOCKS: gl.constexpr = V // (V1 + V2)
    SUBTRACT: gl.constexpr = KEYS and DELTA
    PASSED: gl.constexpr = KEYS and DECAY
    BOTH: gl.constexpr = SUBTRACT or PASSED
    m, h = gl.program_id(0), gl.program_id(1)
    start, end, exists = locate(cu_seqlens, chunk_starts, m, T, N, 64, PACKED)
    if exists:
        at = m.to(gl.int64) * H + h
        first = start * H + h
        left = end - start
        q, k, u, r = q + first * K, k + first * K, u + first * R, r + first * R
        multipliers += at * (FACTORS * 128) + (0 if KEYS else 64)
        along = (dstates if KEYS else states) + at * (TILES * 128 * V)
        beside = states + at * (TILES * 128 * V)
        s1_s = gl.allocate_shared_memory(dt, [2, 128, V1], swizzled(V1))
        s2_s = gl.allocate_shared_memory(dt, [2, 128, V2], swizzled(V2)) if V2 > 0 else s1_s
        z1_s = gl.allocate_shared_memory(dt, [2, 128, V1], swizzled(V1)) if BOTH else s1_s
        z2_s = gl.allocate_shared_memory(dt, [2, 128, V2], swizzled(V2)) if BOTH and V2 > 0 else s2_s
        m_s = gl.allocate_shared_memory(dt, [FACTORS, 64], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
        shared = (s1_s, s2_s, z1_s, z2_s)
        copy(m_s, multipliers, 128, FACTORS, FACTORS, 64, 4)
        copy_piece(shared, along, beside, 0, V, V1, V2, BLOCKS, BOTH)
        async_copy.commit_group()
        copy_piece(shared, along, beside, 1, V, V1, V2, BLOCKS, BOTH)
        async_copy.commit_group()

        # What the rows of the chunk do to each other. Each matrix and its transpose, from scratch.
        a1_s = gl.allocate_shared_memory(dt, [BLOCKS, 64, V1], swizzled(V1))
        a2_s = gl.allocate_shared_memory(dt, [BLOCKS, 64, V2], swizzled(V2)) if V2 > 0 else a1_s
        d1_s = gl.allocate_shared_memory(dt, [BLOCKS, 64, V1], swizzled(V1))
        d2_s = gl.allocate_shared_memory(dt, [BLOCKS, 64, V2], swizzled(V2)) if V2 > 0 else d1_s
        b1_s = gl.allocate_shared_memory(dt, [BLOCKS, 64, V1], swizzled(V1)) if SUBTRACT else a1_s
        b2_s = gl.allocate_shared_memory(dt, [BLOCKS, 64, V2], swizzled(V2)) if SUBTRACT and V2 > 0 else b1_s
        q_s = gl.allocate_shared_memory(dt, [64, 32], swizzled(32))
        k_s = gl.allocate_shared_memory(dt, [64, 32], swizzled(32))
        u_s = gl.allocate_shared_memory(dt, [64, 32], swizzled(32))
        r_s = gl.allocate_shared_memory(dt, [64, 32], swizzled(32))
        load_keys(q_s, q, left, H, K)
        load_keys(k_s, k, left, H, K)
        load_keys(u_s, u, left, H, R)
        load_keys(r_s, r, left, H, R)
        for n in gl.static_range(BLOCKS):
            c = first * V + n * (V1 + V2)
            load_values(a1_s.index(n), writes + c, left, H, V, V1)
            load_values(d1_s.index(n), dout + c, left, H, V, V1)
            if SUBTRACT:
                load_values(b1_s.index(n), solved + c, left, H, V, V1)
            if V2 > 0:
                load_values(a2_s.index(n), writes + c + V1, left, H, V, V2)
                load_values(d2_s.index(n), dout + c + V1, left, H, V, V2)
                if SUBTRACT:
                    load_values(b2_s.index(n), solved + c + V1, left, H, V, V2)
        if DECAY:
            gamma += at * 4096
        if SUBTRACT:
            db = row_products(solved, v, recalled, first, left, H, V, gl.SliceLayout(1, square))
        fence_async_shared()
        barrier()
        i = gl.arange(0, 64, gl.SliceLayout(1, square))
        j = gl.arange(0, 64, gl.SliceLayout(0, square))
        gk = gl.zeros([64, 32], gl.float32, narrow)
        gr = gl.zeros([64, 32], gl.float32, narrow)
        # One Gram matrix at a time: a thread holds 32 numbers of each.
        if KEYS:
            x = value_gram(a1_s, a2_s, d1_s, d2_s, V2, BLOCKS)
            x = gl.where(i[:, None] <= j[None, :], x, 0.0)  # dPᵀ
            if DECAY:
                x = x * gl.load(gamma + j[None, :] * 64 + i[:, None]).to(gl.float32)
            gk = add_product(x * key_gram(r_s, u_s), q_s, gk)
            gr = add_product(x * key_gram(k_s, q_s), u_s, gr)
        else:
            x = value_gram(d1_s, d2_s, a1_s, a2_s, V2, BLOCKS)
            x = gl.where(i[:, None] >= j[None, :], x, 0.0)  # dP
            if DECAY:
                x = x * gl.load(gamma + i[:, None] * 64 + j[None, :]).to(gl.float32)
            y = x * key_gram(u_s, r_s)
            gk = add_product(y, k_s, gk)
            G = key_gram(q_s, k_s)
            gr = add_product(x * G, r_s, gr)
            if DECAY:
                y = gl.where(i[:, None] > j[None, :], y * G, 0.0)
                crossing = gl.sum(y, 1) - gl.convert_layout(gl.sum(y, 0), gl.SliceLayout(1, square))
        gk, gr = warpgroup_mma_wait(0, [gk, gr])
        if SUBTRACT:
            x = value_gram(b1_s, b2_s, a1_s, a2_s, V2, BLOCKS)
            x = gl.where(i[:, None] > j[None, :], -x, 0.0)  # dL
            if DECAY:
                x = x * gl.load(gamma + i[:, None] * 64 + j[None, :]).to(gl.float32)
            bi = gl.load(beta + first + i * H, mask=i < left, other=0.0).to(gl.float32)
            bj = gl.load(beta + first + j * H, mask=j < left, other=0.0).to(gl.float32)
            y = x * key_gram(r_s, r_s)
            G = key_gram(k_s, k_s)
            y = y * G
            db += gl.sum(y, 1)
            if DECAY:
                y = y * bi[:, None]
                crossing = gl.sum(y, 1) - gl.convert_layout(gl.sum(y, 0), gl.SliceLayout(1, square))
            y = value_gram(a1_s, a2_s, b1_s, b2_s, V2, BLOCKS)
            y = gl.where(i[:, None] < j[None, :], -y, 0.0) * bj[None, :]
            if DECAY:
                y = y * gl.load(gamma + j[None, :] * 64 + i[:, None]).to(gl.float32)
            x = x * bi[:, None] + y  # dG + dGᵀ, for the Gram matrix is symmetric
            gr = add_product(x * G, r_s, gr)
            gk = add_product(x * key_gram(r_s, r_s), k_s, gk)
            gk, gr = warpgroup_mma_wait(0, [gk, gr])
        barrier()  # all warps have read

        # What the states bring is added to these, where a thread has the features of a step.
        gk_s = gl.allocate_shared_memory(gl.float32, [64, 32], single)
        gk_s.store(gk)
        gr_s = gl.allocate_shared_memory(gl.float32, [64, 32], single)
        gr_s.store(gr)
        barrier()
        bases = r_s if KEYS else u_s
        base0 = halves(bases, 0)
        D0 = halves(gr_s, 0)
        if PAIRS:
            base1 = bases.slice(16, 8, 1).load(by_feature).to(gl.float32)
            D1 = gr_s.slice(16, 8, 1).load(by_feature)
        if R == 25:
            r24 = gl.sum(bases.slice(24, 8, 1).load(by_step).to(gl.float32), axis=1)
            D24 = gl.sum(gr_s.slice(24, 8, 1).load(by_step), axis=1)
        if DECAY:
            # For dlog: what the rows bring must be taken off again.
            met0 = met_now(base0, D0, base1 if PAIRS else base0, D1 if PAIRS else D0, PAIRS)
            if R == 25:
                met0 += gl.convert_layout(r24 * D24, by_token)

        # The left sides: X and -dE, or dO, with their decays.
        l1_s = a1_s if KEYS else d1_s
        l2_s = a2_s if KEYS else d2_s
        if DECAY:
            t = gl.arange(0, 64, gl.SliceLayout(1, pieces(V1, 4)))
            before = gl.load(scales + at * 128 + t)
            after = gl.load(scales + at * 128 + 64 + t)
        for n in gl.static_range(BLOCKS):
            if DECAY:
                scale_rows(l1_s.index(n), after if KEYS else before, V1)
                if V2 > 0:
                    scale_rows(l2_s.index(n), after if KEYS else before, V2)
            if SUBTRACT:
                minus = -gl.convert_layout(bi, gl.SliceLayout(1, pieces(V1, 4)))
                if DECAY:
                    minus *= before
                scale_rows(b1_s.index(n), minus, V1)
                if V2 > 0:
                    scale_rows(b2_s.index(n), minus, V2)
        if PASSED:
            whole = gl.zeros([128], gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
        for p in gl.static_range(TILES * BLOCKS):
            async_copy.wait_group(1)
            fence_async_shared()
            barrier()
            if p % BLOCKS == 0:
                acc = gl.zeros([64, 128], gl.float32, wide)
            acc = warpgroup_mma(l1_s.index(p % BLOCKS), s1_s.index(p % 2).permute((1, 0)), acc, is_async=True)
            if V2 > 0:
                acc = warpgroup_mma(l2_s.index(p % BLOCKS), s2_s.index(p % 2).permute((1, 0)), acc, is_async=True)
            if SUBTRACT:
                acc = warpgroup_mma(b1_s.index(p % BLOCKS), z1_s.index(p % 2).permute((1, 0)), acc, is_async=True)
                if V2 > 0:
                    acc = warpgroup_mma(b2_s.index(p % BLOCKS), z2_s.index(p % 2).permute((1, 0)), acc, is_async=True)
            if PASSED:
                x = s1_s.index(p % 2).load(pieces(V1, 4)).to(gl.float32) * z1_s.index(p % 2).load(pieces(V1, 4))
                whole += gl.convert_layout(gl.sum(x, 1), gl.BlockedLayout([1], [32], [4], [0]))
                if V2 > 0:
                    x = s2_s.index(p % 2).load(pieces(V2, 4)).to(gl.float32) * z2_s.index(p % 2).load(pieces(V2, 4))
                    whole += gl.convert_layout(gl.sum(x, 1), gl.BlockedLayout([1], [32], [4], [0]))
            acc = warpgroup_mma_wait(0, [acc])
            barrier()  # all warps have read
            if p + 2 < TILES * BLOCKS:
                copy_piece(shared, along, beside, p + 2, V, V1, V2, BLOCKS, BOTH)
            async_copy.commit_group()
            if p % BLOCKS == BLOCKS - 1:
                G = gl.convert_layout(acc.reshape([64, 8, 2, 8]), STEPWISE)
                if p // BLOCKS * 8 < ONES:
                    x = m_s.slice(p // BLOCKS * 8, 8, 0).permute((1, 0)).load(by_step).to(gl.float32)
                    D0 += gl.sum(G * gl.expand_dims(gl.expand_dims(x, 2), 3), axis=1)
                    x = gl.sum(gl.sum(G * gl.expand_dims(base0, 1), axis=2), axis=2)
                    add_to(gk_s.slice(p // BLOCKS * 8, 8, 1), x, by_step)
                else:
                    x = m_s.slice(p // BLOCKS * 16 - 2 * ONES, 16, 0).permute((1, 0)).load(PAIRED)
                    x = gl.convert_layout(x.to(gl.float32).reshape([64, 8, 2]), gl.SliceLayout(3, STEPWISE))
                    y = gl.expand_dims(gl.expand_dims(base1, 1), 1)
                    if p // BLOCKS < 4 or K != 25:
                        D1 += gl.sum(gl.sum(G * gl.expand_dims(x, 3), axis=1), axis=1)
                        add_to(
                            gk_s.slice(p // BLOCKS * 16 - 2 * ONES, 16, 1),
                            gl.sum(G * y, axis=3).reshape([64, 16]),
                            PAIRED,
                        )
                    else:
                        # Steps 0 to 4 of this tile are pairs; 5 is r0..r15 · k24; 6 and 7 are k0..k15, k16..k24 · r24.
                        step = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, STEPWISE))))
                        step = gl.expand_dims(gl.expand_dims(step, 0), 2)  # [1,8,1]
                        half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, STEPWISE))))
                        half = gl.expand_dims(gl.expand_dims(half, 0), 1)  # [1,1,2]
                        e0 = gl.expand_dims(halves(k_s if KEYS else q_s, 0), 1)
                        e1 = gl.expand_dims(halves(k_s if KEYS else q_s, 16), 1)
                        every = gl.expand_dims(step, 3)
                        y = gl.where(every < 5, y, gl.where(every == 5, gl.expand_dims(base0, 1), e0))
                        y = gl.sum(G * gl.where(every == 7, e1, y), axis=3)  # [64,8,2]
                        x = G * gl.expand_dims(x, 3)
                        D1 += gl.sum(gl.sum(gl.where(every < 5, x, 0.0), axis=1), axis=1)
                        D0 += gl.sum(gl.where(every == 5, x, 0.0), axis=1)
                        add_to(
                            gk_s.slice(0, 16, 1), gl.sum(gl.where(every == 6, x, 0.0), axis=1).reshape([64, 16]), HALVES
                        )
                        add_to(
                            gk_s.slice(16, 16, 1),
                            gl.sum(gl.where(every == 7, x, 0.0), axis=1).reshape([64, 16]),
                            HALVES,
                        )
                        D24 += gl.convert_layout(gl.sum(gl.sum(gl.where(step > 5, y, 0.0), axis=2), axis=1), by_token)
                        x = gl.sum(gl.sum(gl.where(step == 5, y, 0.0), axis=2), axis=1)  # of k24
                        x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, STEPWISE))))
                        x = gl.expand_dims(gl.expand_dims(x, 1), 2)
                        y = gl.where(step < 5, y, 0.0) + gl.where((step == 4) & (half == 0), x, 0.0)
                        add_to(gk_s.slice(16, 16, 1), y.reshape([64, 16]), PAIRED)

        gr_s = gl.allocate_shared_memory(gl.float32, [64, 32], single)
        gr_s.slice(0, 16, 1).store(D0.reshape([64, 16]))
        if PAIRS:
            gr_s.slice(16, 8, 1).store(D1)
        if R == 25:
            step = gl.arange(0, 8, gl.SliceLayout(0, by_step))[None, :]
            gr_s.slice(24, 8, 1).store(gl.where(step == 0, D24[:, None], 0.0))
        barrier()
        store_keys(dk + first * K, gk_s.load(ROWWISE), left, H, K)
        store_keys(dr + first * R, gr_s.load(ROWWISE), left, H, R)
        if SUBTRACT:
            gl.store(dbeta + first + i * H, db.to(dbeta.dtype.element_ty), mask=i < left)
        if DECAY:
            # What comes to a row from before it, and what it gives to those after the chunk.
            if KEYS:
                came = gl.zeros([64], gl.float32, gl.SliceLayout(1, square))
                if DELTA:
                    came = crossing - row_products(dv, recalled, None, first, left, H, V, gl.SliceLayout(1, square))
                x = row_products(writes, given, None, first, left, H, V, gl.SliceLayout(1, square))
                gl.store(gave + first + i * H, x, mask=i < left)
                gl.store(passed + at, gl.sum(whole, 0))
            else:
                x = met_now(base0, D0, base1 if PAIRS else base0, D1 if PAIRS else D0, PAIRS)
                if R == 25:
                    x += gl.convert_layout(r24 * D24, by_token)
                came = crossing + gl.convert_layout(x - met0, gl.SliceLayout(1, square))
            gl.store(met + first + i * H, came, mask=i < left)


@triton.jit(do_not_specialize=["T", "N"])
def decay_kernel(
    met_keys,
    met_queries,
    gave,
    passed,
    scales,
    dlog,
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: tl.constexpr,
    PACKED: tl.constexpr,
):
    m, h = tl.program_id(0), tl.program_id(1)
    start, end, exists = locate(cu_seqlens, chunk_starts, m, T, N, 64, PACKED)
    if not exists:
        return
    i = tl.arange(0, 64)
    at = start * H + h + i * H
    inside = start + i < end
    met = tl.load(met_keys + at, mask=inside, other=0.0) + tl.load(met_queries + at, mask=inside, other=0.0)
    given = tl.load(gave + at, mask=inside, other=0.0)
    chunk = m.to(tl.int64) * H + h
    dl = log_gradient(met, given, tl.load(scales + chunk * 128 + 63) * tl.load(passed + chunk), i)
    tl.store(dlog + at, dl.to(dlog.dtype.element_ty), mask=inside)
