"""The kernels of the layer give what its torch code gives: forward, backward, masked, packed and token by token."""

from types import SimpleNamespace

import pytest
import torch
from helpers import rel

from runningtensor.layers import LayerState, RunningTensor, fused, norms, projections, running_tensor

LAYERS = {
    "the paper's": {},
    "cumulative, gate not convolved": {"forget": "cumulative", "gate_conv": False},
    "sigmoid gate": {"output_gate": "sigmoid"},
    "a matrix, additive, bare": {"projection": "linear", "delta": False, "forget": "none", "query_skip": False},
    "repeated, bare": {"projection": "conconly", "query_skip": False},
    "order 2": {"key_dims": (5,)},
    "order 4": {"key_dims": (3, 2, 4)},
}
CALLS = {
    "plain": lambda B, T: {},
    "masked": lambda B, T: {"attention_mask": torch.rand(B, T) > 0.3},
    "packed": lambda B, T: {"cu_seqlens": torch.tensor([0, 3, 3, 20, T])},
}


@pytest.fixture(autouse=True)
def few_large_programs_of_short_spans(monkeypatch, request):
    """Quicker to interpret, and 40 tokens are several spans."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(fused, "LANES", 512)
        monkeypatch.setattr(fused, "SPAN", 16)


LAYER = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


def make(options, D=20):
    torch.manual_seed(0)
    return RunningTensor(
        **({"hidden_size": D, "num_heads": 2, "key_dims": (5, 4), "value_dim": 6} | options), layer_idx=0
    )


def with_and_without(monkeypatch, compute):
    found = []
    for kernels in (True, False):
        for module in (running_tensor, norms, projections):
            monkeypatch.setattr(module, "usable", lambda x, kernels=kernels: kernels)
        found.append(compute())
    return found


@LAYER
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_outputs_and_gradients_are_the_same(monkeypatch, options, call):
    layer = make(options)
    B, T = (1, 40) if call is CALLS["packed"] else (2, 40)  # more than one block of tokens
    x, dout = torch.randn(B, T, 20, requires_grad=True), torch.randn(B, T, 20)
    arguments = call(B, T)

    def compute():
        out = layer(x, **arguments)[0]
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], dout)]

    for got, want in zip(*with_and_without(monkeypatch, compute), strict=True):
        assert rel(got, want) < 1e-5


SIZES = {
    "4 heads of 24/24/48": (128, 4, 24, 48),
    "16 of 15/15/64": (512, 16, 15, 64),
    "8 of 15/15/128": (512, 8, 15, 128),
    "3 of 5/5/8": (40, 3, 5, 8),
}


# Every pair of a size, a layer and a call, not every three: each case compiles kernels of its own.
CASES = [
    pytest.param(SIZES[size], LAYERS[layer], CALLS[call], id=f"{size}, {layer}, {call}")
    for i, size in enumerate(SIZES)
    for j, layer in enumerate(list(LAYERS)[:4])
    for call in [list(CALLS)[(i + j) % len(CALLS)]]
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("size", "options", "call"), CASES)
def test_on_a_gpu_outputs_and_gradients_are_those_of_torch(monkeypatch, dtype, size, options, call):
    D, H, K, V = size
    B, T = (1, 300) if call is CALLS["packed"] else (2, 150)
    torch.manual_seed(0)
    layer = RunningTensor(D, H, (K, K), V, **options).cuda()
    # Four of each, judged as one: the gradient of three taps sums over all tokens and channels, may nearly vanish, and
    # is then 5% off in torch's own bfloat16.
    x, dout = (torch.randn(4, B, T, D).to(dtype).cuda() for _ in range(2))
    arguments = {name: given.cuda() for name, given in call(B, T).items()}
    weights = {name: w.to(dtype) for name, w in layer.state_dict().items()}

    def compute():
        wide = torch.float32 if running_tensor.usable(x) is False else dtype  # torch's code is what is to be met
        layer.to(wide).load_state_dict(weights)
        each = []
        for one, d in zip(x.to(wide), dout.to(wide), strict=True):
            given = one.requires_grad_()
            out = layer(given, **arguments)[0]
            each.append([out.detach(), *torch.autograd.grad(out, [given, *layer.parameters()], d)])
        return [torch.stack(same).double() for same in zip(*each, strict=True)]

    for got, want in zip(*with_and_without(monkeypatch, compute), strict=True):
        assert rel(got, want) < (1e-4 if dtype == torch.float32 else 3e-2)


# The repeated channels (48) end where the last copy of x ends, or within it, or before the first is complete; or there
# are as many as there are columns of the compact form.
@pytest.mark.parametrize("D", (1, 2, 29, 24, 46, 100))
def test_any_width_of_the_input_is_the_same(monkeypatch, D):
    layer = make({"value_dim": 3, "key_dims": (4, 3)}, D)
    x, dout = torch.randn(1, 5, D, requires_grad=True), torch.randn(1, 5, D)

    def compute():
        out = layer(x)[0]
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], dout)]

    for got, want in zip(*with_and_without(monkeypatch, compute), strict=True):
        assert rel(got, want) < 1e-5


@LAYER
def test_decoding_is_the_same(monkeypatch, options):
    layer, x = make(options), torch.randn(2, 14, 20)

    @torch.no_grad()
    def compute():
        cache = SimpleNamespace(layers=[LayerState()])
        pieces = [x[:, :7], *x[:, 7:10].split(1, 1), x[:, 10:]]
        return [torch.cat([layer(piece, past_key_values=cache)[0] for piece in pieces], 1), *cache.layers[0].read()]

    for got, want in zip(*with_and_without(monkeypatch, compute), strict=True):
        assert rel(got, want) < 1e-5


def test_gradients_through_a_cache_are_the_same(monkeypatch):
    layer, x = make({}), torch.randn(1, 12, 20)

    def compute():
        cache = SimpleNamespace(layers=[LayerState()])
        layer(x[:, :5], past_key_values=cache)
        last = x[:, 5:].clone().requires_grad_()
        out = layer(last, past_key_values=cache)[0]
        return torch.autograd.grad(out.square().sum(), [last, *layer.parameters()])

    for got, want in zip(*with_and_without(monkeypatch, compute), strict=True):
        assert rel(got, want) < 1e-5


def test_the_ops_are_well_formed():
    shape = (8, (3, 2), 4, 2, 2, True, True, "telescoping", True)
    front = fused.Front(*shape)
    x, conv = torch.randn(1, 3, 10, requires_grad=True), torch.randn(front.channels, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.runningtensor.front.default, (x, conv, 0, None, None, *shape))
    taps = torch.randn(3, requires_grad=True)
    torch.library.opcheck(torch.ops.runningtensor.mix.default, (x, taps, 27))
    x, gate = (torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(2))
    scale, weight = torch.rand(1, 5, 2, requires_grad=True), torch.rand(4, requires_grad=True)
    for silu in (True, False):
        torch.library.opcheck(torch.ops.runningtensor.gated_norm.default, (x, gate, scale, weight, 1e-5, silu))


def test_without_a_gpu_they_are_not_used():
    assert not fused.usable(torch.zeros(1))
