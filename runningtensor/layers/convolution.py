"""The short convolution: depthwise, causal, over the last few tokens of the same sequence."""

import torch
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """y_t = Σ_s w_s x_{t-s} in each channel."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"conv_size must be positive, but was {size}")
        self.weight = nn.Parameter(torch.empty(channels, size))

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5  # as torch does for a Conv1d of one channel a group
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """x [B,size-1+T,C] begins with the tokens before the first; position [T] is that in each packed sequence."""
        before = self.weight.shape[1] - 1
        T = x.shape[1] - before
        weight = self.weight.to(x.dtype)
        y = weight[:, -1] * x[:, before:]
        for s in range(1, before + 1):
            earlier = x[:, before - s : before - s + T]
            if position is not None:
                earlier = earlier.masked_fill((position < s)[:, None], 0)  # another sequence, whatever it holds
            y = y + weight[:, -1 - s] * earlier
        return y
