"""The forward for Hopper GPUs, with the state in registers.

One program of 8 warps runs through a sequence of one head. A product takes 128 rows, so κ and φ of a chunk of 64 tokens
are stacked (rows 0 to 63 and 64 to 127), and so are the two matrices that follow, M = (I+L)⁻¹:

    [κS; φS] = [κ; φ] S     E = β(V - κS)     [X; PX] = [M; PM] E     O = φS + PX     S += κᵀX
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runningtensor.ops.triton.hopper import (
    accumulator,
    allocate_chunks,
    barrier,
    begin,
    block,
    copy_chunk,
    find_sequence,
    finish,
    multiply,
    pieces,
    reinterpret,
    save,
    swizzled,
    update,
)


@gluon.jit
def identity(w_s):
    """M without the delta rule."""
    layout: gl.constexpr = pieces(64, 8)
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))
    j = gl.arange(0, 64, gl.SliceLayout(0, layout))
    w_s.store(gl.where(i[:, None] == j[None, :], 1.0, 0.0).to(w_s.dtype))


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

    h, start, end, chunk, chunks = find_sequence(cu_seqlens, chunk_starts, T, H, PACKED)
    v0 = gl.program_id(1) * (V1 + V2)
    t1, o1 = block(v0, 128, V1)
    t2, o2 = block(v0 + V1, 128, W2)
    shared = allocate_chunks(dt, BASES, FACTORS, DECAY)
    m_s, r_s, l_s, w_s = shared
    lines = reinterpret(m_s, dt, [2 * FACTORS, 128], gl.SwizzledSharedLayout(8, 1, 1, [0]))
    x1_s = gl.allocate_shared_memory(dt, [128, V1], swizzled(V1))
    x2_s = gl.allocate_shared_memory(dt, [128, V2], swizzled(V2)) if V2 > 0 else x1_s
    if not DELTA:
        identity(w_s.index(0).slice(0, 64, 0))
        identity(w_s.index(1).slice(0, 64, 0))
    place = gl.program_id(0).to(gl.int64) * (K * R * V)
    S, s_s, cells = begin(initial + place if INITIAL else None, dt, K, R, V, V1, V2, ONES, STEPS, TILES)

    arrays = (multipliers, rows, late, mixed, inverse)
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
            save(states, at, s_s, V, V1, V2, TILES)

        # [κS; φS]
        a1, a2 = multiply(r_s.index(now), lines, now * FACTORS, s_s, 128, 1, V1, V2, ONES, STEPS)

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
        total = gl.load(scales + at.to(gl.int64) * 128 + 63) if DECAY else None
        bases = (l_s if DECAY else r_s).index(now).slice(0, 64, 0)
        keys = m_s.index(now).slice(0, 64, 1)
        X = (x1_s.slice(0, 64, 0), x2_s.slice(0, 64, 0))
        S = update(S, s_s, X, total, bases, keys, K, V1, V2, ONES, TILES)

    if FINAL:
        finish(final + place, S, cells, K, R, V, V2, ONES, STEPS, TILES)
