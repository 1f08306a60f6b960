"""Layers: RunningTensor and its parts, and the mixers it is compared with."""

from runningtensor.layers.baselines import (
    BASELINES,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    LinearAttention,
    Mamba2,
    SoftmaxAttention,
)
from runningtensor.layers.running_tensor import LayerState, RunningTensor

__all__ = [
    "BASELINES",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LayerState",
    "LinearAttention",
    "Mamba2",
    "RunningTensor",
    "SoftmaxAttention",
]
