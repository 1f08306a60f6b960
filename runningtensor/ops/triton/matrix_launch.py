"""Launches the kernels for matrix states: as launch.py does those for any order, where its `on_matrix` says so."""

from typing import Any

import torch
from torch import Tensor

from runningtensor.ops.chunk import Inputs
from runningtensor.ops.triton import matrix
from runningtensor.ops.triton.shape import Shape, cdiv, power

WIDEST = 256  # of keys: a program holds all rows of its columns of a state


def prepare(inputs: Inputs, x: Shape, inverse: Tensor | None, backward: bool = False) -> Tensor:
    """PM of every chunk, and in the forward M, into `inverse`."""
    q, k, _, _, v, beta, log_decay = inputs
    mixed = v.new_empty(x.chunks, x.H, 64, 64)
    matrix.prepare_kernel[(x.chunks, x.H)](
        q,
        k,
        beta,
        log_decay,
        inverse,
        mixed,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        x.sequences,
        BK=min(64, power(x.K, 16)),
        SOLVE=x.delta and not backward,
        num_warps=4,
        **constants(x),
    )
    return mixed


def in_parts(inverse: Tensor | None, v: Tensor) -> Tensor | None:
    """Float32 has the room of the two half precise parts that M is kept in."""
    return None if inverse is None else inverse.view(v.dtype)


def constants(x: Shape) -> dict[str, Any]:
    packed = x.cu_seqlens is not None
    return dict(H=x.H, K=x.K, DELTA=x.delta, DECAY=x.decay, PACKED=packed, PREC=x.precision)


def scans(x: Shape, v: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid and the constants of a scan: fewer columns a program where there are few sequences and heads, and fewer
    columns and chunks on their way where shared memory would not hold more."""
    many = roomy = False
    if v.is_cuda:
        gpu = torch.cuda.get_device_properties(v.device)
        many = x.sequences * x.H >= gpu.multi_processor_count
        roomy = getattr(gpu, "shared_memory_per_block_optin", 0) >= 200 * 1024
    KP = power(x.K, 16)
    BV = min(power(x.V, 16), 16 if not many else 64 if roomy and KP <= 128 else 32)
    blocks = dict(V=x.V, KP=KP, BV=BV, num_warps=8 if KP * BV > 4096 else 4)
    blocks["num_stages"] = 1 + roomy + (KP <= 128)
    return (x.sequences * x.H, cdiv(x.V, BV)), blocks | constants(x)


def forward(
    inputs: Inputs, initial_state: Tensor | None, x: Shape, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `launch.forward`."""
    v = inputs[4]
    out = torch.empty_like(v)
    inverse = v.new_empty(*v.shape[:3], 64, dtype=torch.float32) if x.delta else None
    final = v.new_empty(x.sequences, x.H, x.K, 1, x.V, dtype=torch.float32) if keep else None
    halves = in_parts(inverse, v)
    mixed = prepare(inputs, x, halves)
    scan(inputs, x, halves, mixed, initial_state, final=final, out=out)
    return out, final, inverse


def scan(
    inputs: Inputs,
    x: Shape,
    inverse: Tensor | None,
    mixed: Tensor | None,
    initial: Tensor | None,
    final: Tensor | None = None,
    out: Tensor | None = None,
    states: Tensor | None = None,
    recalled: Tensor | None = None,
    writes: Tensor | None = None,
) -> None:
    q, k, _, _, v, beta, log_decay = inputs
    grid, sizes = scans(x, v)
    matrix.scan_kernel[grid](
        q,
        k,
        v,
        beta,
        log_decay,
        inverse,
        mixed,
        None if initial is None else initial.contiguous(),
        final,
        out,
        states,
        recalled,
        writes,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        INITIAL=initial is not None,
        FINAL=final is not None,
        OUT=out is not None,
        SAVE=states is not None,
        **sizes,
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
    """Fills the gradients of q, k, v, beta and log_decay and returns that of the initial state."""
    q, k, _, _, v, beta, log_decay = inputs
    dq, dk, dv, dbeta, dlog = gradients
    inverse = in_parts(inverse, v)
    states = v.new_empty(x.chunks, x.H, x.K, x.V)
    dstates = torch.empty_like(states)
    recalled, writes, solved = (torch.empty_like(v) for _ in range(3)) if x.delta else (None, v, None)
    scan(inputs, x, inverse, None, initial_state, states=states, recalled=recalled, writes=writes)
    mixed = prepare(inputs, x, inverse, backward=True)
    dinitial = None if initial_state is None else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    grid, sizes = scans(x, v)
    matrix.reverse_kernel[grid](
        q,
        k,
        beta,
        log_decay,
        inverse,
        mixed,
        dout,
        None if dfinal is None else dfinal.contiguous(),
        dinitial,
        dstates,
        solved,
        dv,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        INITIAL=dinitial is not None,
        FINAL=dfinal is not None,
        **sizes,
    )
    matrix.gradients_kernel[(x.chunks, x.H)](
        q,
        k,
        v,
        beta,
        log_decay,
        dout,
        states,
        dstates,
        recalled,
        writes,
        solved,
        dv,
        dq,
        dk,
        dbeta,
        dlog,
        x.cu_seqlens,
        x.chunk_starts,
        x.T,
        x.sequences,
        V=x.V,
        BK=min(64, power(x.K, 16)),
        BV=min(64, power(x.V, 16)),
        num_warps=4,
        num_stages=1,
        **constants(x),
    )
    return dinitial
