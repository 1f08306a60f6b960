"""Every kernel compiles for Hopper, as launched, on a machine without a GPU: what ptxas makes of it can be read.

A subprocess, since the kernels here are imported for the interpreter. In it a launch compiles and does not run, so that
block sizes and options are those of launch.py and fused.py and not a copy of them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from sass import from_nowhere

if tuple(map(int, version("triton").split(".")[:2])) < (3, 6):
    pytest.skip("the kernels want Triton 3.6", allow_module_level=True)

SHARED = 227 * 1024  # bytes a block of sm_90 may have
GRID = (2**31 - 1, 65535, 65535)  # blocks along x, y and z
# (K, R, V): heads, delta rule, decay, packed. With few heads other blocks are chosen than with many.
LAUNCHES = {
    (25, 25, 48): ((80, True, False, False), (4, True, True, True), (80, False, True, False)),
    (16, 16, 64): ((80, True, True, False), (4, False, False, True)),
    (24, 24, 48): ((80, True, False, True), (4, False, False, False)),
    (128, 1, 128): ((80, True, True, True), (4, False, False, False)),
    (24, 1, 48): ((160, True, True, False), (4, True, False, True), (80, True, False, False), (4, False, True, False)),
    (6, 6, 8): ((80, True, False, False), (4, True, True, True)),
    (128, 1, 64): ((160, True, True, False), (4, False, True, False)),
    (256, 1, 256): ((160, True, True, False), (4, False, True, False)),
}
MATRICES = ((24, 1, 48), (128, 1, 64), (256, 1, 256))  # by kernels of their own
# The layer of the paper, by (d_model, heads): tokens, packed.
LAYERS = {(128, 4): ((1024, True),), (1024, 32): ((4096, False),)}
# Bytes a thread may spill to local memory: what was measured, and a little more. A guard, not a goal: run this
# file as a program to measure anew. Another Triton brings another ptxas, which spills otherwise.
MEASURED_WITH = "3.7"
SLACK = 64  # of those not named below
SPILLS: dict[tuple[int, ...], dict[str, int]] = {
    (25, 25, 48): {
        "hopper_pack.pack_kernel": 250,
        "hopper_scan.scan_kernel": 120,
        "hopper_reverse.reverse_kernel": 150,
        "hopper_gradients.gradients_kernel": 190,
    },
    (16, 16, 64): {"hopper_pack.pack_kernel": 240},
    (24, 24, 48): {"hopper_pack.pack_kernel": 100},
    (128, 1, 64): {"matrix.reverse_kernel": 150, "matrix.gradients_kernel": 160},
    (256, 1, 256): {"matrix.reverse_kernel": 170, "matrix.gradients_kernel": 250},
    (128, 1, 128): {
        "forward.local_kernel": 1200,
        "forward.scan_kernel": 190,
        "backward.reverse_kernel": 160,
        "backward.gradients_kernel": 3400,
    },
    (6, 6, 8): {
        "forward.local_kernel": 1300,
        "forward.scan_kernel": 850,
        "backward.reverse_kernel": 110,
        "backward.gradients_kernel": 1700,
    },
}


def launch_all(shape: tuple[int, ...], *rule: int) -> None:
    """On tensors without data that say they are on a GPU."""
    from types import SimpleNamespace

    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    FakeTensor.data_ptr = lambda _: 0  # aligned, as all that torch allocates
    FakeTensor.__setitem__ = lambda *_: None  # torch without CUDA cannot
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda _: (9, 0)
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(
        multi_processor_count=132, shared_memory_per_block_optin=SHARED
    )
    from runningtensor.ops.triton import assembler, launch

    assembler.loads = lambda _: True
    if not os.environ.get("AS_TRITON_DOES"):
        assert launch.refuses(torch.device("cuda"), torch.bfloat16) is None  # and chooses the assembler

    def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    with FakeTensorMode():
        (launch_op if len(shape) == 3 else launch_layer)(fake, shape, *rule)


def launch_op(
    fake: Callable, shape: tuple[int, int, int], B: int, H: int, delta: bool, decay: bool, packed: bool
) -> None:
    """Forward, backward and a step."""
    import torch

    from runningtensor.ops.triton import launch

    launch.MATRIX_KERNELS = tuple(shape) in MATRICES
    T, (K, R, V) = 256, shape
    q, k, u, r, v = (fake(B, T, H, width) for width in (K, K, R, R, V))
    inputs = (q, k, u, r, v, fake(B, T, H) if delta else None, fake(B, T, H) if decay else None)
    cu_seqlens = fake(3, dtype=torch.int64) if packed else None
    initial_state = fake(2 if packed else B, H, K, R, V, dtype=torch.float32) if decay else None
    _, _, inverse = launch.forward(inputs, initial_state, cu_seqlens, 64, True)
    launch.backward(v, None, inputs, initial_state, cu_seqlens, inverse, 64)
    token = (None if x is None else fake(B, H, *x.shape[3:]) for x in inputs)
    launch.step(*token, fake(B, H, K, R, V, dtype=torch.float32))


def launch_layer(fake: Callable, shape: tuple[int, int], B: int, T: int, packed: bool) -> None:
    """What is before the op and after it: forward, backward and a step. And the loss."""
    import torch

    from runningtensor.layers import RunningTensor, fused
    from runningtensor.models.loss import cross_entropies_

    layer = RunningTensor(*shape)
    conv, weight = (fake(*part.weight.shape) for part in (layer.conv, layer.norm))

    def forward(T: int, extra: int, position: torch.Tensor | None) -> tuple[tuple, list[tuple], list[torch.Tensor]]:
        # Without the wrappers of custom ops, which launch nothing where tensors are fake.
        x = fake(B, extra + T, layer.projection.compact_width)
        before = (x, conv, extra, position, None, *vars(layer.shape).values())
        outputs = fused._front._init_fn(*before)
        values, _, scale, gate = outputs[-4:]
        after = [(values, gate.view_as(values), scale, weight, layer.norm.eps, silu) for silu in (True, False)]
        for given in after:
            fused._norm._init_fn(*given)
        return before, after, outputs

    before, after, outputs = forward(T, 0, fake(T, dtype=torch.int64) if packed else None)
    for given in after:
        fused._norm_backward._init_fn(given[0], *given)
    fused._front_backward._init_fn(outputs, *before)
    forward(1, conv.shape[1] - 1, None)
    cross_entropies_(fake(8, 32_000), fake(8, dtype=torch.int64))


def name(kernel: object) -> str:
    return f"{kernel.module.split('.')[-1]}.{kernel.__name__}"


def compile_all(shape: tuple[int, ...], *rule: int) -> list[dict]:
    """Of each launch: the kernel, its shared memory, registers and spills, and what it computes from nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Hopper())
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    compile_or_run, found = JITFunction.run, []

    def compile_only(kernel: JITFunction, *arguments: object, warmup: bool, **options: object) -> None:
        compiled = compile_or_run(kernel, *arguments, warmup=True, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage, sass = (
                subprocess.run([cuobjdump, what, file.name], capture_output=True, text=True, check=True).stdout
                for what in ("-res-usage", "-sass")
            )
        registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage).groups())
        found.append(
            {
                "kernel": name(kernel),
                "rule": rule,
                "shared": compiled.metadata.shared,
                "registers": registers,
                "spilled": stack + local,
                "from_nowhere": from_nowhere(sass),
                "products": "wgmma" in compiled.asm["ptx"],
                "cuda": 5 + compiled.asm["cubin"][8],  # of the assembler: the release is in the version of the ABI
            }
        )

    JITFunction.run = compile_only
    launch_all(shape, *rule)
    return found


def grids(shape: tuple[int, ...], *rule: int) -> list[dict]:
    """Of each launch: the kernel and its grid."""
    from triton.runtime.jit import JITFunction

    found = []
    JITFunction.run = lambda kernel, *_, grid, **__: found.append({"kernel": name(kernel), "grid": grid})
    launch_all(shape, *rule)
    return found


def elsewhere(what: str, *arguments: object, **settings: str) -> list[dict]:
    """What a function above returns in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | settings
    command = [sys.executable, __file__, what, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compile_everything() -> dict[tuple[int, ...], list[dict]]:
    """Of each shape, all launches."""
    jobs = [(shape, rule) for shape, rules in (LAUNCHES | LAYERS).items() for rule in rules]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda job: elsewhere("compile_all", job[0], 1, *job[1]), jobs)
    results = {shape: [] for shape in LAUNCHES | LAYERS}
    for (shape, _), launches in zip(jobs, found, strict=True):
        results[shape] += launches
    return results


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, ...], list[dict]]:
    return compile_everything()


SHAPES = pytest.mark.parametrize("shape", LAUNCHES | LAYERS, ids=lambda shape: "x".join(map(str, shape)))


@SHAPES
def test_every_kernel_compiles_for_hopper_within_its_shared_memory(compiled, shape):
    for launch in compiled[shape]:
        assert launch["shared"] <= SHARED, launch


@pytest.mark.skipif(not version("triton").startswith(MEASURED_WITH), reason=f"measured with Triton {MEASURED_WITH}")
@SHAPES
def test_no_kernel_spills_more_registers_than_it_did(compiled, shape):
    more = [
        launch for launch in compiled[shape] if launch["spilled"] > SPILLS.get(shape, {}).get(launch["kernel"], SLACK)
    ]
    assert not more


@SHAPES
def test_no_kernel_computes_with_what_nothing_wrote(compiled, shape):
    assert not [launch for launch in compiled[shape] if launch["from_nowhere"]]


ASSEMBLERS = pytest.mark.skipif(
    not version("triton").startswith("3.7") or "TRITON_PTXAS_PATH" in os.environ, reason="other assemblers"
)


@ASSEMBLERS
@SHAPES
def test_kernels_with_products_are_assembled_by_the_newer_one_and_those_for_hopper_are_not(compiled, shape):
    for launch in compiled[shape]:
        if launch["products"]:
            assert launch["cuda"] == (12 if launch["kernel"].startswith("hopper_") else 13), launch["kernel"]


@ASSEMBLERS
def test_the_assembler_that_triton_would_take_makes_kernels_that_do():
    """Else we would not need another, nor know that the test above can fail."""
    launches = elsewhere("compile_all", (24, 1, 48), 1, 80, True, False, False, AS_TRITON_DOES="1")
    assert {launch["kernel"] for launch in launches if launch["from_nowhere"]} == {"matrix.gradients_kernel"}


@pytest.mark.parametrize("shape", ((25, 25, 48), (128, 1, 128)))
def test_the_grid_of_many_sequences_fits_the_device(shape):
    # 5,000 sequences of 16 heads are 80,000 scans.
    for launch in elsewhere("grids", shape, 5000, 16, True, True, False):
        assert all(blocks <= most for blocks, most in zip(launch["grid"], GRID, strict=False)), launch


if __name__ == "__main__":
    if len(sys.argv) > 1:
        what, arguments = sys.argv[1:]
        print(json.dumps({"compile_all": compile_all, "grids": grids}[what](*json.loads(arguments))))
    else:  # measures anew what the table above holds
        for shape, launches in compile_everything().items():
            for launch in launches:
                print(*shape, *launch.values())
