"""The paper as code: slow, short, and what everything else is held to.

An order-o state has o-1 key modes and one value mode. The comments show order 3, the paper's case, where the keys are
(k, r), the queries (q, u) and the state is S [B,H,K,R,V]. Float64 goes in and comes out; autograd differentiates it.

    write   S_t = α_t S_{t-1} + β_t (v_t - <α_t S_{t-1}, k_t, r_t>) ⊗ k_t ⊗ r_t     (delta rule)
            S_t = α_t S_{t-1} + v_t ⊗ k_t ⊗ r_t                                     (additive: no β)
    read    o_t = <S_t, q_t, u_t>
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

MODES = "ijklmnopq"  # one letter a key mode


def recurrent(
    queries: Sequence[Tensor],  # each [B,T,H,K_i]
    keys: Sequence[Tensor],  # each [B,T,H,K_i]
    values: Tensor,  # [B,T,H,V]
    *,
    beta: Tensor | None = None,  # [B,T,H]; None: additive
    log_decay: Tensor | None = None,  # [B,T,H], log α_t; None: α = 1
    initial_state: Tensor | None = None,  # [B,H,K_1,…,V]
) -> tuple[Tensor, Tensor]:
    """One step after another, as decoding does it. Returns the outputs [B,T,H,V] and the final state."""
    B, T, H, V = values.shape
    modes = MODES[: len(keys)]
    vectors = ",".join(f"bh{mode}" for mode in modes)
    contract = f"bh{modes}v,{vectors}->bhv"  # order 3: "bhijv,bhi,bhj->bhv"
    outer = f"bhv,{vectors}->bh{modes}v"  # order 3: "bhv,bhi,bhj->bhijv"

    state = initial_state
    if state is None:
        state = values.new_zeros(B, H, *(key.shape[-1] for key in keys), V)
    outputs = []
    for t in range(T):
        q_t, k_t, write = [q[:, t] for q in queries], [k[:, t] for k in keys], values[:, t]
        if log_decay is not None:
            state = state * log_decay[:, t].exp().reshape(B, H, *[1] * (len(keys) + 1))
        if beta is not None:
            write = beta[:, t, :, None] * (write - torch.einsum(contract, state, *k_t))
        state = state + torch.einsum(outer, write, *k_t)
        outputs.append(torch.einsum(contract, state, *q_t))
    return (torch.stack(outputs, 1) if outputs else torch.zeros_like(values)), state


def parallel(
    queries: Sequence[Tensor], keys: Sequence[Tensor], values: Tensor, *, log_decay: Tensor | None = None
) -> Tensor:
    """All steps at once, as a T×T matrix: O = ((Q Kᵀ) ⊙ (U Rᵀ) ⊙ M ⊙ Γ) V. Additive, from an empty state."""
    T = values.shape[1]
    scores = torch.ones((), dtype=values.dtype, device=values.device)
    for query, key in zip(queries, keys, strict=True):
        scores = scores * torch.einsum("bthk,bshk->bhts", query, key)
    causal = torch.ones(T, T, dtype=torch.bool, device=values.device).tril()  # M
    if log_decay is not None:
        g = log_decay.cumsum(1).transpose(1, 2)  # [B,H,T], g_t = log γ_t
        scores = scores * (g[..., :, None] - g[..., None, :]).masked_fill(~causal, 0).exp()  # Γ_ts = exp(g_t - g_s)
    return torch.einsum("bhts,bshv->bthv", scores.masked_fill(~causal, 0), values)


def telescoping_gate(logits: Tensor, tau: float = 16.0) -> tuple[Tensor, Tensor]:
    """The paper's forget gate in its own form: g_t = logσ(a_t)/τ, and α_t = exp(g_t - g_{t-1}) with g_0 = 0.

    Returns g and log α, both [B,T,H]. Because g_t is the *cumulative* log decay, Γ_ts = exp(g_t - g_s) telescopes: the
    rule with decay α equals the rule without decay on v_t e^{-g_t}, its outputs times e^{g_t}.
    """
    g = logsigmoid(logits) / tau
    return g, g.diff(dim=1, prepend=torch.zeros_like(g[:, :1]))
