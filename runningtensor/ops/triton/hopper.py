"""The scan for Hopper GPUs, with the state in registers and κ, φ formed in the operand registers of `wgmma`.

One program of 8 warps runs through a sequence of one head. A product takes 128 rows, so κ and φ of a chunk of 64 tokens
are stacked (rows 0 to 63 and 64 to 127), and so are the two matrices that follow:

    [κS; φS] = [κ; φ] S     E = V - κS     [X; PX] = [(I+L)⁻¹β; P(I+L)⁻¹β] E     O = φS + PX     S += κᵀX

Features are taken 16 at a time, a step, which is the depth of one `wgmma`. A step is a base tile (16 of the r, or twice
8, or 16 of the k) times a multiplier for each half (a k, or the last r): no products of odd widths, no padding but the
last step's, and one multiplication forms two features. For K = R = 25, with halves of 8 features:

    steps  0 to 23    r0..r15 · k_j                      base T0
    steps 24 to 36    r16..r23 · k_2p | r16..r23 · k_2p+1      base T1, p = step - 24; k25 is zero
    step  37          r0..r15 · k24                      base T0
    steps 38, 39      k0..k15 · r24, k16..k24 · r24      bases E0, E1

K = R = 24 has the first 36 of these, K = R = 16 steps 0 to 15 alone. `pack_kernel` lays out what a chunk needs:
multipliers [32,128], bases as rows [128,64] and as columns [64,64], and the stacked matrix [128,64].
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

from runningtensor.ops.triton.forward import decays, double, load_columns, load_rows, locate, sequence, within

# Key widths: (steps with one key, steps, tiles of 8 steps)
SHAPES = {(16, 16): (16, 16, 2), (24, 24): (24, 36, 5), (25, 25): (24, 40, 5)}

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name up to Triton 3.6


@triton.jit
def base_tile(k, r, row, inside, c, scale, K: tl.constexpr, R: tl.constexpr):
    """Bases of the tokens along one dimension, T0 T1 E0 E1 along the other: r0..r23, r16..r23, k."""
    ir = tl.where(c < 24, c, c - 8)
    ik = c - 32
    x = tl.load(r + row * R + ir, mask=inside & (c < 32) & (ir < R), other=0.0)
    x += tl.load(k + row * K + ik, mask=inside & (c >= 32) & (ik < K), other=0.0)
    return (x * scale).to(k.dtype.element_ty)


@triton.jit
def pack_side(
    k,
    r,
    row,
    inside,
    before,
    after,
    multipliers,
    rows,
    columns,
    SIDE: tl.constexpr,  # 0: keys, 1: queries
    K: tl.constexpr,
    R: tl.constexpr,
):
    i = tl.arange(0, 64)
    c = tl.arange(0, 64)
    x = base_tile(k, r, row[:, None], inside[:, None], c[None, :], before[:, None], K, R)
    tl.store(rows + (SIDE * 64 + i)[:, None] * 64 + c[None, :], x)
    if SIDE == 0:
        x = base_tile(k, r, row[None, :], inside[None, :], c[:, None], after[None, :], K, R)
        tl.store(columns + c[:, None] * 64 + i[None, :], x)
    f = tl.arange(0, 32)
    ik = tl.where(f < 26, f, 24)
    x = tl.load(k + row[None, :] * K + ik[:, None], mask=inside[None, :] & ((f < 28) & (ik < K))[:, None], other=0.0)
    if R == 25:
        x += tl.load(r + row[None, :] * R + 24, mask=inside[None, :] & (f >= 28)[:, None], other=0.0)
    tl.store(multipliers + f[:, None] * 128 + SIDE * 64 + i[None, :], x)


@triton.jit(do_not_specialize=["T", "N"])
def pack_kernel(
    q,
    k,
    u,
    r,
    beta,
    log_decay,
    multipliers,
    rows,
    columns,
    stacked,
    totals,  # [M·H], exp(g_C)
    inverse,  # [·,H,C], for the backward
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Everything of a chunk that needs no state, laid out for `scan_kernel`. Decays are folded into the bases."""
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
    d, before, after, total = decays(log_decay, first, row, i, end - start, H, 64, DECAY)
    at = m.to(tl.int64) * H + h
    if DECAY:
        tl.store(totals + at, total)
    multipliers, rows = multipliers + at * 4096, rows + at * 8192
    columns, stacked = columns + at * 4096, stacked + at * 8192
    pack_side(k, r, row, inside, before, after, multipliers, rows, columns, 0, K, R)
    pack_side(q, u, row, inside, before, after, multipliers, rows, columns, 1, K, R)

    kt = load_columns(k, row, inside, K, 32)
    rt = load_columns(r, row, inside, R, 32)
    P = tl.dot(load_rows(q, row, inside, K, 32), kt) * tl.dot(load_rows(u, row, inside, R, 32), rt)
    P = within(P, d, i, False, False, DECAY).to(dt)
    M = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    if DELTA:
        b = tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)
        L = tl.dot(load_rows(k, row, inside, K, 32), kt) * tl.dot(load_rows(r, row, inside, R, 32), rt)
        L = within(L, d, i, False, True, DECAY) * b[:, None]
        M -= tl.where((i // 2)[:, None] == (i // 2)[None, :], L, 0.0)
        M = double(L, M, i, 2, "tf32")
        M = double(L, M, i, 4, "tf32")
        M = double(L, M, i, 8, "tf32")
        M = double(L, M, i, 16, "tf32")
        M = double(L, M, i, 32, "tf32")
        tl.store(inverse + first * 64 + row[:, None] * 64 + i[None, :], M.to(dt), mask=inside[:, None])
        M *= b[None, :]
    M = M.to(dt)
    tl.store(stacked + i[:, None] * 64 + i[None, :], M)
    tl.store(stacked + (64 + i)[:, None] * 64 + i[None, :], tl.dot(P, M).to(dt))


@gluon.jit
def copy_tile(smem, pointer, ROWS: gl.constexpr, COLS: gl.constexpr):
    """A contiguous tile into shared memory, 16 bytes a thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [8, 1], [1, 0])
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(smem, pointer + i[:, None] * COLS + j[None, :])


@gluon.jit
def copy_chunk(at, stage, multipliers, rows, columns, stacked, m_s, r_s, c_s, w_s):
    at = at.to(gl.int64)
    copy_tile(m_s.index(stage), multipliers + at * 4096, 32, 128)
    copy_tile(r_s.index(stage), rows + at * 8192, 128, 64)
    copy_tile(c_s.index(stage), columns + at * 4096, 64, 64)
    copy_tile(w_s.index(stage), stacked + at * 8192, 128, 64)
    async_copy.commit_group()


@gluon.jit
def feature(row, TILE: gl.constexpr, K: gl.constexpr, R: gl.constexpr, ONES: gl.constexpr, STEPS: gl.constexpr):
    """Where row `row` of a tile of the state lies among the K·R features, and whether it is one of them."""
    step = TILE * 8 + row // 16
    c = row % 16
    if TILE * 8 < ONES:
        return step * R + c, step < STEPS
    else:
        k = 2 * (step - ONES) + c // 8
        r = 16 + c % 8
        if K == 25:
            k = gl.where(step == 37, 24, gl.where(step >= 38, (step - 38) * 16 + c, k))
            r = gl.where(step == 37, c, gl.where(step >= 38, 24, r))
        return k * R + r, k < K


@gluon.jit(do_not_specialize=["T"])
def scan_kernel(
    multipliers,
    rows,
    columns,
    stacked,
    totals,
    v,
    initial,  # [N,H,K·R,V] float32
    final,  # the same
    out,
    states,  # [M,H,K·R,V], the state before each chunk
    recalled,  # κS [·,H,V]
    writes,  # X [·,H,V]
    cu_seqlens,
    chunk_starts,
    T,
    H: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    V1: gl.constexpr,  # value columns of a program: V1 + V2, both powers of two or V2 zero
    V2: gl.constexpr,
    ONES: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    DELTA: gl.constexpr,
    DECAY: gl.constexpr,
    PACKED: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    OUT: gl.constexpr,
    SAVE: gl.constexpr,
):
    dt: gl.constexpr = v.dtype.element_ty
    mma1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, V1, 16])
    mma2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, V2 if V2 > 0 else 16, 16])
    left1: gl.constexpr = gl.DotOperandLayout(0, mma1, 2)
    left2: gl.constexpr = gl.DotOperandLayout(0, mma2, 2)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    wide1: gl.constexpr = gl.NVMMASharedLayout(2 * V1 if V1 < 64 else 128, 16, 2)
    wide2: gl.constexpr = gl.NVMMASharedLayout(2 * V2 if V2 > 0 else 32, 16, 2)
    # A tile of κᵀ as registers hold it: [warp / 2, warp % 2, half of a step, 8 features, 64 tokens].
    tile: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 8], [0, 0, 0, 0, 16], [0, 0, 0, 0, 32]],
        [[0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 0, 4, 0]],
        [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0]],
        [],
        [4, 2, 2, 8, 64],
    )
    # Its bases, which all warps share [16,64]; those of steps 38 and 39 [32,64], one a warp; its multipliers, one a
    # step [8,64] or two [16,64].
    base: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0], [0, 0]],
        [],
        [16, 64],
    )
    edges: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [0, 0], [0, 0]],
        [],
        [32, 64],
    )
    one: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 64],
    )
    two: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[2, 0], [4, 0], [8, 0]],
        [],
        [16, 64],
    )

    seq, h = gl.program_id(0) // H, gl.program_id(0) % H
    start, end, chunk = sequence(cu_seqlens, chunk_starts, seq, T, 64, PACKED)
    chunks = ((end - start + 63) // 64).to(gl.int32)
    t1 = gl.arange(0, 128, gl.SliceLayout(1, mma1))
    t2 = gl.arange(0, 128, gl.SliceLayout(1, mma2))
    o1 = gl.program_id(1) * (V1 + V2) + gl.arange(0, V1, gl.SliceLayout(0, mma1))
    o2 = gl.program_id(1) * (V1 + V2) + V1 + gl.arange(0, V2 if V2 > 0 else 16, gl.SliceLayout(0, mma2))
    col = gl.arange(0, 16, gl.SliceLayout(0, left1))
    wh = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, tile)))))
    wl = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, tile)))))
    warp = gl.expand_dims(gl.expand_dims(gl.expand_dims(wh[:, None] * 2 + wl[None, :], 2), 3), 4)

    flat: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [0])
    m_s = gl.allocate_shared_memory(dt, [2, 32, 128], flat)
    m_lines = m_s._reinterpret(dt, [64, 128], line)
    r_s = gl.allocate_shared_memory(dt, [2, 128, 64], swizzled)
    c_s = gl.allocate_shared_memory(dt, [2, 64, 64], swizzled)
    w_s = gl.allocate_shared_memory(dt, [2, 128, 64], swizzled)
    s1_s = gl.allocate_shared_memory(dt, [TILES, 128, V1], wide1)
    x1_s = gl.allocate_shared_memory(dt, [128, V1], wide1)
    if V2 > 0:
        s2_s = gl.allocate_shared_memory(dt, [TILES, 128, V2], wide2)
        x2_s = gl.allocate_shared_memory(dt, [128, V2], wide2)

    S1 = ()
    S2 = ()
    place = (seq * H + h).to(gl.int64) * (K * R * V)
    for i in gl.static_range(TILES):
        s = gl.zeros([128, V1], gl.float32, mma1)
        if INITIAL:
            f, real = feature(t1, i, K, R, ONES, STEPS)
            s = gl.load(initial + place + f[:, None] * V + o1[None, :], mask=real[:, None], other=0.0)
        s1_s.index(i).store(s.to(dt))
        S1 = S1 + (s,)
        if V2 > 0:
            s = gl.zeros([128, V2], gl.float32, mma2)
            if INITIAL:
                f, real = feature(t2, i, K, R, ONES, STEPS)
                s = gl.load(initial + place + f[:, None] * V + o2[None, :], mask=real[:, None], other=0.0)
            s2_s.index(i).store(s.to(dt))
            S2 = S2 + (s,)

    if chunks > 0:
        copy_chunk(chunk * H + h, 0, multipliers, rows, columns, stacked, m_s, r_s, c_s, w_s)
    for n in range(0, chunks):
        now = n % 2
        at = (chunk + n) * H + h
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if n + 1 < chunks:
            copy_chunk(at + H, 1 - now, multipliers, rows, columns, stacked, m_s, r_s, c_s, w_s)
        first = (start + n * 64) * H + h
        left = end - start - n * 64  # tokens from here on
        at1 = first * V + (t1 % 64)[:, None] * (H * V) + o1[None, :]
        is_key1 = ((t1 < 64) & (t1 < left))[:, None]
        is_query1 = ((t1 >= 64) & (t1 - 64 < left))[:, None]
        value1 = gl.load(v + at1, mask=is_key1, other=0.0)
        if V2 > 0:
            at2 = first * V + (t2 % 64)[:, None] * (H * V) + o2[None, :]
            is_key2 = ((t2 < 64) & (t2 < left))[:, None]
            is_query2 = ((t2 >= 64) & (t2 - 64 < left))[:, None]
            value2 = gl.load(v + at2, mask=is_key2, other=0.0)

        # [κS; φS]
        bases = r_s.index(now)
        T0 = bases.slice(0, 16, 1).load(left1)
        a1 = gl.zeros([128, V1], gl.float32, mma1)
        a2 = gl.zeros([128, V2 if V2 > 0 else 16], gl.float32, mma2)
        for j in gl.static_range(STEPS):
            if j < ONES:
                A = T0 * m_lines.index(now * 32 + j).load(gl.SliceLayout(1, left1))[:, None]
            else:
                x = m_lines.index(now * 32 + 2 * (j - ONES)).load(gl.SliceLayout(1, left1))
                y = m_lines.index(now * 32 + 2 * (j - ONES) + 1).load(gl.SliceLayout(1, left1))
                if j < 37:
                    B = bases.slice(16, 16, 1).load(left1)
                elif j == 37:
                    B = T0
                else:
                    B = bases.slice(16 * (j - 36), 16, 1).load(left1)
                A = B * gl.where((col < 8)[None, :], x[:, None], y[:, None])
            a1 = warpgroup_mma(A, s1_s.index(j // 8).slice(j % 8 * 16, 16, 0), a1, is_async=True)
            if V2 > 0:
                A2 = gl.convert_layout(A, left2)
                a2 = warpgroup_mma(A2, s2_s.index(j // 8).slice(j % 8 * 16, 16, 0), a2, is_async=True)
            if j % 4 == 3:  # or the operands of all steps would have to stay in registers
                a1, a2 = warpgroup_mma_wait(0, [a1, a2])
        a1, a2 = warpgroup_mma_wait(0, [a1, a2])

        # [X; PX]
        if SAVE:
            gl.store(recalled + at1, a1.to(dt), mask=is_key1)
        if DELTA:
            x1_s.store((value1 - a1).to(dt))
        else:
            x1_s.store(value1)
        if V2 > 0:
            if SAVE:
                gl.store(recalled + at2, a2.to(dt), mask=is_key2)
            if DELTA:
                x2_s.store((value2 - a2).to(dt))
            else:
                x2_s.store(value2)
        fence_async_shared()
        barrier()
        z1 = gl.zeros([128, V1], gl.float32, mma1)
        z2 = gl.zeros([128, V2 if V2 > 0 else 16], gl.float32, mma2)
        z1 = warpgroup_mma(w_s.index(now), x1_s.slice(0, 64, 0), z1, is_async=True)
        if V2 > 0:
            z2 = warpgroup_mma(w_s.index(now), x2_s.slice(0, 64, 0), z2, is_async=True)
        z1, z2 = warpgroup_mma_wait(0, [z1, z2])
        barrier()  # both groups of warps have read E
        x1_s.store(z1.to(dt))
        if V2 > 0:
            x2_s.store(z2.to(dt))
        fence_async_shared()
        barrier()
        if OUT:
            gl.store(out + at1, (a1 + z1).to(dt), mask=is_query1)
            if V2 > 0:
                gl.store(out + at2, (a2 + z2).to(dt), mask=is_query2)
        if SAVE:
            gl.store(writes + at1, z1.to(dt), mask=is_key1)
            if V2 > 0:
                gl.store(writes + at2, z2.to(dt), mask=is_key2)

        # S += κᵀ X
        total = 1.0
        if DECAY:
            total = gl.load(totals + at)
        bases = c_s.index(now)
        keys = m_s.index(now).slice(0, 64, 1)
        shared: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, tile))
        b0 = gl.convert_layout(bases.slice(0, 16, 0).load(base).reshape([2, 8, 64]), shared)
        b0 = gl.expand_dims(gl.expand_dims(b0, 0), 1)
        b1 = gl.convert_layout(bases.slice(16, 16, 0).load(base).reshape([2, 8, 64]), shared)
        b1 = gl.expand_dims(gl.expand_dims(b1, 0), 1)
        N1 = ()
        N2 = ()
        for i in gl.static_range(TILES):
            if i * 8 < ONES:
                x = keys.slice(i * 8, 8, 0).load(one).reshape([4, 2, 64])
                x = gl.convert_layout(x, gl.SliceLayout(2, gl.SliceLayout(3, tile)))
                A = b0 * gl.expand_dims(gl.expand_dims(x, 2), 3)
            else:
                x = keys.slice(i * 16 - 2 * ONES, 16, 0).load(two).reshape([4, 2, 2, 64])
                x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(3, tile)), 3)
                b = b1
                if i == 4 and K == 25:
                    e = bases.slice(32, 32, 0).load(edges).reshape([2, 2, 8, 64])
                    e = gl.expand_dims(gl.convert_layout(e, gl.SliceLayout(0, tile)), 0)
                    b = gl.where(warp < 5, b1, gl.where(warp == 5, b0, e))
                A = b * x
            A = gl.convert_layout(A.reshape([128, 64]), left1)
            if SAVE:
                f, real = feature(t1, i, K, R, ONES, STEPS)
                into = states + at.to(gl.int64) * (K * R * V) + f[:, None] * V + o1[None, :]
                gl.store(into, S1[i].to(dt), mask=real[:, None])
            s1 = warpgroup_mma(A, x1_s.slice(0, 64, 0), S1[i] * total if DECAY else S1[i], is_async=True)
            if V2 > 0:
                if SAVE:
                    f, real = feature(t2, i, K, R, ONES, STEPS)
                    into = states + at.to(gl.int64) * (K * R * V) + f[:, None] * V + o2[None, :]
                    gl.store(into, S2[i].to(dt), mask=real[:, None])
                A2 = gl.convert_layout(A, left2)
                s2 = warpgroup_mma(A2, x2_s.slice(0, 64, 0), S2[i] * total if DECAY else S2[i], is_async=True)
                s1, s2 = warpgroup_mma_wait(0, [s1, s2])
                s2_s.index(i).store(s2.to(dt))
                N2 = N2 + (s2,)
            else:
                s1 = warpgroup_mma_wait(0, [s1])
            s1_s.index(i).store(s1.to(dt))
            N1 = N1 + (s1,)
        S1 = N1
        S2 = N2

    if FINAL:
        for i in gl.static_range(TILES):
            f, real = feature(t1, i, K, R, ONES, STEPS)
            gl.store(final + place + f[:, None] * V + o1[None, :], S1[i], mask=real[:, None])
            if V2 > 0:
                f, real = feature(t2, i, K, R, ONES, STEPS)
                gl.store(final + place + f[:, None] * V + o2[None, :], S2[i], mask=real[:, None])
