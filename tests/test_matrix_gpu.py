"""What only a GPU shows of the kernels for matrix states: compiled, in bfloat16, with blocks for few heads and many."""

import pytest
import torch
from helpers import everything, near
from test_gpu import LENGTHS, RULES, made, near_float64, packing, repeatedly
from test_stress import equal_keys

launch = pytest.importorskip("runningtensor.ops.triton.launch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launch.VERSION < (3, 7, 1), reason="older Triton transposes products wrongly on Hopper"),
]
SHAPES = pytest.mark.parametrize(("K", "V"), ((24, 48), (32, 64), (128, 16), (128, 128), (256, 256), (9, 7)))


@pytest.fixture(autouse=True)
def only_these(monkeypatch):
    monkeypatch.setattr(launch, "scan", None)


@pytest.mark.parametrize(("delta", "decay", "lengths"), RULES.values(), ids=RULES)
@SHAPES
def test_they_are_near_float64(K, V, delta, decay, lengths):
    near_float64(made(lengths, widths=(K,), V=V, delta=delta, decay=decay, dtype=torch.bfloat16), lengths)


@SHAPES
def test_many_heads_which_take_wider_blocks_are_near_float64(K, V):
    near_float64(made(T=150, H=80, widths=(K,), V=V, dtype=torch.bfloat16))


def test_float16_is_near_float64():
    near_float64(made(widths=(24,), V=48, dtype=torch.float16))


@pytest.mark.parametrize(("dtype", "bound"), ((torch.bfloat16, 4e-2), (torch.float16, 5e-3)), ids=str)
def test_equal_keys_are_right(dtype, bound):
    x = equal_keys(made(widths=(45,), V=48, decay=False, dtype=dtype))
    near(everything(x, backend="triton"), everything(x.double(), dtype, backend="torch"), bound)


def test_an_inverse_too_large_for_float16_is_found_in_other_ways():
    x = made(B=1, T=64, H=1, widths=(4,), V=3, decay=False, initial=False, dtype=torch.bfloat16)
    keys = torch.zeros_like(x.keys[0])
    keys[:, 0, :, 0], keys[:, 1, :, 0] = 300, -150  # the second takes 45,000 times what the first wrote
    near_float64(x.but(keys=(keys,), beta=torch.ones_like(x.beta)))


@pytest.mark.parametrize("lengths", (None, LENGTHS), ids=("batch", "packed"))
@pytest.mark.parametrize(("K", "V", "H"), ((24, 48, 2), (128, 128, 80)))
def test_a_hundred_runs_are_equal_bit_for_bit(K, V, H, lengths):
    runs = repeatedly(made(lengths, H=H, widths=(K,), V=V, dtype=torch.bfloat16), packing(lengths))
    first = next(runs)
    for _, again in zip(range(99), runs, strict=False):
        assert all(a.equal(b) for a, b in zip(again, first, strict=True))
