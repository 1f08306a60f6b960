"""Which ptxas assembles the kernels for Hopper.

Triton up to 3.7 takes for it the one of CUDA 12.8 that comes with it. Where tiles of different widths begin at the same
place of shared memory, that one may make the descriptor of a matrix product of registers that nothing wrote: what the
product reads, and whether there is such an address, depends on what the GPU ran before. Triton brings a newer one, too,
for Blackwell. It is not taken for hopper*.py: there the old one makes no such mistake, and the newer one of Triton 3.7
code that is slower by a quarter. Triton 3.8 and later take a newer one by themselves.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from threading import local
from typing import Any

from triton import knobs
from triton.backends.nvidia import compiler
from triton.knobs import NvidiaTool

HOPPER = 90
SOUND = (12, 9)


class Chosen(local):
    """By the thread that compiles."""

    path: str | None = None


CHOSEN = Chosen()


@cache
def refuses(kernels: tuple[Any, ...]) -> str | None:
    """Why no ptxas at hand will do for these, or None where one does: it is then what they are compiled by."""
    given, tool = compiler.get_ptxas(HOPPER), sound()
    if tool is None:
        return (
            f"the ptxas of CUDA {given.version} miscompiles kernels for Hopper, and no other one suits this driver: "
            "pip install 'nvidia-cuda-nvcc-cu12>=12.9', or let TRITON_PTXAS_PATH be that of CUDA 12.9"
        )
    if tool != given:
        for kernel in kernels:
            assemble(kernel, tool.path)
    return None


def sound() -> NvidiaTool | None:
    """Triton's own, if it is."""
    given = compiler.get_ptxas(HOPPER)
    if release(given) >= SOUND:
        return given
    return next((tool for tool in others() if release(tool) >= SOUND and loads(tool)), None)


def others() -> Iterator[NvidiaTool]:
    """Triton's for Blackwell, that of NVIDIA's package, and the one on the PATH."""
    with suppress(RuntimeError):  # it is not there
        yield knobs.nvidia.ptxas_blackwell
    with suppress(ModuleNotFoundError):
        package = find_spec("nvidia.cuda_nvcc")
        for folder in (package and package.submodule_search_locations) or ():
            yield from at(f"{folder}/bin/ptxas")
    yield from at(shutil.which("ptxas"))


def at(path: str | None) -> Iterator[NvidiaTool]:
    with suppress(OSError):  # it may not be run
        if path and (tool := NvidiaTool.from_path(path)):
            yield tool


def assemble(kernel: Any, ptxas: str) -> None:
    """By this one, whatever Triton takes for others."""
    from triton.runtime._async_compile import active_mode

    teach_triton()
    as_usual = kernel._do_compile  # of Triton 3.6 and 3.7; later ones bring what is sound

    def compile(*arguments: Any, **options: Any) -> Any:
        token, CHOSEN.path = active_mode.set(None), ptxas  # not in another thread, which would not know
        try:
            return as_usual(*arguments, **options)
        finally:
            CHOSEN.path = None
            active_mode.reset(token)

    kernel._do_compile = compile


@cache
def teach_triton() -> None:
    """To ask here before it takes its own. PTX stays of its version; what is kept on disk is told apart."""
    its_own, its_version = compiler.get_ptxas, compiler.get_ptxas_version

    def get_ptxas(arch: int) -> NvidiaTool:
        tool = its_own(arch)
        return replace(tool, path=CHOSEN.path) if chosen(arch) else tool

    def get_ptxas_version(arch: int = 80) -> str:
        return version_of(CHOSEN.path) if chosen(arch) else its_version(arch)

    compiler.get_ptxas, compiler.get_ptxas_version = get_ptxas, get_ptxas_version


def chosen(arch: int) -> bool:
    """Not for another GPU beside a Hopper."""
    return CHOSEN.path is not None and arch == HOPPER


@cache
def version_of(ptxas: str) -> str:
    return subprocess.check_output([ptxas, "--version"], text=True)


def release(tool: NvidiaTool) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))


def loads(tool: NvidiaTool) -> bool:
    """Whether this driver takes what it makes: code of CUDA 13 is not for a driver of CUDA 12."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # it has another name here
        return False
    return release(tool)[0] <= version.value // 1000
