"""The shape of a problem, and the constants that kernels are compiled with for it."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from runningtensor.ops.chunk import Inputs
from runningtensor.ops.eager import power_of_two

VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])


def power(n: int, least: int = 32) -> int:
    # Products of 16 columns read out of bounds on Hopper with Triton before 3.7.1.
    return max(least, power_of_two(n))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Shape:
    """What the kernels are compiled for, and the tensors that say where sequences and chunks begin."""

    T: int
    H: int
    K: int
    R: int
    V: int
    C: int
    sequences: int
    chunks: int  # or a little more, where sequences are packed: the device knows, the host need not
    cu_seqlens: Tensor | None
    chunk_starts: Tensor | None
    delta: bool
    decay: bool
    precision: str

    @staticmethod
    def make(inputs: Inputs, cu_seqlens: Tensor | None, chunk: int) -> "Shape":
        _, k, _, r, v, beta, log_decay = inputs
        B, T, H, V = v.shape
        starts = None
        sequences, chunks = B, B * cdiv(T, chunk)
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.contiguous()  # as the kernels read it
            sequences = len(cu_seqlens) - 1
            chunks = T // chunk + sequences
            starts = torch.zeros(sequences + 1, dtype=torch.int32, device=v.device)
            starts[1:] = ((cu_seqlens.diff() + chunk - 1) // chunk).cumsum(0)
        high = v.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        precision = "ieee" if high else "tf32"
        delta, decay = beta is not None, log_decay is not None
        K, R = k.shape[-1], r.shape[-1]
        return Shape(T, H, K, R, V, chunk, sequences, chunks, cu_seqlens, starts, delta, decay, precision)

    def sizes(self) -> dict[str, Any]:
        """The constants all kernels share."""
        return dict(
            H=self.H,
            K=self.K,
            R=self.R,
            C=self.C,
            BK=min(64, power(self.K)),
            RP=power(self.R),
            DECAY=self.decay,
            PACKED=self.cu_seqlens is not None,
            PREC=self.precision,
        )

    def slabs(self, v: Tensor, most: int) -> dict[str, int]:
        """How many features are taken together. In full float32 few: larger products take minutes to compile."""
        most = 32 if v.dtype == torch.float32 else most
        BD = max(power(self.R), min(most, power(self.K * self.R)))
        return dict(V=self.V, BD=BD, num_warps=self.warps, num_stages=1)

    @property
    def warps(self) -> int:
        # A product in full float32 is unrolled: with four warps it takes four times as long to compile.
        return 16 if self.precision == "ieee" else 4
