"""Layers: RunningTensor and its parts."""

from runningtensor.layers.running_tensor import LayerState, RunningTensor

__all__ = ["LayerState", "RunningTensor"]
