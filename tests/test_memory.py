"""κ = k⊗r is wide: what must not be formed is not formed, and what need not be kept is not kept."""

import weakref
from math import isqrt

import pytest
import torch
from helpers import call, make, op
from torch.utils._python_dispatch import TorchDispatchMode

from runningtensor import running_tensor
from runningtensor.ops import chunk

RULES = pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
GATES = pytest.mark.parametrize(
    ("delta", "decay"), ((False, False), (True, False), (False, True), (True, True)), ids=str
)


class Storages(TorchDispatchMode):
    """The sizes, in elements, of all that is allocated: the largest, and the most of one size alive at one time."""

    def __init__(self, watched: int = 0) -> None:
        super().__init__()
        self.largest, self.watched, self.alive, self.most = 0, watched, {}, 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        result = f(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.see(x)
        return result

    def see(self, x: torch.Tensor) -> None:
        size, address = x.untyped_storage().nbytes() // x.element_size(), x.untyped_storage().data_ptr()
        self.largest = max(self.largest, size)
        if size == self.watched:
            self.alive[id(x)] = address
            weakref.finalize(x, self.alive.pop, id(x), None)
            self.most = max(self.most, len(set(self.alive.values())))


def forward_and_backward(x, C: int, keep: bool) -> None:
    """Without the op around them, which would hide what they do from a dispatch mode."""
    (q, u), (k, r) = x.queries, x.keys
    inputs = (q, k, u, r, x.values, x.beta, x.log_decay)
    out, final, inverse = chunk.forward(inputs, x.initial_state, None, C, keep)
    chunk.backward(torch.ones_like(out), final, inputs, x.initial_state, None, inverse, C)


@GATES
@pytest.mark.parametrize("T", (1, 10, 16))
def test_a_single_fresh_chunk_forms_no_kronecker_features(T, delta, decay, monkeypatch):
    def formed(*_):
        raise AssertionError("κ was formed")

    x = make(T=T, delta=delta, decay=decay, initial=False).leaves()
    monkeypatch.setattr(chunk, "kron", formed)
    monkeypatch.setattr(chunk, "unkron", formed)
    out, _ = call(running_tensor, x, chunk_size=16)
    out.sum().backward()
    with pytest.raises(AssertionError, match="κ was formed"):  # where the state is wanted, it must be
        op(x, chunk_size=16)


@GATES
def test_the_largest_tensor_of_a_single_fresh_chunk_is_smaller_than_its_kronecker_features(delta, decay):
    T, K, R = 32, 24, 20
    x = make(B=1, T=T, H=1, widths=(K, R), V=3, delta=delta, decay=decay, initial=False)
    with Storages() as seen:
        forward_and_backward(x, C=T, keep=False)
    assert T * T <= seen.largest <= max(T * T, T * K, K * R * 3)  # a Gram, a row of keys, a state
    assert seen.largest < T * K * R


@GATES
def test_many_chunks_never_hold_the_kronecker_features_of_more_than_one(delta, decay):
    T, C, K, R = 512, 16, 16, 12
    x = make(B=1, T=T, H=1, widths=(K, R), V=3, delta=delta, decay=decay)
    with Storages() as seen:
        forward_and_backward(x, C, keep=True)
    assert seen.largest <= max(T * C, T * K)
    assert C * K * R <= seen.largest < T * K * R


@RULES
def test_the_backward_pass_holds_about_two_square_roots_of_the_chunk_states(delta):
    chunks, C, K, R, V = 144, 4, 12, 10, 9
    x = make(B=1, T=chunks * C, H=1, widths=(K, R), V=V, delta=delta)
    with Storages(watched=K * R * V) as seen:
        forward_and_backward(x, C, keep=True)
    assert isqrt(chunks) < seen.most <= 2 * isqrt(chunks) + 8  # 8: what a single step needs


@GATES
@pytest.mark.parametrize("packed", (False, True))
def test_only_the_inputs_and_the_inverse_are_saved_for_the_backward_pass(delta, decay, packed):
    B, T, H, C = (1 if packed else 2), 40, 2, 16
    cu_seqlens = torch.tensor([0, 13, 40]) if packed else None
    x = make(B, T, H, delta=delta, decay=decay, sequences=2).leaves()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
        op(x, chunk_size=C, cu_seqlens=cu_seqlens)
    given = {y.data_ptr() for y in x.named().values()} | ({cu_seqlens.data_ptr()} if packed else set())
    made = [list(y.shape) for y in saved if y.data_ptr() not in given and y.numel()]
    assert made == ([[B, T, H, C]] if delta else [])
    assert {y.data_ptr() for y in x.named().values()} <= {y.data_ptr() for y in saved}  # the hooks saw the op
