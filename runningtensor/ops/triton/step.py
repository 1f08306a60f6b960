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
    BD: tl.constexpr,
    BV: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
):
    """One program a head of a sequence and BV value columns; BD >= K·R, so that the state stays in registers."""
    n = tl.program_id(0).to(tl.int64)
    ov = tl.program_id(1) * BV + tl.arange(0, BV)
    f = tl.arange(0, BD)
    exists = f < K * R
    has = ov < V
    at = state + n * (K * R * V) + f[:, None] * V + ov[None, :]
    S = tl.load(at, mask=exists[:, None] & has[None, :], other=0.0)
    kap = load_kron(k, r, n, f, exists, K, R)
    X = tl.load(v + n * V + ov, mask=has, other=0.0).to(tl.float32)
    if DECAY:
        S *= tl.exp(tl.load(log_decay + n).to(tl.float32))
    if DELTA:
        X = tl.load(beta + n).to(tl.float32) * (X - tl.sum(kap[:, None] * S, axis=0))
    S += kap[:, None] * X[None, :]
    tl.store(at, S, mask=exists[:, None] & has[None, :])
    O = tl.sum(load_kron(q, u, n, f, exists, K, R)[:, None] * S, axis=0)
    tl.store(out + n * V + ov, O.to(out.dtype.element_ty), mask=has)


@triton.jit
def load_kron(a, b, n, f, exists, K: tl.constexpr, R: tl.constexpr):
    x = tl.load(a + n * K + f // R, mask=exists, other=0.0).to(tl.float32)
    return x * tl.load(b + n * R + f % R, mask=exists, other=0.0).to(tl.float32)
