"""Eager calls go around torch's dispatcher, and wherever something there would notice, they do not."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from runningtensor import running_tensor


def inputs(grad=True):
    torch.manual_seed(0)
    return [torch.randn(1, 9, 2, width, dtype=torch.float64, requires_grad=grad) for width in (3, 3, 2, 2, 4)]


def outputs(q, k, u, r, v):
    return running_tensor((q, u), (k, r), v)[0]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_op_and_its_gradient():
    with Seen() as seen:
        outputs(*inputs()).sum().backward()
    assert [name for name in seen.names if name.startswith("runningtensor")] == [
        "runningtensor.forward.default",
        "runningtensor.backward.default",
    ]


def test_with_and_without_the_dispatcher_it_is_the_same():
    found = []
    for mode in (None, Seen()):
        x = inputs()
        if mode is None:
            grads = torch.autograd.grad(outputs(*x).square().sum(), x)
        else:
            with mode:
                grads = torch.autograd.grad(outputs(*x).square().sum(), x)
        found.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_fake_tensors_stay_fake():
    with FakeTensorMode() as mode:
        x = [torch.empty(1, 9, 2, width) for width in (3, 3, 2, 2, 4)]
        out = outputs(*x)
    assert out.shape == (1, 9, 2, 4) and out.fake_mode is mode


def test_packed_sequences_under_inference_mode():
    x = [x.detach() for x in inputs()]
    want = running_tensor((x[0], x[2]), (x[1], x[3]), x[4], cu_seqlens=torch.tensor([0, 4, 9]))[0]
    with torch.inference_mode():
        got = running_tensor((x[0], x[2]), (x[1], x[3]), x[4], cu_seqlens=torch.tensor([0, 4, 9]))[0]
    assert torch.equal(got, want)
