"""The forward for Hopper GPUs, with the state in registers and κ, φ formed in the operand registers of `wgmma`.

One program of 8 warps runs through a sequence of one head. A product takes 128 rows, so κ and φ of a chunk of 64 tokens
are stacked (rows 0 to 63 and 64 to 127), and so are the two matrices that follow, M = (I+L)⁻¹:

    [κS; φS] = [κ; φ] S     E = β(V - κS)     [X; PX] = [M; PM] E     O = φS + PX     S += κᵀX

Features are taken 16 at a time, a step, which is the depth of one `wgmma`. A step is a base tile (16 of the r, or twice
8, or 16 of the k) times a multiplier for each half (a k, or the last r): no products of odd widths, no padding but the
last step's, and one multiplication forms two features. For K = R = 25, with halves of 8 features:

    steps  0 to 23    r0..r15 · k_j                      base T0
    steps 24 to 36    r16..r23 · k_2p | r16..r23 · k_2p+1      base T1, p = step - 24; k25 is zero
    step  37          r0..r15 · k24                      base T0
    steps 38, 39      k0..k15 · r24, k16..k24 · r24      bases E0, E1

K = R = 24 has the first 36 of these, K = R = 16 steps 0 to 15 alone. A state is some tiles of 8 steps, and is stored so
for the backward. `pack_kernel` lays out what a chunk needs: multipliers, a row each; bases, a row a token; and PM.
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

from runningtensor.ops.triton.forward import decays, double, invert, load_rows, locate, sequence, within

# Key widths: (steps with one key, steps, tiles of 8 steps, columns of bases, rows of multipliers)
SHAPES = {(16, 16): (16, 16, 2, 16, 16), (24, 24): (24, 36, 5, 32, 32), (25, 25): (24, 40, 5, 64, 32)}

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name up to Triton 3.6


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
        M = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        M -= tl.where((i // 2)[:, None] == (i // 2)[None, :], L, 0.0)
        M = double(L, M, i, 2, "fp16")
        M = double(L, M, i, 4, "fp16")
        M = double(L, M, i, 8, "fp16")
        M = double(L, M, i, 16, "fp16")
        M = double(L, M, i, 32, "fp16")
        if tl.sum((tl.abs(M) < 32768.0).to(tl.int32)) < 4096:  # or NaN: not a case for float16
            M = invert(L, 64, "tf32")
        M = M.to(dt)
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


# A tile of κᵀ as registers hold it: [warp / 2, warp % 2, half of a step, 8 features, 64 tokens].
TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 8], [0, 0, 0, 0, 16], [0, 0, 0, 0, 32]],
        [[0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 0, 4, 0]],
        [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0]],
        [],
        [4, 2, 2, 8, 64],
    )
)
# Its bases, which all warps share [16,64]; those of steps 38 and 39 [32,64], one a warp; its multipliers, one a
# step [8,64] or two [16,64].
BASE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0], [0, 0]],
        [],
        [16, 64],
    )
)
EDGES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [0, 0], [0, 0]],
        [],
        [32, 64],
    )
)
ONE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 64],
    )
)
TWO = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[2, 0], [4, 0], [8, 0]],
        [],
        [16, 64],
    )
)


@gluon.constexpr_function
def swizzled(width):
    """How shared memory holds rows of `width` 16-bit numbers for `wgmma`."""
    return gl.NVMMASharedLayout(min(2 * width, 128), 16, 2)


@gluon.constexpr_function
def pieces(width, warps):
    """16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def accumulator(rows, columns, warps):
    """Of a product of `rows` rows: the warps go along the rows, 64 for every four of them, then along the columns."""
    down = min(warps, rows // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, max(columns, 16) * down // warps, 16])


@gluon.jit
def copy(smem, pointer, stride, left, ROWS: gl.constexpr, COLS: gl.constexpr, WARPS: gl.constexpr):
    """Rows into shared memory, asynchronously; those from `left` on are zero."""
    layout: gl.constexpr = pieces(COLS, WARPS)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(smem, pointer + i[:, None] * stride + j[None, :], mask=(i < left)[:, None])


@gluon.jit
def copy_chunk(
    arrays,
    shared,
    stage,
    at,
    first,
    left,
    H: gl.constexpr,
    BASES: gl.constexpr,
    FACTORS: gl.constexpr,
    DELTA: gl.constexpr,
    DECAY: gl.constexpr,
):
    """All a scan needs of chunk and head `at`, whose first row is `first`: the multipliers, the bases, [M; PM]."""
    multipliers, rows, late, mixed, inverse = arrays
    m_s, r_s, l_s, w_s = shared
    at = at.to(gl.int64)
    copy(m_s.index(stage), multipliers + at * (FACTORS * 128), 128, FACTORS, FACTORS, 128, 8)
    copy(r_s.index(stage), rows + at * (128 * BASES), BASES, 128, 128, BASES, 8)
    if DECAY:
        copy(l_s.index(stage), late + at * (64 * BASES), BASES, 64, 64, BASES, 8)
    if DELTA:
        copy(w_s.index(stage).slice(0, 64, 0), inverse + first * 64, H * 64, left, 64, 64, 8)
    copy(w_s.index(stage).slice(64, 64, 0), mixed + at * 4096, 64, 64, 64, 64, 8)


@gluon.jit
def row_step(T0, bases, lines, line, j: gl.constexpr, EACH: gl.constexpr, ONES: gl.constexpr, left: gl.constexpr):
    """Step j of κ [rows,16]. A multiplier is every EACH-th of the lines."""
    if j < ONES:
        return T0 * lines.index(line + EACH * j).load(gl.SliceLayout(1, left))[:, None]
    else:
        x = lines.index(line + EACH * (2 * (j - ONES))).load(gl.SliceLayout(1, left))
        y = lines.index(line + EACH * (2 * (j - ONES) + 1)).load(gl.SliceLayout(1, left))
        col = gl.arange(0, 16, gl.SliceLayout(0, left))
        multiplier = gl.where((col < 8)[None, :], x[:, None], y[:, None])
        if j == 37:
            return T0 * multiplier
        else:
            base = bases.slice(16 if j < 37 else 16 * (j - 36), 16, 1).load(left)
            return base * multiplier


@gluon.jit
def column_base(bases, START: gl.constexpr):
    """16 of the bases [tokens,BASES], as a tile has them."""
    x = bases.slice(START, 16, 1).permute((1, 0)).load(BASE).reshape([2, 8, 64])
    x = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    return gl.expand_dims(gl.expand_dims(x, 0), 1)


@gluon.jit
def column_tile(b0, b1, bases, keys, i: gl.constexpr, K: gl.constexpr, ONES: gl.constexpr, left: gl.constexpr):
    """Tile i of κᵀ [128,64]."""
    if i * 8 < ONES:
        x = keys.slice(i * 8, 8, 0).load(ONE).reshape([4, 2, 64])
        x = gl.convert_layout(x, gl.SliceLayout(2, gl.SliceLayout(3, TILE)))
        A = b0 * gl.expand_dims(gl.expand_dims(x, 2), 3)
    else:
        x = keys.slice(i * 16 - 2 * ONES, 16, 0).load(TWO).reshape([4, 2, 2, 64])
        x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(3, TILE)), 3)
        b = b1
        if i == 4 and K == 25:
            e = bases.slice(32, 32, 1).permute((1, 0)).load(EDGES).reshape([2, 2, 8, 64])
            e = gl.expand_dims(gl.convert_layout(e, gl.SliceLayout(0, TILE)), 0)
            high = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, TILE)))))
            low = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, TILE)))))
            warp = gl.expand_dims(gl.expand_dims(gl.expand_dims(high[:, None] * 2 + low[None, :], 2), 3), 4)
            b = gl.where(warp < 5, b1, gl.where(warp == 5, b0, e))
        A = b * x
    return gl.convert_layout(A.reshape([128, 64]), left)


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


@gluon.jit
def save(states, s_s, V: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr):
    """The state as shared memory has it, tile by tile."""
    layout: gl.constexpr = pieces(WIDTH, 8)
    i = gl.arange(0, 128, gl.SliceLayout(1, layout))
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    for tile in gl.static_range(TILES):
        gl.store(states + (tile * 128 + i)[:, None] * V + j[None, :], s_s.index(tile).load(layout))


@gluon.jit
def identity(w_s):
    """M without the delta rule."""
    layout: gl.constexpr = pieces(64, 8)
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))
    j = gl.arange(0, 64, gl.SliceLayout(0, layout))
    w_s.store(gl.where(i[:, None] == j[None, :], 1.0, 0.0).to(w_s.dtype))


@gluon.jit
def begin(
    state,
    s_s,
    o,
    t,
    mma: gl.constexpr,
    GIVEN: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    WIDTH: gl.constexpr,
    ONES: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
):
    """The tiles of a state [K·R,V] in float32, or zeros: in registers, and rounded in shared memory."""
    S = ()
    for i in gl.static_range(TILES):
        s = gl.zeros([128, WIDTH], gl.float32, mma)
        if GIVEN:
            f, real = feature(t, i, K, R, ONES, STEPS)
            s = gl.load(state + f[:, None] * V + o[None, :], mask=real[:, None], other=0.0)
        s_s.index(i).store(s.to(s_s.dtype))
        S = S + (s,)
    return S


@gluon.jit(do_not_specialize=["T"])
def scan_kernel(
    multipliers,
    rows,
    late,
    mixed,
    scales,
    inverse,
    v,
    beta,
    initial,  # [N,H,K·R,V] float32
    final,  # the same
    out,
    states,  # SAVE: [M,H,TILES·128,V], the state before each chunk
    recalled,  # SAVE: κS [·,H,V]
    writes,  # SAVE: X [·,H,V]
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
    BASES: gl.constexpr,
    FACTORS: gl.constexpr,
    DELTA: gl.constexpr,
    DECAY: gl.constexpr,
    PACKED: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    OUT: gl.constexpr,
    SAVE: gl.constexpr,
):
    dt: gl.constexpr = v.dtype.element_ty
    W2: gl.constexpr = V2 if V2 > 0 else 16
    mma1: gl.constexpr = accumulator(128, V1, 8)
    mma2: gl.constexpr = accumulator(128, V2, 8)
    left1: gl.constexpr = gl.DotOperandLayout(0, mma1, 2)
    left2: gl.constexpr = gl.DotOperandLayout(0, mma2, 2)

    seq, h = gl.program_id(0) // H, gl.program_id(0) % H
    start, end, chunk = sequence(cu_seqlens, chunk_starts, seq, T, 64, PACKED)
    chunks = ((end - start + 63) // 64).to(gl.int32)
    t1 = gl.arange(0, 128, gl.SliceLayout(1, mma1))
    t2 = gl.arange(0, 128, gl.SliceLayout(1, mma2))
    o1 = gl.program_id(1) * (V1 + V2) + gl.arange(0, V1, gl.SliceLayout(0, mma1))
    o2 = gl.program_id(1) * (V1 + V2) + V1 + gl.arange(0, W2, gl.SliceLayout(0, mma2))

    m_s = gl.allocate_shared_memory(dt, [2, FACTORS, 128], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    lines = m_s._reinterpret(dt, [2 * FACTORS, 128], gl.SwizzledSharedLayout(8, 1, 1, [0]))
    r_s = gl.allocate_shared_memory(dt, [2, 128, BASES], swizzled(BASES))
    l_s = gl.allocate_shared_memory(dt, [2, 64, BASES], swizzled(BASES)) if DECAY else r_s
    w_s = gl.allocate_shared_memory(dt, [2, 128, 64], swizzled(64))
    s1_s = gl.allocate_shared_memory(dt, [TILES, 128, V1], swizzled(V1))
    x1_s = gl.allocate_shared_memory(dt, [128, V1], swizzled(V1))
    if V2 > 0:
        s2_s = gl.allocate_shared_memory(dt, [TILES, 128, V2], swizzled(V2))
        x2_s = gl.allocate_shared_memory(dt, [128, V2], swizzled(V2))
    if not DELTA:
        identity(w_s.index(0).slice(0, 64, 0))
        identity(w_s.index(1).slice(0, 64, 0))

    place = (seq * H + h).to(gl.int64) * (K * R * V)
    S1 = begin(initial + place if INITIAL else initial, s1_s, o1, t1, mma1, INITIAL, K, R, V, V1, ONES, STEPS, TILES)
    S2 = ()
    if V2 > 0:
        S2 = begin(
            initial + place if INITIAL else initial, s2_s, o2, t2, mma2, INITIAL, K, R, V, V2, ONES, STEPS, TILES
        )

    arrays = (multipliers, rows, late, mixed, inverse)
    shared = (m_s, r_s, l_s, w_s)
    if chunks > 0:
        copy_chunk(arrays, shared, 0, chunk * H + h, start * H + h, end - start, H, BASES, FACTORS, DELTA, DECAY)
    async_copy.commit_group()
    for n in range(0, chunks):
        now = n % 2
        at = (chunk + n) * H + h
        first = (start + n * 64) * H + h
        left = end - start - n * 64  # tokens from here on
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if n + 1 < chunks:
            copy_chunk(arrays, shared, 1 - now, at + H, first + 64 * H, left - 64, H, BASES, FACTORS, DELTA, DECAY)
        async_copy.commit_group()
        at1 = first * V + (t1 % 64)[:, None] * (H * V) + o1[None, :]
        is_key1 = ((t1 < 64) & (t1 < left))[:, None]
        is_query1 = ((t1 >= 64) & (t1 - 64 < left))[:, None]
        value1 = gl.load(v + at1, mask=is_key1, other=0.0)
        if V2 > 0:
            at2 = first * V + (t2 % 64)[:, None] * (H * V) + o2[None, :]
            is_key2 = ((t2 < 64) & (t2 < left))[:, None]
            is_query2 = ((t2 >= 64) & (t2 - 64 < left))[:, None]
            value2 = gl.load(v + at2, mask=is_key2, other=0.0)
        if SAVE:
            into = states + at.to(gl.int64) * (TILES * 128 * V) + gl.program_id(1) * (V1 + V2)
            save(into, s1_s, V, V1, TILES)
            if V2 > 0:
                save(into + V1, s2_s, V, V2, TILES)

        # [κS; φS]
        T0 = r_s.index(now).slice(0, 16, 1).load(left1)
        a1 = gl.zeros([128, V1], gl.float32, mma1)
        a2 = gl.zeros([128, W2], gl.float32, mma2)
        for j in gl.static_range(STEPS):
            A = row_step(T0, r_s.index(now), lines, now * FACTORS, j, 1, ONES, left1)
            a1 = warpgroup_mma(A, s1_s.index(j // 8).slice(j % 8 * 16, 16, 0), a1, is_async=True)
            if V2 > 0:
                A2 = gl.convert_layout(A, left2)
                a2 = warpgroup_mma(A2, s2_s.index(j // 8).slice(j % 8 * 16, 16, 0), a2, is_async=True)
            if j % 2 == 1:  # or the operands of all steps would have to stay in registers
                a1, a2 = warpgroup_mma_wait(4 if V2 > 0 else 2, [a1, a2])
        a1, a2 = warpgroup_mma_wait(0, [a1, a2])

        # [X; PX]
        if SAVE:
            gl.store(recalled + at1, a1.to(dt), mask=is_key1)
        if DELTA:
            b = gl.load(beta + first + t1 * H, mask=(t1 < 64) & (t1 < left), other=0.0).to(gl.float32)
            x1_s.store(((value1 - a1) * b[:, None]).to(dt))
        else:
            x1_s.store(value1)
        if V2 > 0:
            if SAVE:
                gl.store(recalled + at2, a2.to(dt), mask=is_key2)
            if DELTA:
                b = gl.convert_layout(b, gl.SliceLayout(1, mma2))
                x2_s.store(((value2 - a2) * b[:, None]).to(dt))
            else:
                x2_s.store(value2)
        fence_async_shared()
        barrier()
        z1 = gl.zeros([128, V1], gl.float32, mma1)
        z2 = gl.zeros([128, W2], gl.float32, mma2)
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
            total = gl.load(scales + at.to(gl.int64) * 128 + 63)
        bases = (l_s if DECAY else r_s).index(now).slice(0, 64, 0)
        keys = m_s.index(now).slice(0, 64, 1)
        b0 = column_base(bases, 0)
        b1 = column_base(bases, 16) if BASES > 16 else b0
        N1 = ()
        N2 = ()
        A = column_tile(b0, b1, bases, keys, 0, K, ONES, left1)
        for i in gl.static_range(TILES):
            s1 = warpgroup_mma(A, x1_s.slice(0, 64, 0), S1[i] * total if DECAY else S1[i], is_async=True)
            if V2 > 0:
                A2 = gl.convert_layout(A, left2)
                s2 = warpgroup_mma(A2, x2_s.slice(0, 64, 0), S2[i] * total if DECAY else S2[i], is_async=True)
            if i + 1 < TILES:  # the next is formed while this one is multiplied
                A = column_tile(b0, b1, bases, keys, i + 1, K, ONES, left1)
            if V2 > 0:
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
