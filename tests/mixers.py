"""Small baselines, and each once more as its definition has it, token by token."""

import math
from collections.abc import Callable

import torch
from helpers import upstream
from torch import Tensor, nn
from torch.nn.functional import conv1d, logsigmoid, silu, softplus

from runningtensor.layers import BASELINES
from runningtensor.layers.baselines import Mixer, RMSNorm

SMALL: dict[str, dict] = {  # no two widths alike
    "attention": {"hidden_size": 10, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8},
    "linear_attention": {"hidden_size": 12, "num_heads": 2, "expand_k": 0.5, "expand_v": 1.5},
    "deltanet": {"hidden_size": 12, "num_heads": 3, "conv_size": 3},
    "gated_deltanet": {"hidden_size": 10, "num_heads": 3, "head_dim": 4, "expand_v": 1.5},
    "gla": {"hidden_size": 12, "num_heads": 2, "gate_rank": 5},
    "mamba2": {"hidden_size": 12, "state_dim": 7, "head_dim": 8},
}


def build(name: str, dtype: torch.dtype = torch.float64, **options) -> Mixer:
    """Every parameter is moved from where it begins, so that no norm is without effect and no channel like another."""
    torch.manual_seed(0)
    mixer = BASELINES[name](**options or SMALL[name]).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 * parameter.numel() ** (-0.5 * (parameter.ndim > 1)))
    return mixer.to(dtype)


def draw(mixer: Mixer, B: int = 2, T: int = 150, seed: int = 1) -> Tensor:
    x = torch.randn(B, T, mixer.hidden_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(mixer.out_proj.weight)


def results(f: Callable[[Tensor], Tensor], x: Tensor, *modules: nn.Module) -> dict[str, Tensor]:
    """Outputs and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    parameters = dict(parameter for module in modules for parameter in module.named_parameters())
    out = f(x)
    grads = torch.autograd.grad(out, [x, *parameters.values()], upstream([out]))
    return {"out": out} | dict(zip(("x", *parameters), grads, strict=True))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """[B,T,H,·]; β and g [B,T,H]."""
    S, outs = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        held = (S * k[:, t, :, :, None]).sum(-2)
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - held))[..., None, :]
        outs.append((S * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    """[B,T,H,·]; g [B,T,H,K]."""
    S, outs = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, :, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append((S * q[:, t, :, :, None]).sum(-2) * scale)
    return torch.stack(outs, 1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def projected(m: Mixer, x: Tensor, *sizes: int) -> list[Tensor]:
    return [x @ w.T for w in m.in_proj.weight.split(sizes)]


def convolved(m: Mixer, x: Tensor) -> Tensor:
    """Of the channels of x, which may be some of the convolution's."""
    size = m.conv.weight.shape[1]
    return conv1d(x.transpose(1, 2), m.conv.weight[:, None], padding=size - 1, groups=x.shape[-1])[
        ..., : x.shape[1]
    ].transpose(1, 2)


def split_heads(m: Mixer, *xs: Tensor) -> list[Tensor]:
    return [x.reshape(*x.shape[:2], m.num_heads, -1) for x in xs]


def attention(m, x):
    K, G = m.key_dim, m.num_kv_heads
    q, k, v = projected(m, x, m.num_heads * K, G * K, G * K)
    q, k, v = (y.reshape(*y.shape[:2], -1, K) for y in (q, k, v))
    q, k = rms(q, m.q_norm.weight, 1e-6), rms(k, m.k_norm.weight, 1e-6)
    turns = torch.tensor([[t * 1e6 ** (-2 * i / K) for i in range(K // 2)] for t in range(x.shape[1])], dtype=x.dtype)

    def turned(y):  # as complex numbers
        pairs = torch.complex(y[..., : K // 2], y[..., K // 2 :]) * torch.exp(1j * turns)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    q, k = turned(q), turned(k)
    heads = []
    for h in range(m.num_heads):
        of = h // (m.num_heads // G)
        scores = q[:, :, h] @ k[:, :, of].transpose(1, 2) / math.sqrt(K)
        future = torch.ones_like(scores[0]).triu(1).bool()
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, :, of])
    return torch.cat(heads, -1)


def linear_attention(m, x):
    K, V = m.num_heads * m.key_dim, m.num_heads * m.value_dim
    q, k, v = split_heads(m, *projected(m, x, K, K, V))
    return rms(gla(q, k, v, torch.zeros_like(k), m.key_dim**-0.5), m.norm.weight, 1e-5).flatten(2)


def deltanet(m, x):
    K, V = m.num_heads * m.key_dim, m.num_heads * m.value_dim
    *qkv, b = projected(m, x, K, K, V, m.num_heads)
    q, k, v = split_heads(m, *silu(convolved(m, torch.cat(qkv, -1))).split((K, K, V), -1))
    out = delta_rule(unit(q), unit(k), v, b.sigmoid(), torch.zeros_like(b))
    return rms(out, m.norm.weight, 1e-5).flatten(2)


def gated_deltanet(m, x):
    K, V = m.num_heads * m.key_dim, m.num_heads * m.value_dim
    ungated = isinstance(m.norm, RMSNorm)
    *qkv, gate, a, b = projected(m, x, K, K, V, 0 if ungated else V, m.num_heads, m.num_heads)
    q, k, v = split_heads(m, *silu(convolved(m, torch.cat(qkv, -1))).split((K, K, V), -1))
    g = -m.A_log.exp() * softplus(a + m.dt_bias)
    out = rms(delta_rule(unit(q), unit(k), v, b.sigmoid(), g), m.norm.weight, 1e-5)
    return out.flatten(2) * (1 if ungated else silu(gate))


def gated_linear(m, x):
    K, V = m.num_heads * m.key_dim, m.num_heads * m.value_dim
    q, k, v, gate, a = projected(m, x, K, K, V, V, m.forget_proj.in_features)
    g = logsigmoid(a @ m.forget_proj.weight.T + m.forget_proj.bias) / 16
    out = rms(gla(*split_heads(m, q, k, v, g), m.key_dim**-0.5), m.norm.weight, 1e-5)
    return out.flatten(2) * silu(gate)


def mamba2(m, x):
    H, N, P = m.num_heads, m.key_dim, m.value_dim
    gate, *xBC, dt = projected(m, x, H * P, H * P, N, N, H)
    x, B, C = silu(convolved(m, torch.cat(xBC, -1)) + m.conv_bias).split((H * P, N, N), -1)
    (x,) = split_heads(m, x)
    dt = softplus(dt + m.dt_bias)
    B, C = (y[:, :, None].repeat(1, 1, H, 1) for y in (B, C))
    g = (-m.A_log.exp() * dt)[..., None].repeat(1, 1, 1, N)
    out = gla(C, B, x * dt[..., None], g, 1.0) + m.D[:, None] * x
    return rms(out.flatten(2) * silu(gate), m.norm.weight, 1e-5)


ORACLES = {
    "attention": attention,
    "linear_attention": linear_attention,
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "gla": gated_linear,
    "mamba2": mamba2,
}
