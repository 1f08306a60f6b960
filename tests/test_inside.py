"""Interpreted kernels that leave a tensor are caught, whatever lies beside it; masked lanes may be anywhere."""

import os

import pytest
import torch
import triton
import triton.language as tl
from helpers import bounds, everything, make, near

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1, which is set where there is no GPU"
)


@triton.jit
def copy_kernel(x, y, first, n, BLOCK: tl.constexpr):
    i = first + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def single_kernel(x, i, WRITE: tl.constexpr):
    if WRITE:
        tl.store(x + i, 1.0)
    else:
        tl.load(x + i)


@triton.jit
def count_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(x + i, 1.0, mask=i < n)


@triton.jit
def of_two_kernel(both, i):
    tl.store(both[1], tl.load(both[0] + i))


def outside(words: str) -> pytest.RaisesExc:
    return pytest.raises(triton.runtime.errors.InterpreterError, match=words)


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """Neighbours in memory: what lies beyond the first is the second."""
    a, b = torch.arange(14.0).split(7)
    return a, b


def test_masked_lanes_may_be_anywhere():
    x, y = torch.randn(7), torch.zeros(7)
    copy_kernel[(1,)](x, y, 0, 7, BLOCK=16)
    assert y.equal(x)
    count_kernel[(1,)](y, 7, BLOCK=16)
    assert y.equal(x + 1)


def test_one_element_too_far_is_too_far():
    x, y = halves()
    with outside("copy_kernel: masked_load at test_inside.py:19, .* 1 addresses outside .*, the first 4 bytes beyond"):
        copy_kernel[(1,)](x, y, 0, 8, BLOCK=8)
    with outside("masked_store at test_inside.py:19"):
        copy_kernel[(1,)](torch.cat((x, y)), x, 0, 8, BLOCK=8)
    with outside("atomic_rmw"):
        count_kernel[(1,)](x, 8, BLOCK=8)
    assert y.equal(torch.arange(7.0, 14.0))


@pytest.mark.parametrize("write", (False, True), ids=("read", "written"))
def test_accesses_without_a_mask_are_checked(write):
    _, x = halves()
    single_kernel[(1,)](x, 6, WRITE=write)
    with outside("4 bytes beyond"):
        single_kernel[(1,)](x, 7, WRITE=write)
    with outside("4 bytes before"):
        single_kernel[(1,)](x, -1, WRITE=write)


def test_another_tensor_of_the_same_launch_is_outside():
    both = halves()
    of_two_kernel[(1,)](both, 6)
    assert both[1][0] == 6
    with outside("of_two_kernel: masked_load"):
        of_two_kernel[(1,)](both, 7)


def test_a_view_ends_where_its_last_element_does():
    x = torch.arange(12.0).view(3, 4)
    single_kernel[(1,)](x[:, 1], 8, WRITE=True)
    assert x[2, 1] == 1
    with outside("4 bytes beyond"):
        single_kernel[(1,)](x[:, 1], 9, WRITE=True)


def test_an_empty_tensor_holds_nothing():
    with outside(r"outside a tensor \[0\]"):
        single_kernel[(1,)](torch.empty(0), 0, WRITE=False)


def test_bounds_of_sequences_may_be_strided():
    """The kernels read one after another: what lies between would lead them anywhere."""
    x = make(1, 20, widths=(4, 3), V=5, initial=False, dtype=torch.float32)
    cu_seqlens = bounds((3, 6, 11))
    apart = torch.stack((cu_seqlens, torch.full_like(cu_seqlens, 10**6)), 1)[:, 0]
    assert not apart.is_contiguous()
    near(everything(x, backend="triton", cu_seqlens=apart), everything(x, backend="triton", cu_seqlens=cu_seqlens), 0)
