"""The backward scan for Hopper GPUs: hopper_scan.py in reverse, with the gradient of the state in registers.

One program runs through the chunks of a sequence of one head from last to first:

    A = κ dS'     Y = Mᵀ A + (PM)ᵀ dO     dE = βY     dS = dS' + φᵀ dO - κᵀ dE
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
    copy,
    copy_chunk,
    find_sequence,
    finish,
    multiply,
    reinterpret,
    save,
    swizzled,
    update,
)


@gluon.jit(do_not_specialize=["T"])
def reverse_kernel(
    multipliers,
    rows,
    late,
    mixed,
    scales,
    inverse,
    beta,
    dout,
    dfinal,  # [N,H,K·R,V] float32
    dinitial,  # the same
    dstates,  # [M,H,TILES·128,V], the gradient of the state after each chunk
    solved,  # DELTA: Y [·,H,V]
    given,  # DECAY: A [·,H,V]
    dv,
    cu_seqlens,
    chunk_starts,
    T,
    H: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    V1: gl.constexpr,
    V2: gl.constexpr,
    ONES: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    BASES: gl.constexpr,
    FACTORS: gl.constexpr,
    DELTA: gl.constexpr,
    DECAY: gl.constexpr,
    PACKED: gl.constexpr,
    FINAL: gl.constexpr,
    INITIAL: gl.constexpr,
):
    dt: gl.constexpr = dout.dtype.element_ty
    W2: gl.constexpr = V2 if V2 > 0 else 16
    mma1: gl.constexpr = accumulator(64, V1, 8)
    mma2: gl.constexpr = accumulator(64, V2, 8)

    h, start, end, chunk, chunks = find_sequence(cu_seqlens, chunk_starts, T, H, PACKED)
    t1 = gl.arange(0, 64, gl.SliceLayout(1, mma1))
    t2 = gl.arange(0, 64, gl.SliceLayout(1, mma2))
    v0 = gl.program_id(1) * (V1 + V2)
    shared = allocate_chunks(dt, BASES, FACTORS, DECAY)
    m_s, r_s, l_s, w_s = shared
    lines = reinterpret(m_s, dt, [4 * FACTORS, 64], gl.SwizzledSharedLayout(8, 1, 1, [0]))  # keys and queries in turn
    d1_s = gl.allocate_shared_memory(dt, [2, 64, V1], swizzled(V1))
    x1_s = gl.allocate_shared_memory(dt, [64, V1], swizzled(V1))
    d2_s = gl.allocate_shared_memory(dt, [2, 64, V2], swizzled(V2)) if V2 > 0 else d1_s
    x2_s = gl.allocate_shared_memory(dt, [64, V2], swizzled(V2)) if V2 > 0 else x1_s
    place = gl.program_id(0).to(gl.int64) * (K * R * V)
    S, s_s, cells = begin(dfinal + place if FINAL else None, dt, K, R, V, V1, V2, ONES, STEPS, TILES)

    arrays = (multipliers, rows, late, mixed, inverse)
    at = (chunk + chunks - 1) * H + h
    first = (start + (chunks - 1) * 64) * H + h
    left = end - start - (chunks - 1) * 64  # tokens from here on
    if chunks > 0:
        copy_chunk(arrays, shared, 0, at, first, left, H, BASES, FACTORS, DELTA, DECAY)
        copy(d1_s.index(0), dout + first * V + v0, H * V, left, 64, V1, 8)
        if V2 > 0:
            copy(d2_s.index(0), dout + first * V + v0 + V1, H * V, left, 64, V2, 8)
    async_copy.commit_group()
    for n in range(0, chunks):
        now = n % 2
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if n + 1 < chunks:
            copy_chunk(arrays, shared, 1 - now, at - H, first - 64 * H, left + 64, H, BASES, FACTORS, DELTA, DECAY)
            copy(d1_s.index(1 - now), dout + (first - 64 * H) * V + v0, H * V, left + 64, 64, V1, 8)
            if V2 > 0:
                copy(d2_s.index(1 - now), dout + (first - 64 * H) * V + v0 + V1, H * V, left + 64, 64, V2, 8)
        async_copy.commit_group()
        save(dstates, at, s_s, V, V1, V2, TILES)

        # A = κ dS'
        bases = l_s.index(now).slice(0, 64, 0)
        y1, y2 = multiply(bases, lines, now * (2 * FACTORS), s_s, 64, 2, V1, V2, ONES, STEPS)

        # Y = Mᵀ A + (PM)ᵀ dO
        at1 = first * V + v0 + t1[:, None] * (H * V) + gl.arange(0, V1, gl.SliceLayout(0, mma1))[None, :]
        at2 = first * V + v0 + V1 + t2[:, None] * (H * V) + gl.arange(0, W2, gl.SliceLayout(0, mma2))[None, :]
        inside1 = (t1 < left)[:, None]
        inside2 = (t2 < left)[:, None]
        if DECAY:
            gl.store(given + at1, y1.to(dt), mask=inside1)
            if V2 > 0:
                gl.store(given + at2, y2.to(dt), mask=inside2)
        Mt = w_s.index(now).slice(0, 64, 0).permute((1, 0))
        PMt = w_s.index(now).slice(64, 64, 0).permute((1, 0))
        d1 = d1_s.index(now)
        if DELTA:
            x1_s.store(y1.to(dt))
            if V2 > 0:
                x2_s.store(y2.to(dt))
            fence_async_shared()
            barrier()
            y1 = warpgroup_mma(Mt, x1_s, gl.zeros([64, V1], gl.float32, mma1), is_async=True)
            if V2 > 0:
                y2 = warpgroup_mma(Mt, x2_s, gl.zeros([64, W2], gl.float32, mma2), is_async=True)
        y1 = warpgroup_mma(PMt, d1, y1, is_async=True)
        if V2 > 0:
            y2 = warpgroup_mma(PMt, d2_s.index(now), y2, is_async=True)
        y1, y2 = warpgroup_mma_wait(0, [y1, y2])
        if DELTA:
            barrier()  # both groups of warps have read A
            gl.store(solved + at1, y1.to(dt), mask=inside1)
            b = gl.load(beta + first + t1 * H, mask=t1 < left, other=0.0).to(gl.float32)
            y1 = y1 * b[:, None]
            x1_s.store((-y1).to(dt))
            if V2 > 0:
                gl.store(solved + at2, y2.to(dt), mask=inside2)
                y2 = y2 * gl.convert_layout(b, gl.SliceLayout(1, mma2))[:, None]
                x2_s.store((-y2).to(dt))
            fence_async_shared()
            barrier()
        gl.store(dv + at1, y1.to(dt), mask=inside1)
        if V2 > 0:
            gl.store(dv + at2, y2.to(dt), mask=inside2)
        if not DELTA:
            barrier()  # both groups of warps have read the state

        # dS = dS' + φᵀ dO - κᵀ dE
        total = gl.load(scales + at.to(gl.int64) * 128 + 63) if DECAY else None
        if DELTA:
            bases, keys = r_s.index(now).slice(0, 64, 0), m_s.index(now).slice(0, 64, 1)
            S = update(S, s_s, (x1_s, x2_s), total, bases, keys, K, V1, V2, ONES, TILES, STORE=False)
        bases, queries = r_s.index(now).slice(64, 64, 0), m_s.index(now).slice(64, 64, 1)
        d = (d1, d2_s.index(now))
        S = update(S, s_s, d, None if DELTA else total, bases, queries, K, V1, V2, ONES, TILES)
        at -= H
        first -= 64 * H
        left += 64

    if INITIAL:
        finish(dinitial + place, S, cells, K, R, V, V2, ONES, STEPS, TILES)
