"""Causal softmax attention with grouped heads: of a batch, and of sequences packed one after another.

Packed sequences never see a mask over the whole row, whose T² numbers a long row could not hold. On a GPU torch's flash
kernels take them as they are; elsewhere, and in wider types, one sequence is done after another.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runningtensor.ops.interface import check_packing, check_tensor, require

HALF = (torch.bfloat16, torch.float16)
ROWS = 64  # queries whose scores are held at a time, backward and without a kernel


def attention(
    q: Tensor,  # [B,T,H,K]
    k: Tensor,  # [B,T,G,K], where G divides H
    v: Tensor,  # [B,T,G,K]
    cu_seqlens: Tensor | None = None,  # [N+1], B = 1
) -> Tensor:
    """[B,T,H,K], in the type of the values; scores are scaled by 1/√K."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    if cu_seqlens is None:
        return attend(q, k, v)
    check_bounds(cu_seqlens, q)
    return _packed(q[0], k[0], v[0], cu_seqlens)[0][None]


def check_bounds(cu_seqlens: Tensor, x: Tensor) -> None:
    """Of the sequences packed in x [B,T,…]."""
    B, T = x.shape[:2]
    check_tensor("cu_seqlens", cu_seqlens, ["N+1"], (torch.int32, torch.int64), x.device)
    require(len(cu_seqlens) > 0, "cu_seqlens", "an empty tensor", "[0, …, T]")
    require(B == 1, "cu_seqlens", f"given with a batch of {B}", "of a batch of 1: pack the sequences along T")
    if not torch.compiler.is_compiling():
        check_packing(cu_seqlens, T)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B,H,T,K]
    grouped = v.dtype in HALF  # in wider types torch has grouped heads only where it holds all T² scores
    if not grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def flash(q: Tensor) -> bool:
    """Whether torch's flash kernels take such heads."""
    return (
        q.is_cuda
        and q.numel() > 0
        and q.dtype in HALF
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.version.hip is None
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def flash_bounds(cu_seqlens: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor, int, int]:
    """As the kernels want them. At 1, where every sequence is of one token, they would stumble over empty ones."""
    longest = max(2, *(end - start for start, end in pairwise(bounds)))
    return cu_seqlens.int(), cu_seqlens.int(), longest, longest


# An op, as the bounds are in the data: torch.compile sees one call. The flash kernels are called as torch's own
# `varlen_attn` calls them; that function's arguments have changed with every version, and these have not.
@torch.library.custom_op("runningtensor::packed_attention", mutates_args=())
def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """[T,H,K], and the logs of the sums of each softmax, which are empty where no kernel made them."""
    bounds = check_packing(cu_seqlens, q.shape[0])
    if flash(q):
        dropout, causal, debug = 0.0, True, False
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *flash_bounds(cu_seqlens, bounds), dropout, causal, debug
        )
        return out, sums
    out = torch.empty_like(q)
    with torch.autocast(q.device.type, enabled=False):
        for start, end in pairwise(bounds):
            if start < end:
                out[start:end] = attend(*(x[None, start:end] for x in (q, k, v)))[0]
    return out, q.new_empty(0, dtype=torch.float)


@_packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]) if flash(q) else 0, dtype=torch.float)


@torch.library.custom_op("runningtensor::packed_attention_backward", mutates_args=())
def _packed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = check_packing(cu_seqlens, q.shape[0])
    if flash(q):
        dropout, causal = 0.0, True
        seed, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # of the dropout that there is not
        ends = flash_bounds(cu_seqlens, bounds)
        return torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, sums, *ends, dropout, causal, seed, unused
        )
    wide = torch.promote_types(q.dtype, torch.float)
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        for first, last in pairwise(bounds):
            for start in range(first, last, ROWS):
                end = min(start + ROWS, last)
                qs, ds = (x[start:end].transpose(0, 1).to(wide) for x in (q, dout))  # [H,·,K]
                ks, vs = (x[first:end].transpose(0, 1).to(wide).repeat_interleave(groups, 0) for x in (k, v))
                scores = scale * qs @ ks.mT
                future = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + start - first)
                weights = scores.masked_fill(future, -torch.inf).softmax(-1)
                dweights = ds @ vs.mT
                dscores = scale * weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
                dq[start:end] = (dscores @ ks).transpose(0, 1)
                for grad, each in ((dk, dscores.mT @ qs), (dv, weights.mT @ ds)):
                    grad[first:end] += each.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@_packed_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_packed_backward(dout, *ctx.saved_tensors), None


_packed.register_autograd(_differentiate, setup_context=_save)
