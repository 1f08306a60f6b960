"""The layer is the paper's section 2.2, token by token or all at once, and a token that is masked was never there."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers import bounds, near, rel
from layers import FORGET, WIDTHS, Cache, D, H, V, chunks, differentiate, draw, make, masks, run, variants
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import conv1d, cross_entropy, pad

from runningtensor.layers import RunningTensor
from runningtensor.layers.baselines import GatedDeltaNet
from runningtensor.layers.convolution import ShortConvolution
from runningtensor.layers.projections import ConcOnly, ConcOnlyC

# -- The paper ---------------------------------------------------------------------------------------------------------


def paper(layer: RunningTensor, x: Tensor) -> Tensor:
    """Section 2.2, sentence by sentence: nothing in parallel, nothing folded into something else."""
    B, T, width = x.shape
    heads, d_v, modes = layer.num_heads, layer.value_dim, layer.key_dims

    def silu(y):
        return y / (1 + torch.exp(-y))

    def sigmoid(y):
        return 1 / (1 + torch.exp(-y))

    def unit(y):
        return y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6)

    # "Let x … the fused projection width is d_fused = H(2 d_k + 2 d_r + 2 d_v + 4)"; the matrix rows have no z.
    gates = 2 + (len(modes) if layer.query_skip or len(modes) > 1 else 0)
    d_fused = heads * (2 * sum(modes) + 2 * d_v + gates)
    tiled = [x[..., c % width] for c in range(d_fused)]
    weights = dict(layer.projection.named_parameters())
    if "weight" in weights:
        fused = [(x * weights["weight"][c]).sum(-1) for c in range(d_fused)]
    elif "taps" in weights:
        nothing = torch.zeros_like(tiled[0])
        signal = [nothing, *tiled, nothing]
        fused = [sum(weights["taps"][k] * signal[c + k] for k in range(3)) for c in range(d_fused)]
    else:
        fused = tiled
    fused = torch.stack(fused, -1)  # [B,T,d_fused]

    # "a depthwise causal short convolution of kernel 4 along time then follows"
    w = layer.conv.weight
    size = w.shape[1]
    channels = d_fused if layer.gate_conv else d_fused - heads * d_v
    convolved = []
    for t in range(T):
        reach = range(max(0, t - size + 1), t + 1)
        now = sum(w[:, size - 1 - (t - s)] * fused[:, s, :channels] for s in reach)
        convolved.append(torch.cat((now, fused[:, t, channels:]), -1))
    fused = torch.stack(convolved, 1)

    # "for (q, k, u, r, v, a, b, z1, z2, g_out)"
    blocks, start = [], 0
    for n in (*(d for d in modes for _ in range(2)), d_v, 1, 1, *[1] * (gates - 2), d_v):
        blocks.append(fused[..., start : start + heads * n].reshape(B, T, heads, n))
        start += heads * n
    assert start == d_fused
    g_out = blocks.pop()
    a, b, *z = blocks[2 * len(modes) + 1 :]

    outputs = torch.zeros(B, T, heads, d_v, dtype=x.dtype)
    for h in range(heads):
        S = torch.zeros(B, *(d + layer.query_skip for d in modes), d_v, dtype=x.dtype)
        g_before = torch.zeros(B, dtype=x.dtype)  # g_0 = log γ_0 = 0
        rows = []
        for t in range(T):
            queries = [unit(silu(blocks[2 * i][:, t, h])) for i in range(len(modes))]
            keys = [unit(silu(blocks[2 * i + 1][:, t, h])) for i in range(len(modes))]
            v = silu(blocks[2 * len(modes)][:, t, h])
            if layer.query_skip:
                ξ = [sigmoid(gate[:, t, h]) for gate in z]  # [B,1]
                queries = [unit(torch.cat((1 - ξ[i], ξ[i] * q), -1)) for i, q in enumerate(queries)]
                keys = [unit(torch.cat((torch.ones(B, 1, dtype=x.dtype), k), -1)) for k in keys]
            g = torch.log(sigmoid(a[:, t, h, 0])) / 16
            α = {"telescoping": torch.exp(g - g_before), "cumulative": torch.exp(g), "none": torch.ones_like(g)}
            S = α[layer.forget].reshape(B, *[1] * (S.ndim - 1)) * S
            g_before = g
            if layer.delta:
                v = sigmoid(b[:, t, h]) * (v - contract(S, keys))
            S = S + outer(keys, v)
            rows.append(contract(S, queries))
        outputs = outputs + torch.stack(rows, 1)[:, :, None] * torch.eye(heads, dtype=x.dtype)[h][:, None]

    normed = outputs / torch.sqrt((outputs * outputs).mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
    opened = {"silu": silu, "sigmoid": sigmoid}[layer.norm.output_gate](g_out)  # the paper's is SiLU
    return (normed * opened).reshape(B, T, heads * d_v) @ layer.out_proj.weight.T


def contract(S: Tensor, vectors: list[Tensor]) -> Tensor:
    """<S, k, r, …>: one mode after another."""
    for vector in vectors:
        S = (S * vector.reshape(*vector.shape, *[1] * (S.ndim - 2))).sum(1)
    return S


def outer(vectors: list[Tensor], last: Tensor) -> Tensor:
    """k ⊗ r ⊗ … ⊗ v"""
    for vector in reversed(vectors):
        last = vector.reshape(*vector.shape, *[1] * (last.ndim - 1)) * last[:, None]
    return last


@variants()
def test_the_layer_and_its_gradients_are_those_of_the_paper(options):
    layer, x = make(**options), draw()
    near(differentiate(layer, x), differentiate(layer, x, paper), 1e-10)


def test_the_layer_is_the_papers_over_several_chunks_of_the_op():
    layer, x = make(), draw(B=1, T=130)
    assert rel(run(layer, x), paper(layer, x)) < 1e-10


def test_the_ten_slices_have_the_papers_order_and_widths():
    layer = RunningTensor(128)
    assert layer.shape.sizes == [96, 96, 96, 96, 192, 4, 4, 4, 4, 192]
    assert sum(layer.shape.sizes) == layer.conv_channels == 784 == 4 * (2 * 24 + 2 * 24 + 2 * 48 + 4)


# -- Its parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden_size", "width"),
    [(8, 32), (8, 29), (8, 33), (8, 9), (8, 8), (8, 7), (8, 2), (1, 2), (1, 7), (2, 2), (2, 7), (2, 8), (128, 784)],
)
def test_conconlyc_is_a_convolution_over_the_repeated_channels(hidden_size, width):
    torch.manual_seed(0)
    part = ConcOnlyC(hidden_size, width).double()
    part.reset_parameters()
    x = torch.randn(2, 3, hidden_size, dtype=torch.float64)

    def want(part, x):
        tiled = x.repeat(1, 1, width // hidden_size + 1)[..., :width]
        return conv1d(tiled.reshape(-1, 1, width), part.taps.reshape(1, 1, 3), padding=1).reshape(2, 3, width)

    near(differentiate(part, x, lambda part, x: part(x)), differentiate(part, x, want), 1e-13)


def test_conconly_repeats_channels_and_has_no_parameters():
    x = torch.arange(1.0, 4.0)
    assert ConcOnly(3, 8)(x).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert ConcOnly(3, 2)(x).tolist() == [1, 2]
    assert list(ConcOnly(3, 8).parameters()) == []


@pytest.mark.parametrize("T", (1, 2, 9))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_the_short_convolution_is_depthwise_and_goes_on_from_the_tokens_before(size, T):
    torch.manual_seed(0)
    part = ShortConvolution(6, size).double()
    part.reset_parameters()
    x = torch.randn(2, size - 1 + T, 6, dtype=torch.float64)

    def want(part, x):
        return conv1d(x.mT, part.weight[:, None], groups=6).mT

    got = differentiate(part, x, lambda part, x: part(x))
    assert got["out"].shape == (2, T, 6)
    near(got, differentiate(part, x, want), 1e-13)


@pytest.mark.parametrize("size", (1, 2, 4))
def test_the_short_convolution_of_packed_sequences_begins_anew_in_each(size):
    torch.manual_seed(0)
    part = ShortConvolution(6, size).double()
    part.reset_parameters()
    x = torch.randn(1, 9, 6, dtype=torch.float64)

    def want(part, x):
        apart = [pad(y.mT, (size - 1, 0)) for y in x.split((5, 1, 3), 1)]
        return torch.cat([conv1d(y, part.weight[:, None], groups=6).mT for y in apart], 1)

    def got(part, x):
        position = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2])
        return part(pad(x, (0, 0, size - 1, 0)), position)

    near(differentiate(part, x, got), differentiate(part, x, want), 1e-13)


@pytest.mark.parametrize("make", (partial(RunningTensor, 12, 2, (3, 4), 5), partial(GatedDeltaNet, 12, 2, 4)))
def test_a_sigmoid_opens_the_output_gate_where_it_is_asked_for(make):
    """SiLU(g) = g σ(g): with the same weights, one norm's output is g times the other's."""
    normed = []
    for options in ({}, {"output_gate": "sigmoid"}):
        torch.manual_seed(0)
        layer = make(**options)
        layer.norm.register_forward_hook(lambda norm, given, out: normed.append((given[1], out)))
        layer(torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1)))
    (gate, silu), (_, sigmoid) = normed
    assert torch.allclose(silu, gate * sigmoid, atol=1e-6) and not torch.allclose(silu, sigmoid, atol=1e-2)
    with pytest.raises(ValueError, match=r"output_gate must be one of silu, sigmoid.* but was 'tanh'"):
        make(output_gate="tanh")


# -- The paper's second table ------------------------------------------------------------------------------------------

BARE = {"gate_conv": False, "query_skip": False, "delta": False}
MATRIX = {**BARE, "key_dims": (24,)}
TABLE = {  # options, non-embedding parameters a layer, floats of its state
    "tensor + ConcOnlyC + ξ + Δ + g_out@t": ({}, 175_475, 120_000),
    "tensor + ConcOnlyC + Δ + g_out@t": ({"query_skip": False}, 175_475, 110_592),
    "tensor + ConcOnlyC + ξ + g_out@t": ({"delta": False}, 175_475, 120_000),
    "tensor + ConcOnlyC + ξ + Δ": ({"gate_conv": False}, 174_707, 120_000),
    "tensor + ConcOnlyC + Δ": ({"gate_conv": False, "query_skip": False}, 174_707, 110_592),
    "tensor + ConcOnlyC": (BARE, 174_707, 110_592),
    "tensor + ConcOnly": ({**BARE, "projection": "conconly"}, 174_704, 110_592),
    "tensor + OneLinear": ({**BARE, "projection": "linear"}, 275_056, 110_592),
    "matrix + ConcOnlyC": (MATRIX, 173_907, 4_608),
    "matrix + ConcOnly": ({**MATRIX, "projection": "conconly"}, 173_904, 4_608),
    "matrix + OneLinear": ({**MATRIX, "projection": "linear"}, 248_656, 4_608),
}


@pytest.mark.parametrize(("options", "parameters", "floats"), TABLE.values(), ids=TABLE)
def test_parameters_and_state_are_those_of_the_papers_table(options, parameters, floats):
    layer = RunningTensor(128, layer_idx=0, **options)
    assert sum(layer.shape.sizes) == (784 if layer.order == 3 else 584)
    block = 3 * 128 * 384 + 2 * 128  # SwiGLU and two RMSNorms
    assert sum(p.numel() for p in layer.parameters()) + block == parameters
    assert layer.state_floats == floats
    cache = Cache()
    run(layer, torch.randn(1, 2, 128), past_key_values=cache)
    assert cache.layers[0].state.numel() == floats


# -- Precision ---------------------------------------------------------------------------------------------------------


@FORGET
@pytest.mark.parametrize("projection", ("conconlyc", "linear"))
def test_bfloat16_stays_near_float32(projection, forget):
    low = make(projection=projection, forget=forget, dtype=torch.bfloat16)
    high = copy.deepcopy(low).float()
    x = draw(B=4, T=40, dtype=torch.bfloat16)
    out = run(low, x)
    assert out.dtype == torch.bfloat16 and rel(out, run(high, x.float())) < 3e-2
    with torch.no_grad():
        cache = Cache()
        assert rel(chunks(low, x, (30, *[1] * 10), cache=cache), run(high, x.float())) < 3e-2
        assert cache.layers[0].state.dtype == torch.float32


@pytest.mark.parametrize("masked", (False, True))
@variants("the paper", "cumulative", "matrix", "no skips", "order 4")
def test_autocast_over_float32_parameters(options, masked):
    layer, x = make(dtype=torch.float32, **options), draw(T=20, dtype=torch.float32)
    mask = masks("random", 2, 20) if masked else None
    want = differentiate(layer, x, attention_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        got = differentiate(layer, x, attention_mask=mask)
        with torch.no_grad():
            decoded = chunks(layer, x, (15, *[1] * 5), mask)
    assert got["out"].dtype in (torch.bfloat16, torch.float32)
    assert all(y.isfinite().all() for y in got.values())
    assert all(grad.dtype == torch.float32 for name, grad in got.items() if name != "out")
    assert rel(got["out"], want["out"]) < 3e-2 and rel(decoded, want["out"]) < 3e-2
    near(got, want, 0.1)


# -- The compiler ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("how", "forget", "lengths"),
    (("plain", "telescoping", (9, 12)), ("masked", "cumulative", (9,)), ("packed", "none", (9,))),
    ids=("plain", "masked", "packed"),
)
def test_compiled_equals_eager(how, forget, lengths, fresh):
    layer = make(forget=forget)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for T in lengths:
        x, arguments = draw(B=1 if how == "packed" else 2, T=T), {}
        if how == "masked":
            arguments = {"attention_mask": masks("random", 2, T)}
        elif how == "packed":
            arguments = {"cu_seqlens": bounds((4, 0, T - 4))}
        got = differentiate(layer, x, lambda _, x, **arguments: run(compiled, x, **arguments), **arguments)
        near(got, differentiate(layer, x, **arguments), 1e-12)


@pytest.mark.parametrize(("forget", "masked"), (("telescoping", False), ("cumulative", True)))
@torch.no_grad()
def test_compiled_decoding_equals_eager_and_is_compiled_three_times_at_most(forget, masked, fresh):
    layer, x = make(forget=forget), draw(T=16)
    mask = masks("random", 2, 16) if masked else None
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    want, got = Cache(), Cache()
    expected = chunks(layer, x, (4, *[1] * 12), mask, want)
    assert rel(chunks(compiled, x, (4, *[1] * 12), mask, got), expected) < 1e-12
    near(got.held(), want.held(), 1e-12)
    assert counter.frame_count <= 3  # the prompt, a token, a token whatever their number before


# -- Parameters and arguments ------------------------------------------------------------------------------------------


@variants()
def test_every_parameter_is_set_by_reset_parameters(options):
    order, rest = options.get("order", 3), {name: y for name, y in options.items() if name != "order"}
    with torch.device("meta"):
        layer = RunningTensor(D, H, WIDTHS[order], V, **rest)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, float("nan"))
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert parameter.isfinite().all() and (parameter != 0).all(), name


def test_output_scale_scales_the_last_matrix_and_nothing_else():
    layer, other = RunningTensor(64), RunningTensor(64)
    for part, scale in ((layer, 1.0), (other, 0.25)):
        torch.manual_seed(0)
        part.reset_parameters(output_scale=scale)
    for (name, one), two in zip(layer.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(two, one * 0.25 if name == "out_proj.weight" else one)
    assert abs(layer.out_proj.weight.std().item() / 192**-0.5 - 1) < 0.05


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("projection", {"projection": "dense"}),
        ("forget", {"forget": "always"}),
        ("key_dims must be a tuple, a width for each key, but was 6", {"key_dims": 6}),
        ("key_dims", {"key_dims": ()}),
        ("key_dims", {"key_dims": (4, 0)}),
        ("value_dim", {"value_dim": 0}),
        ("num_heads", {"num_heads": 0}),
        ("hidden_size", {"hidden_size": 0}),
        ("conv_size", {"conv_size": 0}),
    ],
)
def test_a_wrong_option_is_named(name, options):
    with pytest.raises(ValueError, match=name):
        RunningTensor(**{"hidden_size": D, **options})


@pytest.mark.parametrize("shape", ((2, 10, D - 1), (2, 10, D + 1), (2, 10, 2 * D), (10, D)), ids=str)
def test_hidden_states_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=rf"hidden_states must be of shape \[B, T, {D}\], but was of shape \[.*\]"):
        make()(torch.randn(shape))


def test_packed_sequences_take_neither_mask_nor_cache():
    layer, x = make(), draw(B=1)
    for extra in ({"attention_mask": torch.ones(1, 9)}, {"past_key_values": Cache()}):
        with pytest.raises(ValueError, match="cu_seqlens"):
            run(layer, x, cu_seqlens=bounds((4, 5)), **extra)


def test_packed_sequences_are_one_row():
    with pytest.raises(ValueError, match="cu_seqlens"):
        run(make(), draw(B=2), cu_seqlens=bounds((4, 5)))


@pytest.mark.parametrize("shape", ((0, 9), (2, 0)), ids=("no rows", "no tokens"))
def test_nothing_in_nothing_out(shape):
    layer, cache = make(), Cache()
    assert run(layer, draw(*shape), past_key_values=cache).shape == (*shape, D)
    assert run(layer, draw(*shape), attention_mask=torch.ones(shape)).shape == (*shape, D)
    assert (cache.layers[0].state == 0).all()


# -- Learning ----------------------------------------------------------------------------------------------------------


def recall(generator, B=64, pairs=2, words=6) -> tuple[Tensor, Tensor]:
    """Keys and their values, then the keys again in any order; and the values that belong to those."""
    keys, asked = (torch.rand(B, n, generator=generator).argsort(1)[:, :pairs] for n in (words, pairs))
    values = torch.randint(words, (B, pairs), generator=generator)
    told = torch.stack((keys, words + values), -1).flatten(1)  # k v k v
    return torch.cat((told, keys.gather(1, asked)), 1), values.gather(1, asked)


def test_it_learns_to_recall():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    embed, layer, head = nn.Embedding(12, 32), RunningTensor(32, 2, (6, 6), 8), nn.Linear(32, 6, bias=False)
    model = nn.ModuleList((embed, layer, head))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    losses = []
    for _ in range(80):
        tokens, answers = recall(generator)
        logits = head(run(layer, embed(tokens)))[:, -2:]
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(6)) < 0.2  # it begins knowing nothing
    assert sum(losses[-5:]) / 5 < losses[0] / 6
