"""Is this installation right? Every backend on this machine against float64, outputs and gradients.

What to run when in doubt, as `runningtensor selfcheck`: it says which backend, dtype and case is off, and how far.

On a GPU most of the time goes into compiling kernels. `precompile` does that first, in as many processes as there are
cores, which leave what they compile in Triton's cache on disk.
"""

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from runningtensor.ops.interface import available_backends, running_tensor
from runningtensor.ops.step import running_tensor_step

# Relative errors ‖x - x64‖/‖x64‖ allowed for outputs and states, for gradients, and for the gradients of the gates.
LIMITS = {
    torch.float64: (1e-12, 1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5, 1e-5),
    torch.float16: (1e-3, 2e-3, 2e-3),
    torch.bfloat16: (5e-3, 8e-3, 1e-2),
}
TF32_LIMITS = (1e-3, 1e-3, 1e-3)
WIDTHS = {2: (9,), 3: (9, 5), 4: (5, 3, 4)}  # key modes of each order; none a power of two
V = 7


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    widths: tuple[int, ...]
    V: int
    delta: bool
    decay: bool
    packed: bool
    states: bool = True  # begins with a state and returns the last
    T: int = 80  # more than one chunk of the default size
    H: int = 2
    chunk: int = 64
    tf32: bool = False  # float32 whose products may be of TF32
    small: bool = True  # the recurrence in float64 is quick enough to be checked, and checked against

    def __str__(self) -> str:
        words = ["delta" if self.delta else "additive", "decay" * self.decay, "packed" * self.packed]
        return " ".join(filter(None, (*words, "" if self.states else "fresh")))

    @property
    def group(self) -> tuple[str, str]:
        """Cases of one dtype and one shape have one verdict: its first words."""
        shape = "×".join(map(str, (*self.widths, self.V)))
        more = f", {self.H} heads" if self.H != Case.H else f", chunks of {self.chunk}" if self.chunk != 64 else ""
        return str(self.dtype).removeprefix("torch.") + " (TF32)" * self.tf32, shape + more

    @property
    def limits(self) -> tuple[float, float, float]:
        return TF32_LIMITS if self.tf32 else LIMITS[self.dtype]


@dataclass(frozen=True)
class Verdict:
    """How far one backend is off in one dtype and shape, where it is furthest off."""

    backend: str
    dtype: str
    shape: str  # of a head's state
    error: float
    limit: float
    worst: str  # the tensor and the case

    @property
    def right(self) -> bool:
        return self.error <= self.limit  # False for NaN


# -- What is checked ---------------------------------------------------------------------------------------------------


def cases(device: torch.device) -> list[Case]:
    return gpu_cases() if device.type == "cuda" else cpu_cases()


def cpu_cases() -> list[Case]:
    rules = list(itertools.product((False, True), repeat=3))
    return [Case(dtype, WIDTHS[o], V, *rule) for dtype, o, rule in itertools.product(LIMITS, WIDTHS, rules)]


def gpu_cases() -> list[Case]:
    """Each kernel and block size that ships, each option on and off beside each other; no more: each is compiled."""
    full, plain = (True, True, True), (False, False, False)  # delta, decay, packed
    paper, other = (True, False, False), (False, True, True)
    half, whole = torch.bfloat16, torch.float32
    found = [Case(torch.float64, widths, V, *full) for widths in WIDTHS.values()]
    # Any shape, any dtype, any chunk.
    for order, rule in ((2, paper), (2, other), (3, full), (3, plain), (4, paper)):
        found.append(Case(half, WIDTHS[order], V, *rule))
    found += [
        Case(torch.float16, WIDTHS[3], V, *full),
        Case(whole, WIDTHS[3], V, *full),
        Case(whole, WIDTHS[2], V, *plain),
    ]
    found += [Case(whole, WIDTHS[3], V, *full, tf32=True)]
    found += [Case(half, WIDTHS[3], V, *full, chunk=chunk) for chunk in (32, 16)]
    # More keys and values than one block holds.
    for widths, values, rule in (((128,), 128, full), ((13, 7), 40, plain), ((5, 5, 25), 48, paper)):
        found.append(Case(half, widths, values, *rule, T=200, small=False))
    # The widths that Hopper GPUs have kernels for, with blocks for few and for many heads.
    for widths, values, H, rule, states in (
        ((25, 25), 48, 2, full, True),
        ((25, 25), 48, 40, paper, False),
        ((25, 25), 48, 40, other, True),
        ((24, 24), 48, 2, plain, False),
        ((24, 24), 48, 40, full, True),
        ((16, 16), 64, 2, full, True),
        ((16, 16), 64, 40, plain, False),
        ((25, 25), 64, 40, paper, True),
    ):
        found.append(Case(half, widths, values, *rule, states, T=200, H=H, small=False))
    found += [Case(torch.float16, (25, 25), 48, *full, T=200, H=40, small=False)]
    return found


# -- Checking ----------------------------------------------------------------------------------------------------------


def selfcheck(device: torch.device) -> Iterator[Verdict]:
    """Yields verdicts as they are found: one for each backend, dtype and shape, over all cases."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases(device):
        groups.setdefault(case.group, []).append(case)
    for members in groups.values():
        backends = available_backends(device, members[0].dtype)
        backends = backends if members[0].small else [b for b in backends if b != "recurrent"]
        verdicts: dict[str, list[Verdict]] = {backend: [] for backend in backends}
        for case in members:
            inputs = make_inputs(case, device)
            exact = {name: x.double() for name, x in inputs.items()}
            # Where the recurrence would take too long, the chunk form that smaller cases hold to it.
            oracle = run(case, exact, "recurrent" if case.small else "torch")
            for backend in backends:
                results = run(case, inputs, backend)
                if backend == backends[0] and case.states and not case.packed:
                    results |= run_steps(case, inputs)
                verdicts[backend] += judge(backend, case, results, oracle)
        for found in verdicts.values():
            # A NaN is the worst of all, and compares as neither more nor less.
            yield max(found, key=lambda v: v.error / v.limit if v.error == v.error else float("inf"))


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Unit keys and queries, as the layer makes them, drawn on the CPU so that every device sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    lead = (1 if case.packed else 2, case.T, case.H)
    sequences = 4 if case.packed else 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {}
    for i, width in enumerate(case.widths):
        inputs[f"q{i}"], inputs[f"k{i}"] = (normalize(draw(*lead, width), dim=-1) for _ in range(2))
    inputs["v"] = draw(*lead, case.V)
    if case.delta:
        inputs["beta"] = draw(*lead).sigmoid()
    if case.decay:
        inputs["log_decay"] = -draw(*lead).exp() / 16
    inputs = {name: x.to(device, case.dtype) for name, x in inputs.items()}
    if case.states:
        state = draw(sequences, case.H, *case.widths, case.V)
        inputs["initial_state"] = state.to(device, torch.promote_types(case.dtype, torch.float32))
    return inputs


def arguments(case: Case, x: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    modes = range(len(case.widths))
    return [x[f"q{i}"] for i in modes], [x[f"k{i}"] for i in modes], x["v"]


@contextmanager
def matmul_precision(case: Case) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run(case: Case, inputs: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Outputs, final state, and the gradients of everything from both."""
    x = {name: y.detach().requires_grad_() for name, y in inputs.items()}
    device, T = x["v"].device, case.T
    with matmul_precision(case):
        out, state = running_tensor(
            *arguments(case, x),
            beta=x.get("beta"),
            log_decay=x.get("log_decay"),
            initial_state=x.get("initial_state"),
            output_final_state=case.states,
            # An empty sequence and one of a single token; lengths that no chunk size divides.
            cu_seqlens=torch.tensor([0, 0, 1, T - 12, T], device=device) if case.packed else None,
            chunk_size=case.chunk,
            backend=backend,
        )
        results = {"out": out} if state is None else {"out": out, "final_state": state}
        generator = torch.Generator().manual_seed(1)
        # The same numbers for the oracle: rounded to what the outputs are in.
        starts = [torch.randn(y.shape, generator=generator).to(case.dtype).to(y) for y in results.values()]
        grads = torch.autograd.grad(list(results.values()), list(x.values()), starts)
    return results | {f"d{name}": g for name, g in zip(x, grads, strict=True)}


@torch.no_grad()
def run_steps(case: Case, x: dict[str, Tensor], count: int | None = None) -> dict[str, Tensor]:
    """The same outputs, token by token."""
    state = x["initial_state"].clone()
    queries, keys, values = arguments(case, x)
    outs = []
    for t in range(case.T if count is None else count):
        gates = {name: x[name][:, t] for name in ("beta", "log_decay") if name in x}
        outs.append(
            running_tensor_step([q[:, t] for q in queries], [k[:, t] for k in keys], values[:, t], state, **gates)
        )
    return {"step_out": torch.stack(outs, 1), "step_state": state}


def judge(backend: str, case: Case, results: dict[str, Tensor], oracle: dict[str, Tensor]) -> Iterator[Verdict]:
    out_limit, grad_limit, gate_limit = case.limits
    for name, result in results.items():
        truth = oracle[{"step_out": "out", "step_state": "final_state"}.get(name, name)].double()
        error = ((result.double() - truth).norm() / truth.norm()).item()
        limit = gate_limit if name in ("dbeta", "dlog_decay") else grad_limit if name.startswith("d") else out_limit
        yield Verdict(backend, *case.group, error, limit, f"{name}: {case}")


# -- Compiling the kernels, on all cores at once -----------------------------------------------------------------------

Launch = tuple[Case, int]  # which of its launches


def precompile(wanted: Iterable[Case], device: torch.device) -> Iterator[tuple[int, int]]:
    """Has other processes compile what `run` and `run_steps` will need; yields how many kernels are done, of how many.

    Nothing where there are no kernels. What fails there is passed over: it fails here too, when run, and says so.
    """
    todo = launches([case for case in wanted if "triton" in available_backends(device, case.dtype)], device)
    if not todo:
        return
    waiting: SimpleQueue[Launch] = SimpleQueue()
    compiled: list[Launch] = []
    for launch in todo:
        waiting.put(launch)

    def employ() -> None:
        """Gives one process a launch after the other, and a new process where that one died."""
        worker = None
        with suppress(Empty):
            while True:
                launch = waiting.get_nowait()
                worker = worker or start_worker(device)
                if not answers(worker, launch):
                    worker.kill()
                    worker.communicate()
                    worker = None
                compiled.append(launch)
        if worker is not None:
            worker.communicate()  # closes its input, which ends it

    count = min(len(os.sched_getaffinity(0)), len(todo))
    with ThreadPoolExecutor(count) as pool:
        employers = [pool.submit(employ) for _ in range(count)]
        try:
            while wait(employers, 0.2).not_done:
                yield len(compiled), len(todo)
        finally:
            with suppress(Empty):
                while True:
                    waiting.get_nowait()
    for employer in employers:
        employer.result()


def start_worker(device: torch.device) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", f"from runningtensor.ops.selfcheck import work; work('{device}')"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def answers(worker: "subprocess.Popen[bytes]", launch: Launch) -> bool:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        pickle.dump(launch, worker.stdin)
        worker.stdin.flush()
    except OSError:
        return False
    return worker.stdout.readline() != b""  # which it is if the worker died


def work(device: str) -> None:
    """A worker: compiles the launches that it reads, and answers when it has."""
    with suppress(EOFError):
        while True:
            case, which = pickle.load(sys.stdin.buffer)
            with suppress(Exception):
                compile_launch(case, torch.device(device), which)
            print("compiled", flush=True)


def launches(wanted: Iterable[Case], device: torch.device) -> list[Launch]:
    """Those of all cases, each kernel once for what it is compiled for, the slowest to compile first."""
    found: dict[Hashable, tuple[int, Launch]] = {}
    for case in wanted:
        seen: list[Hashable] = []

        def note(kernel: Any, *values: Any, grid: Any, seen: list[Hashable] = seen, **options: Any) -> None:
            seen.append((id(kernel), *map(kind, values), *sorted(options.items(), key=str)))

        rehearse(case, device, note)
        size = prod(case.widths) * case.V * (10_000 if case.dtype == torch.float32 else 1)
        for which, key in enumerate(seen):
            found.setdefault(key, (size, (case, which)))
    return [launch for _, launch in sorted(found.values(), key=lambda x: x[0], reverse=True)]


def kind(x: Any) -> Hashable:
    """What of an argument makes Triton compile anew."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return (x == 1, x % 16 == 0) if isinstance(x, int) else x


def compile_launch(case: Case, device: torch.device, which: int) -> None:
    from triton.runtime.jit import JITFunction

    compile_or_run, count = JITFunction.run, itertools.count()

    def one(kernel: Any, *values: Any, warmup: bool, **options: Any) -> None:
        if next(count) == which:
            compile_or_run(kernel, *values, warmup=True, **options)

    rehearse(case, device, one)


def rehearse(case: Case, device: torch.device, launch: Callable[..., None]) -> None:
    """Forward, backward and a step, with `launch` called in place of kernels."""
    from triton.runtime.jit import JITFunction

    inputs = make_inputs(case, device)
    before = JITFunction.run
    JITFunction.run = launch
    try:
        run(case, inputs, "triton")
        if case.states and not case.packed:
            run_steps(case, inputs, 1)
    finally:
        JITFunction.run = before
