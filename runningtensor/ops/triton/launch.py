"""Launches the kernels: the same two functions as chunk.py, `forward` and `backward`, and `step`.

No autotuning: a table chooses the block sizes.
"""

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from runningtensor.ops.chunk import Inputs
from runningtensor.ops.triton import assembler, hopper_launch, matrix, matrix_launch
from runningtensor.ops.triton.backward import gradients_kernel, reverse_kernel
from runningtensor.ops.triton.forward import local_kernel, scan_kernel
from runningtensor.ops.triton.hopper_launch import on_hopper
from runningtensor.ops.triton.shape import VERSION, Shape, cdiv, power
from runningtensor.ops.triton.step import step_kernel

INTERPRETED = isinstance(scan_kernel, InterpretedFunction)
# All that have matrix products, but for hopper*.py.
WITH_PRODUCTS = (
    *(local_kernel, scan_kernel, reverse_kernel, gradients_kernel),
    *(matrix.prepare_kernel, matrix.scan_kernel, matrix.reverse_kernel, matrix.gradients_kernel),
)
MATRIX_KERNELS = INTERPRETED or VERSION >= (3, 7, 1)  # older Triton transposes products wrongly on Hopper


def refuses(device: torch.device, dtype: torch.dtype, products: bool = True) -> str | None:
    """Why the kernels cannot be used here, or None where they can; without `products`, all but WITH_PRODUCTS."""
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
    if products and torch.cuda.get_device_capability(device)[0] == 9:
        return assembler.refuses(WITH_PRODUCTS)
    return None


def forward(
    inputs: Inputs, initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk: int, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `chunk.forward`."""
    inputs = contiguous(inputs)
    v = inputs[4]
    x = Shape.make(inputs, cu_seqlens, chunk)
    if on_matrix(x.K, x.R, x.C, v):
        return matrix_launch.forward(inputs, initial_state, x, keep)
    out = torch.empty_like(v)
    if on_hopper(x.K, x.R, x.C, v):
        inverse = v.new_empty(*v.shape[:3], x.C) if x.delta else None
        state = v.new_empty(x.sequences, x.H, x.K, x.R, x.V, dtype=torch.float32) if keep else None
        packed = hopper_launch.pack(inputs, x, inverse)
        hopper_launch.scan(packed, inputs, x, initial_state, inverse, final=state, out=out)
        return out, state, inverse
    inverse = invert(inputs, x) if x.delta else None
    state = start_state(initial_state, x, v)
    scan(inputs, x, state, inverse, out=out)
    return out, state if keep else None, inverse


def on_matrix(K: int, R: int, chunk: int, v: Tensor) -> bool:
    """Whether the kernels for matrix states take this. Order 2 has a mode of width 1, and it alone: of ones."""
    half = INTERPRETED or v.dtype != torch.float32
    return MATRIX_KERNELS and R == 1 and K <= matrix_launch.WIDEST and chunk == 64 and half


def inverse_dtype(K: int, R: int, chunk: int, v: Tensor) -> torch.dtype:
    """hopper_pack.py multiplies P by the inverse before it rounds; the general kernels need all of its digits, and
    matrix.py has two parts of half as many."""
    return v.dtype if on_hopper(K, R, chunk, v) else torch.float32


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
        dstate = hopper_launch.backward(dout, dfinal, inputs, initial_state, inverse, x, gradients)
        return dq.to(given[0]), dk.to(given[1]), du, dr, dv, dbeta, dlog, dstate
    if on_matrix(x.K, x.R, x.C, v):
        dstate = matrix_launch.backward(dout, dfinal, inputs, initial_state, inverse, x, [dq, dk, dv, dbeta, dlog])
        return dq.to(given[0]), dk.to(given[1]), du.zero_(), dr.zero_(), dv, dbeta, dlog, dstate
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
