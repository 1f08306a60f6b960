"""The sequence mixers the paper compares with, in the shapes of its tables: hidden states in, hidden states out.

Where a rule is the op of order 2, it is called as such. Gated linear attention forgets in each key channel apart, which
the op cannot; it has its own chunk-parallel form here. Details are those of flash-linear-attention's layers, of Qwen3's
attention and of Mamba-2's own code; but the matrices that read the input are one, `in_proj`, and so are the short
convolutions.

The originals scale queries by 1/√K. Here the norm of the outputs does: RMSNorm(x/√K) is RMSNorm(x) with K·eps for eps.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, rms_norm, silu, softplus

from runningtensor.layers.attention import HALF, attention, check_bounds
from runningtensor.layers.convolution import ShortConvolution
from runningtensor.layers.norms import GATES, GatedRMSNorm, l2_normalize
from runningtensor.layers.running_tensor import positions
from runningtensor.ops import running_tensor
from runningtensor.ops.interface import DTYPES, check_tensor, require

TAU = 16  # of the forget gate of gated linear attention


class Mixer(nn.Module):
    """A layer of `num_heads` states of key_dim × value_dim, called as `RunningTensor` is; without padding and cache."""

    out_proj: nn.Linear
    products = 2  # of a token with the state: to write and to read; the delta rule has one more, to correct

    def __init__(self, hidden_size: int, num_heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        positive(hidden_size=hidden_size, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)
        self.hidden_size, self.num_heads, self.key_dim, self.value_dim = hidden_size, num_heads, key_dim, value_dim

    @property
    def state_floats(self) -> int | None:
        """What the state of a sequence holds, in all heads; None where it grows with the sequence."""
        return self.num_heads * self.key_dim * self.value_dim

    def reset_parameters(self, output_scale: float = 1.0) -> None:
        part: Any
        for part in self.children():
            part.reset_parameters()
        with torch.no_grad():
            self.out_proj.weight.mul_(output_scale)

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads of {self.key_dim}×{self.value_dim}"

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def forward(
        self,
        hidden_states: Tensor,  # [B,T,D]
        attention_mask: Tensor | None = None,  # all ones
        past_key_values: None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,  # [N+1], B = 1
        **kwargs: Any,  # what a model gives to all of its layers
    ) -> tuple[Tensor, None, None]:
        check_tensor("hidden_states", hidden_states, ["B", "T", self.hidden_size], DTYPES, None)
        name = type(self).__name__
        require(past_key_values is None, "past_key_values", "given", f"None: {name} keeps nothing between calls")
        require(not use_cache, "use_cache", use_cache, f"False: {name} keeps nothing between calls")
        if attention_mask is not None:
            refuse_padding(attention_mask)
        position = None
        if cu_seqlens is not None:
            check_bounds(cu_seqlens, hidden_states)
            position = positions(cu_seqlens, hidden_states.shape[1])
        return self.out_proj(self.mix(hidden_states, cu_seqlens, position)), None, None

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, position: Tensor | None) -> Tensor:
        """From [B,T,D] to what `out_proj` reads; position [T] is that in each packed sequence."""
        raise NotImplementedError


def refuse_padding(attention_mask: Tensor) -> None:
    wrong = "attention_mask must be all ones: this mixer has no padding. Pack the sequences and give cu_seqlens"
    if torch.compiler.is_compiling():
        torch._assert_async((attention_mask == 1).all(), wrong)
    elif not (attention_mask == 1).all():
        raise ValueError(f"{wrong}, but it had {int((attention_mask != 1).sum())} that are not")


class SoftmaxAttention(Mixer):
    """Qwen3's: grouped heads, RMSNorm of queries and keys, rotary positions."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 16,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        *,
        rope_theta: float = 1e6,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, head_dim)
        if num_kv_heads < 1 or num_heads % num_kv_heads or head_dim % 2:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads and head_dim even, "
                f"but they were {num_heads}, {num_kv_heads} and {head_dim}"
            )
        self.num_kv_heads, self.rope_theta = num_kv_heads, rope_theta
        self.in_proj = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=norm_eps)
        self.out_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.reset_parameters()

    @property
    def state_floats(self) -> None:
        return None

    def extra_repr(self) -> str:
        return f"{self.num_heads} query heads and {self.num_kv_heads} key-value heads of {self.key_dim}"

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, position: Tensor | None) -> Tensor:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = self.in_proj(x).unflatten(-1, (-1, self.key_dim)).split(heads, -2)
        if position is None:
            position = torch.arange(x.shape[1], device=x.device)
        q, k = (rotate(norm(x), position, self.rope_theta) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return attention(q, k, v, cu_seqlens).flatten(2)


class LinearAttention(Mixer):
    """The paper's section 2.1: no feature map, no normaliser; an RMSNorm of the outputs instead."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(hidden_size, num_heads, *head_dims(hidden_size, num_heads, expand_k, expand_v))
        self.sizes = [num_heads * n for n in (self.key_dim, self.key_dim, self.value_dim)]
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.norm = RMSNorm(self.value_dim, eps=self.key_dim * norm_eps)
        self.out_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, position: Tensor | None) -> Tensor:
        q, k, v = (self.heads(y) for y in self.in_proj(x).split(self.sizes, -1))
        out, _ = running_tensor((q,), (k,), v, cu_seqlens=cu_seqlens)
        return self.norm(out).flatten(-2)


class DeltaNet(Mixer):
    """The delta rule on unit keys, after a short convolution and SiLU."""

    products = 3

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(hidden_size, num_heads, *head_dims(hidden_size, num_heads, expand_k, expand_v))
        self.sizes = [num_heads * n for n in (self.key_dim, self.key_dim, self.value_dim)]
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes) + num_heads, bias=False)  # q, k, v, b
        self.conv = ShortConvolution(sum(self.sizes), conv_size)
        self.norm = RMSNorm(self.value_dim, eps=self.key_dim * norm_eps)
        self.out_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, position: Tensor | None) -> Tensor:
        qkv, b = self.in_proj(x).split((sum(self.sizes), self.num_heads), -1)
        q, k, v = (silu(self.heads(y)) for y in convolve(self.conv, qkv, position).split(self.sizes, -1))
        q, k, v = l2_normalize(q), l2_normalize(k), v.contiguous()  # the op would copy it, forward and backward
        out, _ = running_tensor((q,), (k,), v, beta=b.sigmoid(), cu_seqlens=cu_seqlens)
        return self.norm(out).flatten(-2)


class GatedDeltaNet(Mixer):
    """DeltaNet that forgets, at a rate drawn from the input, and whose outputs are gated.

    output_gate: "silu", "sigmoid" or "none", without which there are fewer parameters
    """

    products = 3

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int = 24,
        *,
        expand_v: float = 2.0,
        conv_size: int = 4,
        output_gate: str = "silu",
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, whole("head_dim · expand_v", head_dim * expand_v))
        if output_gate not in (*GATES, "none"):
            raise ValueError(f"output_gate must be one of {', '.join(GATES)}, none, but was {output_gate!r}")
        self.sizes = [num_heads * n for n in (head_dim, head_dim, self.value_dim)]
        self.gated = output_gate != "none"
        self.rest = [num_heads * n for n in (self.value_dim if self.gated else 0, 1, 1)]
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes) + sum(self.rest), bias=False)  # q, k, v, gate, a, b
        self.conv = ShortConvolution(sum(self.sizes), conv_size)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        eps = head_dim * norm_eps
        self.norm: nn.Module = (
            GatedRMSNorm(self.value_dim, eps, output_gate) if self.gated else RMSNorm(self.value_dim, eps=eps)
        )
        self.out_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, output_scale: float = 1.0) -> None:
        super().reset_parameters(output_scale)
        reset_rates(self.A_log, self.dt_bias, slowest=0)

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, position: Tensor | None) -> Tensor:
        qkv, gate, a, b = self.in_proj(x).split((sum(self.sizes), *self.rest), -1)
        q, k, v = (silu(self.heads(y)) for y in convolve(self.conv, qkv, position).split(self.sizes, -1))
        q, k, v = l2_normalize(q), l2_normalize(k), v.contiguous()
        beta, log_decay = wide(b).sigmoid(), -wide(self.A_log).exp() * softplus(wide(a) + self.dt_bias)
        out, _ = running_tensor((q,), (k,), v, beta=beta, log_decay=log_decay, cu_seqlens=cu_seqlens)
        return (self.norm(out, self.heads(gate)) if self.gated else self.norm(out)).flatten(-2)


class GatedLinearAttention(Mixer):
    """Linear attention that forgets in each key channel apart; the rates pass through few channels."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(hidden_size, num_heads, *head_dims(hidden_size, num_heads, expand_k, expand_v))
        positive(gate_rank=gate_rank)
        K, V = num_heads * self.key_dim, num_heads * self.value_dim
        self.sizes = [K, K, V, V, gate_rank]  # q, k, v, gate, forget gate
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.forget_proj = nn.Linear(gate_rank, K)
        self.norm = GatedRMSNorm(self.value_dim, self.key_dim * norm_eps)
        self.out_proj = nn.Linear(V, hidden_size, bias=False)
        self.reset_parameters()

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, position: Tensor | None) -> Tensor:
        *parts, a = self.in_proj(x).split(self.sizes, -1)
        q, k, v, gate = (self.heads(y) for y in parts)
        log_decay = logsigmoid(wide(self.heads(self.forget_proj(a)))) / TAU
        if position is not None:  # a sequence begins where all before it is forgotten
            log_decay = log_decay.masked_fill((position == 0)[:, None, None], -torch.inf)
        return self.norm(gated_linear_attention(q, k, v, log_decay), gate).flatten(-2)


class Mamba2(Mixer):
    """State-space duality: one key and one query for all heads, a step size for each, a skip from its inputs."""

    def __init__(
        self,
        hidden_size: int,
        *,
        expand: float = 2.0,
        state_dim: int = 128,
        head_dim: int = 16,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        positive(head_dim=head_dim, state_dim=state_dim)
        inner = whole("hidden_size · expand", hidden_size * expand)
        num_heads = whole("hidden_size · expand / head_dim", inner / head_dim)
        super().__init__(hidden_size, num_heads, state_dim, head_dim)
        self.sizes = [inner, state_dim, state_dim]
        self.in_proj = nn.Linear(hidden_size, inner + sum(self.sizes) + num_heads, bias=False)  # gate, x, B, C, dt
        self.conv = ShortConvolution(sum(self.sizes), conv_size)
        self.conv_bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.norm = RMSNorm(inner, eps=norm_eps)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, output_scale: float = 1.0) -> None:
        super().reset_parameters(output_scale)
        bound = self.conv.weight.shape[1] ** -0.5
        nn.init.uniform_(self.conv_bias, -bound, bound)
        reset_rates(self.A_log, self.dt_bias, slowest=1)
        nn.init.ones_(self.D)

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, position: Tensor | None) -> Tensor:
        H = self.num_heads
        gate, xBC, dt = self.in_proj(x).split((self.sizes[0], sum(self.sizes), H), -1)
        xBC = silu(convolve(self.conv, xBC, position) + self.conv_bias.to(xBC.dtype))
        x, B, C = xBC.split(self.sizes, -1)
        x = self.heads(x)
        B, C = (y[..., None, :].expand(-1, -1, H, -1) for y in (B, C))
        dt = softplus(wide(dt) + self.dt_bias)
        written, log_decay = (x * dt[..., None]).to(x.dtype), -wide(self.A_log).exp() * dt
        out, _ = running_tensor((C,), (B,), written, log_decay=log_decay, cu_seqlens=cu_seqlens)
        out = (out + self.D[:, None] * x).flatten(-2)
        return self.norm(wide(out) * silu(wide(gate))).to(gate.dtype)  # gated first, unlike the others


BASELINES: dict[str, type[Mixer]] = {
    "attention": SoftmaxAttention,
    "linear_attention": LinearAttention,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "gla": GatedLinearAttention,
    "mamba2": Mamba2,
}


# -- Gated linear attention --------------------------------------------------------------------------------------------


def gated_linear_attention(
    q: Tensor,  # [B,T,H,K]
    k: Tensor,  # [B,T,H,K]
    v: Tensor,  # [B,T,H,V]
    log_decay: Tensor,  # [B,T,H,K], not positive; -inf forgets all
    chunk_size: int = 64,  # a power of two
) -> Tensor:
    """S_t = diag(exp g_t) S_{t-1} + k_t v_tᵀ, o_t = q_tᵀ S_t, with no scale: chunk by chunk, all chunks at once.

    Every exponent is summed over its own span of tokens and none is positive: nothing overflows and nothing cancels,
    however strong the decay.
    """
    T, dtype = q.shape[1], v.dtype
    chunks = -(-T // chunk_size)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g = (
            pad(wide(x), (0, 0, 0, 0, 0, chunks * chunk_size - T)).unflatten(1, (chunks, chunk_size)).transpose(2, 3)
            for x in (q, k, v, log_decay)
        )  # [B,N,H,C,·]
        since_start = g.cumsum(-2)
        written = (k * sums_after(g).exp()).transpose(-1, -2) @ v
        before = states_before(written, since_start[..., -1, :, None].exp())
        out = decayed_scores(q, k, g) @ v + (q * since_start.exp()) @ before
        return out.transpose(2, 3).flatten(1, 2)[:, :T].to(dtype)


def decayed_scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Σ_c q_ic k_jc exp(g_{j+1,c} + … + g_{i,c}), j ≤ i [...,C,C].

    Rows are halved, and halved again. Between the second half of some rows and their first half, an exponent is what
    falls in the one and what falls in the other: a product of matrices for each size of halves. The scans are slow to
    compile; but with sums stacked half by half instead, a compiled layer on an H200 read outside its memory.
    """
    C, size = q.shape[-2], 1
    half = torch.arange(C, device=q.device)
    scores = (q * k).sum(-1).diag_embed()
    while size < C:
        halves = g.unflatten(-2, (C // size, size))
        into, out_of = halves.cumsum(-2).flatten(-3, -2), sums_after(halves).flatten(-3, -2)
        products = (q * into.exp()) @ (k * out_of.exp()).transpose(-1, -2)
        scores = scores + products.masked_fill((half[:, None] != half + 1) | (half % 2 == 1), 0)
        half, size = half // 2, 2 * size
    return scores


def sums_after(g: Tensor) -> Tensor:
    """Along the rows, of those after each."""
    return pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def states_before(written: Tensor, kept: Tensor) -> Tensor:
    """S_n, where S_{n+1} = kept_n S_n + written_n along dimension 1 and S_0 = 0: in log₂ N steps of doubled stride."""
    state, stride = written, 1
    while stride < written.shape[1]:
        state = torch.cat((state[:, :stride], state[:, stride:] + kept[:, stride:] * state[:, :-stride]), 1)
        kept = torch.cat((kept[:, :stride], kept[:, stride:] * kept[:, :-stride]), 1)
        stride *= 2
    return torch.cat((torch.zeros_like(state[:, :1]), state[:, :-1]), 1)


# -- Parts -------------------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype in HALF else x


class RMSNorm(nn.RMSNorm):
    """In float32 at least; torch's own is slow where x and the weight differ in type, as under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(wide(x), self.normalized_shape, wide(self.weight), self.eps).to(x.dtype)


def convolve(conv: ShortConvolution, x: Tensor, position: Tensor | None) -> Tensor:
    """From the first token on: nothing was before it."""
    return conv(pad(x, (0, 0, conv.weight.shape[1] - 1, 0)), position)


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:  # [B,T,H,K], [T]
    """Rotary positions; channel i turns with channel i + K/2."""
    first, second = wide(x).chunk(2, -1)
    cos, sin = _turns(position, x.shape[-1], theta, first.dtype).unbind()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


# An op, or torch.compile would have every element of queries and keys compute its own: half of attention's time.
@torch.library.custom_op("runningtensor::turns", mutates_args=())
def _turns(position: Tensor, K: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines [2,T,1,K/2]."""
    frequencies = theta ** (-torch.arange(0, K, 2, device=position.device, dtype=dtype) / K)
    angles = position.to(dtype)[:, None, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


@_turns.register_fake
def _(position: Tensor, K: int, theta: float, dtype: torch.dtype) -> Tensor:
    return position.new_empty(2, len(position), 1, K // 2, dtype=dtype)


@torch.no_grad()
def reset_rates(A_log: Tensor, dt_bias: Tensor, slowest: float) -> None:
    """Decay rates uniform up to 16 and time steps log-uniform from 0.001 to 0.1, as Mamba-2 has them."""
    A_log.uniform_(slowest, 16).clamp_(min=1e-4).log_()  # the log of 0 could not be trained
    dt = dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of this is dt


def head_dims(hidden_size: int, num_heads: int, expand_k: float, expand_v: float) -> tuple[int, int]:
    positive(num_heads=num_heads)
    key_dim = whole("hidden_size · expand_k / num_heads", hidden_size * expand_k / num_heads)
    return key_dim, whole("hidden_size · expand_v / num_heads", hidden_size * expand_v / num_heads)


def positive(**sizes: int) -> None:
    for name, n in sizes.items():
        if n < 1:
            raise ValueError(f"{name} must be positive, but was {n}")


def whole(name: str, n: float) -> int:
    if not math.isclose(n, round(n), abs_tol=1e-9):
        raise ValueError(f"{name} must be a whole number, but was {n}")
    return round(n)
