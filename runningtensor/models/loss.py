"""The loss of a language model, without ever holding the logits of all tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

from runningtensor.layers.fused import usable
from runningtensor.ops.eager import on_device

IGNORE = -100  # the label of a token that is not to be predicted


class SummedLoss(torch.autograd.Function):
    """The sum of the cross entropies of `hidden @ weight.T`, which are made a few rows at a time and only once.

    Its gradient is known up to a factor when it is, so a chunk's logits become their gradient at once, which goes into
    those of hidden and weight. What is kept is as large as these: [N,D], and [V,D] summed up in float32. There is no
    second derivative.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=wide)
        dhidden = hidden.new_empty(hidden.shape) if ctx.needs_input_grad[0] else None
        dweight = weight.new_zeros(weight.shape, dtype=wide) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            ignored = (targets[rows] == IGNORE)[:, None]
            x = hidden[rows].masked_fill(ignored, 0)  # it may be anything there
            logits = x @ weight.T
            loss += cross_entropies_(logits, targets[rows]).sum()
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[rows]).masked_fill_(ignored, 0)
            if dweight is not None and dweight.is_cuda:  # bfloat16 in, float32 out: CPUs have no such product
                dweight += torch.mm(logits.T, x, out_dtype=wide)
            elif dweight is not None:
                torch.addmm(dweight, logits.T.to(wide), x.to(wide), out=dweight)
            del logits  # before there are those of the next
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        dhidden = None if dhidden is None else dhidden * dloss
        return dhidden, None if dweight is None else (dweight * dloss).to(ctx.dtype), None, None


def cross_entropies_(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each row, zero where none is to be predicted. The logits become their gradient: softmax - 1 at the target."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if usable(logits):
        from runningtensor.models.loss_kernel import loss_kernel

        losses = logits.new_empty(len(logits), dtype=wide)
        with on_device(logits):
            loss_kernel[(len(logits),)](
                logits, targets.contiguous(), losses, V=logits.shape[1], IGNORE=IGNORE, BLOCK=4096, num_warps=8
            )
        return losses
    ignored = targets == IGNORE
    target = targets.masked_fill(ignored, 0)[:, None]
    logs = log_softmax(logits, -1, dtype=wide)
    log = logs.gather(1, target)
    # In the memory of the logits; expm1, as it may be tiny.
    torch.exp(logs, out=logits).scatter_(1, target, log.expm1().to(logits.dtype))
    return -log[:, 0].masked_fill(ignored, 0)


def only_a_matrix(head: nn.Module) -> bool:
    """Not if it has a bias, or is one of PEFT's, or if hooks do something about its call."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    plain = type(head) is nn.Linear and head.bias is None and type(head.weight) in (nn.Parameter, Tensor)
    return plain and not any(hooks) and "forward" not in vars(head)
