"""Time and memory of the op on this machine's CPU, beside the recurrence and beside what one would use without it.

python -m runningtensor.bench.ops [--quick] [--out FOLDER]

Each case runs in processes of its own. Times are taken in rounds, in which each case has its turn: the machine may
change its speed within seconds, and a round gives all cases the same machine. A case whose results are wrong ends the
benchmark: its speed means nothing.
"""

import argparse
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from runningtensor import running_tensor
from runningtensor.bench.provenance import Row, provenance, write

B, H, K, R, V = 1, 4, 25, 25, 48
SEED = 0
TOLERANCE = 1e-4  # relative to the largest entry
T, LONG = 4096, 16384
OURS, RECURRENT, PEER = "runningtensor-torch", "runningtensor-recurrent", "transformers-kronecker"
# The peer's tensors exceed the 32 MiB from which glibc maps memory anew each time, unless told to keep it: then most of
# its time goes into page faults. This is what its arithmetic costs.
PEER_KEEPING = "transformers-kronecker, malloc keeps"
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
# glibc raises the size from which it gives memory back at once by what was freed before. Held where it begins, the peak
# is what was in use.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
Case = tuple[str, int]  # implementation and T
TARGETS: list[Case] = [(OURS, T), (PEER, T), (PEER_KEEPING, T), (RECURRENT, T), (OURS, LONG)]
CURVES: list[Case] = [(OURS, 1024), (OURS, 2048), (OURS, 8192), (PEER, 1024), (PEER, 2048)]

console = Console()


def ours(q: Tensor, k: Tensor, u: Tensor, r: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return running_tensor((q, u), (k, r), v, beta=beta, backend="torch")[0]


def recurrent(q: Tensor, k: Tensor, u: Tensor, r: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return running_tensor((q, u), (k, r), v, beta=beta, backend="recurrent")[0]


def peer(q: Tensor, k: Tensor, u: Tensor, r: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """What one would do without this library: the matrix delta rule, on keys and queries multiplied out to K·R."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    rule = inspect.unwrap(torch_chunk_gated_delta_rule)  # the wrapper would pick a GPU kernel where one is installed
    q = q * (K * R) ** 0.5  # it divides by this; undone where it is cheapest
    κ, φ = ((a[..., :, None] * b[..., None, :]).flatten(-2) for a, b in ((k, r), (q, u)))
    return rule(φ, κ, v, g=torch.zeros_like(beta), beta=beta, use_qk_l2norm_in_kernel=False)[0]


FUNCTIONS: dict[str, Callable[..., Tensor]] = {OURS: ours, RECURRENT: recurrent, PEER: peer, PEER_KEEPING: peer}


def make_inputs(length: int) -> tuple[list[Tensor], Tensor]:
    """q, k, u, r, v, beta, and the gradient of the outputs."""
    torch.manual_seed(SEED)
    q, k, u, r = (normalize(torch.randn(B, length, H, width), dim=-1) for width in (K, K, R, R))
    inputs = [q, k, u, r, torch.randn(B, length, H, V), torch.rand(B, length, H)]
    return [x.requires_grad_() for x in inputs], torch.randn(B, length, H, V)


def run(name: str, inputs: list[Tensor], dout: Tensor) -> tuple[float, float, list[Tensor]]:
    """Milliseconds forward and backward, and the outputs followed by the gradients."""
    start = time.perf_counter()
    out = FUNCTIONS[name](*inputs)
    middle = time.perf_counter()
    grads = torch.autograd.grad(out, inputs, dout)
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3, [out.detach(), *grads]


def check(name: str, inputs: list[Tensor], dout: Tensor, results: list[Tensor]) -> None:
    """The first outputs against the float64 recurrence, gradients against ours, which the tests hold to it."""
    with torch.no_grad():
        truth = recurrent(*(x[:, :1024].double() for x in inputs))
    results = [results[0][:, :1024], *results[1:]]
    expected = [truth, *run(OURS, inputs, dout)[2][1:]]
    for what, got, want in zip(("outputs", *"qkurv", "beta"), results, expected, strict=True):
        error = float((got - want).abs().max() / want.abs().max())
        if not error <= TOLERANCE:
            sys.exit(f"{name} at T={dout.shape[1]} is wrong, {what} by {error:.1e}; nothing is reported.")


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def memory(name: str, length: int) -> None:
    """Checks the case and prints its extra peak memory: what forward and backward need above their inputs."""
    run(name, *make_inputs(128))  # loads libraries and starts threads
    inputs, dout = make_inputs(length)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = peak_mib()
    *_, results = run(name, inputs, dout)  # the first call: later ones reuse what malloc has kept
    extra = peak_mib() - before
    check(name, inputs, dout, results)
    print(extra)


def clock(name: str, length: int, repetitions: int) -> None:
    """Prints the milliseconds forward and backward of each repetition, after one to warm up."""
    inputs, dout = make_inputs(length)
    for i in range(repetitions + 1):
        forward, backward, _ = run(name, inputs, dout)
        if i > 0:
            print(forward, backward)


def in_its_own_process(what: str, case: Case, environment: dict[str, str], *more: str) -> list[list[float]]:
    """What `memory` or `clock` prints."""
    command = [sys.executable, "-m", "runningtensor.bench.ops", what, case[0], str(case[1]), *more]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode != 0:
        sys.exit(f"{done.stderr.strip()}\n{case[0]} at T={case[1]} failed; nothing is reported.")
    return [[float(number) for number in line.split()] for line in done.stdout.splitlines()]


def main(out: Path = Path("results/bench"), quick: bool = False) -> None:
    """Measures, prints tables, writes `ops_cpu.csv` and draws `ops_cpu.png`. Quick: what the targets need only."""
    cases = TARGETS if quick else CURVES + TARGETS
    for package in ("transformers", "matplotlib"):
        if find_spec(package) is None:
            console.print(f"{package} is not installed (pip install 'runningtensor\\[bench]'): done without.")
    if find_spec("transformers") is None:
        cases = [case for case in cases if FUNCTIONS[case[0]] is not peer]
    origin = provenance(torch.device("cpu"))
    console.print(f"{origin.device}, {origin.cores} cores, torch {origin.torch}, commit {origin.commit}")
    console.print(f"float32, B{B} H{H}, keys {K} and {R}, V {V}, delta rule, forward and backward")

    extra = {
        case: in_its_own_process("--memory", case, GIVING_BACK)[-1][0]
        for case in track(cases, "results and memory", console=console)
    }
    times: dict[Case, list[list[float]]] = {case: [] for case in cases}
    for case in track(cases * 2, "time", console=console):
        environment = KEEPING if case[0] == PEER_KEEPING else {}
        times[case] += in_its_own_process("--time", case, environment, "2" if case[0] == RECURRENT else "4")

    rows = [
        Row(
            **asdict(origin),
            implementation=name,
            dtype="float32",
            B=B,
            T=length,
            H=H,
            K=K,
            R=R,
            V=V,
            seed=SEED,
            ms_forward=round(median(forward for forward, _ in times[name, length]), 2),
            ms_backward=round(median(backward for _, backward in times[name, length]), 2),
            ms_total=round(median(sum(pair) for pair in times[name, length]), 2),
            repetitions=len(times[name, length]),
            extra_peak_mib=round(extra[name, length], 1),
        )
        for name, length in cases
    ]
    console.print(measurements(rows), verdicts(rows))
    path = out / ("ops_cpu_quick.csv" if quick else "ops_cpu.csv")
    write(path, rows, Row)
    console.print(f"Wrote {path}")
    if find_spec("matplotlib") is not None:
        from runningtensor.plots import plot_ops

        plot_ops(path, path.with_suffix(".png"))
        console.print(f"Wrote {path.with_suffix('.png')}")


def measurements(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, caption=f"Medians; extra peak memory; ratios to {OURS} at the same T.")
    table.add_column("implementation")
    for heading in ("T", "fwd ms", "bwd ms", "both", "ratio", "MiB", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: (row.T, row.ms_total)):
        mine = next((other for other in rows if (other.implementation, other.T) == (OURS, row.T)), row)
        table.add_row(
            row.implementation,
            str(row.T),
            f"{row.ms_forward:,.0f}",
            f"{row.ms_backward:,.0f}",
            f"{row.ms_total:,.0f}",
            f"{row.ms_total / mine.ms_total:.1f}",
            f"{row.extra_peak_mib:,.0f}",
            f"{row.extra_peak_mib / mine.extra_peak_mib:.1f}",
        )
    return table


def verdicts(rows: list[Row]) -> Table:
    at = {(row.implementation, row.T): row for row in rows}
    mine, long, slow, other = at[OURS, T], at[OURS, LONG], at[RECURRENT, T], at.get((PEER, T))
    table = Table("target", "wanted", "measured", "", box=SIMPLE, pad_edge=False)

    def add(what: str, least: float | None, most: float | None, measured: float) -> None:
        met = (least is None or measured >= least) and (most is None or measured <= most)
        wanted = f"≥ {least:g}" if least is not None else f"≤ {most:g}"
        table.add_row(what, wanted, f"{measured:.2f}", "[green]met" if met else "[bold red]missed")

    add(f"times faster than the recurrence, T={T}", 40, None, slow.ms_total / mine.ms_total)
    if other is not None:
        add(f"times faster than transformers on Kronecker keys, T={T}", 10, None, other.ms_total / mine.ms_total)
        add("extra memory, as a part of theirs", None, 0.25, mine.extra_peak_mib / other.extra_peak_mib)
    add(f"time at T={LONG} over that at {T}", None, 4.4, long.ms_total / mine.ms_total)
    add(f"extra memory at T={LONG} over that at {T}", None, 4.4, long.extra_peak_mib / mine.extra_peak_mib)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time and memory of the op on this machine's CPU.")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="where the CSV and the figure go")
    parser.add_argument("--quick", action="store_true", help="what the targets need, fewer times")
    parser.add_argument("--memory", nargs=2, metavar=("NAME", "T"), help="check one case and print its extra memory")
    parser.add_argument("--time", nargs=3, metavar=("NAME", "T", "N"), help="print the times of N runs of one case")
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory[0], int(arguments.memory[1]))
    elif arguments.time:
        clock(arguments.time[0], int(arguments.time[1]), int(arguments.time[2]))
    else:
        main(arguments.out, arguments.quick)
