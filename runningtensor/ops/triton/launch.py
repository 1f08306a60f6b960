"""Launches the kernels: the same two functions as chunk.py, `forward` and `backward`, and `step`.

No autotuning: a table chooses the block sizes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from runningtensor.ops.chunk import Inputs
from runningtensor.ops.eager import power_of_two
from runningtensor.ops.triton import hopper, hopper_gradients, hopper_pack, hopper_reverse, hopper_scan
from runningtensor.ops.triton.backward import gradients_kernel, reverse_kernel
from runningtensor.ops.triton.forward import local_kernel, scan_kernel
from runningtensor.ops.triton.step import step_kernel

VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
INTERPRETED = isinstance(scan_kernel, InterpretedFunction)


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be used here, or None where they can."""
    if dtype == torch.float64:
        return "the kernels take float32, bfloat16 and float16, not float64"
    if INTERPRETED:
        return None  # tests, on any device
    if device.type != "cuda":
        return f"tensors are on {device}, not on a CUDA device"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is not an NVIDIA GPU of compute capability 8.0 or newer"
    if VERSION < (3, 6):
        return f"Triton {triton.__version__} is older than 3.6, and some Triton before that miscompile these kernels"
    return None


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


def forward(
    inputs: Inputs, initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk: int, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `chunk.forward`."""
    inputs = contiguous(inputs)
    v = inputs[4]
    x = Shape.make(inputs, cu_seqlens, chunk)
    out = torch.empty_like(v)
    if on_hopper(x.K, x.R, x.C, v):
        inverse = v.new_empty(*v.shape[:3], x.C) if x.delta else None
        state = v.new_empty(x.sequences, x.H, x.K, x.R, x.V, dtype=torch.float32) if keep else None
        packed = pack(inputs, x, inverse)
        scan_on_hopper(packed, inputs, x, initial_state, inverse, final=state, out=out)
        return out, state, inverse
    inverse = invert(inputs, x) if x.delta else None
    state = start_state(initial_state, x, v)
    scan(inputs, x, state, inverse, out=out)
    return out, state if keep else None, inverse


def on_hopper(K: int, R: int, chunk: int, v: Tensor) -> bool:
    """Whether the kernels for Hopper take this: bfloat16 or float16, some widths of keys, V a multiple of 16."""
    if v.device.type != "cuda" or torch.cuda.get_device_capability(v.device)[0] != 9:
        return False
    return (K, R) in hopper.SHAPES and v.shape[-1] % 16 == 0 and chunk == 64 and v.dtype != torch.float32


def inverse_dtype(K: int, R: int, chunk: int, v: Tensor) -> torch.dtype:
    """hopper_pack.py multiplies P by the inverse before it rounds; the general kernels need all of its digits."""
    return v.dtype if on_hopper(K, R, chunk, v) else torch.float32


@dataclass(frozen=True)
class Packed:
    """What the scans on Hopper need of every chunk, laid out by `pack_kernel`, and how they are launched."""

    arrays: tuple[Tensor | None, ...]  # multipliers, bases, late bases, PM, scales
    gamma: Tensor | None
    where: tuple[object, ...]
    constants: dict[str, int]
    grid: tuple[int, int]


def value_blocks(V: int, most: int) -> tuple[int, int]:
    return next((a, b) for a, b in ((64, 0), (32, 16), (32, 0), (16, 0)) if V % (a + b) == 0 and a + b <= most)


def pack(inputs: Inputs, x: Shape, inverse: Tensor | None, backward: bool = False) -> Packed:
    q, k, u, r, v, beta, log_decay = inputs
    ones, steps, tiles, bases, factors = hopper.SHAPES[x.K, x.R]
    shared: dict[str, int] = dict(H=x.H, K=x.K, R=x.R, BASES=bases, FACTORS=factors)
    shared |= dict(DELTA=x.delta, DECAY=x.decay, PACKED=x.cu_seqlens is not None)
    arrays = (
        v.new_empty(x.chunks, x.H, factors, 128),
        v.new_empty(x.chunks, x.H, 128, bases),
        v.new_empty(x.chunks, x.H, 64, bases) if x.decay else None,
        v.new_empty(x.chunks, x.H, 64, 64),
        v.new_empty(x.chunks, x.H, 2, 64, dtype=torch.float32) if x.decay else None,
    )
    gamma = v.new_empty(x.chunks, x.H, 64, 64) if x.decay and backward else None
    where = (x.cu_seqlens, x.chunk_starts, x.T)
    hopper_pack.pack_kernel[(x.chunks, x.H)](
        q,
        k,
        u,
        r,
        beta,
        log_decay,
        *arrays,
        gamma,
        inverse,
        *where,
        x.sequences,
        SOLVE=x.delta and not backward,
        GAMMA=gamma is not None,
        num_warps=4,
        num_stages=1,
        maxnreg=168,  # three programs at a time on a multiprocessor
        **shared,
    )
    # Value columns a program: as many as the registers hold, or fewer, to fill the GPU with few sequences and heads.
    few = 2 * x.sequences * x.H <= torch.cuda.get_device_properties(v.device).multi_processor_count
    V1, V2 = value_blocks(x.V, 16 if few else 240 // tiles)
    shared |= dict(V=x.V, V1=V1, V2=V2, ONES=ones, STEPS=steps, TILES=tiles, num_warps=8)
    return Packed(arrays, gamma, where, shared, (x.sequences * x.H, x.V // (V1 + V2)))


def scan_on_hopper(
    packed: Packed,
    inputs: Inputs,
    x: Shape,
    initial: Tensor | None,
    inverse: Tensor | None,
    final: Tensor | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    recalled: Tensor | None = None,
    writes: Tensor | None = None,
) -> None:
    hopper_scan.scan_kernel[packed.grid](
        *packed.arrays,
        inverse,
        inputs[4],
        inputs[5],
        None if initial is None else initial.contiguous(),
        final,
        out,
        states,
        recalled,
        writes,
        *packed.where,
        INITIAL=initial is not None,
        FINAL=final is not None,
        OUT=out is not None,
        SAVE=states is not None,
        **packed.constants,
    )


def invert(inputs: Inputs, x: Shape) -> Tensor:
    _, k, _, r, v, beta, log_decay = inputs
    inverse = v.new_empty(*v.shape[:3], x.C, dtype=torch.float32)
    solve = "ieee" if v.dtype == torch.float32 else "tf32x3"
    local_kernel[(x.chunks, x.H)](
        k,
        r,
        beta,
        log_decay,
        inverse,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        x.sequences,
        SOLVE=solve,
        num_warps=x.warps,
        num_stages=1,
        **x.sizes(),
    )
    return inverse


def scan(
    inputs: Inputs,
    x: Shape,
    state: Tensor,
    inverse: Tensor | None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    recalled: Tensor | None = None,
    writes: Tensor | None = None,
) -> None:
    v = inputs[4]
    BV = min(64, power(x.V))
    scan_kernel[(x.sequences * x.H, cdiv(x.V, BV))](
        *inputs,
        inverse,
        state,
        out,
        states,
        recalled,
        writes,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        BV=BV,
        DELTA=x.delta,
        OUT=out is not None,
        SAVE=states is not None,
        **x.sizes(),
        **x.slabs(v, 64),
    )


def backward(
    dout: Tensor,
    dfinal: Tensor | None,
    inputs: Inputs,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor | None,
    chunk: int,
) -> tuple[Tensor | None, ...]:
    """As `chunk.backward`."""
    given = [x.dtype for x in inputs[:2]]
    inputs = contiguous(inputs)
    q, k, u, r, v, beta, log_decay = inputs
    dout = dout.contiguous()
    x = Shape.make(inputs, cu_seqlens, chunk)
    dq, dk, du, dr, dv = (torch.empty_like(y) for y in inputs[:5])
    dbeta, dlog = (None if y is None else torch.empty_like(y) for y in (beta, log_decay))
    if on_hopper(x.K, x.R, x.C, v):
        gradients = [dq, dk, du, dr, dv, dbeta, dlog]
        dstate = backward_on_hopper(dout, dfinal, inputs, initial_state, inverse, x, gradients)
        return dq.to(given[0]), dk.to(given[1]), du, dr, dv, dbeta, dlog, dstate
    states = v.new_empty(x.chunks, x.H, x.K * x.R, x.V)
    dstates = torch.empty_like(states)
    recalled, writes, solved = (torch.empty_like(v) for _ in range(3))
    scan(inputs, x, start_state(initial_state, x, v), inverse, states=states, recalled=recalled, writes=writes)
    dstate = start_state(dfinal, x, v)
    BV = min(64, power(x.V))
    reverse_kernel[(x.sequences * x.H, cdiv(x.V, BV))](
        q,
        k,
        u,
        r,
        beta,
        log_decay,
        inverse,
        dout,
        dstate,
        dstates,
        solved,
        dv,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        BV=BV,
        DELTA=x.delta,
        **x.sizes(),
        **x.slabs(v, 64),
    )
    slabs = x.slabs(v, 128)
    sizes = x.sizes()
    sizes["KW"] = power(slabs["BD"] // x.R)
    if VERSION < (3, 7, 1):  # gives wrong du and dr where these widths differ
        sizes["KW"] = sizes["RP"] = max(sizes["KW"], sizes["RP"])
    gradients_kernel[(x.chunks, x.H)](
        *inputs,
        dout,
        states,
        dstates,
        recalled,
        writes,
        solved,
        dv,
        dq,
        dk,
        du,
        dr,
        dbeta,
        dlog,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        x.sequences,
        BV=16,
        DELTA=x.delta,
        **sizes,
        **slabs,
    )
    return dq.to(given[0]), dk.to(given[1]), du, dr, dv, dbeta, dlog, None if initial_state is None else dstate


def backward_on_hopper(
    dout: Tensor,
    dfinal: Tensor | None,
    inputs: Inputs,
    initial_state: Tensor | None,
    inverse: Tensor | None,
    x: Shape,
    gradients: list[Tensor | None],
) -> Tensor | None:
    """Fills the gradients of the inputs and returns that of the initial state."""
    q, k, u, r, v, beta, log_decay = inputs
    dq, dk, du, dr, dv, dbeta, dlog = gradients
    packed = pack(inputs, x, inverse, backward=True)
    states = v.new_empty(x.chunks, x.H, packed.constants["TILES"] * 128, x.V)
    recalled, writes = torch.empty_like(v), torch.empty_like(v)
    solved = torch.empty_like(v) if x.delta else None
    given = torch.empty_like(v) if x.decay else None
    scan_on_hopper(packed, inputs, x, initial_state, inverse, states=states, recalled=recalled, writes=writes)
    dstates = torch.empty_like(states)
    dinitial = None if initial_state is None else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    hopper_reverse.reverse_kernel[packed.grid](
        *packed.arrays,
        inverse,
        beta,
        dout,
        None if dfinal is None else dfinal.contiguous(),
        dinitial,
        dstates,
        solved,
        given,
        dv,
        *packed.where,
        FINAL=dfinal is not None,
        INITIAL=dinitial is not None,
        **packed.constants,
    )
    multipliers, scales = packed.arrays[0], packed.arrays[-1]
    names = ("H", "K", "R", "V", "ONES", "TILES", "FACTORS", "DELTA", "DECAY", "PACKED")
    constants = {name: packed.constants[name] for name in names}
    constants["V1"], constants["V2"] = value_blocks(x.V, 64)
    lines = [None if log_decay is None else torch.empty_like(log_decay, dtype=torch.float32) for _ in range(3)]
    met_keys, met_queries, gave = lines
    passed = v.new_empty(x.chunks, x.H, dtype=torch.float32) if x.decay else None
    for keys, outputs in ((True, (dk, dr, dbeta, met_keys)), (False, (dq, du, None, met_queries))):
        hopper_gradients.gradients_kernel[(x.chunks, x.H)](
            q,
            k,
            u,
            r,
            v,
            beta,
            multipliers,
            packed.gamma,
            scales,
            dout,
            states,
            dstates,
            recalled,
            writes,
            solved,
            given,
            dv,
            *outputs,
            gave,
            passed,
            *packed.where,
            x.sequences,
            KEYS=keys,
            num_warps=4,
            **constants,
        )
    if dlog is not None:
        hopper_gradients.decay_kernel[(x.chunks, x.H)](
            met_keys,
            met_queries,
            gave,
            passed,
            scales,
            dlog,
            *packed.where,
            x.sequences,
            H=x.H,
            PACKED=constants["PACKED"],
            num_warps=1,
        )
    return dinitial


def step(
    q: Tensor,  # [B,H,K]
    k: Tensor,
    u: Tensor,
    r: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,  # [B,H,K,R,V], updated in place
) -> Tensor:
    q, k, u, r, v = (x.contiguous() for x in (q, k, u, r, v))
    beta, log_decay = (x if x is None else x.contiguous() for x in (beta, log_decay))
    (B, H, K), R, V = k.shape, r.shape[-1], v.shape[-1]
    out = torch.empty_like(v)
    wide = K * R > 1024
    BV = min(16 if wide else 64, power(V, 16))
    D1 = power(K * R + 1) // 2 if K * R > 16 else 16
    step_kernel[(B * H, cdiv(V, BV))](
        q,
        k,
        u,
        r,
        v,
        beta,
        log_decay,
        state,
        out,
        K=K,
        R=R,
        V=V,
        D1=D1,
        D2=power(K * R - D1, 16) if K * R > D1 else 0,
        BV=BV,
        DELTA=beta is not None,
        DECAY=log_decay is not None,
        num_warps=16 if wide else 8 if K * R > 256 else 4,
    )
    return out


def contiguous(inputs: Inputs) -> Inputs:
    q, k, u, r, v, beta, log_decay = (x if x is None else x.contiguous() for x in inputs)
    assert q is not None and k is not None and u is not None and r is not None and v is not None
    # From order 4 on, k is a product of keys in float32; here it is an operand of a matrix product like any other.
    return q.to(v.dtype), k.to(v.dtype), u, r, v, beta, log_decay


def start_state(state: Tensor | None, x: Shape, v: Tensor) -> Tensor:
    """A copy of the state, or zeros: [N,H,K,R,V] float32, to be updated in place."""
    shape = (x.sequences, x.H, x.K, x.R, x.V)
    if state is None:
        return v.new_zeros(shape, dtype=torch.float32)
    return state.clone(memory_format=torch.contiguous_format)
