"""The baselines are what their names say: token by token, beside transformers' modules, and in the paper's counts."""

import copy
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import bounds, near, rel, upstream
from torch import Tensor, nn
from torch.nn.functional import conv1d, logsigmoid, silu, softplus

from runningtensor.layers import BASELINES, baselines
from runningtensor.layers.attention import attention as packed_attention
from runningtensor.layers.baselines import Mixer, gated_linear_attention

REST = 3 * 128 * 384 + 2 * 128  # of a decoder layer at d_model 128: SwiGLU and two norms
TABLE = {  # parameters of a decoder layer, floats of a state
    "attention": (934_400, None),
    "gated_deltanet": (248_632, 4_608),
    "mamba2": (283_696, 32_768),
    "gla": (216_416, 2_048),
    "deltanet": (248_640, 8_192),
    "linear_attention": (REST + 4 * 128 * 128 + 32, 4_096),  # not in the paper's
}
SMALL: dict[str, dict] = {  # no two widths alike
    "attention": {"hidden_size": 10, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8},
    "linear_attention": {"hidden_size": 12, "num_heads": 2, "expand_k": 0.5, "expand_v": 1.5},
    "deltanet": {"hidden_size": 12, "num_heads": 3, "conv_size": 3},
    "gated_deltanet": {"hidden_size": 10, "num_heads": 3, "head_dim": 4, "expand_v": 1.5},
    "gla": {"hidden_size": 12, "num_heads": 2, "gate_rank": 5},
    "mamba2": {"hidden_size": 12, "state_dim": 7, "head_dim": 8},
}
EVERY = pytest.mark.parametrize("name", BASELINES)


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


# -- Token by token ----------------------------------------------------------------------------------------------------


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
    *qkv, gate, a, b = projected(m, x, K, K, V, V, m.num_heads, m.num_heads)
    q, k, v = split_heads(m, *silu(convolved(m, torch.cat(qkv, -1))).split((K, K, V), -1))
    g = -m.A_log.exp() * softplus(a + m.dt_bias)
    out = rms(delta_rule(unit(q), unit(k), v, b.sigmoid(), g), m.norm.weight, 1e-5)
    return out.flatten(2) * silu(gate)


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


@EVERY
@pytest.mark.parametrize(("dtype", "bound"), ((torch.float64, 1e-10), (torch.float32, 1e-5)), ids=str)
def test_equals_its_definition(name, dtype, bound):
    mixer = build(name, dtype)
    x = draw(mixer)
    exact = copy.deepcopy(mixer).double()
    want = results(lambda x: ORACLES[name](exact, x) @ exact.out_proj.weight.T, x.double(), exact)
    near(results(lambda x: mixer(x)[0], x, mixer), want, bound)


@EVERY
def test_is_called_as_the_layer_is(name):
    mixer = build(name)
    for T in (0, 1, 2):
        out, weights, cache = mixer(draw(mixer, T=T))
        assert out.shape == (2, T, mixer.hidden_size) and weights is None and cache is None
    x = draw(mixer, T=5)
    ones = torch.ones(2, 5, dtype=torch.long)
    assert torch.equal(mixer(x, attention_mask=ones, position_ids=None)[0], mixer(x)[0])


@EVERY
@pytest.mark.parametrize(
    ("given", "message"),
    (
        ({"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "attention_mask must be all ones.* 1 that are not"),
        ({"past_key_values": object()}, "past_key_values must be None: .* keeps nothing between calls"),
        ({"use_cache": True}, "use_cache must be False: .* keeps nothing between calls"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must be of a batch of 1: .* a batch of 2"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "cu_seqlens must be of torch.int32 or torch.int64"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.long)}, "cu_seqlens must be .* an empty tensor"),
    ),
    ids=("padding", "a cache", "a cache to be made", "a batch", "no integers", "no bounds"),
)
def test_what_it_cannot_do_is_refused(name, given, message):
    mixer = build(name)
    with pytest.raises(ValueError, match=message):
        mixer(draw(mixer, T=3), **given)


@EVERY
def test_hidden_states_of_another_width_are_refused(name):
    mixer = build(name)
    with pytest.raises(ValueError, match=rf"hidden_states must be of shape \[B, T, {mixer.hidden_size}\]"):
        mixer(torch.randn(2, 3, mixer.hidden_size + 1))


@EVERY
def test_bounds_that_are_not_those_of_the_row_are_refused(name):
    mixer = build(name)
    with pytest.raises(ValueError, match=r"cu_seqlens must be 0 = c_0 .* = T = 3, but was 2 at the end"):
        mixer(draw(mixer, B=1, T=3), cu_seqlens=torch.tensor([0, 2]))


# -- Packed sequences --------------------------------------------------------------------------------------------------

LENGTHS = (20, 1, 0, 90, 2, 16, 33)  # longer and shorter than a convolution, a chunk, a block of queries


@EVERY
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_packed_sequences_are_separate_ones(name, dtype):
    mixer = build(name)
    x, packing = draw(mixer, B=1, T=sum(LENGTHS)), bounds(LENGTHS).to(dtype)

    def apart(x):
        return torch.cat([mixer(part)[0] for part in x.split(LENGTHS, 1)], 1)

    near(results(lambda x: mixer(x, cu_seqlens=packing)[0], x, mixer), results(apart, x, mixer), 1e-10)


@EVERY
def test_a_row_without_sequences_is_empty(name):
    mixer = build(name)
    assert mixer(draw(mixer, B=1, T=0), cu_seqlens=torch.tensor([0]))[0].shape == (1, 0, mixer.hidden_size)


@EVERY
def test_packed_sequences_in_bfloat16_stay_near_float32(name):
    mixer = build(name, torch.float32, hidden_size=128)
    x, packing = draw(mixer, B=1, T=sum(LENGTHS)), bounds(LENGTHS)
    want = mixer(x, cu_seqlens=packing)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = mixer(x, cu_seqlens=packing)[0]
    near([got], [want], 4e-2)
    got.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


def heads(T: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """Queries of 4 heads, keys and values of 2."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, T, n, 16, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def test_packed_attention_is_an_op_that_torch_can_trace_and_differentiate():
    q, k, v = (x[0] for x in heads(sum(LENGTHS)))
    torch.library.opcheck(torch.ops.runningtensor.packed_attention.default, (q, k, v, bounds(LENGTHS)))
    torch.library.opcheck(torch.ops.runningtensor.turns.default, (torch.arange(5), 8, 1e6, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("lengths", (LENGTHS, (1, 0, 1), (700,)), ids=str)
def test_packed_attention_on_a_gpu_is_that_of_the_cpu(dtype, lengths):
    def run(*x):
        out = packed_attention(*x, bounds(lengths).to(x[0].device))
        return [y.double().cpu() for y in (out, *torch.autograd.grad(out, x, upstream([out])))]

    inputs = heads(sum(lengths), dtype, "cuda")
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    near(run(*inputs), run(*exact), 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
def test_packed_attention_in_bfloat16_takes_the_flash_kernels():
    q, k, v = heads(sum(LENGTHS), torch.bfloat16, "cuda")
    _, sums = torch.ops.runningtensor.packed_attention(q[0], k[0], v[0], bounds(LENGTHS).cuda())
    assert sums.shape == (4, sum(LENGTHS))


# -- Beside transformers' modules --------------------------------------------------------------------------------------

Layout = dict[str, dict[str, slice | Tensor]]  # parameters of ours: those of the peer, and which of our rows they are
ALL = slice(None)


def spans(*sizes: int) -> list[Tensor]:
    return list(torch.arange(sum(sizes)).split(sizes))


def beside(mixer: Mixer, peer: nn.Module, forward: Callable[[Tensor], Tensor], layout: Layout, bound: float) -> None:
    """The same weights give the same outputs and gradients."""
    theirs = dict(peer.named_parameters())
    ours = {name: (mine, rows) for mine, parts in layout.items() for name, rows in parts.items()}
    assert ours.keys() == theirs.keys() and layout.keys() == dict(mixer.named_parameters()).keys()
    with torch.no_grad():
        for name, (mine, rows) in ours.items():
            theirs[name].copy_(mixer.get_parameter(mine)[rows].reshape(theirs[name].shape))
    x = draw(mixer)
    got, want = results(lambda x: mixer(x)[0], x, mixer), results(forward, x, peer)
    arranged = {name: got[mine][rows].reshape(want[name].shape) for name, (mine, rows) in ours.items()}
    near({"out": got["out"], "x": got["x"]} | arranged, want, bound)


def without(*packages: str) -> pytest.MarkDecorator:
    """Where they are installed transformers calls their kernels, and these know no CPU."""
    return pytest.mark.skipif(any(find_spec(name) for name in packages), reason=f"{' or '.join(packages)} is installed")


def test_attention_is_qwen3s():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    mixer = build("attention", torch.float32, hidden_size=128)
    config = Qwen3Config(
        hidden_size=128,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    peer, rotary = Qwen3Attention(config, 0), Qwen3RotaryEmbedding(config)

    def forward(x):
        T = x.shape[1]
        mask = torch.full((T, T), -math.inf).triu(1)[None, None]
        return peer(x, rotary(x, torch.arange(T)[None]), mask)[0]

    q, k, v = spans(2048, 1024, 1024)
    layout = {
        "in_proj.weight": {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v},
        "q_norm.weight": {"q_norm.weight": ALL},
        "k_norm.weight": {"k_norm.weight": ALL},
        "out_proj.weight": {"o_proj.weight": ALL},
    }
    beside(mixer, peer, forward, layout, 1e-5)


@without("mamba_ssm", "causal_conv1d")
def test_mamba2_is_transformers():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    mixer = build("mamba2", torch.float32, hidden_size=128)
    config = Mamba2Config(
        hidden_size=128,
        num_heads=16,
        head_dim=16,
        state_size=128,
        expand=2,
        n_groups=1,
        conv_kernel=4,
        num_hidden_layers=1,
        layer_norm_epsilon=1e-5,
        chunk_size=32,
    )
    peer = Mamba2Mixer(config, 0)
    same = {name: {name: ALL} for name in ("in_proj.weight", "out_proj.weight", "norm.weight", "A_log", "dt_bias", "D")}
    layout = same | {"conv.weight": {"conv1d.weight": ALL}, "conv_bias": {"conv1d.bias": ALL}}
    beside(mixer, peer, peer, layout, 1e-5)


@without("fla", "causal_conv1d")
def test_gated_deltanet_is_qwen3_nexts():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mixer = build("gated_deltanet", torch.float32, hidden_size=128)
    config = Qwen3NextConfig(
        hidden_size=128,
        linear_num_value_heads=4,
        linear_num_key_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=48,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    peer = Qwen3NextGatedDeltaNet(config, 0)
    q, k, v, gate, a, b = (rows.reshape(4, -1) for rows in spans(96, 96, 192, 192, 4, 4))  # theirs go head by head
    layout = {
        "in_proj.weight": {
            "in_proj_qkvz.weight": torch.cat((q, k, v, gate), 1).flatten(),
            "in_proj_ba.weight": torch.cat((b, a), 1).flatten(),
        },
        "conv.weight": {"conv1d.weight": ALL},
        "A_log": {"A_log": ALL},
        "dt_bias": {"dt_bias": ALL},
        "norm.weight": {"norm.weight": ALL},
        "out_proj.weight": {"out_proj.weight": ALL},
    }
    beside(mixer, peer, peer, layout, 1e-5)


# -- Beside flash-linear-attention -------------------------------------------------------------------------------------


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Its own references, in plain torch. Read as single files: to import the package takes a GPU."""
    if not find_spec("fla"):
        monkeypatch.syspath_prepend(str(Path(sys.prefix, "peers")))
    package = find_spec("fla")
    if package is None:
        pytest.skip("fla-core is not installed: make .venv/ready puts it into .venv/peers")

    def load(rule: str) -> ModuleType:
        spec = spec_from_file_location(
            f"naive_{rule}", Path(package.submodule_search_locations[0], "ops", rule, "naive.py")
        )
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", ("linear_attention", "deltanet", "gla"))
def test_its_rule_is_that_of_flash_linear_attentions_reference(name, naive, monkeypatch):
    delta, gated = naive("delta_rule").delta_rule_recurrence, naive("gla").naive_recurrent_gla

    def their_delta_rule(q, k, v, beta, g):
        assert not g.any()
        return delta(*(x.transpose(1, 2) for x in (q, k, v, beta)))[0].transpose(1, 2)

    def their_gla(q, k, v, g, scale):
        assert scale == q.shape[-1] ** -0.5  # theirs too
        return gated(q, k, v, g)[0]

    monkeypatch.setitem(globals(), "delta_rule", their_delta_rule)
    monkeypatch.setitem(globals(), "gla", their_gla)
    mixer = build(name, torch.float32, hidden_size=128)
    want = results(lambda x: ORACLES[name](mixer, x) @ mixer.out_proj.weight.T, draw(mixer), mixer)
    near(results(lambda x: mixer(x)[0], draw(mixer), mixer), want, 1e-5)


FLA: dict[str, tuple[str, dict, dict[str, int]]] = {  # class, options, parts of in_proj
    "linear_attention": (
        "LinearAttention",
        {"feature_map": "identity", "num_heads": 4},
        {"q_proj": 128, "k_proj": 128, "v_proj": 128},
    ),
    "deltanet": ("DeltaNet", {"expand_v": 2.0}, {"q_proj": 128, "k_proj": 128, "v_proj": 256, "b_proj": 4}),
    "gated_deltanet": (
        "GatedDeltaNet",
        {"num_heads": 4, "head_dim": 24, "expand_v": 2.0},
        {"q_proj": 96, "k_proj": 96, "v_proj": 192, "g_proj": 192, "a_proj": 4, "b_proj": 4},
    ),
    "gla": (
        "GatedLinearAttention",
        {},
        {"q_proj": 64, "k_proj": 64, "v_proj": 128, "g_proj": 128, "gk_proj.0": 16},
    ),
}


def fla_layout(name: str) -> Layout:
    parts = FLA[name][2]
    rows = dict(zip(parts, spans(*parts.values()), strict=True))
    norm = {"linear_attention": "norm", "gla": "g_norm_swish_gate"}.get(name, "o_norm")
    layout: Layout = {
        "in_proj.weight": {f"{part}.weight": of for part, of in rows.items()},
        "norm.weight": {f"{norm}.weight": ALL},
        "out_proj.weight": {"o_proj.weight": ALL},
    }
    if "deltanet" in name:
        layout["conv.weight"] = {f"{c}_conv1d.weight": rows[f"{c}_proj"] for c in "qkv"}
    if name == "gated_deltanet":
        layout |= {"A_log": {"A_log": ALL}, "dt_bias": {"dt_bias": ALL}}
    if name == "gla":
        layout |= {f"forget_proj.{x}": {f"gk_proj.1.{x}": ALL} for x in ("weight", "bias")}
    return layout


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLA)
def test_is_flash_linear_attentions(name):
    pytest.importorskip("fla")
    from fla import layers

    kind, options, _ = FLA[name]
    mixer = build(name, torch.float32, hidden_size=128).cuda()
    peer = getattr(layers, kind)(hidden_size=128, **options).cuda()
    beside(mixer, peer, lambda x: peer(x)[0], fla_layout(name), 2e-2)  # its kernels multiply in TF32


# -- Shapes and beginnings ---------------------------------------------------------------------------------------------


@EVERY
def test_has_the_parameters_and_the_state_of_the_paper(name):
    mixer = BASELINES[name](128)
    count, state = TABLE[name]
    assert REST + sum(parameter.numel() for parameter in mixer.parameters()) == count
    assert mixer.state_floats == state


def test_attention_holds_more_with_every_token():
    assert BASELINES["attention"](128).floats_a_token == 2 * 8 * 128


@EVERY
def test_every_parameter_is_drawn_anew(name):
    def drawn(mixer):
        torch.manual_seed(3)
        mixer.reset_parameters(output_scale=0.5)
        return dict(mixer.named_parameters())

    torch.manual_seed(2)
    used = build(name, torch.float32)
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.fill_(torch.nan)
    with torch.device("meta"):
        empty = BASELINES[name](**SMALL[name])
    first, second = drawn(used), drawn(empty.to_empty(device="cpu"))
    assert all(torch.equal(first[key], second[key]) for key in first | second)
    assert all(parameter.isfinite().all() for parameter in first.values())
    writer = used.out_proj.weight
    assert 0.4 < writer.abs().max() * writer.shape[1] ** 0.5 <= 0.5
    torch.manual_seed(3)
    empty.reset_parameters()
    assert torch.equal(empty.out_proj.weight * 0.5, writer)


@pytest.mark.parametrize(("name", "slowest"), (("gated_deltanet", 0), ("mamba2", 1)))
def test_rates_begin_where_the_originals_do(name, slowest):
    torch.manual_seed(0)
    mixers = [BASELINES[name](128) for _ in range(100)]
    rates, steps = (torch.cat([f(mixer).detach() for mixer in mixers]) for f in (rate, step))
    assert slowest <= rates.min() < slowest + 0.2 and 15.8 < rates.max() <= 16 * (1 + 1e-6)
    assert rel(rates.mean(), torch.tensor((slowest + 16) / 2)) < 0.1
    assert steps.min() >= 0.999e-3 and steps.max() <= 1.001e-1
    assert rel(steps.log().mean(), torch.tensor(0.01).log()) < 0.05


def rate(mixer: Mixer) -> Tensor:
    return mixer.A_log.exp()


def step(mixer: Mixer) -> Tensor:
    return softplus(mixer.dt_bias)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    (
        ("attention", {"num_heads": 3, "num_kv_heads": 2}, "must be a multiple of num_kv_heads .* 3, 2 and 128"),
        ("attention", {"head_dim": 5}, "head_dim even"),
        ("deltanet", {"num_heads": 5}, "hidden_size · expand_k / num_heads must be a whole number, but was 25.6"),
        ("gated_deltanet", {"head_dim": 5, "expand_v": 1.5}, "head_dim · expand_v must be a whole number, but was 7.5"),
        ("mamba2", {"head_dim": 7}, "must be a whole number"),
        ("gated_deltanet", {"num_heads": 0}, "must be positive, but were 128, 0, 24 and 48"),
    ),
)
def test_says_which_shape_is_wrong(name, options, message):
    with pytest.raises(ValueError, match=message):
        BASELINES[name](128, **options)


# -- Numbers -----------------------------------------------------------------------------------------------------------


def gla_inputs(T: int, strength: float, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, T, 3, n, generator=generator, dtype=torch.float64) for n in (4, 4, 5, 4))
    g = logsigmoid(strength * g) / 16 if strength < torch.inf else logsigmoid(g).masked_fill(g < -1.5, -torch.inf)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g)]


@pytest.mark.parametrize("T", (1, 15, 64, 65, 150))
@pytest.mark.parametrize("strength", (1.0, 1e2, 1e5, torch.inf))  # 1e5: resets among channels that hardly forget
def test_gla_takes_any_decay_and_length(T, strength):
    def run(f, dtype):
        x = gla_inputs(T, strength, dtype)
        out = f(*x)
        return [out, *torch.autograd.grad(out, x, upstream([out]))]

    want = run(lambda *x: gla(*x, 1.0), torch.float64)
    near(run(gated_linear_attention, torch.float64), want, 1e-12)
    near(run(gated_linear_attention, torch.float32), want, 1e-5, floor=1e-3)
    near(run(lambda *x: gated_linear_attention(*x, chunk_size=8), torch.float64), want, 1e-12)


@EVERY
def test_bfloat16_stays_near_float32(name):
    mixer = build(name, torch.float32, hidden_size=128)
    x = draw(mixer, T=40)
    want = mixer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        near([mixer(x)[0]], [want], 4e-2)
    low = mixer.to(torch.bfloat16)
    out = low(x.bfloat16())[0]
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and rel(out, want) < 4e-2
    assert all(parameter.grad.isfinite().all() for parameter in low.parameters())


def test_no_more_is_exported_than_is_tested():
    classes = {x for x in vars(baselines).values() if isinstance(x, type) and issubclass(x, Mixer) and x is not Mixer}
    assert classes == set(BASELINES.values()) and ORACLES.keys() == TABLE.keys() == SMALL.keys() == BASELINES.keys()
