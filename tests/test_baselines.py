"""The baselines are what their names say, token by token, and in the paper's counts."""

import copy

import pytest
import torch
from helpers import bounds, near, rel, upstream
from mixers import ORACLES, SMALL, build, draw, gla, results
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

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
EVERY = pytest.mark.parametrize("name", BASELINES)


@EVERY
@pytest.mark.parametrize(("dtype", "bound"), ((torch.float64, 1e-10), (torch.float32, 1e-5)), ids=str)
def test_equals_its_definition(name, dtype, bound):
    mixer = build(name, dtype)
    x = draw(mixer)
    exact = copy.deepcopy(mixer).double()
    want = results(lambda x: ORACLES[name](exact, x) @ exact.out_proj.weight.T, x.double(), exact)
    near(results(lambda x: mixer(x)[0], x, mixer), want, bound)


def test_gated_deltanet_without_its_gate_is_the_same_without_it():
    mixer = build("gated_deltanet", **SMALL["gated_deltanet"], output_gate="none")
    x, want = draw(mixer), ORACLES["gated_deltanet"]
    near(
        results(lambda x: mixer(x)[0], x, mixer),
        results(lambda x: want(mixer, x) @ mixer.out_proj.weight.T, x, mixer),
        1e-10,
    )
    gated = build("gated_deltanet")
    spared = gated.hidden_size * gated.num_heads * gated.value_dim
    assert sum(p.numel() for p in gated.parameters()) - sum(p.numel() for p in mixer.parameters()) == spared


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


# -- Shapes and beginnings ---------------------------------------------------------------------------------------------


@EVERY
def test_has_the_parameters_and_the_state_of_the_paper(name):
    mixer = BASELINES[name](128)
    count, state = TABLE[name]
    assert REST + sum(parameter.numel() for parameter in mixer.parameters()) == count
    assert mixer.state_floats == state


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
        ("gated_deltanet", {"num_heads": 0}, "num_heads must be positive, but was 0"),
        ("gated_deltanet", {"conv_size": 0}, "conv_size must be positive, but was 0"),
        ("gated_deltanet", {"output_gate": "tanh"}, "output_gate must be one of silu, sigmoid, none, but was 'tanh'"),
        ("deltanet", {"num_heads": 0}, "num_heads must be positive, but was 0"),
        ("deltanet", {"expand_v": 0.0}, "value_dim must be positive, but was 0"),
        ("gla", {"gate_rank": 0}, "gate_rank must be positive, but was 0"),
        ("mamba2", {"head_dim": 0}, "head_dim must be positive, but was 0"),
        ("mamba2", {"state_dim": -1}, "state_dim must be positive, but was -1"),
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
