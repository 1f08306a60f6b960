"""Little before a kernel: custom ops without torch's dispatcher, which takes longer than a small kernel runs."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PLAIN = (Tensor, nn.Parameter)


def quick(op: Any) -> Callable[..., Any]:
    """A custom op, called directly where nobody would notice: in eager mode, on tensors of no kind of their own."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = op._init_fn(*inputs)
            op._setup_context_fn(ctx, inputs, output)
            ctx.many = isinstance(output, list)
            return tuple(output) if ctx.many else output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return op._backward_fn(ctx, grads) if ctx.many else op._backward_fn(ctx, *grads)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not plain(inputs):
            return op(*inputs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors(inputs)):
            return Function.apply(*inputs) if op._backward_fn is not None else op(*inputs)
        return op._init_fn(*inputs)

    return call


def tensors(inputs: Iterable[Any]) -> list[Tensor]:
    found = []
    for x in inputs:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list):
            found += tensors(x)
    return found


def plain(inputs: Iterable[Any]) -> bool:
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return False
    return all(type(x) in PLAIN and not x.is_meta for x in tensors(inputs))


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, wherever the tensors are; to change it takes time, and is rarely needed."""
    here = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(x.device)


def power_of_two(n: int) -> int:
    """At least n. Triton's own function takes as long as a launch."""
    return 1 << (n - 1).bit_length()
