"""What the benchmarks on an NVIDIA GPU share: clocks, processes, the peers' kernels, runs cut off, tables, options."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from runningtensor.bench.provenance import Provenance, append, cores, read, write

SEED = 0
WARM_UPS, REPETITIONS, SECONDS = 10, 30, 1.0
SLEEP = 10_000_000  # clock cycles, some 6 ms: longer than Python needs for one forward and backward of any of these
LIMIT = 240  # seconds one process may take, all its cases together
COMPILE_LIMIT = 150  # seconds; what is not compiled by then is compiled when it is timed
RESULT = "RESULT "  # marks the lines of a worker that are not the peers' chatter

console = Console(width=None if sys.stdout.isatty() else 160)  # a pipe has no width, and the tables need one

# A case says what is measured: a dataclass of strings and numbers, so that it can be given to another process.
AnyCase = TypeVar("AnyCase", bound=Any)
Found = dict[str, Any]  # the columns of a case that are measured


class Measured(Provenance):
    """A row of results. No dataclass itself: what inherits it orders its columns."""

    note: str

    @property
    def case(self) -> Any:
        raise NotImplementedError

    @property
    def failed(self) -> bool:
        return self.note.startswith("failed")


AnyMeasured = TypeVar("AnyMeasured", bound=Measured)


# Clocks.


def both_ways(f: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(f(*inputs), inputs, dout)


def timed(f: Callable[[], object], head_start: bool, warm_ups: int = WARM_UPS) -> tuple[float, int]:
    """The median in milliseconds, and of how many."""
    for _ in range(warm_ups):
        f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    times = max(3, min(REPETITIONS, int(SECONDS / (time.perf_counter() - start))))
    return median_of(f, times, head_start), times


def median_of(f: Callable[[], object], times: int, head_start: bool = False) -> float:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in events:
        if head_start:
            torch.cuda._sleep(SLEEP)
        begin.record()
        f()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in events)


def trained(f: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> Found:
    """Times of a forward, and of a forward and backward, and the memory of the latter."""
    both_ways(f, inputs, dout)  # whatever allocates only once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = both_ways(f, inputs, dout)
    kept = sum(x.numel() * x.element_size() for x in gradients)
    extra = torch.cuda.max_memory_allocated() - before - kept
    del gradients
    forward, total = (lambda: f(*inputs)), (lambda: both_ways(f, inputs, dout))
    ms_total, repetitions = timed(total, False)
    return {
        "ms_forward": timed(forward, False)[0],
        "ms_total": ms_total,
        "gpu_ms_forward": timed(forward, True)[0],
        "gpu_ms_total": timed(total, True)[0],
        "repetitions": repetitions,
        "extra_peak_mib": extra / 2**20,
    }


# A process that measures.


def work(cases: list[AnyCase], measure: Callable[[AnyCase], Found], autotuned: bool) -> None:
    """Prints what is found, case by case."""
    if autotuned:
        import triton.testing
        from triton.runtime.autotuner import Autotuner

        # A third of the time Triton would take for each of hundreds of variants, and the median of many calls still.
        quicker = staticmethod(lambda f, quantiles: triton.testing.do_bench(f, 10, 30, quantiles=quantiles))
        setattr(Autotuner, "do_bench", quicker)  # noqa: B010
    for case in cases:
        try:
            found = measure(case)
        except Exception as error:  # whatever a peer may raise
            found = {"note": f"failed: {reason(f'{type(error).__name__}: {error}')}"}
        print(f"\n{RESULT}{json.dumps([astuple(case), found])}", flush=True)
        torch.cuda.empty_cache()


def far(pairs: dict[str, tuple[Tensor, Tensor]], tolerance: float) -> str | None:
    """The first that is not what it should be, by its relative error in norm."""
    with torch.no_grad():
        errors = {name: float((got.double() - want).norm() / want.norm()) for name, (got, want) in pairs.items()}
    return next((f"{name} off by {error:.1e}" for name, error in errors.items() if not error <= tolerance), None)


def reason(text: str) -> str:
    return " ".join(text.split())[:160]


def compile_share(make: Callable[[], tuple[Callable[..., Tensor], list[Tensor]]], share: int, shares: int) -> None:
    """Compiles one share of the variants of all kernels of a case and times none of them."""
    from triton.runtime.autotuner import Autotuner

    def compiled(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if self.configs.index(config) % shares == share:
            try:
                self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
                return [0.0] * 3
            except Exception:  # too large for this GPU, say: it will not be chosen when it is timed either
                pass
        return [math.inf] * 3

    # Nor may the choice that this leads to be remembered.
    for name, value in (("_bench", compiled), ("check_disk_cache", lambda self, key, configs, bench: bench())):
        setattr(Autotuner, name, value)
    f, inputs = make()
    out = f(*inputs)
    torch.autograd.grad(out, inputs, torch.randn_like(out))


# The process that runs these. `module` is the benchmark, which knows the options --work and --compile.


def start(module: str, what: str, argument: str, environment: dict[str, str], output: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_AUTOTUNING": "1", **environment}  # a resumed run need not choose anew
    command = [sys.executable, "-m", module, what, argument]
    both = subprocess.STDOUT if output == subprocess.PIPE else output
    return subprocess.Popen(command, stdout=output, stderr=both, text=True, env=environment)


def in_process(module: str, cases: list[AnyCase], environment: dict[str, str]) -> Iterator[tuple[AnyCase, Found]]:
    """What one process found, case by case as it comes; what it did not get to has failed."""
    left = list(cases)
    process = start(module, "--work", json.dumps([astuple(case) for case in left]), environment, subprocess.PIPE)
    killer = Timer(LIMIT, process.kill)
    killer.start()
    last = ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(RESULT):
            fields, found = json.loads(line.removeprefix(RESULT))
            left.remove(case := type(cases[0])(*fields))
            yield case, found
        elif line.strip():
            last = line
    killer.cancel()
    code = process.wait()
    why = f"killed, out of memory or of its {LIMIT} s" if code == -9 else f"exit {code}, {reason(last)}"
    yield from ((case, {"note": f"failed: {why}"}) for case in left)


def compile_families(
    module: str, families: Sequence[Any], progress: Progress, shares: int | None = None, what: str = "the peers"
) -> None:
    """All variants of all kernels that these cases need, side by side, into the caches on disk."""
    if not families:
        return
    shares = shares or math.ceil(cores() / len(families))
    jobs = [(astuple(case), share, shares) for case in families for share in range(shares)]
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores() // len(jobs)))}  # else each takes all cores
    running = [start(module, "--compile", json.dumps(job), threads, subprocess.DEVNULL) for job in jobs]
    progress.console.print(f"compiling {what} in {len(running)} processes, {COMPILE_LIMIT} s at most")
    task = progress.add_task(f"compiling {what}", total=len(running))
    deadline = time.monotonic() + COMPILE_LIMIT
    while (left := sum(process.poll() is None for process in running)) and time.monotonic() < deadline:
        progress.update(task, completed=len(running) - left)
        time.sleep(0.2)
    for process in running:
        process.kill()  # does nothing to those that have ended
        process.wait()
    progress.update(task, completed=len(running))
    failed = sum(process.returncode not in (0, -9) for process in running)
    progress.console.print(f"compiled {what}; of the processes {left} were stopped and {failed} failed")


# Runs, whole or resumed.


def measured_before(paths: Sequence[Path], origin: Provenance, kind: type[AnyMeasured]) -> list[AnyMeasured]:
    """Rows of the same code on the same machine that did not fail."""
    if origin.commit == "unknown" or origin.commit.endswith("+"):
        console.print(f"The commit is {origin.commit}: nobody knows if the code is the same, all is measured again.")
        return []

    def same(row: Provenance) -> bool:
        names = ("commit", "device", "torch", "triton")
        return all(getattr(row, name) == getattr(origin, name) for name in names)

    rows = [row for path in paths if path.exists() for row in read(path, kind) if same(row) and not row.failed]
    return list({row.case: row for row in rows}.values())


def partial_of(path: Path) -> Path:
    """Where the rows of a run are until it ends."""
    return path.with_suffix(".partial.csv")


def collect(
    path: Path,
    kind: type[AnyMeasured],
    cases: list[AnyCase],
    before: list[AnyMeasured],
    slow: Callable[[AnyCase], bool],  # those whose kernels are compiled beforehand: they come last
    compile_peers: Callable[[list[AnyCase], Progress], None],
    in_processes: Callable[[list[AnyCase]], Iterable[tuple[AnyCase, Found]]],
    make_row: Callable[[AnyCase, Found], AnyMeasured],
    one_line: Callable[[AnyMeasured], str],
) -> list[AnyMeasured]:
    """Measures what was not measured before, writes each row at once, and all of them in order at the end."""
    rows = [row for row in before if row.case in cases]
    partial = partial_of(path)
    write(partial, rows, kind)
    done = {row.case for row in rows}
    left = [case for case in cases if case not in done]
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=len(cases), completed=len(done))
        last = [case for case in left if slow(case)]
        for part in ([case for case in left if not slow(case)], last):
            if part and part is last:
                compile_peers(last, progress)
            for case, found in in_processes(part):
                row = make_row(case, found)
                append(partial, row)
                rows.append(row)
                progress.console.print(one_line(row), highlight=False)
                progress.advance(task)

    rows.sort(key=lambda row: cases.index(row.case))
    write(path, rows, kind)
    partial.unlink()
    console.print(f"Wrote {path}")
    return rows


def rounded(found: Found) -> Found:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


# Tables and figures.


def text(x: float, form: str = ".3f") -> str:
    return format(x, form) if x == x else ""


def comparison(
    caption: str,
    rows: Sequence[AnyMeasured],
    groups: Iterable[Sequence[AnyCase]],
    alike: Callable[[Sequence[AnyCase]], bool],  # whether a group's times can be compared
    shape: Callable[[AnyCase], str],
    last: dict[str, Callable[[AnyMeasured], str]],
) -> Table:
    """Times, each with its ratio to that of the first of the group; then other columns, by their headings."""
    table = Table(box=SIMPLE, pad_edge=False, caption=caption)
    table.add_column("implementation")
    table.add_column("shape")
    for heading in ("fwd", "×", "both", "×", "gpu fwd", "×", "gpu both", "×", *last):
        table.add_column(heading, justify="right", no_wrap=True)
    at = {row.case: row for row in rows}
    for group in groups:
        first = at.get(group[0]) if alike(group) else None
        for row in (at[case] for case in group if case in at):
            cells: list[str] = []
            for column in ("ms_forward", "ms_total", "gpu_ms_forward", "gpu_ms_total"):
                ms = getattr(row, column)
                cells += [text(ms), "" if first is None else text(ms / getattr(first, column), ".2f")]
            name = f"{row.case.implementation}, {row.note}" if row.note else row.case.implementation
            table.add_row(name, shape(row.case), *cells, *(cell(row) for cell in last.values()))
        table.add_section()
    return table


def spread(times: Sequence[float]) -> float:
    """The longest over the shortest; nan if one was not measured."""
    return max(times) / min(times) if all(t == t for t in times) else math.nan


@dataclass(frozen=True)
class Verdict:
    target: str
    wanted: str
    measured: float  # nan: not measured
    gpu: float  # the same without waiting for Python, to know why
    met: bool


def verdict_table(found: list[Verdict]) -> Table:
    table = Table("target", "wanted", "measured", "gpu alone", "", box=SIMPLE, pad_edge=False)
    for verdict in found:
        said = "[green]met" if verdict.met else "[bold red]missed"
        said = said if verdict.measured == verdict.measured else "[yellow]not measured"
        table.add_row(verdict.target, verdict.wanted, text(verdict.measured, ".2f"), text(verdict.gpu, ".2f"), said)
    return table


def draw(path: Path, plot: Callable[[Path, Path], None]) -> None:
    """The figure of a CSV, beside it."""
    if find_spec("matplotlib") is None:
        console.print("matplotlib is not installed: no figure.")
        return
    plot(path, path.with_suffix(".png"))
    console.print(f"Wrote {path.with_suffix('.png')}")


# The command line.


def command(
    about: str,
    csv: str,
    kind: type[AnyCase],
    measure: Callable[[AnyCase], Found],
    make: Callable[[AnyCase], tuple[Callable[..., Tensor], list[Tensor]]],
    autotuned: Container[str],  # the implementations whose kernels are compiled beforehand
    report: Callable[[Path], None],
    main: Callable[..., object],
    warm: Callable[[AnyCase], object] | None = None,  # what is done with a case beforehand in place of that
    **flags: str,  # what else `main` takes, with its help
) -> None:
    """Measures and reports; or does a part of it, as a process that another has started."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="where the CSV and the figure go")
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    parser.add_argument("--no-peers", action="store_true", help="ours only")
    parser.add_argument("--resume", action="store_true", help="keep what was measured before of this commit")
    parser.add_argument("--report", action="store_true", help="measure nothing: tables and figure of the CSV there is")
    parser.add_argument("--work", metavar="CASES", help="measure these and print what was found")
    parser.add_argument("--compile", metavar="JOB", help="compile a share of what is measured")
    asked = parser.parse_args()
    if asked.work:
        cases = [kind(*fields) for fields in json.loads(asked.work)]
        work(cases, measure, autotuned=cases[0].implementation in autotuned)
    elif asked.compile:
        fields, *share = json.loads(asked.compile)
        compile_share(partial(make, kind(*fields)), *share) if warm is None else warm(kind(*fields))
    elif asked.report:
        finished = asked.out / csv
        report(unfinished if (unfinished := partial_of(finished)).exists() else finished)
    else:
        more = {flag: getattr(asked, flag) for flag in flags}
        main(asked.out, peers=not asked.no_peers, resume=asked.resume, **more)
