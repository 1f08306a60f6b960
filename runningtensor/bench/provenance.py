"""One row of results, where it came from, and the CSV it goes into. The columns are the same for every device."""

import csv
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Provenance:
    date: str  # UTC
    commit: str  # with + if the code had changed since; "unknown" outside git
    device: str
    cores: int  # that this process may use
    torch: str
    triton: str  # empty: not installed
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
        triton=installed("triton"),
        transformers=installed("transformers"),
    )


def write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


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
