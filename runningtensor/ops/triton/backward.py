"""Backward kernels: `reverse_kernel` runs through the chunks from last to first, `gradients_kernel` does the rest.

The scan of forward.py has stored the state before each chunk, κS and X. The reverse scan stores the gradient of the
state after each chunk and Y. With these the gradients of a chunk depend on nothing outside it: all chunks at once.
"""

import triton
import triton.language as tl

from runningtensor.ops.triton.forward import (
    add_dot,
    decays,
    dot,
    features,
    key_products,
    kron_columns,
    kron_rows,
    load_columns,
    load_rows,
    locate,
    sequence,
    solve,
    within,
)


@triton.jit(do_not_specialize=["T"])
def reverse_kernel(
    q,
    k,
    u,
    r,
    beta,
    log_decay,
    inverse,
    dout,
    dstate,  # [N,H,K·R,V] float32: the gradient of the final state on entry, of the initial state on return
    dstates,  # [M,H,K·R,V], the gradient of the state after each chunk
    solved,  # DELTA: Y [·,H,V]
    dv,
    cu_seqlens,
    chunk_starts,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    RP: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    PREC: tl.constexpr,
):
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, end, chunk = sequence(cu_seqlens, chunk_starts, n, T, C, PACKED)
    dt = dout.dtype.element_ty
    i = tl.arange(0, C)
    ov = tl.program_id(1) * BV + tl.arange(0, BV)
    has = (ov < V)[None, :]
    dstate += (n * H + h).to(tl.int64) * (K * R * V) + ov[None, :]
    steps = (end - start + C - 1) // C
    for step in range(0, steps):
        at_chunk = steps - 1 - step
        t0 = start + at_chunk * C
        inside = t0 + i < end
        row = i * H
        at = row[:, None] * V + ov[None, :]
        mask = inside[:, None] & has
        first = t0 * H + h
        qc, kc, uc, rc = q + first * K, k + first * K, u + first * R, r + first * R
        d, before, after, total = decays(log_decay, first, row, i, end - t0, H, C, DECAY)
        into = dstates + ((chunk + at_chunk).to(tl.int64) * H + h) * (K * R * V) + ov[None, :]

        dX = tl.zeros([C, BV], tl.float32)  # κ dS'
        for k0 in range(0, K, BD // R):
            _, _, place, exists = features(k0, K, R, BD)
            dS = tl.load(dstate + place[:, None] * V, mask=exists[:, None] & has, other=0.0).to(dt)
            tl.store(into + place[:, None] * V, dS, mask=exists[:, None] & has)
            dX = dot(kron_rows(kc, rc, row, inside, k0, K, R, BD), dS, PREC, dX)

        bdo = tl.load(dout + first * V + at, mask=mask, other=0.0)
        Pt = key_products(kc, qc, row, inside, K, C, BK, PREC)
        Pt *= dot(load_rows(rc, row, inside, R, RP), load_columns(uc, row, inside, R, RP), PREC)
        Pt = within(Pt, d, i, True, False, DECAY)
        dX = dot(Pt, bdo.to(tl.float32), PREC, dX * after[:, None])
        dE = dX
        if DELTA:
            inv_t = tl.load(inverse + first * C + row[None, :] * C + i[:, None], mask=inside[None, :], other=0.0)
            Y = solve(inv_t, dX, PREC)
            tl.store(solved + first * V + at, Y.to(dt), mask=mask)
            dE = Y * tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(dv + first * V + at, dE.to(dt), mask=mask)

        bdo = (bdo * before[:, None]).to(dt)
        dE = (dE * before[:, None]).to(dt)
        tl.debug_barrier()  # every thread has read the gradient
        for k0 in range(0, K, BD // R):
            _, _, place, exists = features(k0, K, R, BD)
            dS = tl.load(dstate + place[:, None] * V, mask=exists[:, None] & has, other=0.0)
            if DECAY:
                dS *= total
            dS = add_dot(dS, kron_columns(qc, uc, row, inside, k0, K, R, BD), bdo, PREC)
            if DELTA:
                dS = add_dot(dS, -kron_columns(kc, rc, row, inside, k0, K, R, BD), dE, PREC)
            tl.store(dstate + place[:, None] * V, dS, mask=exists[:, None] & has)
        tl.debug_barrier()  # every thread has written it


@triton.jit
def value_products(
    a,
    b,
    row,
    inside,
    place,
    exists,
    V: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """A Sᵀ [C,BD] for a slab of a stored state."""
    x = tl.zeros([C, BD], tl.float32)
    for v0 in range(0, V, BV):
        w = v0 + tl.arange(0, BV)
        y = tl.load(a + row[:, None] * V + w[None, :], mask=inside[:, None] & (w < V)[None, :], other=0.0)
        s = tl.load(b + place[None, :] * V + w[:, None], mask=exists[None, :] & (w < V)[:, None], other=0.0)
        x = dot(y, s, PREC, x)
    return x


@triton.jit
def row_sums(a, b, row, inside, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
    """rowsum(A ⊙ B) [C]."""
    x = tl.zeros([C], tl.float32)
    for v0 in range(0, V, BV):
        w = v0 + tl.arange(0, BV)
        mask = inside[:, None] & (w < V)[None, :]
        y = tl.load(a + row[:, None] * V + w[None, :], mask=mask, other=0.0).to(tl.float32)
        x += tl.sum(y * tl.load(b + row[:, None] * V + w[None, :], mask=mask, other=0.0).to(tl.float32), axis=1)
    return x


@triton.jit
def log_gradient(met, given, passed, i):
    """log_decay of row s scales whatever passes from before s to s or later; see chunk.py."""
    earlier = tl.sum(tl.where(i[:, None] > i[None, :], given[None, :], 0.0), 1)
    return tl.cumsum(met, 0, reverse=True) + earlier + passed


@triton.jit(do_not_specialize=["T", "N"])
def gradients_kernel(
    q,
    k,
    u,
    r,
    v,
    beta,
    log_decay,
    dout,
    states,
    dstates,
    recalled,
    writes,
    solved,
    dv,
    dq,
    dk,
    du,
    dr,
    dbeta,
    dlog,
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    RP: tl.constexpr,
    BD: tl.constexpr,
    KW: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    PREC: tl.constexpr,
):
    m, h = tl.program_id(0), tl.program_id(1)
    start, end, is_chunk = locate(cu_seqlens, chunk_starts, m, T, N, C, PACKED)
    if not is_chunk:
        return
    dt = v.dtype.element_ty
    i = tl.arange(0, C)
    inside = start + i < end
    row = i * H
    first = start * H + h
    q, k, dq, dk = q + first * K, k + first * K, dq + first * K, dk + first * K
    u, r, du, dr = u + first * R, r + first * R, du + first * R, dr + first * R
    v, dout, dv = v + first * V, dout + first * V, dv + first * V
    recalled, writes, solved = recalled + first * V, writes + first * V, solved + first * V
    d, before, after, total = decays(log_decay, first, row, i, end - start, H, C, DECAY)
    states += (m.to(tl.int64) * H + h) * (K * R * V)
    dstates += (m.to(tl.int64) * H + h) * (K * R * V)

    # What the rows of the chunk do to each other. Each matrix and its transpose, from scratch.
    dP = within(key_products(dout, writes, row, inside, V, C, BV, PREC), d, i, False, False, DECAY)
    dPt = within(key_products(writes, dout, row, inside, V, C, BV, PREC), d, i, True, False, DECAY)
    br = load_rows(r, row, inside, R, RP)
    bu = load_rows(u, row, inside, R, RP)
    UR = dot(bu, load_columns(r, row, inside, R, RP), PREC)
    RU = dot(br, load_columns(u, row, inside, R, RP), PREC)
    QK = key_products(q, k, row, inside, K, C, BK, PREC)
    KQ = key_products(k, q, row, inside, K, C, BK, PREC)
    gdu = dot((dP * QK).to(dt), br, PREC)  # [C,RP]
    gdr = dot((dPt * KQ).to(dt), bu, PREC)
    toq = (dP * UR).to(dt)  # dq = toq K, dk = toqt Q
    toqt = (dPt * RU).to(dt)
    dl = tl.zeros([C], tl.float32)
    if DECAY:
        crossing = tl.where(i[:, None] > i[None, :], dP * UR * QK, 0.0)
        dl += tl.sum(crossing, 1) - tl.sum(crossing, 0)
    if DELTA:
        b = tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)
        dL = -within(key_products(solved, writes, row, inside, V, C, BV, PREC), d, i, False, True, DECAY)
        dLt = -within(key_products(writes, solved, row, inside, V, C, BV, PREC), d, i, True, True, DECAY)
        RR = dot(br, load_columns(r, row, inside, R, RP), PREC)
        KK = key_products(k, k, row, inside, K, C, BK, PREC)
        db = row_sums(solved, v, row, inside, V, C, BV) - row_sums(solved, recalled, row, inside, V, C, BV)
        db += tl.sum(dL * RR * KK, 1)
        tl.store(dbeta + first + row, db.to(dbeta.dtype.element_ty), mask=inside)
        dG = dL * b[:, None]
        both = dG + dLt * b[None, :]  # dG + dGᵀ, for the Gram matrix is symmetric
        gdr = dot((both * KK).to(dt), br, PREC, gdr)
        tok = (both * RR).to(dt)
        if DECAY:
            crossing = dG * RR * KK
            dl += tl.sum(crossing, 1) - tl.sum(crossing, 0)

    # What the states do to the rows, and the rows to the states.
    met = tl.zeros([C], tl.float32)
    given = tl.zeros([C], tl.float32)
    passed = 0.0
    for k0 in range(0, K, BD // R):
        ik, ir, place, exists = features(k0, K, R, BD)
        mask = inside[:, None] & exists[None, :]
        kr = tl.load(r + row[:, None] * R + ir[None, :], mask=mask, other=0.0)
        ku = tl.load(u + row[:, None] * R + ir[None, :], mask=mask, other=0.0)
        kk = tl.load(k + row[:, None] * K + ik[None, :], mask=mask, other=0.0)
        kq = tl.load(q + row[:, None] * K + ik[None, :], mask=mask, other=0.0)
        w = tl.arange(0, KW)
        # Which k of the slab, and which r, each feature belongs to: contraction is a product with these.
        of_k = (ik[:, None] - k0 == w[None, :]).to(dt)  # [BD,KW]
        of_r = (ir[:, None] == tl.arange(0, RP)[None, :]).to(dt)  # [BD,RP]

        dphi = value_products(dout, states, row, inside, place, exists, V, C, BD, BV, PREC) * before[:, None]
        gdq = dot((dphi * ku).to(dt), of_k, PREC)
        gdu = dot((dphi * kq).to(dt), of_r, PREC, gdu)
        dkap = value_products(writes, dstates, row, inside, place, exists, V, C, BD, BV, PREC) * after[:, None]
        if DECAY:
            met += tl.sum(dphi * ku * kq, 1)
            given += tl.sum(dkap * kr * kk, 1)
            for v0 in range(0, V, BV):
                ov = v0 + tl.arange(0, BV)
                where = place[:, None] * V + ov[None, :]
                real = exists[:, None] & (ov < V)[None, :]
                s = tl.load(states + where, mask=real, other=0.0).to(tl.float32)
                passed += tl.sum(s * tl.load(dstates + where, mask=real, other=0.0).to(tl.float32))
        if DELTA:
            dkap -= value_products(dv, states, row, inside, place, exists, V, C, BD, BV, PREC) * before[:, None]
        gdk = dot((dkap * kr).to(dt), of_k, PREC)
        gdr = dot((dkap * kk).to(dt), of_r, PREC, gdr)

        # The rows' part of dq and dk, for the keys of this slab.
        wk = k0 + w
        real = inside[:, None] & ((w < BD // R) & (wk < K))[None, :]
        at = row[:, None] * K + wk[None, :]
        bk = tl.load(k + at, mask=real, other=0.0)
        bq = tl.load(q + at, mask=real, other=0.0)
        gdq = dot(toq, bk, PREC, gdq)
        gdk = dot(toqt, bq, PREC, gdk)
        if DELTA:
            gdk = dot(tok, bk, PREC, gdk)
        tl.store(dq + at, gdq.to(dt), mask=real)
        tl.store(dk + at, gdk.to(dt), mask=real)

    ow = tl.arange(0, RP)
    real = inside[:, None] & (ow < R)[None, :]
    tl.store(du + row[:, None] * R + ow[None, :], gdu.to(dt), mask=real)
    tl.store(dr + row[:, None] * R + ow[None, :], gdr.to(dt), mask=real)
    if DECAY:
        if DELTA:
            met -= row_sums(dv, recalled, row, inside, V, C, BV)
        dl = log_gradient(dl + met, given, total * passed, i)
        tl.store(dlog + first + row, dl.to(dlog.dtype.element_ty), mask=inside)
