"""The layer of the paper's section 2.2: fused projection, short convolution, gates, the op, gated norm, projection.

x → fused projection → short convolution → q, k, u, r, v, a, b, z1, z2, g_out
q, k, u, r: SiLU, ℓ2, query-skip features, ℓ2      v: SiLU      β = σ(b)      ξ = σ(z)      g = logσ(a)/16
o = running_tensor((q, u), (k, r), v)               out = (RMSNorm(o) ⊙ SiLU(g_out)) W
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, silu

from runningtensor.layers.convolution import ShortConvolution
from runningtensor.layers.fused import Front, front, usable
from runningtensor.layers.norms import GatedRMSNorm, l2_normalize
from runningtensor.layers.projections import PROJECTIONS
from runningtensor.ops import running_tensor, running_tensor_step
from runningtensor.ops.interface import DTYPES, check_tensor, require

TAU = 16  # of the forget gate, as in gated linear attention
FORGET = ("telescoping", "cumulative", "none")


class LayerState:
    """What a layer keeps between calls, its window and its state: made by the caller, filled by the layer."""

    def __init__(self) -> None:
        self.conv: Tensor | None = None
        self.state: Tensor | None = None
        self.tokens = 0

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        return self.conv, self.state

    def write(self, conv: Tensor, state: Tensor, tokens: int) -> None:
        self.conv = keep(self.conv, conv)
        self.state = keep(self.state, state)
        self.tokens += tokens


def keep(held: Tensor | None, new: Tensor) -> Tensor:
    """Into the tensor that is held, whose address a CUDA graph may know."""
    if held is None:
        return new.detach()
    if held is not new:
        held.copy_(new.detach())
    return held


class RunningTensor(nn.Module):
    """Linear attention with a tensor state, of order len(key_dims) + 1. The residual is outside.

    projection:  "conconlyc" (channels repeated and mixed: the paper), "conconly" (repeated) or "linear" (a matrix)
    delta:       the delta rule; else values are added
    query_skip:  gates by which a query may leave out a key mode
    forget:      "telescoping" (the paper), "cumulative" (α_t = exp g_t, as gated linear attention) or "none"
    gate_conv:   the output gate passes through the short convolution too
    output_gate: "silu" (the paper) or "sigmoid", whose sign is not random at first
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        key_dims: tuple[int, ...] = (24, 24),
        value_dim: int = 48,
        *,
        projection: str = "conconlyc",
        delta: bool = True,
        query_skip: bool = True,
        forget: str = "telescoping",
        gate_conv: bool = True,
        output_gate: str = "silu",
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        if projection not in PROJECTIONS:
            raise ValueError(f"projection must be one of {', '.join(PROJECTIONS)}, but was {projection!r}")
        if forget not in FORGET:
            raise ValueError(f"forget must be one of {', '.join(FORGET)}, but was {forget!r}")
        if not isinstance(key_dims, tuple | list):
            raise ValueError(f"key_dims must be a tuple, a width for each key, but was {key_dims!r}")
        if len(key_dims) == 0 or min(*key_dims, value_dim, num_heads, conv_size, hidden_size) < 1:
            raise ValueError(
                "hidden_size, num_heads, key_dims, value_dim and conv_size must be positive, and key_dims not empty, "
                f"but were {hidden_size}, {num_heads}, {tuple(key_dims)}, {value_dim} and {conv_size}"
            )
        self.hidden_size, self.num_heads, self.value_dim = hidden_size, num_heads, value_dim
        self.key_dims = tuple(key_dims)
        self.delta, self.query_skip, self.forget, self.gate_conv = delta, query_skip, forget, gate_conv
        self.layer_idx = layer_idx
        # The paper's tensor rows without query-skip gates have their channels all the same, its matrix rows have not.
        skips = len(key_dims) if query_skip or self.order > 2 else 0
        shape = Front(hidden_size, self.key_dims, value_dim, num_heads, skips, query_skip, delta, forget, gate_conv)
        self.projection = PROJECTIONS[projection](hidden_size, shape.channels)
        self.shape = replace(shape, period=self.projection.hidden_size)
        self.conv_channels = shape.channels - (0 if gate_conv else num_heads * value_dim)
        self.conv = ShortConvolution(self.conv_channels, conv_size)
        self.norm = GatedRMSNorm(value_dim, norm_eps, output_gate)
        self.out_proj = nn.Linear(num_heads * value_dim, hidden_size, bias=False)
        self.reset_parameters()

    @property
    def order(self) -> int:
        return len(self.key_dims) + 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the key modes of the state: the query-skip features have one slot more."""
        return tuple(width + self.query_skip for width in self.key_dims)

    @property
    def state_floats(self) -> int:
        """What the state of a sequence holds, in all heads."""
        return self.num_heads * int(torch.Size(self.widths).numel()) * self.value_dim

    def reset_parameters(self, output_scale: float = 1.0) -> None:
        for part in (self.projection, self.conv, self.norm):
            part.reset_parameters()
        nn.init.normal_(self.out_proj.weight, std=output_scale * self.out_proj.in_features**-0.5)

    def extra_repr(self) -> str:
        modes = "×".join(map(str, (*self.widths, self.value_dim)))
        return f"order {self.order}, {self.num_heads} heads of {modes}, delta={self.delta}, forget={self.forget!r}"

    def forward(
        self,
        hidden_states: Tensor,  # [B,T,D]
        attention_mask: Tensor | None = None,  # [B,L], L >= T: the last T columns say which tokens are there
        past_key_values: Any = None,  # .layers[layer_idx] is a LayerState, or reads and writes like one
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,  # [N+1], B = 1
        **kwargs: Any,  # what a model gives to all of its layers, and attention alone has a use for
    ) -> tuple[Tensor, None, Any]:
        check_tensor("hidden_states", hidden_states, ["B", "T", self.hidden_size], DTYPES, None)
        T = hidden_states.shape[1]
        if past_key_values is not None and self.layer_idx is None:
            raise ValueError("layer_idx must be given to a layer that is used with past_key_values, but was None")
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if cu_seqlens is not None and (attention_mask is not None or cache is not None):
            raise ValueError("cu_seqlens must be None where there is an attention_mask or a cache: it has no padding")
        if cu_seqlens is not None:
            check_tensor("cu_seqlens", cu_seqlens, ["N+1"], (torch.int32, torch.int64), hidden_states.device)
            require(len(cu_seqlens) > 0, "cu_seqlens", "an empty tensor", "[0, …, T]")
        window, state = cache.read() if cache is not None else (None, None)

        mask = order = None
        x = hidden_states
        if attention_mask is not None:
            B, shape = x.shape[0], tuple(attention_mask.shape)
            if len(shape) != 2 or shape[0] != B or shape[1] < T:
                raise ValueError(
                    f"attention_mask must be of shape [{B}, L >= {T}], as hidden_states are, but was {shape}"
                )
            mask = attention_mask[:, attention_mask.shape[1] - T :].bool()
            x = x.masked_fill(~mask[..., None], 0)
            if T > 1:
                # Tokens that are there first, in their order: a window of the convolution then holds no others.
                order = (~mask).long().argsort(dim=1, stable=True)
                mask = mask.gather(1, order)
                x = x.gather(1, order[..., None].expand_as(x))
        position = None if cu_seqlens is None else positions(cu_seqlens, T)

        source = self.projection.compact(x)
        if window is not None:
            source = torch.cat((window.to(source.dtype), source), 1)
        queries, keys, values, beta, log_decay, scale, gate = self.front(source, T, position, mask)
        if T == 1 and state is not None and not torch.is_grad_enabled():
            out = self.step(queries, keys, values, beta, log_decay, state)
        else:
            out, state = running_tensor(
                queries,
                keys,
                values,
                beta=beta,
                log_decay=log_decay,
                # The cache is written in place, and autograd may have to read what was there.
                initial_state=state.clone() if state is not None and torch.is_grad_enabled() else state,
                output_final_state=cache is not None,
                cu_seqlens=cu_seqlens,
            )
        out = self.back(out, gate, scale)
        if mask is not None:
            out = out * mask[..., None]
        if order is not None:
            out = torch.zeros_like(out).scatter(1, order[..., None].expand_as(out), out)
        if cache is not None:
            cache.write(self.next_window(source, T, mask), state, T)
        return out, None, past_key_values

    def front(
        self, source: Tensor, T: int, position: Tensor | None, mask: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Queries, keys, values, β, log α, the scale of the outputs and the output gate, of the last T tokens."""
        H, V, modes = self.num_heads, self.value_dim, len(self.key_dims)
        if usable(source):
            found = front(self.shape, source, self.conv.weight, source.shape[1] - T, position, mask)
            values, overwrite, forget, gate = found[2 * modes :]
            return (
                tuple(found[:modes]),
                tuple(found[modes : 2 * modes]),
                values,
                overwrite if self.delta else None,
                forget if self.forget == "cumulative" else None,
                forget if self.forget == "telescoping" else None,
                gate,
            )

        before = self.conv.weight.shape[1] - 1
        source = pad(source, (0, 0, before + T - source.shape[1], 0))
        fused = self.projection.spread(source)
        convolved = self.conv(fused[..., : self.conv_channels], position)
        gate = convolved[..., -H * V :] if self.gate_conv else fused[:, before:, -H * V :]
        sizes = self.shape.sizes[:-1]
        parts = convolved[..., : sum(sizes)].split(sizes, -1)
        *pairs, values, a, b = parts[: 2 * modes + 3]
        skips = parts[2 * modes + 3 :]
        pairs = [l2_normalize(silu(x).unflatten(-1, (H, -1))) for x in pairs]
        queries, keys = tuple(pairs[0::2]), tuple(pairs[1::2])
        values = silu(values).unflatten(-1, (H, -1))
        if self.query_skip:
            ξ = [z.sigmoid()[..., None] for z in skips]
            queries = tuple(l2_normalize(torch.cat((1 - g, g * q), -1)) for q, g in zip(queries, ξ, strict=True))
            keys = tuple(l2_normalize(torch.cat((torch.ones_like(k[..., :1]), k), -1)) for k in keys)
        if mask is not None:  # a zero key neither writes nor takes anything back
            keys = tuple(k * mask[..., None, None] for k in keys)
        beta = b.sigmoid() if self.delta else None
        g = logsigmoid(a.float() if a.dtype in (torch.bfloat16, torch.float16) else a) / TAU
        log_decay = scale = None
        if self.forget == "cumulative":
            log_decay = g if mask is None else g * mask[..., None]
        elif self.forget == "telescoping":
            # Γ_ts = exp(g_t - g_s) needs no decay in the rule: it comes off the values and back onto the outputs.
            values = (values * torch.exp(-g)[..., None]).to(values.dtype)
            scale = torch.exp(g)
        return queries, keys, values, beta, log_decay, scale, gate

    def step(
        self,
        queries: tuple[Tensor, ...],
        keys: tuple[Tensor, ...],
        values: Tensor,
        beta: Tensor | None,
        log_decay: Tensor | None,
        state: Tensor,  # [B,H,…], updated in place
    ) -> Tensor:
        """The rule, of what `front` gives of one token of each sequence: [B,1,H,V]."""
        return running_tensor_step(
            tuple(q[:, 0] for q in queries),
            tuple(k[:, 0] for k in keys),
            values[:, 0],
            state,
            beta=None if beta is None else beta[:, 0],
            log_decay=None if log_decay is None else log_decay[:, 0],
        )[:, None]

    def back(self, out: Tensor, gate: Tensor, scale: Tensor | None) -> Tensor:
        """From the rule's outputs [B,T,H,V] to hidden states."""
        gate = gate.unflatten(-1, (self.num_heads, self.value_dim))
        return self.out_proj(self.norm(out, gate, scale).flatten(-2))

    def next_window(self, source: Tensor, T: int, mask: Tensor | None) -> Tensor:
        """The inputs of the convolution at the last tokens that were there."""
        before = self.conv.weight.shape[1] - 1
        source = pad(source, (0, 0, before + T - source.shape[1], 0))
        if mask is None:
            return source[:, T:].clone()
        last = mask.sum(1)[:, None] + torch.arange(before, device=mask.device)
        return source.gather(1, last[..., None].expand(-1, -1, source.shape[2]))


def positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """Of each token in its own sequence."""
    t = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return t - cu_seqlens[torch.searchsorted(cu_seqlens, t, right=True) - 1]
