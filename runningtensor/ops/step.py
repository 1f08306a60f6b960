"""One token of decoding: the recurrence of `reference.py`, in place, any order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runningtensor.ops.chunk import kron
from runningtensor.ops.eager import on_device, plain
from runningtensor.ops.interface import check_inputs, check_tensor, choose, require, state_dtype, two_modes, wrong

WIDEST_KERNEL = 4096  # features: the kernel holds them all in registers


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
    if not state.is_contiguous():
        raise wrong("state", f"of strides {state.stride()}", "contiguous, to be updated in place")
    tensors = (*queries, *keys, values, state, beta, log_decay)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    require(not tracked, "inputs", "tensors that require grad", "under torch.no_grad(): a step overwrites its state")

    q, u = two_modes(queries)
    k, r = two_modes(keys)
    if k.shape[-1] * r.shape[-1] <= WIDEST_KERNEL and choose("auto", k, r, values) == "triton":
        inputs = (q, k, u, r, values, beta, log_decay, state)
        if torch.compiler.is_compiling() or not plain(inputs):
            return _kernel_step(*inputs)
        torch.autograd.graph.increment_version(state)  # as the dispatcher does with what an op overwrites
        return _kernel_step._init_fn(*inputs)

    with torch.autocast(values.device.type, enabled=False):
        S = state.view(B, H, k.shape[-1] * r.shape[-1], V)  # the Kronecker view: a matrix rule with κ = k⊗r
        κ, φ = (kron(a.to(S.dtype), b.to(S.dtype))[:, :, None] for a, b in ((k, r), (q, u)))  # [B,H,1,K·R]
        X = values.to(S.dtype)[:, :, None]  # [B,H,1,V]
        if log_decay is not None:
            S.mul_(log_decay.to(S.dtype).exp()[..., None, None])
        if beta is not None:
            X = beta.to(S.dtype)[..., None, None] * (X - κ @ S)
        S.addcmul_(κ.mT, X)
        return (φ @ S).squeeze(2).to(values.dtype)


@torch.library.custom_op("runningtensor::step", mutates_args=("state",))
def _kernel_step(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
) -> Tensor:
    from runningtensor.ops.triton import launch

    with on_device(v):
        return launch.step(q, k, u, r, v, beta, log_decay, state)


@_kernel_step.register_fake
def _(q, k, u, r, v, beta, log_decay, state):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape)
