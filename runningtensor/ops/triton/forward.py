"""Forward kernels: `local_kernel` inverts I + L for every chunk, `scan_kernel` runs through the chunks.

Line by line the forms of chunk.py. The result of a dot is never transposed into another dot, which Triton 3.4 to 3.7.0
miscompiles on Hopper: its transpose is computed anew instead.

A slab is BD of the K·R features: whole keys k with all of r beside each, so that 5·25 = 125 of 128 are filled at
K = R = 25. The state lies in memory as [N,H,K·R,V] float32 and is streamed through, slab by slab; what is read again
soon stays in the L2 cache. So nothing limits K or V.
"""

import triton
import triton.language as tl


@triton.jit
def locate(cu_seqlens, chunk_starts, m, T, N, C: tl.constexpr, PACKED: tl.constexpr):
    """Of chunk m: its first token, the end of its sequence, and whether there is such a chunk."""
    if PACKED:
        # chunk_starts [N+1]: the chunks before each sequence. Bisection finds the sequence without asking the host.
        lo = 0
        hi = N
        while hi - lo > 1:
            mid = (lo + hi) // 2
            if tl.load(chunk_starts + mid) <= m:
                lo = mid
            else:
                hi = mid
        start = tl.load(cu_seqlens + lo).to(tl.int64) + (m - tl.load(chunk_starts + lo)) * C
        return start, tl.load(cu_seqlens + lo + 1).to(tl.int64), m < tl.load(chunk_starts + N)
    else:
        chunks = tl.cdiv(T, C)
        first = (m // chunks).to(tl.int64) * T
        return first + (m % chunks) * C, first + T, m >= 0


@triton.jit
def sequence(cu_seqlens, chunk_starts, n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Of sequence n: its first token, its end, and the number of its first chunk."""
    if PACKED:
        start = tl.load(cu_seqlens + n).to(tl.int64)
        return start, tl.load(cu_seqlens + n + 1).to(tl.int64), tl.load(chunk_starts + n)
    else:
        start = n.to(tl.int64) * T
        return start, start + T, n * tl.cdiv(T, C)


@triton.jit
def rounded(x):
    """Float32 to the nearest TF32. Tensor cores cut it off; this halves the error and takes its bias away. NaN stays
    NaN: that of NVIDIA GPUs, all ones, would become zero."""
    return tl.where(x == x, ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def dot(a, b, PREC: tl.constexpr, acc=None):
    """A B + acc."""
    if PREC == "tf32" and a.dtype == tl.float32:
        a = rounded(a)
        b = rounded(b)
    return tl.dot(a, b, acc, input_precision=PREC)


@triton.jit
def add_dot(S, a, b, PREC: tl.constexpr):
    """S + A B, the product summed up first: added to the state one by one, its terms would each be rounded at the
    state's size. Where the compiler sees a plus, it adds them one by one all the same."""
    return S - dot(a, -b, PREC)


@triton.jit
def solve(inverse, x, PREC: tl.constexpr):
    """(I + L)⁻¹ X, the inverse in float32 proper, in two parts where products are in TF32.

    Where keys repeat, its entries do too, and TF32 would err in all of them alike: sums of rows, which ought to
    telescope, would gather 64 times that error into the state.
    """
    if PREC == "tf32":
        x = rounded(x)
        most = rounded(inverse)
        return tl.dot(inverse - most, x, tl.dot(most, x, input_precision=PREC), input_precision=PREC)
    else:
        return tl.dot(inverse, x, input_precision=PREC)


@triton.jit
def load_rows(x, row, inside, W: tl.constexpr, WP: tl.constexpr):
    """[C,WP]: rows of a [·,W] tensor, zero outside.

    Pointers are those of a chunk's first row, and rows are counted from there, in 32 bits: 64-bit addresses of gathers
    would fill the registers.
    """
    w = tl.arange(0, WP)
    return tl.load(x + row[:, None] * W + w[None, :], mask=inside[:, None] & (w < W)[None, :], other=0.0)


@triton.jit
def load_columns(x, row, inside, W: tl.constexpr, WP: tl.constexpr):
    """[WP,C]: the transpose of load_rows."""
    w = tl.arange(0, WP)
    return tl.load(x + row[None, :] * W + w[:, None], mask=inside[None, :] & (w < W)[:, None], other=0.0)


@triton.jit
def features(k0, K: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """Of the slab that begins at key k0: indices into k and r, the place in the state, and which features exist."""
    j = tl.arange(0, BD)
    ik = k0 + j // R
    ir = j % R
    return ik, ir, ik * R + ir, (j < (BD // R) * R) & (ik < K)


@triton.jit
def kron_rows(a, b, row, inside, k0, K: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """κ [C,BD]: a slab of rows of a⊗b."""
    ik, ir, _, exists = features(k0, K, R, BD)
    mask = inside[:, None] & exists[None, :]
    x = tl.load(a + row[:, None] * K + ik[None, :], mask=mask, other=0.0)
    return x * tl.load(b + row[:, None] * R + ir[None, :], mask=mask, other=0.0)


@triton.jit
def kron_columns(a, b, row, inside, k0, K: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """κᵀ [BD,C]."""
    ik, ir, _, exists = features(k0, K, R, BD)
    mask = inside[None, :] & exists[:, None]
    x = tl.load(a + row[None, :] * K + ik[:, None], mask=mask, other=0.0)
    return x * tl.load(b + row[None, :] * R + ir[:, None], mask=mask, other=0.0)


@triton.jit
def invert(L, C: tl.constexpr, PREC: tl.constexpr):
    """(I + L)⁻¹ of a strictly lower triangular L [C,C], float32.

    Forward substitution in 16×16 diagonal blocks, all at once; then, doubling the block, [[A,0],[B,D]]⁻¹ =
    [[A⁻¹,0],[-D⁻¹BA⁻¹,D⁻¹]], which is M - M B M with M the inverse of the blocks so far.
    """
    NB: tl.constexpr = C // 16
    i = tl.arange(0, C)
    block = tl.arange(0, NB)
    own = block[:, None, None, None] == block[None, None, :, None]
    D = tl.sum(tl.where(own, tl.reshape(L, (NB, 16, NB, 16)), 0.0), axis=2)  # [NB,16,16]
    c = tl.arange(0, 16)
    inv = tl.where(c[:, None] == c[None, :], 1.0, 0.0)[None] + tl.zeros_like(D)
    for row in range(1, 16):
        here = (c == row)[None, :, None]
        l = tl.sum(tl.where(here, D, 0.0), axis=1)  # row `row` of each block
        inv = inv - tl.where(here, tl.sum(l[:, :, None] * inv, axis=1)[:, None, :], 0.0)
    M = tl.reshape(tl.where(own, inv[:, :, None, :], 0.0), (C, C))
    if C >= 32:
        M = double(L, M, i, 16, PREC)
    if C >= 64:
        M = double(L, M, i, 32, PREC)
    return M


@triton.jit
def double(L, M, i, W: tl.constexpr, PREC: tl.constexpr):
    below = ((i // (2 * W))[:, None] == (i // (2 * W))[None, :]) & ((i // W)[:, None] > (i // W)[None, :])
    B = tl.where(below, L, 0.0)
    if PREC == "fp16":
        X = tl.dot(M.to(tl.float16), tl.dot(B.to(tl.float16), M.to(tl.float16)).to(tl.float16))
    else:
        X = tl.dot(M, tl.dot(B, M, input_precision=PREC), input_precision=PREC)
    return M - X


@triton.jit
def invert_by_doubling(L, i, PREC: tl.constexpr):
    """(I + L)⁻¹ of a strictly lower triangular L [64,64], doubled up from 2×2 blocks: quicker than `invert`, and less
    exact in float16, which has the digits of TF32 and half its bytes."""
    M = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    M -= tl.where((i // 2)[:, None] == (i // 2)[None, :], L, 0.0)
    M = double(L, M, i, 2, PREC)
    M = double(L, M, i, 4, PREC)
    M = double(L, M, i, 8, PREC)
    M = double(L, M, i, 16, PREC)
    M = double(L, M, i, 32, PREC)
    if PREC == "fp16":  # noqa: SIM102
        if tl.sum((tl.abs(M) < 32768.0).to(tl.int32)) < 4096:  # or NaN: not a case for float16
            M = invert(L, 64, "tf32")
    return M


@triton.jit
def decays(log_decay, first, row, i, n, H: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Of the n rows from a chunk's first: log decays, and exp of their sums up to t, after t, and over the chunk."""
    if DECAY:
        d = tl.load(log_decay + first + row, mask=i < n, other=0.0).to(tl.float32)
        following = tl.load(log_decay + first + row + H, mask=(i + 1 < n) & (i < C - 1), other=0.0).to(tl.float32)
        return d, tl.exp(tl.cumsum(d, 0)), tl.exp(tl.cumsum(following, 0, reverse=True)), tl.exp(tl.sum(d, 0))
    else:
        one = tl.full([C], 1.0, tl.float32)
        return one, one, one, 1.0


@triton.jit
def within(x, d, i, UPPER: tl.constexpr, STRICT: tl.constexpr, DECAY: tl.constexpr):
    """A Gram matrix [C,C], masked and decayed: what row j gives to row i, or if UPPER what row i gives to row j.

    The decay is exp of sums of d over each span. Differences of one running sum would lose weak decays beside a strong.
    """
    a = i[None, :] if UPPER else i[:, None]  # the later row
    b = i[:, None] if UPPER else i[None, :]
    x = tl.where(a > b if STRICT else a >= b, x, 0.0)
    if DECAY:
        d = d[None, :] if UPPER else d[:, None]
        x = x * tl.exp(tl.cumsum(tl.where(a > b, d, 0.0), 1 if UPPER else 0))
    return x


@triton.jit(do_not_specialize=["T", "N"])
def local_kernel(
    k,
    r,
    beta,
    log_decay,
    inverse,  # [·,H,C]
    cu_seqlens,
    chunk_starts,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    RP: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    PREC: tl.constexpr,
    SOLVE: tl.constexpr,
):
    m, h = tl.program_id(0), tl.program_id(1)
    start, end, exists = locate(cu_seqlens, chunk_starts, m, T, N, C, PACKED)
    if not exists:
        return
    i = tl.arange(0, C)
    inside = start + i < end
    row = i * H
    first = start * H + h
    k += first * K
    r += first * R
    beta += first
    inverse += first * C
    G = key_products(k, k, row, inside, K, C, BK, PREC)
    br = load_rows(r, row, inside, R, RP)
    G *= dot(br, load_columns(r, row, inside, R, RP), PREC)
    d, _, _, _ = decays(log_decay, first, row, i, end - start, H, C, DECAY)
    L = within(G, d, i, False, True, DECAY)
    L *= tl.load(beta + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    inv = invert(L, C, SOLVE)
    tl.store(inverse + row[:, None] * C + i[None, :], inv.to(inverse.dtype.element_ty), mask=inside[:, None])


@triton.jit
def key_products(a, b, row, inside, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr):
    """A Bᵀ [C,C] of two [·,H,K] tensors, BK columns at a time, so that K may be anything."""
    G = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        w = k0 + tl.arange(0, BK)
        x = tl.load(a + row[:, None] * K + w[None, :], mask=inside[:, None] & (w < K)[None, :], other=0.0)
        y = tl.load(b + row[None, :] * K + w[:, None], mask=inside[None, :] & (w < K)[:, None], other=0.0)
        G = dot(x, y, PREC, G)
    return G


@triton.jit(do_not_specialize=["T"])
def scan_kernel(
    q,
    k,
    u,
    r,
    v,
    beta,
    log_decay,
    inverse,
    state,  # [N,H,K·R,V] float32: the initial state on entry, the final state on return
    out,
    states,  # SAVE: [M,H,K·R,V], the state before each chunk
    recalled,  # SAVE: κS [·,H,V]
    writes,  # SAVE: X [·,H,V]
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
    OUT: tl.constexpr,
    SAVE: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a sequence, head and BV value columns. OUT: write outputs. SAVE: write what the backward needs."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, end, chunk = sequence(cu_seqlens, chunk_starts, n, T, C, PACKED)
    dt = v.dtype.element_ty
    i = tl.arange(0, C)
    ov = tl.program_id(1) * BV + tl.arange(0, BV)
    has = (ov < V)[None, :]
    state += (n * H + h).to(tl.int64) * (K * R * V) + ov[None, :]
    for t0 in range(start, end, C):
        inside = t0 + i < end
        row = i * H
        at = row[:, None] * V + ov[None, :]
        mask = inside[:, None] & has
        first = t0 * H + h
        qc, kc, uc, rc, vc = q + first * K, k + first * K, u + first * R, r + first * R, v + first * V
        d, before, after, total = decays(log_decay, first, row, i, end - t0, H, C, DECAY)
        if SAVE:
            into = states + (chunk.to(tl.int64) * H + h) * (K * R * V) + ov[None, :]

        E = tl.zeros([C, BV], tl.float32)  # κ S
        O = tl.zeros([C, BV], tl.float32)  # φ S
        for k0 in range(0, K, BD // R):
            _, _, place, exists = features(k0, K, R, BD)
            S = tl.load(state + place[:, None] * V, mask=exists[:, None] & has, other=0.0).to(dt)
            if SAVE:
                tl.store(into + place[:, None] * V, S, mask=exists[:, None] & has)
            if DELTA:
                E = dot(kron_rows(kc, rc, row, inside, k0, K, R, BD), S, PREC, E)
            if OUT:
                O = dot(kron_rows(qc, uc, row, inside, k0, K, R, BD), S, PREC, O)

        bv = tl.load(vc + at, mask=mask, other=0.0)
        if DELTA:
            E *= before[:, None]
            b = tl.load(beta + first + row, mask=inside, other=0.0).to(tl.float32)
            inv = tl.load(inverse + first * C + row[:, None] * C + i[None, :], mask=inside[:, None], other=0.0)
            # Within a chunk few numbers are multiplied, so that these may as well be float32.
            X = solve(inv, (bv - E) * b[:, None], PREC)
        else:
            X = bv.to(tl.float32)
        if SAVE:
            tl.store(recalled + first * V + at, E.to(dt), mask=mask)
            tl.store(writes + first * V + at, X.to(dt), mask=mask)
        if OUT:
            P = key_products(qc, kc, row, inside, K, C, BK, PREC)
            P *= dot(load_rows(uc, row, inside, R, RP), load_columns(rc, row, inside, R, RP), PREC)
            P = within(P, d, i, False, False, DECAY)
            O = dot(P, X, PREC, O * before[:, None])
            tl.store(out + first * V + at, O.to(dt), mask=mask)

        X = (X * after[:, None]).to(dt) if DECAY else X.to(dt)
        tl.debug_barrier()  # every thread has read the state
        for k0 in range(0, K, BD // R):
            _, _, place, exists = features(k0, K, R, BD)
            S = tl.load(state + place[:, None] * V, mask=exists[:, None] & has, other=0.0)
            if DECAY:
                S *= total
            S = add_dot(S, kron_columns(kc, rc, row, inside, k0, K, R, BD), X, PREC)
            tl.store(state + place[:, None] * V, S, mask=exists[:, None] & has)
        tl.debug_barrier()  # every thread has written it
        chunk += 1
