"""While kernels are interpreted: every address that they read or write lies in the tensor that it was counted from.

The interpreter follows any pointer, and beside a tensor there is mostly memory of the same process: a kernel that goes
a little too far, and does nothing with what it finds, is right in every test. On a GPU it may end the process.

Addresses have 48 bits. In the 16 above them a pointer carries the number of its tensor through whatever a kernel
computes; they are taken off again where it is followed.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

BITS = np.uint64(48)
ADDRESS = np.uint64(2**48 - 1)
# Where they have pointers, and a mask. Accesses without a mask, and those to blocks, become these.
ACCESSES: dict[str, tuple[int, int | None]] = {
    "masked_load": (0, 1),
    "masked_store": (0, 2),
    "atomic_cas": (0, None),
    "atomic_rmw": (1, 3),
}


class Outside(Exception):
    """An access outside the tensor that it was counted from."""


class Launch:
    """The tensors of a launch, by number, from 1 on: 0 is what was not counted from any."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.tensors: list[Any] = [torch.empty(0)]
        self.first, self.bytes = np.zeros(1, np.uint64), np.zeros(1, np.uint64)

    def add(self, x: Any) -> np.uint64:
        """Its number, to be added to pointers."""
        x = x.base if isinstance(x, triton.runtime.jit.TensorWrapper) else x
        number = np.uint64(len(self.tensors)) << BITS
        reach = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        self.tensors.append(x)
        self.first = np.append(self.first, number + np.uint64(x.data_ptr()))
        self.bytes = np.append(self.bytes, np.uint64(reach * x.element_size()))
        return number

    def follow(self, access: str, pointers: TensorHandle, wanted: Any) -> TensorHandle:
        """The pointers as they are in memory, if those that are wanted lie where they should."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        number = pointers.data >> BITS
        offset = pointers.data - self.first.take(number, mode="clip")  # before the first it is huge
        room = self.bytes.take(number, mode="clip")
        wrong = ((offset >= room) | (offset + np.uint64(size) > room)) & wanted
        if wrong.any():
            first = tuple(np.argwhere(wrong)[0])
            raise Outside(self.complaint(access, int(number[first]), int(offset[first].view(np.int64)), size, wrong))
        return TensorHandle(pointers.data & ADDRESS, pointers.dtype)

    def complaint(self, access: str, number: int, offset: int, size: int, wrong: np.ndarray) -> str:
        program = interpreter.interpreter_builder.grid_idx
        said = f"{self.kernel}: {access} at {line()}, program {program}: {wrong.sum()} addresses outside"
        if not 0 < number < len(self.tensors):
            return f"{said} all tensors"
        x, room = self.tensors[number], int(self.bytes[number])
        by = f"{-offset} bytes before" if offset < 0 else f"{offset + size - room} bytes beyond"
        return f"{said} a tensor {list(x.shape)} of {x.dtype}, the first {by} it"


def line() -> str:
    """Of the kernel that is being interpreted."""
    frame: Any = sys._getframe(1)
    others = (__file__, str(Path(triton.__file__).parent))
    while frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def checked() -> Iterator[None]:
    """Kernels that are interpreted in here raise an error where they leave their tensors."""
    launches: list[Launch] = []
    call, convert = GridExecutor.__call__, interpreter._implicit_cvt

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launches.append(Launch(self.fn.__name__))
        try:
            call(self, *args, **kwargs)
        finally:
            launches.pop()

    def numbered(x: Any) -> Any:
        converted = convert(x)
        if hasattr(x, "data_ptr"):
            converted.handle.data = converted.handle.data + launches[-1].add(x)
        return converted

    def guarded(access: str, pointers: int, mask: int | None) -> Any:
        method = getattr(InterpreterBuilder, f"create_{access}")

        def follow(self: InterpreterBuilder, *args: Any) -> Any:
            wanted = True if mask is None else np.asarray(args[mask].data)
            found = launches[-1].follow(access, args[pointers], wanted)
            return method(self, *args[:pointers], found, *args[pointers + 1 :])

        return patch.object(InterpreterBuilder, f"create_{access}", follow)

    with ExitStack() as patches:
        patches.enter_context(patch.object(GridExecutor, "__call__", launch))
        patches.enter_context(patch.object(interpreter, "_implicit_cvt", numbered))
        for access, places in ACCESSES.items():
            patches.enter_context(guarded(access, *places))
        yield
