"""One token of decoding, one launch: reads the state once, writes it once."""

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    q,
    k,
    u,
    r,
    v,
    beta,
    log_decay,
    state,  # [B,H,K·R,V] float32, updated in place
    out,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    D1: tl.constexpr,  # the state's rows, as two powers of two that fill little more: 625 in 512 and 128
    D2: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
):
    """One program a head of a sequence and BV value columns; D1 + D2 >= K·R, so that the state stays in registers."""
    n = tl.program_id(0).to(tl.int64)
    ov = tl.program_id(1) * BV + tl.arange(0, BV)
    has = ov < V
    state += n * (K * R * V)
    k, q, r, u = k + n * K, q + n * K, r + n * R, u + n * R
    alpha = 1.0
    if DECAY:
        alpha = tl.exp(tl.load(log_decay + n).to(tl.float32))
    at1, S1, kap1, phi1 = load_slab(q, k, u, r, state, 0, D1, ov, has, alpha, K, R, V)
    at2, S2, kap2, phi2 = at1, S1, kap1, phi1
    if D2 > 0:
        at2, S2, kap2, phi2 = load_slab(q, k, u, r, state, D1, D2, ov, has, alpha, K, R, V)
    X = tl.load(v + n * V + ov, mask=has, other=0.0).to(tl.float32)
    if DELTA:
        X -= tl.sum(kap1[:, None] * S1, axis=0)
        if D2 > 0:
            X -= tl.sum(kap2[:, None] * S2, axis=0)
        X *= tl.load(beta + n).to(tl.float32)
    S1 += kap1[:, None] * X[None, :]
    tl.store(state + at1, S1, mask=(at1 < K * R * V) & has[None, :])
    O = tl.sum(phi1[:, None] * S1, axis=0)
    if D2 > 0:
        S2 += kap2[:, None] * X[None, :]
        tl.store(state + at2, S2, mask=(at2 < K * R * V) & has[None, :])
        O += tl.sum(phi2[:, None] * S2, axis=0)
    tl.store(out + n * V + ov, O.to(out.dtype.element_ty), mask=has)


@triton.jit
def load_slab(
    q,
    k,
    u,
    r,
    state,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    ov,
    has,
    alpha,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
):
    """ROWS rows of the state from START on: where they lie, what they hold, and those of κ and φ."""
    f = START + tl.arange(0, ROWS)
    real = f < K * R
    at = f[:, None] * V + ov[None, :]
    S = tl.load(state + at, mask=real[:, None] & has[None, :], other=0.0) * alpha
    kap = tl.load(k + f // R, mask=real, other=0.0).to(tl.float32) * tl.load(r + f % R, mask=real, other=0.0)
    phi = tl.load(q + f // R, mask=real, other=0.0).to(tl.float32) * tl.load(u + f % R, mask=real, other=0.0)
    return at, S, kap, phi
