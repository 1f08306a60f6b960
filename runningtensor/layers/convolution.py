"""The short convolution: depthwise, causal, over the last few tokens of the same sequence."""

import torch
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """y_t = Σ_s w_s x_{t-s} in each channel. `window` holds the inputs of the tokens before the first."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5  # as torch does for a Conv1d of one channel a group
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, window: Tensor | None = None, position: Tensor | None = None) -> Tensor:
        """x [B,T,C], window [B,size-1,C], position [T]: where sequences are packed, of each token in its own."""
        T, size = x.shape[1], self.weight.shape[1]
        padded = self.extend(x, window)
        weight = self.weight.to(x.dtype)
        y = weight[:, -1] * x
        for s in range(1, size):
            earlier = padded[:, size - 1 - s : size - 1 - s + T]
            if position is not None:
                earlier = earlier * (position >= s)[:, None]
            y = y + weight[:, -1 - s] * earlier
        return y

    def extend(self, x: Tensor, window: Tensor | None) -> Tensor:
        """x with the tokens before it, [B,size-1+T,C]."""
        if window is None:
            window = x.new_zeros(x.shape[0], self.weight.shape[1] - 1, x.shape[2])
        return torch.cat((window.to(x.dtype), x), 1)
