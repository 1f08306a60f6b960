"""Is this installation right? Every backend on this machine against the float64 recurrence, outputs and gradients.

What to run when in doubt, as `runningtensor selfcheck`: it says which backend, dtype and case is off, and how far.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

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
WIDTHS = {2: (9,), 3: (9, 5), 4: (5, 3, 4)}  # key modes of each order; none a power of two


T, H, V = 80, 2, 7  # more than one chunk of the default size


@dataclass(frozen=True)
class Case:
    order: int
    delta: bool
    decay: bool
    packed: bool

    def __str__(self) -> str:
        words = ["delta" if self.delta else "additive", "decay" * self.decay, "packed" * self.packed]
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Verdict:
    """How far one backend is off in one dtype and shape, where it is furthest off."""

    backend: str
    dtype: torch.dtype
    shape: str  # of a head's state
    error: float
    limit: float
    worst: str  # the tensor and the case

    @property
    def right(self) -> bool:
        return self.error <= self.limit  # False for NaN


def selfcheck(device: str | torch.device | None = None) -> Iterator[Verdict]:
    """Yields verdicts as they are found: one for each backend, dtype and order, over all cases."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for dtype, order in product(LIMITS, WIDTHS):
        backends = available_backends(device, dtype)
        verdicts: dict[str, list[Verdict]] = {backend: [] for backend in backends}
        for options in product((False, True), repeat=3):
            case = Case(order, *options)
            inputs = make_inputs(case, dtype, device)
            oracle = run(case, {name: x.double() for name, x in inputs.items()}, "recurrent")
            for backend in backends:
                results = run(case, inputs, backend)
                if backend == backends[0] and not case.packed:
                    results |= run_steps(case, inputs)
                verdicts[backend] += judge(backend, dtype, case, results, oracle)
        for found in verdicts.values():
            # A NaN is the worst of all, and compares as neither more nor less.
            yield max(found, key=lambda v: v.error / v.limit if v.error == v.error else float("inf"))


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Unit keys and queries, as the layer makes them, drawn on the CPU so that every device sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    lead = (1, T, H) if case.packed else (2, T, H)
    sequences = 4 if case.packed else 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {}
    for i, width in enumerate(WIDTHS[case.order]):
        inputs[f"q{i}"], inputs[f"k{i}"] = (normalize(draw(*lead, width), dim=-1) for _ in range(2))
    inputs["v"] = draw(*lead, V)
    if case.delta:
        inputs["beta"] = draw(*lead).sigmoid()
    if case.decay:
        inputs["log_decay"] = -draw(*lead).exp() / 16
    inputs = {name: x.to(device, dtype) for name, x in inputs.items()}
    state = draw(sequences, H, *WIDTHS[case.order], V)
    return inputs | {"initial_state": state.to(device, torch.promote_types(dtype, torch.float32))}


def arguments(case: Case, x: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    modes = range(case.order - 1)
    return [x[f"q{i}"] for i in modes], [x[f"k{i}"] for i in modes], x["v"]


def run(case: Case, inputs: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Outputs, final state, and the gradients of everything from both."""
    x = {name: y.detach().requires_grad_() for name, y in inputs.items()}
    device = x["v"].device
    out, state = running_tensor(
        *arguments(case, x),
        beta=x.get("beta"),
        log_decay=x.get("log_decay"),
        initial_state=x["initial_state"],
        output_final_state=True,
        # An empty sequence and one of a single token; lengths that no chunk size divides.
        cu_seqlens=torch.tensor([0, 0, 1, 68, T], device=device) if case.packed else None,
        backend=backend,
    )
    assert state is not None
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for result in (out, state):
        loss = loss + (result.double() * torch.randn(result.shape, generator=generator).to(result)).sum()
    grads = torch.autograd.grad(loss, list(x.values()))
    return {"out": out, "final_state": state} | {f"d{name}": g for name, g in zip(x, grads, strict=True)}


@torch.no_grad()
def run_steps(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same outputs, token by token."""
    state = x["initial_state"].clone()
    queries, keys, values = arguments(case, x)
    outs = []
    for t in range(T):
        gates = {name: x[name][:, t] for name in ("beta", "log_decay") if name in x}
        outs.append(
            running_tensor_step([q[:, t] for q in queries], [k[:, t] for k in keys], values[:, t], state, **gates)
        )
    return {"step_out": torch.stack(outs, 1), "step_state": state}


def judge(
    backend: str, dtype: torch.dtype, case: Case, results: dict[str, Tensor], oracle: dict[str, Tensor]
) -> Iterator[Verdict]:
    out_limit, grad_limit, gate_limit = LIMITS[dtype]
    shape = "×".join(map(str, (*WIDTHS[case.order], V)))
    for name, result in results.items():
        truth = oracle[{"step_out": "out", "step_state": "final_state"}.get(name, name)].double()
        error = ((result.double() - truth).norm() / truth.norm()).item()
        limit = gate_limit if name in ("dbeta", "dlog_decay") else grad_limit if name.startswith("d") else out_limit
        yield Verdict(backend, dtype, shape, error, limit, f"{name}: {case}")
