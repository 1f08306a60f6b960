"""The layer's kernels as differentiable ops, `front`, `mix` and `gated_norm`, and whether they can be used."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from runningtensor.ops.eager import on_device, power_of_two, quick
from runningtensor.ops.interface import triton_refuses

BLOCK = 32  # rows of a program that mixes or norms, fewer if they are wide
LANES, SPAN = 128, 64  # of a program of the front end, and how many tokens it walks through


def usable(x: Tensor) -> bool:
    """Where the kernels of the op run, so do these, which have no matrix products."""
    return x.is_cuda and triton_refuses(x.device, x.dtype, products=False) is None


@dataclass(frozen=True)
class Front:
    """The shape of a layer's front end."""

    period: int  # channels after which the projection repeats itself
    key_dims: tuple[int, ...]
    value_dim: int
    num_heads: int
    skips: int  # channels for query-skip gates
    query_skip: bool
    delta: bool
    forget: str
    gate_conv: bool

    @property
    def sizes(self) -> list[int]:
        """Channels of q, k, u, r, v, a, b, z1, z2 and g_out: the paper's order, which decides what each reads of x."""
        pairs = [width for width in self.key_dims for _ in range(2)]
        return [self.num_heads * n for n in (*pairs, self.value_dim, 1, 1, *[1] * self.skips, self.value_dim)]

    @property
    def starts(self) -> tuple[int, ...]:
        """The channels at which they begin."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @property
    def channels(self) -> int:
        return sum(self.sizes)

    def outputs(self, x: Tensor, extra: int) -> list[Tensor]:
        """Room for queries, keys, values, β, what the forget gate gives, and the output gate."""
        lead = (x.shape[0], x.shape[1] - extra, self.num_heads)
        widths = [width + self.query_skip for width in self.key_dims]
        shapes = [(*lead, width) for width in widths * 2] + [(*lead, self.value_dim)]
        found = [x.new_empty(shape) for shape in shapes]
        found.append(x.new_empty(lead if self.delta else 0))
        found.append(x.new_empty(lead if self.forget != "none" else 0, dtype=torch.float32))
        return [*found, x.new_empty(*lead[:2], self.num_heads * self.value_dim)]

    def launch(
        self, x: Tensor, conv: Tensor, extra: int, position: Tensor | None
    ) -> tuple[int, tuple[int, int], dict[str, Any]]:
        """Spans of tokens, the grid of programs, and what they are compiled for."""
        T = x.shape[1] - extra
        span = min(SPAN, power_of_two(T))
        spans = x.shape[0] * -(-T // span)
        rows, constants = _compiled_for(self, x.shape[2], conv.shape[1], span, LANES, extra, position is not None)
        return spans, (-(-spans * self.num_heads // rows), 2 * len(self.key_dims) + 2), constants


@cache
def _compiled_for(
    front: Front, columns: int, conv_size: int, span: int, program: int, extra: int, packed: bool
) -> tuple[int, dict[str, Any]]:
    """The fewest heads that a program takes, and the constants of the kernels."""
    from runningtensor.layers.front_kernels import lanes

    rows = program // max(lanes(width) for width in (*front.key_dims, front.value_dim))
    return rows, dict(
        KEY_DIMS=front.key_dims,
        STARTS=front.starts,
        V=front.value_dim,
        H=front.num_heads,
        D=front.period,
        X=columns,
        F=front.channels,
        SIZE=conv_size,
        SPAN=span,
        LANES=program,
        num_warps=program // 32,
        EXTRA=extra,
        SKIP=int(front.query_skip),
        TELESCOPING=front.forget == "telescoping",
        GATE_CONV=front.gate_conv,
        PACKED=packed,
    )


def front(
    front: Front,
    x: Tensor,  # [B,extra+T,·]: what a projection's `compact` gives
    conv: Tensor,
    extra: int,  # tokens at the front that the convolution reads and nothing is asked of
    position: Tensor | None,
    mask: Tensor | None,
) -> list[Tensor]:
    """Queries, keys, values, β, exp(g) or log α, and the output gate, of T tokens."""
    shape = (front.period, front.key_dims, front.value_dim, front.num_heads, front.skips)
    options = (front.query_skip, front.delta, front.forget, front.gate_conv)
    return list(_quick_front(x, conv, extra, position, mask, *shape, *options))


@torch.library.custom_op("runningtensor::front", mutates_args=())
def _front(
    x: Tensor,
    conv: Tensor,
    extra: int,
    position: Tensor | None,
    mask: Tensor | None,
    period: int,
    key_dims: Sequence[int],
    value_dim: int,
    num_heads: int,
    skips: int,
    query_skip: bool,
    delta: bool,
    forget: str,
    gate_conv: bool,
) -> list[Tensor]:
    from runningtensor.layers.front_kernels import front_kernel

    front = Front(period, tuple(key_dims), value_dim, num_heads, skips, query_skip, delta, forget, gate_conv)
    x, conv = x.contiguous(), conv.contiguous()
    outputs = front.outputs(x, extra)
    if outputs[0].numel() == 0:
        return outputs
    modes = len(key_dims)
    queries, keys, (values, beta, gone, gate) = outputs[:modes], outputs[modes : 2 * modes], outputs[2 * modes :]
    _, grid, constants = front.launch(x, conv, extra, position)
    with on_device(x):
        front_kernel[grid](
            x,
            conv,
            position,
            None if mask is None else mask.contiguous(),
            tuple(queries),
            tuple(keys),
            values,
            beta if delta else None,
            gone if forget != "none" else None,
            gate,
            x.shape[0],
            x.shape[1] - extra,
            **constants,
        )
    return outputs


@_front.register_fake
def _like_front(x, conv, extra, position, mask, period, key_dims, *rest):  # type: ignore[no-untyped-def]
    return Front(period, tuple(key_dims), *rest).outputs(x, extra)


@torch.library.custom_op("runningtensor::front_backward", mutates_args=())
def _front_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    conv: Tensor,
    extra: int,
    position: Tensor | None,
    mask: Tensor | None,
    period: int,
    key_dims: Sequence[int],
    value_dim: int,
    num_heads: int,
    skips: int,
    query_skip: bool,
    delta: bool,
    forget: str,
    gate_conv: bool,
) -> tuple[Tensor, Tensor]:
    from runningtensor.layers.front_gradients import front_gradients_kernel, input_gradients_kernel

    front = Front(period, tuple(key_dims), value_dim, num_heads, skips, query_skip, delta, forget, gate_conv)
    x, conv = x.contiguous(), conv.contiguous()
    grads = [grad.contiguous() for grad in grads]
    modes, B, T, X = len(key_dims), x.shape[0], x.shape[1] - extra, x.shape[2]
    spans, grid, constants = front.launch(x, conv, extra, position)
    everything = delta and forget != "none" and (query_skip or skips == 0)
    make = x.new_empty if everything else x.new_zeros  # channels that nothing reads have no gradient
    dfused = make(B, T, front.channels)
    dconv = make(spans, *conv.shape, dtype=torch.float32)
    dx = dfused if period == front.channels == X else x.new_empty(B, T, X)  # else columns are copied or moved
    if dx.numel() > 0:
        mask = None if mask is None else mask.contiguous()
        dvalues, dbeta, dgone, dgate = grads[2 * modes :]
        with on_device(x):
            front_gradients_kernel[grid](
                x,
                conv,
                position,
                mask,
                tuple(grads[:modes]),
                tuple(grads[modes : 2 * modes]),
                dvalues,
                dbeta if delta else None,
                dgone if forget != "none" else None,
                dgate,
                dfused,
                dconv,
                B,
                T,
                C=conv.shape[0],
                **constants,
            )
    if dx is not dfused and dx.numel() > 0:
        BR, BD = 16, 64
        grid = (-(-B * T // BR), -(-X // BD))
        with on_device(x):
            input_gradients_kernel[grid](dfused, dx, B * T, D=period, X=X, F=front.channels, BR=BR, BD=BD)
    return dx, dconv.sum(0).to(conv.dtype)


@_front_backward.register_fake
def _like_front_backward(grads, x, conv, extra, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], x.shape[1] - extra, x.shape[2]), torch.empty_like(conv)


def _save_front(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, conv, ctx.extra, position, mask, *ctx.shape = inputs
    ctx.save_for_backward(x, conv, position, mask)


def _front_gradients(ctx, grads):  # type: ignore[no-untyped-def]
    x, conv, position, mask = ctx.saved_tensors
    if any(grad is None for grad in grads):
        period, key_dims, *rest = ctx.shape
        outputs = Front(period, tuple(key_dims), *rest).outputs(x, ctx.extra)
        grads = [torch.zeros_like(y) if grad is None else grad for y, grad in zip(outputs, grads, strict=True)]
    dx, dconv = _quick_front_backward(list(grads), x, conv, ctx.extra, position, mask, *ctx.shape)
    if ctx.extra > 0:  # what a cache holds has no gradient
        dx = torch.nn.functional.pad(dx, (0, 0, ctx.extra, 0))
    return dx, dconv, *[None] * (3 + len(ctx.shape))


_front.register_autograd(_front_gradients, setup_context=_save_front)
_quick_front, _quick_front_backward = quick(_front), quick(_front_backward)


def blocks_of(x: Tensor) -> tuple[int, int, int]:
    """Rows, rows of a program, and blocks of them."""
    rows = x.numel() // x.shape[-1]
    block = max(1, min(BLOCK, 4096 // power_of_two(x.shape[-1])))
    return rows, block, -(-rows // block)


@torch.library.custom_op("runningtensor::mix", mutates_args=())
def _mix(x: Tensor, taps: Tensor, width: int) -> Tensor:
    """`ConcOnlyC.compact` of x [...,D]."""
    from runningtensor.layers.kernels import mix_kernel

    x, taps, D = x.contiguous(), taps.contiguous(), x.shape[-1]
    out = x.new_empty(*x.shape[:-1], D + 2)
    rows, BR, blocks = blocks_of(x)
    if rows > 0:
        with on_device(x):
            mix_kernel[(blocks,)](x, taps, out, rows, D=D, LAST=width - 1, BR=BR, DP=power_of_two(D))
    return out


@_mix.register_fake
def _like_mix(x, taps, width):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 2)


@torch.library.custom_op("runningtensor::mix_backward", mutates_args=())
def _mix_backward(dout: Tensor, x: Tensor, taps: Tensor, width: int) -> tuple[Tensor, Tensor]:
    from runningtensor.layers.kernels import mix_gradients_kernel

    dout, x, taps, D = dout.contiguous(), x.contiguous(), taps.contiguous(), x.shape[-1]
    dx = torch.empty_like(x)
    rows, BR, blocks = blocks_of(x)
    dtaps = x.new_empty(blocks, 3, dtype=torch.float32)
    if rows > 0:
        constants = dict(D=D, LAST=width - 1, BR=BR, DP=power_of_two(D))
        with on_device(x):
            mix_gradients_kernel[(blocks,)](x, taps, dout, dx, dtaps, rows, **constants)
    return dx, dtaps.sum(0).to(taps.dtype)


@_mix_backward.register_fake
def _like_mix_backward(dout, x, taps, width):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(taps)


def _save_mix(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, taps, ctx.width = inputs
    ctx.save_for_backward(x, taps)


def _mix_gradients(ctx, dout):  # type: ignore[no-untyped-def]
    return *_quick_mix_backward(dout, *ctx.saved_tensors, ctx.width), None


_mix.register_autograd(_mix_gradients, setup_context=_save_mix)
mix, _quick_mix_backward = quick(_mix), quick(_mix_backward)


@torch.library.custom_op("runningtensor::gated_norm", mutates_args=())
def _norm(x: Tensor, gate: Tensor, scale: Tensor | None, weight: Tensor, eps: float, silu: bool) -> Tensor:
    """RMSNorm(scale x) ⊙ SiLU(gate), or σ(gate), over the last dimension of x [...,V]; scale [...]."""
    from runningtensor.layers.kernels import norm_kernel

    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty_like(x)
    rows, BR, blocks = blocks_of(x)
    V = x.shape[-1]
    if rows > 0:
        with on_device(x):
            norm_kernel[(blocks,)](
                x,
                gate,
                None if scale is None else scale.contiguous(),
                weight,
                out,
                rows,
                eps,
                SILU=silu,
                V=V,
                BR=BR,
                VP=power_of_two(V),
            )
    return out


@_norm.register_fake
def _like_norm(x, gate, scale, weight, eps, silu):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("runningtensor::gated_norm_backward", mutates_args=())
def _norm_backward(
    dout: Tensor, x: Tensor, gate: Tensor, scale: Tensor | None, weight: Tensor, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from runningtensor.layers.kernels import norm_gradients_kernel

    dout, x, gate = dout.contiguous(), x.contiguous(), gate.contiguous()
    rows, BR, blocks = blocks_of(x)
    V = x.shape[-1]
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    dscale = x.new_empty(0) if scale is None else torch.empty_like(scale, memory_format=torch.contiguous_format)
    dweight = x.new_empty(blocks, V, dtype=torch.float32)
    if rows > 0:
        with on_device(x):
            norm_gradients_kernel[(blocks,)](
                x,
                gate,
                None if scale is None else scale.contiguous(),
                weight,
                dout,
                dx,
                dgate,
                dscale,
                dweight,
                rows,
                eps,
                SILU=silu,
                V=V,
                BR=BR,
                VP=power_of_two(V),
            )
    return dx, dgate, dscale, dweight.sum(0).to(weight.dtype)


@_norm_backward.register_fake
def _like_norm_backward(dout, x, gate, scale, weight, eps, silu):  # type: ignore[no-untyped-def]
    like = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, gate)]
    return *like, x.new_empty(0) if scale is None else torch.empty_like(scale), torch.empty_like(weight)


def _save_norm(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.eps, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _norm_gradients(ctx, dout):  # type: ignore[no-untyped-def]
    x, gate, scale, weight = ctx.saved_tensors
    dx, dgate, dscale, dweight = _quick_norm_backward(dout, x, gate, scale, weight, ctx.eps, ctx.silu)
    return dx, dgate, None if scale is None else dscale, dweight, None, None


_norm.register_autograd(_norm_gradients, setup_context=_save_norm)
gated_norm, _quick_norm_backward = quick(_norm), quick(_norm_backward)
