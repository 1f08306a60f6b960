"""Small layers, every option off or otherwise at least once."""

from itertools import pairwise

import pytest
import torch
from helpers import bounds, upstream
from torch import Tensor

from runningtensor.layers import LayerState, RunningTensor

D, H, V = 11, 2, 5
WIDTHS = {2: (4,), 3: (4, 3), 4: (3, 2, 4)}
FORGET = pytest.mark.parametrize("forget", ("telescoping", "cumulative", "none"))
# Every option off or otherwise at least once, every order with and without the delta rule.
VARIANTS = {
    "the paper": {},
    "order 2": {"order": 2},
    "order 4": {"order": 4},
    "additive": {"delta": False},
    "no skips": {"query_skip": False},
    "no skips, order 2": {"query_skip": False, "order": 2},
    "gate not convolved": {"gate_conv": False},
    "sigmoid gate": {"output_gate": "sigmoid"},
    "cumulative": {"forget": "cumulative"},
    "never forgets": {"forget": "none"},
    "repeated": {"projection": "conconly"},
    "matrix": {"projection": "linear"},
    "plain linear attention": {
        "order": 2,
        "projection": "linear",
        "delta": False,
        "query_skip": False,
        "forget": "none",
        "gate_conv": False,
    },
    "cumulative, additive, order 4": {"order": 4, "forget": "cumulative", "delta": False, "gate_conv": False},
    "no skips, repeated, order 4": {"order": 4, "query_skip": False, "projection": "conconly"},
    "convolution of one token": {"conv_size": 1},
    "convolution of two": {"conv_size": 2, "forget": "cumulative"},
}


def variants(*names):
    names = names or tuple(VARIANTS)
    return pytest.mark.parametrize("options", [VARIANTS[name] for name in names], ids=names)


SOME = variants(
    "the paper", "cumulative", "never forgets", "additive", "no skips", "order 2", "order 4", "matrix",
    "gate not convolved", "convolution of one token",
)  # fmt: skip


def make(order=3, dtype=torch.float64, seed=0, **options) -> RunningTensor:
    """A small layer. Its convolution and its norm are drawn anew, so that no tap and no channel is like another."""
    torch.manual_seed(seed)
    layer = RunningTensor(D, H, WIDTHS[order], V, layer_idx=0, **options).to(torch.float64)
    with torch.no_grad():
        layer.conv.weight.add_(torch.randn_like(layer.conv.weight), alpha=0.5)
        layer.norm.weight.add_(torch.randn_like(layer.norm.weight), alpha=0.3)
    return layer.to(dtype)


def draw(B=2, T=9, seed=1, dtype=torch.float64) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Cache:
    """As the layer wants it: an object with layers."""

    def __init__(self) -> None:
        self.layers = [LayerState()]

    def held(self) -> dict[str, Tensor]:
        return {"conv": self.layers[0].conv, "state": self.layers[0].state}


def run(layer, x, **arguments) -> Tensor:
    return layer(x, **arguments)[0]


def differentiate(layer, x, f=run, **arguments) -> dict[str, Tensor]:
    """The outputs, and the gradients of the inputs and of all parameters."""
    x = x.detach().clone().requires_grad_()
    out = f(layer, x, **arguments)
    names = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(out, list(names.values()), upstream([out])[0].to(out.dtype))
    return {"out": out.detach()} | {f"d {name}": grad for name, grad in zip(names, grads, strict=True)}


def masks(kind: str, B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.arange(B) * 3 % T + 1
    t = torch.arange(T)
    some = torch.rand(B, T, generator=generator)
    return {
        "left": t >= T - lengths[:, None],
        "right": t < lengths[:, None],
        "interior": (t < 2) | (t >= 2 + lengths[:, None]),
        "random": some < 0.5,
        "few": some < 0.2,
        "a whole row": (some < 0.7) & (torch.arange(B) != 1)[:, None],
        "all": torch.zeros(B, T, dtype=torch.bool),
        "none": torch.ones(B, T, dtype=torch.bool),
    }[kind]


def chunks(layer, x, lengths, mask=None, cache=None) -> Tensor:
    """Some tokens after others, each time with the mask of all so far."""
    cache = Cache() if cache is None else cache
    edges, outs = bounds(lengths).tolist(), []
    for start, end in pairwise(edges):
        so_far = None if mask is None else mask[:, :end]
        outs.append(run(layer, x[:, start:end], attention_mask=so_far, past_key_values=cache))
    assert cache.layers[0].tokens == edges[-1]
    return torch.cat(outs, 1)
