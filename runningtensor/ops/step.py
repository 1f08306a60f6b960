"""One token of decoding: the recurrence of `reference.py`, in place, any order."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from runningtensor.ops.chunk import kron
from runningtensor.ops.interface import check_inputs, check_tensor, require, state_dtype


def running_tensor_step(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """Writes one token into `state`, in place, and reads it: the outputs `[B,H,V]`.

    Args:
        queries, keys: order-1 tensors each, `[B,H,K_i]`.
        values: `[B,H,V]`.
        state: `[B,H,K_1,…,V]`, float32 (float64 with float64 inputs), as `running_tensor` returns it.
        beta, log_decay: `[B,H]` or None, as for `running_tensor`.

    Not differentiable, since it overwrites the state: train with `running_tensor`, decode under `torch.no_grad()`.
    """
    queries, keys = check_inputs(queries, keys, values, beta, log_decay, "BH")
    B, H, V = values.shape
    widths = [key.shape[-1] for key in keys]
    check_tensor("state", state, [B, H, *widths, V], (state_dtype(values),), values.device)
    require(state.is_contiguous(), "state", f"of strides {state.stride()}", "contiguous, to be updated in place")
    tensors = (*queries, *keys, values, state, beta, log_decay)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    require(not tracked, "inputs", "tensors that require grad", "under torch.no_grad(): a step overwrites its state")

    S = state.view(B, H, -1, V)  # the Kronecker view: a matrix rule with κ = k⊗r
    κ, φ = (reduce(kron, [x.to(state.dtype) for x in modes])[:, :, None] for modes in (keys, queries))  # [B,H,1,K·R]
    X = values.to(state.dtype)[:, :, None]  # [B,H,1,V]
    if log_decay is not None:
        S.mul_(log_decay.to(state.dtype).exp()[..., None, None])
    if beta is not None:
        X = beta.to(state.dtype)[..., None, None] * (X - κ @ S)
    S.addcmul_(κ.mT, X)
    return (φ @ S).squeeze(2).to(values.dtype)
