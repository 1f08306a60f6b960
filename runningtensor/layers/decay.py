"""Which parameters weight decay is for."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def decay_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """As an optimizer takes them. What has one dimension, norms, rates and biases, is not pulled to zero."""
    groups: tuple[list[Tensor], list[Tensor]] = ([], [])
    for p in parameters:
        groups[p.ndim < 2].append(p)
    return [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (weight_decay, 0.0), strict=True)]
