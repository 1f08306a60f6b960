"""How exact the op is: relative errors of outputs, states and gradients against the float64 recurrence.

python -m runningtensor.bench.errors [--out FOLDER]

Each backend gets inputs rounded to its dtype, and so does the recurrence, so that only the arithmetic is judged. Beside
the kernels stands the torch backend, and the torch backend with the operands of its matrix products rounded as tensor
cores take them: that is what such arithmetic costs by itself, and the kernels may be off by little more.
"""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runningtensor.bench.provenance import Provenance, append, provenance, write
from runningtensor.ops import chunk
from runningtensor.ops.interface import available_backends
from runningtensor.ops.selfcheck import Case, default_device, make_inputs, precompile, run

KERNELS, TORCH, ROUNDED = "triton", "torch", "torch, rounded"
SHAPES: dict[tuple[int, ...], int] = {  # key modes: V
    (64,): 64,
    (25, 25): 48,
    (24, 24): 48,
    (16, 16): 64,
    (13, 7): 40,
    (5, 5, 25): 48,
}
DTYPES = ((torch.bfloat16, False), (torch.float16, False), (torch.float32, True), (torch.float32, False))  # and TF32
RULES = ((True, False), (True, True), (False, False), (False, True))  # delta, decay
# The kernels may be off by so much more than the torch backend with rounded operands: outputs and states, gradients.
RATIOS = (2.0, 3.0)


@dataclass(frozen=True)
class Row(Provenance):
    backend: str
    dtype: str
    state: str  # the shape of a head's
    rule: str
    T: int
    tensor: str
    error: float  # ‖x - x64‖/‖x64‖
    limit: float  # that none may exceed; infinite where nothing is promised
    ratio: float  # of the error to that of the torch backend with rounded operands; 0: not of interest
    most: float  # that the ratio may be

    @property
    def right(self) -> bool:
        return self.error <= self.limit and self.ratio <= self.most  # False for NaN


def cases(device: torch.device) -> Iterator[list[Case]]:
    """Those of one dtype together: their kernels are compiled together."""
    T = 1024 if device.type == "cuda" else 256
    for dtype, tf32 in DTYPES:
        yield [
            Case(dtype, widths, V, *rule, packed=False, T=T, H=4, tf32=tf32, small=False)
            for widths, V in SHAPES.items()
            for rule in RULES
        ]


def measure(case: Case, device: torch.device) -> dict[str, dict[str, float]]:
    """The errors of each tensor, by backend."""
    inputs = make_inputs(case, device)
    oracle = run(case, {name: x.double() for name, x in inputs.items()}, "recurrent")
    backends = [backend for backend in (KERNELS, TORCH) if backend in available_backends(device, case.dtype)]
    found = {backend: errors(run(case, inputs, backend), oracle) for backend in backends}
    with rounded_products(case):
        return found | {ROUNDED: errors(run(case, inputs, TORCH), oracle)}


def errors(results: dict[str, Tensor], oracle: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: ((results[name].double() - truth).norm() / truth.norm()).item()
        for name, truth in ((name, truth.double()) for name, truth in oracle.items())
    }


def judge(case: Case, found: dict[str, dict[str, float]], origin: Provenance) -> list[Row]:
    """A row for each backend and tensor. Only the kernels are held to the torch backend's errors."""
    dtype, state = case.group
    rows = []
    for backend, of in found.items():
        for tensor, error in of.items():
            gradient = tensor not in ("out", "final_state")
            limits = case.limits
            limit = limits[0 if not gradient else 2 if tensor in ("dbeta", "dlog_decay") else 1]
            beside = found[ROUNDED][tensor]
            ratio = error / beside if backend == KERNELS and beside > 0 else 0.0
            bound = limit if backend != ROUNDED else float("inf")  # what rounding costs is measured, not promised
            rows.append(
                Row(
                    **asdict(origin),
                    backend=backend,
                    dtype=dtype,
                    state=state.split(",")[0],
                    rule=str(case),
                    T=case.T,
                    tensor=tensor,
                    error=float(f"{error:.3g}"),
                    limit=bound,
                    ratio=float(f"{ratio:.3g}"),
                    most=RATIOS[gradient],
                )
            )
    return rows


# -- The torch backend, with operands as tensor cores take them --------------------------------------------------------


@contextmanager
def rounded_products(case: Case) -> Iterator[None]:
    """Within, the torch backend rounds the operands of its matrix products, forward and backward.

    The functions of chunk.py are wrapped, not the op: a mode around the op would not reach into it, nor, on a GPU, into
    the thread that runs the backward.
    """

    def wrapped(f: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with Rounding(case.dtype, case.tf32) if case.dtype != torch.float32 or case.tf32 else nullcontext():
                return f(*arguments)

        return call

    before = chunk.forward, chunk.backward
    chunk.forward, chunk.backward = map(wrapped, before)
    try:
        yield
    finally:
        chunk.forward, chunk.backward = before


# Where the operands are among the arguments.
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2)}


class Rounding(TorchDispatchMode):
    """Rounds the operands of matrix products to bfloat16, float16 or TF32; sums stay as they are."""

    def __init__(self, dtype: torch.dtype, tf32: bool) -> None:
        super().__init__()
        self.dtype, self.tf32 = dtype, tf32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = PRODUCTS.get(func.overloadpacket.__name__, ())
        args = [self.rounded(x) if i in operands else x for i, x in enumerate(args)]
        return func(*args, **(kwargs or {}))

    def rounded(self, x: Tensor) -> Tensor:
        if not self.tf32:
            return x.to(self.dtype).to(x.dtype)
        bits = x.contiguous().view(torch.int32)  # 13 of 23 bits of the mantissa go, to the nearest, ties to even
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


# -- The table ---------------------------------------------------------------------------------------------------------


def main(out: Path = Path("results/bench"), groups: Iterable[list[Case]] | None = None) -> bool:
    """Measures, prints a table of the worst of each backend, dtype and shape, writes every number; whether all hold."""
    console, device = Console(), default_device()
    origin = provenance(device)
    console.print(f"{origin.device}, torch {origin.torch}, Triton {origin.triton or '-'}, commit {origin.commit}")
    path = out / f"errors_{'gpu' if device.type == 'cuda' else 'cpu'}.csv"
    write(path, [], Row)
    rows: list[Row] = []
    with console.status("") as status:
        for group in cases(device) if groups is None else groups:
            for done, total in precompile(group, device):
                status.update(f"{group[0].group[0]}, compiling kernels: {done} of {total}")
            for i, case in enumerate(group):
                status.update(f"{case.group[0]}, measuring: {i} of {len(group)}")
                found = judge(case, measure(case, device), origin)
                append(path, *found)
                rows += found
    console.print(table(rows))
    wrong = [row for row in rows if not row.right]
    for row in wrong:
        console.print(
            f"[bold red]exceeded[/]: {row.backend}, {row.dtype}, {row.state}, {row.rule}, {row.tensor}: "
            f"{row.error:.1e}, at most {row.limit:.0e}; "
            f"{row.ratio:.1f} times that of rounded operands, at most {row.most:g}"
        )
    console.print(f"{len(rows) - len(wrong)} of {len(rows)} within their bounds. Wrote {path}")
    return not wrong


def table(rows: list[Row]) -> Table:
    """The largest errors over rules, of outputs, states, gradients and gradients of gates."""
    kinds = {"out": "out", "final_state": "state", "dbeta": "gates", "dlog_decay": "gates"}
    headings = ("out", "state", "gradients", "gates")
    found = Table(box=SIMPLE, pad_edge=False)
    for heading in ("backend", "dtype", "state", *headings, "ratio", ""):
        found.add_column(heading, no_wrap=True)
    keys = list(dict.fromkeys((row.dtype, row.state, row.backend) for row in rows))
    for dtype, state, backend in keys:
        mine = [row for row in rows if (row.dtype, row.state, row.backend) == (dtype, state, backend)]
        worst = {heading: 0.0 for heading in headings}
        for row in mine:
            heading = kinds.get(row.tensor, "gradients")
            worst[heading] = max(worst[heading], row.error) if row.error == row.error else float("nan")
        ratio = max(row.ratio for row in mine)
        right = all(row.right for row in mine)
        verdict = "" if backend == ROUNDED else "[green]within" if right else "[bold red]exceeds"
        numbers = (f"{worst[heading]:.1e}" if worst[heading] else "-" for heading in headings)
        found.add_row(backend, dtype, state, *numbers, f"{ratio:.1f}" if ratio else "-", verdict)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="How exact the op is on this machine.")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="where the CSV goes")
    raise SystemExit(0 if main(parser.parse_args().out) else 1)
