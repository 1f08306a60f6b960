"""One row of results, where it came from, and the CSV or JSON it goes into."""

import csv
import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch


@dataclass(frozen=True)
class Provenance:
    date: str  # UTC
    commit: str  # RUNNINGTENSOR_COMMIT if set; else git's, with + if the code had changed since, or "unknown"
    device: str
    cores: int  # that this process may use
    torch: str
    triton: str  # empty: not installed; on a GPU with the release of CUDA whose ptxas it takes, half of the compiler
    transformers: str


@dataclass(frozen=True)
class Row(Provenance):
    implementation: str
    dtype: str
    B: int
    T: int
    H: int
    K: int
    R: int
    V: int
    seed: int
    ms_forward: float  # medians, each of its own: the third need not be the sum of the first two
    ms_backward: float
    ms_total: float
    repetitions: int
    extra_peak_mib: float  # above the inputs, in one forward and backward


def provenance(device: torch.device) -> Provenance:
    return Provenance(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        commit=commit(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        cores=cores(),
        torch=torch.__version__,
        triton=installed("triton") + ptxas(device),
        transformers=installed("transformers"),
    )


AnyRow = TypeVar("AnyRow", bound=Provenance)


def write(path: Path, rows: Sequence[AnyRow], kind: type[AnyRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer(file, kind).writeheader()
    append(path, *rows)


def append(path: Path, *rows: Provenance) -> None:
    with path.open("a", newline="") as file:
        for row in rows:
            writer(file, type(row)).writerow(asdict(row))


def writer(file: Any, kind: type[Provenance]) -> "csv.DictWriter[str]":
    return csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")


def read(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """What `write` and `append` wrote; a last line that was cut off is left out."""
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    with path.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if None not in line.values()]
    return [kind(**{name: types[name](text) for name, text in line.items()}) for line in lines]


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def ptxas(device: torch.device) -> str:
    """The releases of CUDA whose ptxas Triton takes here, and some of our kernels in its place."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        from runningtensor.ops.triton.assembler import HOPPER, sound

        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
        used = [get_ptxas(arch), sound() if arch == HOPPER else None]
    except (ImportError, AttributeError, RuntimeError, TypeError):  # there is none, or too old for the kernels
        return ""
    return f" (ptxas {', '.join(dict.fromkeys(tool.version for tool in used if tool))})"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    if named := os.environ.get("RUNNINGTENSOR_COMMIT"):  # where the code was copied to without its .git
        return named
    package = Path(__file__).parents[1]

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", package, *command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # else the repository is that of whoever installed us
        # Results are not code: measuring again must not make the tree dirty.
        changed = git("status", "--porcelain", "--", ":/", ":(top,exclude)results")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def finite(x: Any) -> Any:
    """JSON has no NaN and no infinity: null instead."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def write_json(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing, whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    tmp.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    tmp.replace(path)
