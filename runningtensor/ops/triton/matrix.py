"""Kernels for matrix states: order 2, where κ is k and φ is q, in half precision and chunks of 64.

The forms of forward.py and backward.py, with what a matrix state allows: it stays in registers from the first chunk to
the last, and the inverse is used as on Hopper (hopper_pack.py), [X; PX] = [M; PM] E and Y = Mᵀ κdS' + (PM)ᵀ dO.
`prepare_kernel` makes M and PM for all chunks; the scans read them. M comes in two PARTS where values are half precise,
as they are and what that rounds away: where keys repeat, its entries do too, and sums that ought to telescope would
gather 64 times what one entry errs.

Results of dots are transposed into others here, which Triton before 3.7.1 miscompiles on Hopper: it is not used there.
"""

import triton
import triton.language as tl

from runningtensor.ops.triton.backward import log_gradient, row_sums
from runningtensor.ops.triton.forward import (
    decays,
    dot,
    invert_by_doubling,
    key_products,
    load_rows,
    locate,
    sequence,
    within,
)


@triton.jit(do_not_specialize=["T", "N"])
def prepare_kernel(
    q,
    k,
    beta,
    log_decay,
    inverse,  # DELTA: M [·,H,PARTS,64], written if SOLVE, else read
    mixed,  # PM, or P without the delta rule [M,H,64,64]
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    SOLVE: tl.constexpr,
    PREC: tl.constexpr,
):
    m, h = tl.program_id(0), tl.program_id(1)
    start, end, exists = locate(cu_seqlens, chunk_starts, m, T, N, 64, PACKED)
    if not exists:
        return
    dt = k.dtype.element_ty
    PARTS: tl.constexpr = 32 // dt.primitive_bitwidth
    i = tl.arange(0, 64)
    inside = start + i < end
    row = i * H
    first = start * H + h
    q, k = q + first * K, k + first * K
    d, _, _, _ = decays(log_decay, first, row, i, end - start, H, 64, DECAY)
    G = within(tl.full([64, 64], 1.0, tl.float32), d, i, False, False, DECAY)
    P = G * key_products(q, k, row, inside, K, 64, BK, PREC)
    if DELTA:
        saved = inverse_cells(first, row, i, PARTS)
        if SOLVE:
            L = tl.where(i[:, None] > i[None, :], G * key_products(k, k, row, inside, K, 64, BK, PREC), 0.0)
            L *= tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)[:, None]
            M = invert_by_doubling(L, i, "fp16" if PARTS == 2 else "ieee")
            # What is beyond the range of float16 is left to the other part.
            most = (tl.clamp(M, -65504.0, 65504.0) if dt == tl.float16 else M).to(dt)
            tl.store(inverse + saved, most, mask=inside[:, None])
            if PARTS == 2:
                tl.store(inverse + saved + 64, (M - most).to(dt), mask=inside[:, None])
        else:
            M = tl.load(inverse + saved, mask=inside[:, None], other=0.0).to(tl.float32)
            if PARTS == 2:
                M += tl.load(inverse + saved + 64, mask=inside[:, None], other=0.0)
        P = dot(P, M, "tf32" if PARTS == 2 else PREC)
    at = (m.to(tl.int64) * H + h) * 4096 + i[:, None] * 64 + i[None, :]
    tl.store(mixed + at, P.to(dt))


@triton.jit
def inverse_cells(first, row, i, PARTS: tl.constexpr):
    return first * (64 * PARTS) + row[:, None] * (64 * PARTS) + i[None, :]


@triton.jit
def columns(K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr):
    """This program's value columns, the cells of a state [K,V] in them, and which of these there are."""
    w = tl.arange(0, KP)
    ov = tl.program_id(1) * BV + tl.arange(0, BV)
    return ov, w[:, None] * V + ov[None, :], (w < K)[:, None] & (ov < V)[None, :]


@triton.jit(do_not_specialize=["T"])
def scan_kernel(
    q,
    k,
    v,
    beta,
    log_decay,
    inverse,
    mixed,
    initial,  # INITIAL: [N,H,K,V] float32
    final,  # FINAL: the same
    out,
    states,  # SAVE: [M,H,K,V], the state before each chunk
    recalled,  # SAVE, DELTA: κS [·,H,V]
    writes,  # SAVE, DELTA: X [·,H,V]
    cu_seqlens,
    chunk_starts,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    OUT: tl.constexpr,
    SAVE: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a sequence, head and BV value columns. OUT: write outputs. SAVE: write what the backward needs."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, end, chunk = sequence(cu_seqlens, chunk_starts, n, T, 64, PACKED)
    dt = v.dtype.element_ty
    PARTS: tl.constexpr = 32 // dt.primitive_bitwidth
    i = tl.arange(0, 64)
    ov, cell, is_cell = columns(K, V, KP, BV)
    S = tl.zeros([KP, BV], tl.float32)
    if INITIAL:
        S = tl.load(initial + tl.program_id(0).to(tl.int64) * (K * V) + cell, mask=is_cell, other=0.0)
    row = i * H
    square = i[:, None] * 64 + i[None, :]
    for t0 in range(start, end, 64):
        inside = t0 + i < end
        at = row[:, None] * V + ov[None, :]
        mask = inside[:, None] & (ov < V)[None, :]
        first = t0 * H + h
        bk = load_rows(k + first * K, row, inside, K, KP)
        X = tl.load(v + first * V + at, mask=mask, other=0.0)
        _, before, after, total = decays(log_decay, first, row, i, end - t0, H, 64, DECAY)
        Sd = S.to(dt)
        if SAVE:
            tl.store(states + (chunk.to(tl.int64) * H + h) * (K * V) + cell, Sd, mask=is_cell)
        E = X
        if DELTA:
            recall = dot(bk, Sd, PREC) * before[:, None]
            b = tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)
            E = ((X - recall) * b[:, None]).to(dt)
            M = inverse + inverse_cells(first, row, i, PARTS)
            X = dot(tl.load(M, mask=inside[:, None], other=0.0), E, PREC)
            if PARTS == 2:
                X = dot(tl.load(M + 64, mask=inside[:, None], other=0.0), E, PREC, X)
            X = X.to(dt)
            if SAVE:
                tl.store(recalled + first * V + at, recall.to(dt), mask=mask)
                tl.store(writes + first * V + at, X, mask=mask)
        if OUT:
            bq = load_rows(q + first * K, row, inside, K, KP)
            PM = tl.load(mixed + (chunk.to(tl.int64) * H + h) * 4096 + square)
            O = dot(PM, E, PREC, dot(bq, Sd, PREC) * before[:, None])
            tl.store(out + first * V + at, O.to(dt), mask=mask)
        if DECAY:
            X = (X * after[:, None]).to(dt)
            S *= total
        S = dot(tl.trans(bk), X, PREC, S)
        chunk += 1
    if FINAL:
        tl.store(final + tl.program_id(0).to(tl.int64) * (K * V) + cell, S, mask=is_cell)


@triton.jit(do_not_specialize=["T"])
def reverse_kernel(
    q,
    k,
    beta,
    log_decay,
    inverse,
    mixed,
    dout,
    dfinal,  # FINAL: the gradient of the final state [N,H,K,V] float32
    dinitial,  # INITIAL: that of the initial state
    dstates,  # [M,H,K,V], the gradient of the state after each chunk
    solved,  # DELTA: Y [·,H,V]
    dv,
    cu_seqlens,
    chunk_starts,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    PREC: tl.constexpr,
):
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, end, chunk = sequence(cu_seqlens, chunk_starts, n, T, 64, PACKED)
    dt = dout.dtype.element_ty
    PARTS: tl.constexpr = 32 // dt.primitive_bitwidth
    i = tl.arange(0, 64)
    ov, cell, is_cell = columns(K, V, KP, BV)
    dS = tl.zeros([KP, BV], tl.float32)
    if FINAL:
        dS = tl.load(dfinal + tl.program_id(0).to(tl.int64) * (K * V) + cell, mask=is_cell, other=0.0)
    row = i * H
    square = i[:, None] * 64 + i[None, :]
    steps = (end - start + 63) // 64
    for step in range(0, steps):
        at_chunk = steps - 1 - step
        t0 = start + at_chunk * 64
        inside = t0 + i < end
        at = row[:, None] * V + ov[None, :]
        mask = inside[:, None] & (ov < V)[None, :]
        first = t0 * H + h
        place = (chunk + at_chunk).to(tl.int64) * H + h
        bk = load_rows(k + first * K, row, inside, K, KP)
        bq = load_rows(q + first * K, row, inside, K, KP)
        bdo = tl.load(dout + first * V + at, mask=mask, other=0.0)
        PM = tl.load(mixed + place * 4096 + square)
        _, before, after, total = decays(log_decay, first, row, i, end - t0, H, 64, DECAY)
        dSd = dS.to(dt)
        tl.store(dstates + place * (K * V) + cell, dSd, mask=is_cell)
        dE = dot(bk, dSd, PREC) * after[:, None]
        if DELTA:
            M = inverse + inverse_cells(first, row, i, PARTS)
            Y = dot(tl.trans(PM), bdo, PREC)
            Y = dot(tl.trans(tl.load(M, mask=inside[:, None], other=0.0)), dE.to(dt), PREC, Y)
            if PARTS == 2:
                Y = dot(tl.trans(tl.load(M + 64, mask=inside[:, None], other=0.0)), dE.to(dt), PREC, Y)
            tl.store(solved + first * V + at, Y.to(dt), mask=mask)
            dE = Y * tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        else:
            dE = dot(tl.trans(PM), bdo, PREC, dE)
        tl.store(dv + first * V + at, dE.to(dt), mask=mask)
        if DECAY:
            bdo = (bdo * before[:, None]).to(dt)
            dE *= before[:, None]
            dS *= total
        dS = dot(tl.trans(bq), bdo, PREC, dS)
        if DELTA:
            dS = dot(tl.trans(bk), (-dE).to(dt), PREC, dS)
    if INITIAL:
        tl.store(dinitial + tl.program_id(0).to(tl.int64) * (K * V) + cell, dS, mask=is_cell)


@triton.jit(do_not_specialize=["T", "N"])
def gradients_kernel(
    q,
    k,
    v,
    beta,
    log_decay,
    dout,
    states,
    dstates,
    recalled,
    writes,  # X; v without the delta rule
    solved,
    dv,
    dq,
    dk,
    dbeta,
    dlog,
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    PREC: tl.constexpr,
):
    """What is left, of all chunks at once."""
    m, h = tl.program_id(0), tl.program_id(1)
    start, end, is_chunk = locate(cu_seqlens, chunk_starts, m, T, N, 64, PACKED)
    if not is_chunk:
        return
    dt = v.dtype.element_ty
    i = tl.arange(0, 64)
    inside = start + i < end
    row = i * H
    first = start * H + h
    q, k, dq, dk = q + first * K, k + first * K, dq + first * K, dk + first * K
    v, dout, dv, writes = v + first * V, dout + first * V, dv + first * V, writes + first * V
    d, before, after, total = decays(log_decay, first, row, i, end - start, H, 64, DECAY)
    place = m.to(tl.int64) * H + h
    states, dstates = states + place * (K * V), dstates + place * (K * V)
    G = within(tl.full([64, 64], 1.0, tl.float32), d, i, False, False, DECAY)
    strict = i[:, None] > i[None, :]

    # What the rows of the chunk do to each other: dq = toq K, dk = toqᵀ Q + (tok + tokᵀ) K.
    dP = G * key_products(dout, writes, row, inside, V, 64, BV, PREC)
    toq = dP.to(dt)
    met = tl.zeros([64], tl.float32)
    if DECAY:
        crossing = tl.where(strict, dP * key_products(q, k, row, inside, K, 64, BK, PREC), 0.0)
    if DELTA:
        solved, recalled = solved + first * V, recalled + first * V
        b = tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)
        dL = tl.where(strict, -G * key_products(solved, writes, row, inside, V, 64, BV, PREC), 0.0)
        tok = (dL * b[:, None]).to(dt)
        dL *= key_products(k, k, row, inside, K, 64, BK, PREC)
        kept = row_sums(solved, recalled, row, inside, V, 64, BV)
        db = row_sums(solved, v, row, inside, V, 64, BV) - kept + tl.sum(dL, 1)
        tl.store(dbeta + first + row, db.to(dbeta.dtype.element_ty), mask=inside)
        if DECAY:
            crossing += dL * b[:, None]
            met -= b * kept
    if DECAY:
        met += tl.sum(crossing - tl.trans(crossing), 1)

    # What the states do to the rows, and the rows to the states.
    given = tl.zeros([64], tl.float32)
    passed = 0.0
    for k0 in range(0, K, BK):
        wk = k0 + tl.arange(0, BK)
        exists = wk < K
        gdq = tl.zeros([64, BK], tl.float32)
        gdk = tl.zeros([64, BK], tl.float32)
        taken = tl.zeros([64, BK], tl.float32)
        both = tl.zeros([BK, BV], tl.float32)
        for v0 in range(0, V, BV):
            ov = v0 + tl.arange(0, BV)
            at = row[:, None] * V + ov[None, :]
            mask = inside[:, None] & (ov < V)[None, :]
            cell = wk[:, None] * V + ov[None, :]
            is_cell = exists[:, None] & (ov < V)[None, :]
            s = tl.load(states + cell, mask=is_cell, other=0.0)
            ds = tl.load(dstates + cell, mask=is_cell, other=0.0)
            gdq = dot(tl.load(dout + at, mask=mask, other=0.0), tl.trans(s), PREC, gdq)
            gdk = dot(tl.load(writes + at, mask=mask, other=0.0), tl.trans(ds), PREC, gdk)
            if DELTA:
                taken = dot(tl.load(dv + at, mask=mask, other=0.0), tl.trans(s), PREC, taken)
            if DECAY:
                both += s.to(tl.float32) * ds.to(tl.float32)
        at = row[:, None] * K + wk[None, :]
        mask = inside[:, None] & exists[None, :]
        bk = tl.load(k + at, mask=mask, other=0.0)
        bq = tl.load(q + at, mask=mask, other=0.0)
        if DECAY:
            gdq *= before[:, None]
            gdk *= after[:, None]
            met += tl.sum(gdq * bq, 1)
            given += tl.sum(gdk * bk, 1)
            passed += tl.sum(both)
        if DELTA:
            gdk = dot(tok, bk, PREC, gdk - taken * before[:, None])
            gdk = dot(tl.trans(tok), bk, PREC, gdk)
        gdq = dot(toq, bk, PREC, gdq)
        gdk = dot(tl.trans(toq), bq, PREC, gdk)
        tl.store(dq + at, gdq.to(dt), mask=mask)
        tl.store(dk + at, gdk.to(dt), mask=mask)
    if DECAY:
        dl = log_gradient(met, given, total * passed, i)
        tl.store(dlog + first + row, dl.to(dlog.dtype.element_ty), mask=inside)
