"""From d_model channels to d_fused: the paper's three ways, two of which have no matrix."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

CONV1D = 3**-0.5  # the bound torch draws the taps of such a convolution from


def tile(x: Tensor, width: int) -> Tensor:
    """[x, x, …] cut off at `width` channels."""
    return x[..., torch.arange(width, device=x.device) % x.shape[-1]]


class OneLinear(nn.Module):
    """A dense matrix, d_model · d_fused parameters."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden_size))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class ConcOnly(nn.Module):
    """Channels repeated. No parameters."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.width = width

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return tile(x, self.width)


class ConcOnlyC(nn.Module):
    """Channels repeated, then mixed with their neighbours: y_c = Σ_k w_k x̃_{c+k}, k from -1 to 1. Three parameters."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.taps = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.taps, -CONV1D, CONV1D)

    def forward(self, x: Tensor) -> Tensor:
        before, here, after = self.taps.to(x.dtype)
        # x̃ is periodic, so mixing and repeating commute, and to mix d_model channels is cheaper than to mix d_fused.
        # Only at its two ends x̃ stops where a period would go on.
        y = tile(before * x.roll(1, -1) + here * x + after * x.roll(-1, -1), self.width)
        first = y[..., :1] - before * x[..., -1:]
        end = self.width % x.shape[-1]  # the channel that would follow
        last = y[..., -1:] - after * x[..., end : end + 1]
        return torch.cat((first, y[..., 1:-1], last), -1)


PROJECTIONS: dict[str, type[OneLinear] | type[ConcOnly] | type[ConcOnlyC]] = {
    "conconlyc": ConcOnlyC,
    "conconly": ConcOnly,
    "linear": OneLinear,
}
