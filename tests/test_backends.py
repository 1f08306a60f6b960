"""Which backend is taken, and why the kernels are not: by name, by "auto", in a program that was traced elsewhere."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import make, op
from test_kernels import pytestmark  # noqa: F401

from runningtensor import running_tensor
from runningtensor.layers import fused
from runningtensor.ops import interface
from runningtensor.ops.triton import launch

WITHOUT_INTERPRETER = """
import torch, warnings
from runningtensor import running_tensor
warnings.simplefilter("error")
x = torch.ones(1, 4, 1, 3)
running_tensor((x,), (x,), x)
running_tensor((x,), (x,), x, backend="triton")
"""


def test_without_the_interpreter_the_kernels_refuse_a_cpu_and_auto_says_nothing():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_INTERPRETER], capture_output=True, text=True, env=environment)
    *frames, message = done.stderr.strip().split("\n")
    assert 'File "<string>", line 7, in <module>' in frames[1]  # and not the call before it
    assert message.startswith(
        "ValueError: backend must be 'auto', 'torch' or 'recurrent' here, but was 'triton'; tensors are on"
    )


def test_a_last_mode_too_wide_is_refused_and_the_reason_given():
    x = make(1, T=3, H=1, widths=(2, 129), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^backend must be .*'triton'; the last key mode is 129 wide, more than"):
        op(x, backend="triton")


def test_float64_is_refused_and_the_reason_given():
    with pytest.raises(ValueError, match=r"^backend must be .*'triton'; the kernels take .*, not float64"):
        op(make(1, T=3, H=1), backend="triton")


def test_auto_falls_back_where_the_kernels_refuse_and_warns_once(monkeypatch):
    x = make(1, T=3, H=1, dtype=torch.float32)
    want, _ = op(x, backend="torch")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(interface, "triton_refuses", lambda *_, **__: "the moon is full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out, _ = running_tensor(
                x.queries, x.keys, x.values, beta=x.beta, log_decay=x.log_decay, initial_state=x.initial_state
            )
            assert out.equal(want)
    (warning,) = caught
    assert str(warning.message) == "running_tensor falls back to its slower torch backend: the moon is full"
    assert warning.filename == __file__  # where it was called, not where it was decided


def test_a_program_traced_elsewhere_is_refused_too(monkeypatch):
    """Its graph names the backend, and nothing chooses one again."""
    x = make(1, T=3, H=1, dtype=torch.float32)
    monkeypatch.setattr(interface, "triton_refuses", lambda *_, **__: "the moon is full")
    with pytest.raises(ValueError, match=r"^backend must be .*'triton'; the moon is full"):
        q, u, k, r = (*x.queries, *x.keys)
        torch.ops.runningtensor.forward(q, k, u, r, x.values, None, None, None, None, 64, False, "triton")
    inputs = (q, k, u, r, x.values, None, None, None, None, x.values)
    with pytest.raises(ValueError, match=r"^backend must be .*'triton'; the moon is full"):
        torch.ops.runningtensor.backward(x.values, None, *inputs, 64, "triton")


@pytest.fixture
def miscompiling(monkeypatch):
    """A Hopper whose driver takes no code but that of an assembler which miscompiles some kernels."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (interface, fused):
        monkeypatch.setattr(module, "triton_refuses", lambda *_, products=True: "ptxas is old" if products else None)
    interface.warn_once.cache_clear()


def test_without_a_sound_assembler_kernels_that_need_none_go_on(miscompiling):
    """A step has no matrix products, and the kernels for Hopper are compiled rightly."""
    v = torch.zeros(1, 64, 1, 48, dtype=torch.float16)
    of_25, of_24, of_6 = (torch.zeros(1, 64, 1, width, dtype=torch.float16) for width in (25, 24, 6))
    assert interface.choose("auto", of_25, of_25, v, 64) == "triton"
    assert interface.choose("auto", of_6, of_6, v) == "triton"
    assert fused.usable(v)
    narrow, odd = v[..., :8], v[..., :40]
    for k, r, values, tile in (
        *((of_6, of_6, v, 64), (of_24, of_24[..., :1], v, 64), (of_25, of_25, narrow, 64), (of_25, of_25, odd, 64)),
        *((of_25, of_25, v, 32), (of_25.float(), of_25.float(), v.float(), 64)),
    ):
        with pytest.warns(match="falls back to its slower torch backend: ptxas is old"):
            assert interface.choose("auto", k, r, values, tile) == "torch"
        interface.warn_once.cache_clear()
        with pytest.raises(ValueError, match=r"^backend must be .*'triton'; ptxas is old"):
            interface.choose("triton", k, r, values, tile)
    assert interface.available_backends(torch.device("cuda"), torch.float16) == ["torch", "recurrent"]


@pytest.mark.parametrize("capability", ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)))
@pytest.mark.parametrize("products", (False, True))
def test_only_products_on_a_hopper_want_a_sound_assembler(monkeypatch, capability, products):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(launch.assembler, "refuses", lambda kernels: f"{len(kernels)} kernels")
    wanted = "8 kernels" if products and capability == (9, 0) else None
    assert launch.refuses(torch.device("cuda"), torch.bfloat16, products) == wanted


def test_auto_takes_the_kernels_on_a_gpu_where_they_do_not_refuse(monkeypatch):
    x = make(1, T=3, H=1, dtype=torch.float32)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(interface, "triton_refuses", lambda *_: None)
    assert interface.choose("auto", *x.keys, x.values) == "triton"


def test_where_triton_cannot_be_imported_that_is_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "runningtensor.ops.triton", None)
    reason = interface._triton_refuses.__wrapped__(torch.device("cuda"), torch.float32, True)
    assert reason.startswith("Triton cannot be imported (")


def test_a_triton_that_has_renamed_what_we_take_is_such_a_reason(monkeypatch):
    package = sys.modules["runningtensor.ops.triton"]
    for name in ("launch", "hopper_launch", "hopper"):
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}")
        monkeypatch.delattr(package, name)
    monkeypatch.delattr("triton.experimental.gluon.language.shared_memory_descriptor")
    reason = interface._triton_refuses.__wrapped__(torch.device("cuda"), torch.float32, True)
    assert reason.startswith("Triton cannot be imported (") and "shared_memory_descriptor" in reason
