"""The mixers a run can name."""

import inspect
import json
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor, nn

from runningtensor.layers import BASELINES, RunningTensor


class TiedKeys(RunningTensor):
    """RunningTensor of order 3 whose second key and query are the first: r = k, u = q.

    That is power attention of degree 2 with a delta rule. Built as the layer of order 2, whose channels it has.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, key_dim: int = 24, value_dim: int = 48) -> None:
        super().__init__(hidden_size, num_heads, (key_dim,), value_dim)

    @property
    def order(self) -> int:
        return 3

    @property
    def widths(self) -> tuple[int, ...]:
        return super().widths * 2

    def front(
        self, source: Tensor, T: int, position: Tensor | None, mask: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        queries, keys, values, beta, log_decay, scale, gate = super().front(source, T, position, mask)
        return queries * 2, keys * 2, values, beta, log_decay, scale, gate


MIXERS: dict[str, Callable[..., nn.Module]] = {
    "running_tensor": RunningTensor,
    "running_tensor_tied": TiedKeys,
    **BASELINES,
}


class Own(nn.Module):
    """A layer that is not of this project, in the way such layers are usually trained: its parameters stay float32,
    and in a model of bfloat16 autocast decides what is computed in that."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.state_floats = layer, getattr(layer, "state_floats", None)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        # No cache: what a CUDA graph repeats must include the copies of the weights.
        with torch.autocast(x.device.type, torch.bfloat16, x.dtype == torch.bfloat16, cache_enabled=False):
            mixed = self.layer(x.float())
        if isinstance(mixed, tuple) and mixed:
            mixed = mixed[0]
        if not isinstance(mixed, Tensor):
            raise ValueError(
                f"mixer must return a tensor, or a tuple that begins with one, but it was a {type(mixed).__name__}"
            )
        if mixed.shape != x.shape:  # it would be broadcast
            raise ValueError(f"mixer must return as much as it was given, {[*x.shape]}, but it was {[*mixed.shape]}")
        return (mixed.to(x.dtype),)


def mixer(name: str, d_model: int, options: dict[str, object]) -> nn.Module:
    """A new one of those, or module:name(d_model, **options) of one's own: a module that takes and returns
    [B,T,d_model], or a tuple that begins with it. It may say how many floats its state has, state_floats.
    """
    module, own, attribute = name.partition(":")
    if own:
        try:
            make = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"mixer must be package.module:name of what can be imported, but was {name!r}: {error}"
            ) from error
        if not callable(make):
            raise ValueError(
                f"mixer must be a class or a function that makes a layer, but {name!r} is of type {type(make).__name__}"
            )
    else:
        make = MIXERS[name]
    try:
        inspect.signature(make).bind(d_model, **options)
    except TypeError as error:
        raise ValueError(f"options must fit {name}, but were {json.dumps(options)}: {error}") from error
    made = make(d_model, **options)
    if not isinstance(made, nn.Module):  # its parameters would not be found
        raise ValueError(f"mixer must make a torch.nn.Module, but {name!r} made a {type(made).__name__}")
    return Own(made) if own else made
