"""Launches the kernels for Hopper: as launch.py does those for any GPU, where `on_hopper` says so."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runningtensor.ops.chunk import Inputs
from runningtensor.ops.triton import hopper, hopper_gradients, hopper_pack, hopper_reverse, hopper_scan
from runningtensor.ops.triton.shape import VERSION, Shape

NOT_TRIED = (3, 10)  # Triton's Gluon, which these kernels are written in, changes with its releases


def on_hopper(K: int, R: int, chunk: int, v: Tensor) -> bool:
    """Whether the kernels for Hopper take this."""
    if v.device.type != "cuda" or torch.cuda.get_device_capability(v.device)[0] != 9:
        return False
    return takes(K, R, chunk, v)


def takes(K: int, R: int, chunk: int, v: Tensor) -> bool:
    """Whether they would, on such a GPU: bfloat16 or float16, some widths of keys, V a multiple of 16."""
    known = any(k == K and r == R for k, r in hopper.SHAPES)  # not `in`: a compiler's widths cannot be hashed
    return VERSION < NOT_TRIED and known and v.shape[-1] % 16 == 0 and chunk == 64 and v.dtype != torch.float32


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


def scan(
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


def backward(
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
    scan(packed, inputs, x, initial_state, inverse, states=states, recalled=recalled, writes=writes)
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
