"""Kernels for Hopper are assembled by a ptxas that does not miscompile them, or not at all."""

from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch

from runningtensor.bench.provenance import ptxas

assembler = pytest.importorskip("runningtensor.ops.triton.assembler")
from triton import knobs  # noqa: E402
from triton.backends.nvidia import compiler  # noqa: E402
from triton.runtime._async_compile import active_mode  # noqa: E402

HOPPER = assembler.HOPPER
OLD, NEW = compiler.get_ptxas(HOPPER), knobs.nvidia.ptxas_blackwell


class Kernel:
    pass


@pytest.fixture
def machine(monkeypatch):
    """Its driver's release of CUDA, those of Triton's ptxas for Hopper and for Blackwell, of a package's, of PATH's."""

    def make(driver, given, newer, package=None, path=None):
        tools = [SimpleNamespace(path=f"/cuda-{release}", version=release) for release in (given, newer, package, path)]
        monkeypatch.setattr(compiler, "get_ptxas", lambda arch: {HOPPER: tools[0]}[arch])
        monkeypatch.setattr(assembler, "knobs", SimpleNamespace(nvidia=SimpleNamespace(ptxas_blackwell=tools[1])))
        monkeypatch.setattr(assembler.shutil, "which", {"ptxas": path and "/bin/ptxas"}.get)
        found = package and SimpleNamespace(submodule_search_locations=["/package"])
        monkeypatch.setattr(assembler, "find_spec", lambda _: found)
        monkeypatch.setattr(
            assembler.NvidiaTool, "from_path", {"/package/bin/ptxas": tools[2], "/bin/ptxas": tools[3]}.get
        )
        monkeypatch.setattr(assembler, "loads", lambda tool: assembler.release(tool)[0] <= driver)
        monkeypatch.setattr(assembler, "assemble", lambda kernel, ptxas: vars(kernel).update(by=ptxas))

    return make


@pytest.mark.parametrize(
    ("driver", "newer", "package", "path", "taken"),
    (
        (12, "12.9", None, None, "12.9"),
        (13, "13.1", None, None, "13.1"),
        (13, "13.1", "12.9", "13.2", "13.1"),
        (12, "13.1", "12.9", "12.10", "12.9"),
        (12, "13.1", "12.8", "12.10", "12.10"),
        (12, "13.1", None, "12.9", "12.9"),
    ),
)
def test_one_that_miscompiles_is_replaced_by_a_newer_one_that_the_driver_takes(
    machine, driver, newer, package, path, taken
):
    machine(driver, "12.8", newer, package, path)
    kernel = Kernel()
    assert assembler.refuses((kernel,)) is None and kernel.by == f"/cuda-{taken}"


@pytest.mark.parametrize("given", ("12.9", "12.10", "13.0"))
def test_one_that_does_not_stays(machine, given):
    machine(13, given, "13.1")
    kernel = Kernel()
    assert assembler.refuses((kernel,)) is None and not vars(kernel)


@pytest.mark.parametrize(
    ("driver", "newer", "package", "path"),
    ((13, "12.8", "12.8", "12.8"), (12, "13.1", None, None), (12, "13.1", "13.0", "13.1")),
)
def test_without_another_kernels_are_refused_and_it_is_said_what_to_do(machine, driver, newer, package, path):
    machine(driver, "12.8", newer, package, path)
    kernel = Kernel()
    assert assembler.refuses((kernel,)).startswith("the ptxas of CUDA 12.8 miscompiles kernels for Hopper")
    assert not vars(kernel)


def test_without_tritons_newer_one_or_a_driver_there_is_a_reason_too(monkeypatch):
    class Nvidia:
        @property
        def ptxas_blackwell(self):
            raise RuntimeError("Cannot find ptxas-blackwell")

    monkeypatch.setattr(compiler, "get_ptxas", lambda _: SimpleNamespace(path="/cuda-12.8", version="12.8"))
    monkeypatch.setattr(assembler, "knobs", SimpleNamespace(nvidia=Nvidia()))
    monkeypatch.setattr(assembler, "find_spec", lambda _: None)
    monkeypatch.setattr(assembler.shutil, "which", lambda _: None)
    assert "pip install" in assembler.refuses((Kernel(),))
    monkeypatch.setattr(assembler.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert not assembler.loads(SimpleNamespace(version="12.9"))


@pytest.mark.parametrize(("driver", "taken"), ((12080, {"12.8", "12.9"}), (13000, {"12.8", "12.9", "13.0", "13.1"})))
def test_a_driver_takes_code_of_its_own_release_of_cuda_and_of_those_before(monkeypatch, driver, taken):
    def get_version(version):
        version._obj.value = driver

    monkeypatch.setattr(assembler.ctypes, "CDLL", lambda _: SimpleNamespace(cuDriverGetVersion=get_version))
    releases = ("12.8", "12.9", "13.0", "13.1", "14.0")
    assert {release for release in releases if assembler.loads(SimpleNamespace(version=release))} == taken


def test_one_that_may_not_be_run_is_none(tmp_path):
    (tmp_path / "ptxas").mkdir()
    assert not [*assembler.at(str(tmp_path / "ptxas"))] and not [*assembler.at(str(tmp_path / "missing"))]
    assert [tool.version for tool in assembler.at(NEW.path)] == [NEW.version]


def test_where_there_is_no_package_of_nvidia_there_is_tritons_own():
    assert [tool.path for tool in assembler.others()][:1] == [NEW.path]


class Asking:
    """What Triton knows of its ptxas while it compiles: the tool, and a part of the key of what it keeps on disk."""

    def _do_compile(self):
        return compiler.get_ptxas(HOPPER), compiler.get_ptxas_version(HOPPER)


@pytest.mark.skipif(OLD.version == NEW.version, reason="Triton brings one alone")
def test_it_compiles_these_kernels_and_no_others_and_triton_keeps_them_apart():
    theirs, ours = Asking(), Asking()
    assembler.assemble(ours, NEW.path)
    for _ in range(2):
        for kernel, used in ((theirs, OLD), (ours, NEW)):
            tool, key = kernel._do_compile()
            # What it is given stays PTX of a version that both know.
            assert (tool.path, tool.version) == (used.path, OLD.version) and f"release {used.version}" in key


def test_a_kernel_for_another_gpu_beside_a_hopper_is_compiled_as_ever():
    kernel = SimpleNamespace(_do_compile=lambda: (compiler.get_ptxas(80), compiler.get_ptxas_version(80)))
    want = kernel._do_compile()
    assembler.assemble(kernel, NEW.path)
    assert kernel._do_compile() == want


def test_what_another_thread_compiles_meanwhile_is_compiled_as_ever():
    both, seen = Barrier(2, timeout=60), {}

    def compiled(name, kernel):
        seen[name] = kernel._do_compile()

    class Waiting(Asking):
        def _do_compile(self):
            both.wait()
            found = super()._do_compile()
            both.wait()
            return found

    theirs, ours = Waiting(), Waiting()
    assembler.assemble(ours, NEW.path)
    thread = Thread(target=compiled, args=("theirs", theirs))
    thread.start()
    compiled("ours", ours)
    thread.join()
    assert seen["theirs"] == (OLD, compiler.get_ptxas_version(HOPPER)) and seen["ours"][0].path == NEW.path


def test_it_is_compiled_at_once_where_triton_would_do_so_later():
    kernel = SimpleNamespace(_do_compile=active_mode.get)
    assembler.assemble(kernel, NEW.path)
    token = active_mode.set("later")
    assert kernel._do_compile() is None and active_mode.get() == "later"
    active_mode.reset(token)


def test_a_compilation_that_fails_leaves_triton_as_it_was():
    kernel = SimpleNamespace(_do_compile=lambda: 1 / 0)
    assembler.assemble(kernel, NEW.path)
    with pytest.raises(ZeroDivisionError):
        kernel._do_compile()
    assert compiler.get_ptxas(HOPPER) == OLD and f"release {OLD.version}" in compiler.get_ptxas_version(HOPPER)


@pytest.mark.parametrize(("capability", "used"), ((8, (compiler.get_ptxas(80),)), (9, (OLD, NEW)), (10, (NEW,))))
def test_a_measurement_says_which_assemblers_are_used_on_its_gpu(monkeypatch, capability, used):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    monkeypatch.setattr(assembler, "sound", lambda: NEW)
    assert ptxas(torch.device("cuda")) == f" (ptxas {', '.join(dict.fromkeys(tool.version for tool in used))})"
    assert ptxas(torch.device("cpu")) == ""
