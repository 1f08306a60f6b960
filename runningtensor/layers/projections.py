"""From d_model channels to d_fused: the paper's three ways, two of which have no matrix."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from runningtensor.layers.fused import mix, usable

CONV1D = 3**-0.5  # the bound torch draws the taps of such a convolution from


class Projection(nn.Module):
    """d_model channels to `width`, in two steps: `compact` does the work, `spread` repeats columns and nothing else.

    What lies between is all that the convolution over time has to be given, and has to keep of the last tokens.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.hidden_size, self.width = hidden_size, width

    @property
    def compact_width(self) -> int:
        return self.hidden_size

    def reset_parameters(self) -> None:
        pass

    def compact(self, x: Tensor) -> Tensor:
        return x

    def columns(self, device: torch.device) -> Tensor:
        """Of the compact form, for each channel."""
        return torch.arange(self.width, device=device) % self.hidden_size

    def spread(self, x: Tensor) -> Tensor:
        return x[..., self.columns(x.device)]

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(self.compact(x))


class ConcOnly(Projection):
    """Channels repeated: [x, x, …], cut off at the width. No parameters."""


class ConcOnlyC(Projection):
    """Channels repeated, then mixed with their neighbours: y_c = Σ_k w_k x̃_{c+k}, k from -1 to 1. Three parameters."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__(hidden_size, width)
        self.taps = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.taps, -CONV1D, CONV1D)

    @property
    def compact_width(self) -> int:
        return self.hidden_size + 2

    def compact(self, x: Tensor) -> Tensor:
        """The mixed channels, and two more: x̃ is periodic, so mixing and repeating commute, but for its two ends."""
        if usable(x):
            return mix(x, self.taps, self.width)
        before, here, after = self.taps.to(x.dtype)

        def column(c: int) -> Tensor:
            return x[..., c % self.hidden_size, None]

        last = self.width - 1
        first_one = here * column(0) + after * column(1)
        last_one = before * column(last - 1) + here * column(last)
        mixed = before * x.roll(1, -1) + here * x + after * x.roll(-1, -1)
        return torch.cat((mixed, first_one, last_one), -1)

    def columns(self, device: torch.device) -> Tensor:
        ends = torch.arange(self.hidden_size, self.hidden_size + 2, device=device)
        return torch.cat((ends[:1], super().columns(device)[1:-1], ends[1:]))


class OneLinear(Projection):
    """A dense matrix, d_model · d_fused parameters."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__(width, width)
        self.weight = nn.Parameter(torch.empty(width, hidden_size))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def compact(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def spread(self, x: Tensor) -> Tensor:
        return x


PROJECTIONS: dict[str, type[Projection]] = {"conconlyc": ConcOnlyC, "conconly": ConcOnly, "linear": OneLinear}
