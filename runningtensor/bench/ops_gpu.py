"""Time and memory of the op on this machine's NVIDIA GPU, beside other ways to mix tokens.

python -m runningtensor.bench.ops_gpu [--quick] [--no-peers] [--resume] [--report] [--out FOLDER]

Each implementation is timed in a process of its own, alone on the GPU; one that fails is shown with its reason and
stops nothing. What has been measured is in `ops_gpu.partial.csv` at once: a run that was cut off can be resumed.

The peers (pip install flash-linear-attention==0.6.0 retention==1.0.7) try hundreds of variants of their kernels, which
takes minutes. So these are compiled by many processes side by side; which is fastest is found out alone on the GPU.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

from runningtensor import running_tensor, running_tensor_step
from runningtensor.bench import gpu
from runningtensor.bench.gpu import (
    SEED,
    Found,
    Measured,
    Verdict,
    both_ways,
    console,
    spread,
    text,
    timed,
    verdict_table,
)
from runningtensor.bench.provenance import Provenance, installed, provenance, read
from runningtensor.plots import plot_ops_gpu

MODULE, CSV = "runningtensor.bench.ops_gpu", "ops_gpu.csv"
TOLERANCE = 2e-2  # relative error in norm, bfloat16 against float64: this tells right from wrong, not good from better
CHUNKS = (512, 128, 256, 1024)  # of power retention; it chooses its blocks at the first and keeps them

OURS, STEP, FIRST, COPY = "runningtensor", "runningtensor-step", "runningtensor-first", "torch-copy"
GATED, DELTA, POWER, SDPA = "fla-gated-deltanet", "fla-deltanet", "power-retention", "torch-sdpa"
PACKAGES = {GATED: "fla", DELTA: "fla", POWER: "retention"}  # what must be installed, where it is not torch
VERSIONS = {GATED: "flash-linear-attention", DELTA: "flash-linear-attention", POWER: "retention"}


@dataclass(frozen=True)
class Case:
    implementation: str
    B: int
    T: int
    H: int
    K: int
    R: int  # 1: a matrix state, or none
    V: int


@dataclass(frozen=True)
class GpuRow(Measured):
    implementation: str
    version: str  # of the package it comes from; ours is the commit
    dtype: str
    B: int
    T: int
    H: int
    K: int
    R: int
    V: int
    seed: int
    ms_forward: float = math.nan  # medians of CUDA events around one call, calls queued as in a training loop
    ms_total: float = math.nan  # forward and backward
    gpu_ms_forward: float = math.nan  # the same without waiting for Python: queued while the GPU sleeps
    gpu_ms_total: float = math.nan
    repetitions: int = 0
    extra_peak_mib: float = math.nan  # above inputs and gradients, in one forward and backward
    note: str = ""

    @property
    def case(self) -> Case:
        return Case(self.implementation, self.B, self.T, self.H, self.K, self.R, self.V)


# (a) to (d): the targets' shapes, ours first.
SHORT = [
    Case(OURS, 64, 1024, 4, 25, 25, 48),
    Case(GATED, 64, 1024, 4, 24, 1, 48),
    Case(DELTA, 64, 1024, 4, 24, 1, 48),
]
MEDIUM = [
    Case(OURS, 16, 4096, 4, 25, 25, 48),
    Case(POWER, 16, 4096, 4, 32, 1, 32),
    Case(SDPA, 16, 4096, 16, 128, 1, 128),
]
MANY_HEADS = [Case(OURS, 8, 4096, 32, 25, 25, 48)]
SQUARE = [Case(OURS, 8, 4096, 16, 16, 16, 64), Case(SDPA, 8, 4096, 16, 128, 1, 128)]
# (e): as many tokens in fewer and longer sequences.
TOKENS, LENGTHS = 65536, (1024, 4096, 16384, 65536)
CURVES = [
    [
        Case(OURS, TOKENS // T, T, 32, 25, 25, 48),
        Case(GATED, TOKENS // T, T, 32, 24, 1, 48),
        Case(DELTA, TOKENS // T, T, 32, 24, 1, 48),
        Case(POWER, TOKENS // T, T, 32, 32, 1, 32),
        Case(SDPA, TOKENS // T, T, 16, 128, 1, 128),
    ]
    for T in LENGTHS
]
# (f) and (g).
DECODING = [Case(STEP, 256, 1, 4, 25, 25, 48), Case(COPY, 1, 1, 1, 1, 1, 2**28)]
COMPILING = [Case(FIRST, 8, 4096, 32, 25, 25, 48)]
GROUPS = [SHORT, MEDIUM, MANY_HEADS, SQUARE, *CURVES, DECODING, COMPILING]
# What is ours goes first: if the time runs out, it is there.
ORDER = [FIRST, OURS, STEP, COPY, SDPA, GATED, DELTA, POWER]


# One process, one implementation.


def unit(*shape: int) -> Tensor:
    return normalize(torch.randn(*shape, device="cuda"), dim=-1).bfloat16().requires_grad_()


def make(case: Case) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The function and its inputs, made as in ops.py."""
    B, T, H, K, R, V = astuple(case)[1:]
    torch.manual_seed(SEED)
    if case.implementation == SDPA:
        q, k = unit(B, H, T, K), unit(B, H, T, K)
        v = torch.randn(B, H, T, V, device="cuda").bfloat16().requires_grad_()
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]
    q, k = unit(B, T, H, K), unit(B, T, H, K)
    v = torch.randn(B, T, H, V, device="cuda").bfloat16().requires_grad_()
    beta = torch.rand(B, T, H, device="cuda").bfloat16().requires_grad_()
    if case.implementation in (OURS, FIRST):
        return ours, [q, k, unit(B, T, H, R), unit(B, T, H, R), v, beta]
    if case.implementation == GATED:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        g = logsigmoid(torch.randn(B, T, H, device="cuda") + 3).requires_grad_()  # float32, as in its own layer
        return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0)[0], [q, k, v, g, beta]
    if case.implementation == DELTA:
        from fla.ops.delta_rule import chunk_delta_rule

        return lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta, scale=1.0)[0], [q, k, v, beta]
    from retention import power_retention

    return lambda q, k, v, chunk=CHUNKS[0]: power_retention(q, k, v, deg=2, chunk_size=chunk), [q, k, v]


def ours(*inputs: Tensor, backend: str = "triton") -> Tensor:
    q, k, u, r, v, beta = inputs
    return running_tensor((q, u), (k, r), v, beta=beta, backend=backend)[0]


def wrong(inputs: list[Tensor], out: Tensor) -> str | None:
    """What of ours is wrong in the first tokens of the first sequence, by the float64 chunked form in torch."""
    few = [x.detach()[:1, :1024].requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in few]
    dout = torch.randn_like(out[:1, :1024])
    truth = ours(*exact, backend="torch")
    names = ("outputs", "dq", "dk", "du", "dr", "dv", "dbeta")
    got = (out[:1, :1024], *both_ways(ours, few, dout))
    want = (truth, *torch.autograd.grad(truth, exact, dout.double()))
    return gpu.far(dict(zip(names, zip(got, want, strict=True), strict=True)), TOLERANCE)


def measure(case: Case) -> Found:
    """The columns of one case that are measured."""
    if case.implementation == FIRST:
        return first(case)
    if case.implementation == COPY:
        source = torch.randn(case.V, device="cuda")
        target = torch.empty_like(source)
        return forward_only(lambda: target.copy_(source))
    if case.implementation == STEP:
        return forward_only(step(case))

    f, inputs = make(case)
    note = ""
    out = f(*inputs)
    dout = torch.randn_like(out)
    if case.implementation == OURS and (fault := wrong(inputs, out)):
        return {"note": f"failed: {fault}"}
    if case.implementation == POWER:  # the best of its chunks
        chunk = min(
            (chunk for chunk in CHUNKS if chunk < case.T),
            key=lambda chunk: timed(lambda: both_ways(lambda *x: f(*x, chunk), inputs, dout), True, warm_ups=3)[0],
        )
        f, note = (lambda *x, f=f: f(*x, chunk)), f"chunks of {chunk}"
    del out

    return {**gpu.trained(f, inputs, dout), "note": note}


def forward_only(f: Callable[[], object]) -> Found:
    with torch.no_grad():
        ms, repetitions = timed(f, False)
        return {"ms_forward": ms, "gpu_ms_forward": timed(f, True)[0], "repetitions": repetitions}


def step(case: Case) -> Callable[[], object]:
    _, inputs = make(Case(OURS, *astuple(case)[1:]))
    q, k, u, r, v, beta = (x.detach()[:, 0] for x in inputs)
    state = torch.zeros(case.B, case.H, case.K, case.R, case.V, device="cuda")
    return lambda: running_tensor_step((q, u), (k, r), v, state, beta=beta)


def first(case: Case) -> Found:
    """The very first call, kernels compiled and all; the process must be new and Triton's cache empty."""
    f, inputs = make(case)
    dout = torch.randn_like(inputs[4])
    torch.cuda.synchronize()
    start = time.perf_counter()
    both_ways(f, inputs, dout)
    torch.cuda.synchronize()
    return {"ms_total": (time.perf_counter() - start) * 1e3, "repetitions": 1}


# The process that runs these.


def in_processes(cases: list[Case]) -> Iterator[tuple[Case, Found]]:
    """What was found, case by case as it comes; each implementation in a process of its own."""
    for _, some in groupby(cases, lambda case: "decoding" if case in DECODING else case.implementation):
        together = list(some)
        with tempfile.TemporaryDirectory() as empty:
            cache = {"TRITON_CACHE_DIR": empty} if together[0] in COMPILING else {}
            yield from gpu.in_process(MODULE, together, cache)


def compile_peers(cases: list[Case], progress: Progress) -> None:
    # Variants are chosen at the first case: by fla for each number of heads, by power retention once and for all.
    heads = {case: case.H if PACKAGES[case.implementation] == "fla" else 0 for case in cases}
    families = {(case.implementation, heads[case]): case for case in reversed(cases)}
    gpu.compile_families(MODULE, list(families.values()), progress)


def chosen(quick: bool, peers: bool) -> list[Case]:
    """The cases in the order they are measured. Quick: without the peers' curves."""
    cases = dict.fromkeys(case for group in GROUPS for case in group)
    without = {case for group in CURVES for case in group[1:]} - set(MEDIUM) if quick else set()
    without |= set() if peers else {case for case in cases if case.implementation in (*PACKAGES, SDPA)}
    return sorted(cases.keys() - without, key=lambda case: (ORDER.index(case.implementation), case.H, case.T, case.B))


def measured_before(paths: Sequence[Path], origin: Provenance) -> list[GpuRow]:
    return gpu.measured_before(paths, origin, GpuRow)


def main(
    out: Path = Path("results/bench"), quick: bool = False, peers: bool = True, resume: bool = False
) -> list[GpuRow]:
    """Measures, prints tables, writes `ops_gpu.csv` and draws `ops_gpu.png`."""
    path = out / CSV
    origin = provenance(torch.device("cuda"))
    console.print(f"{origin.device}, torch {origin.torch}, triton {origin.triton}, commit {origin.commit}, bfloat16")
    cases = chosen(quick, peers)
    missing = {package for package in PACKAGES.values() if peers and find_spec(package) is None}
    if missing:
        console.print(f"not installed, done without: {', '.join(sorted(missing))}")
        cases = [case for case in cases if PACKAGES.get(case.implementation) not in missing]

    rows = gpu.collect(
        path,
        GpuRow,
        cases,
        measured_before((path, gpu.partial_of(path)), origin) if resume else [],
        lambda case: case.implementation in PACKAGES,
        compile_peers,
        in_processes,
        partial(make_row, origin),
        one_line,
    )
    report(path)
    return rows


def make_row(origin: Provenance, case: Case, found: Found) -> GpuRow:
    name = case.implementation
    version = installed(VERSIONS[name]) if name in VERSIONS else origin.torch if "torch" in name else origin.commit
    dtype = {STEP: "bfloat16, state float32", COPY: "float32"}.get(name, "bfloat16")
    return GpuRow(**asdict(origin), version=version, dtype=dtype, seed=SEED, **asdict(case), **gpu.rounded(found))


def report(path: Path) -> None:
    """The tables and the figure of what is in a CSV."""
    rows = read(path, GpuRow)
    console.print(measurements(rows), verdict_table(verdicts(rows)))
    gpu.draw(path, plot_ops_gpu)


def rate(row: GpuRow, ms: float) -> float:
    """Useful TFLOP/s of ours in the forward, GB/s of what only moves memory, nan for the others."""
    if row.implementation == OURS:
        return 6 * row.B * row.T * row.H * row.K * row.R * row.V / ms / 1e9
    if row.implementation in (STEP, COPY):
        return 2 * 4 * row.B * row.H * row.K * row.R * row.V / ms / 1e6  # read and written, float32
    return math.nan


def shape(case: Case) -> str:
    widths = f"{case.K}×{case.R}×{case.V}" if case.R > 1 else f"{case.K}×{case.V}"
    return "1 GiB" if case.implementation == COPY else f"B{case.B} T{case.T} H{case.H} {widths}"


def one_line(row: GpuRow) -> str:
    what = f"{row.implementation} {shape(row.case)}: "
    times = {"forward": row.ms_forward, "forward and backward": row.ms_total}
    return what + (row.note if row.failed else ", ".join(f"{k} {v:.3f} ms" for k, v in times.items() if v == v))


def measurements(rows: list[GpuRow]) -> Table:
    return gpu.comparison(
        "Milliseconds, medians; ×: over ours, above; gpu: without waiting for Python; rate: useful TFLOP/s "
        "forward, or GB/s; MiB: peak above inputs and gradients.",
        rows,
        GROUPS,
        lambda group: group not in (DECODING, COMPILING),
        shape,
        {
            "rate": lambda row: text(rate(row, row.ms_forward), ",.0f"),
            "MiB": lambda row: text(row.extra_peak_mib, ",.0f"),
        },
    )


def verdicts(rows: list[GpuRow]) -> list[Verdict]:
    at = {row.case: row for row in rows}
    found: list[Verdict] = []

    def ms(case: Case, column: str) -> float:
        return getattr(at[case], column) if case in at else math.nan

    def add(target: str, value: Callable[[str], float], most: float = math.inf, least: float = -math.inf) -> None:
        measured = value("")
        wanted = f"≤ {most:g}" if most < math.inf else f"≥ {least:g}"
        found.append(Verdict(target, wanted, measured, value("gpu_"), least <= measured <= most))

    def against(name: str, group: list[Case], case: Case, most: float, columns: Sequence[str]) -> None:
        for column in columns:
            way = "forward" if column == "ms_forward" else "forward and backward"
            add(
                f"{name}: {way}, over {case.implementation}",
                lambda gpu, column=column: ms(group[0], gpu + column) / ms(case, gpu + column),  # type: ignore[misc]
                most,
            )

    def tflops(gpu: str, case: Case) -> float:
        return rate(at[case], ms(case, f"{gpu}ms_forward")) if case in at else math.nan

    def over_lengths(gpu: str, column: str) -> float:
        return spread([ms(group[0], gpu + column) for group in CURVES])

    def bandwidth(gpu: str) -> float:
        moving, copying = (
            rate(at[case], ms(case, f"{gpu}ms_forward")) if case in at else math.nan for case in DECODING
        )
        return moving / copying

    both = ("ms_forward", "ms_total")
    against(shape(SHORT[0]), SHORT, SHORT[1], 1, both)
    against(f"aim: {shape(SHORT[0])}", SHORT, SHORT[2], 1, both)
    against(shape(MEDIUM[0]), MEDIUM, MEDIUM[1], 0.8, both)
    against(shape(MEDIUM[0]), MEDIUM, MEDIUM[2], 0.5, both)
    name = shape(MANY_HEADS[0])
    add(f"{name}: TFLOP/s forward", lambda gpu: tflops(gpu, MANY_HEADS[0]), least=100)
    add(f"aim: {name}: TFLOP/s forward", lambda gpu: tflops(gpu, MANY_HEADS[0]), least=200)
    add(f"{name}: ms forward and backward", lambda gpu: ms(MANY_HEADS[0], f"{gpu}ms_total"), 10)
    add(f"{name}: GiB above inputs and gradients", lambda _: ms(MANY_HEADS[0], "extra_peak_mib") / 1024, 3)
    add(f"{shape(SQUARE[0])}: TFLOP/s forward", lambda gpu: tflops(gpu, SQUARE[0]), least=150)
    against(shape(SQUARE[0]), SQUARE, SQUARE[1], 1, both[1:])
    name = f"{TOKENS} tokens, H32 25×25×48, T from {LENGTHS[0]} to {LENGTHS[-1]}: longest over shortest time"
    add(f"{name}, forward", lambda gpu: over_lengths(gpu, "ms_forward"), 1.6)
    add(f"{name}, forward and backward", lambda gpu: over_lengths(gpu, "ms_total"), 1.6)
    add(f"step, {shape(DECODING[0])}: part of the bandwidth of a copy", bandwidth, least=0.6)
    add("seconds of the first forward and backward, nothing compiled", lambda _: ms(COMPILING[0], "ms_total") / 1e3, 20)
    return found


if __name__ == "__main__":
    about = "Time and memory of the op on this machine's GPU."
    gpu.command(about, CSV, Case, measure, make, PACKAGES, report, main, quick="without the peers' curves")
