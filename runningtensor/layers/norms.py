"""Normalisations."""

from collections.abc import Callable

import torch
from torch import Tensor, nn, sigmoid
from torch.nn.functional import silu

from runningtensor.layers.fused import gated_norm, usable


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / |x|, zero at zero with a finite gradient: eps is inside the root."""
    y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": sigmoid}


class GatedRMSNorm(nn.Module):
    """RMSNorm(scale x) ⊙ SiLU(gate), or σ(gate), over the last dimension."""

    def __init__(self, width: int, eps: float, output_gate: str = "silu") -> None:
        super().__init__()
        if output_gate not in GATES:
            raise ValueError(f"output_gate must be one of {', '.join(GATES)}, but was {output_gate!r}")
        self.eps, self.output_gate = eps, output_gate
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor, scale: Tensor | None = None) -> Tensor:
        if usable(x):
            return gated_norm(x, gate, scale, self.weight, self.eps, self.output_gate == "silu")
        y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if scale is not None:
            y = y * scale[..., None]
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (y * GATES[self.output_gate](gate.to(y.dtype))).to(x.dtype)
