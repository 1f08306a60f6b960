"""Random inputs, the op's forms called alike, and how far two results lie apart."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from runningtensor import running_tensor
from runningtensor.ops import reference

# Key widths by order. No two neighbours alike and no power of two, so that no transposed or padded mode goes unnoticed.
WIDTHS = {2: (5,), 3: (5, 3), 4: (5, 3, 6), 5: (3, 5, 3, 6)}
ORDERS = tuple(WIDTHS)
V = 7


@dataclass(frozen=True)
class Inputs:
    queries: tuple[Tensor, ...]  # each [B,T,H,K_i]
    keys: tuple[Tensor, ...]  # each [B,T,H,K_i]
    values: Tensor  # [B,T,H,V]
    beta: Tensor | None = None  # [B,T,H]
    log_decay: Tensor | None = None  # [B,T,H]
    initial_state: Tensor | None = None  # [N,H,K_1,…,V]

    def map(self, f: Callable[[Tensor], Tensor]) -> "Inputs":
        def each(x: tuple[Tensor, ...] | Tensor | None) -> tuple[Tensor, ...] | Tensor | None:
            return tuple(map(f, x)) if isinstance(x, tuple) else None if x is None else f(x)

        return Inputs(**{field.name: each(getattr(self, field.name)) for field in fields(self)})

    def but(self, **changes: object) -> "Inputs":
        return replace(self, **changes)

    def tokens(self, rows: slice | int) -> "Inputs":
        """Some of the tokens, or one, which then has no dimension T; from no state."""
        return self.but(initial_state=None).map(lambda x: x[:, rows])

    def named(self) -> dict[str, Tensor]:
        """Every tensor that is there, by its name in the error messages."""
        modes = {f"{name}[{i}]": x for name in ("queries", "keys") for i, x in enumerate(getattr(self, name))}
        rest = {name: getattr(self, name) for name in ("values", "beta", "log_decay", "initial_state")}
        return modes | {name: x for name, x in rest.items() if x is not None}

    def leaves(self) -> "Inputs":
        return self.map(lambda x: x.detach().clone().requires_grad_())

    def double(self) -> "Inputs":
        return self.map(lambda x: x.detach().double())


def make(
    B: int = 2,
    T: int = 20,
    H: int = 2,
    widths: tuple[int, ...] = WIDTHS[3],
    V: int = V,
    dtype: torch.dtype = torch.float64,
    delta: bool = True,
    decay: bool = True,
    initial: bool = True,
    sequences: int | None = None,  # states to begin with: B, or as many as are packed
    seed: int = 0,
) -> Inputs:
    """Unit keys and queries, normal values, β in (0, 1), α in (e^-½, 1); rounded to `dtype`, the state to float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    queries, keys = (tuple(normalize(normal(B, T, H, K), dim=-1) for K in widths) for _ in range(2))
    values, beta, log_decay = normal(B, T, H, V), uniform(B, T, H), -uniform(B, T, H) / 2
    x = Inputs(queries, keys, values, beta if delta else None, log_decay if decay else None).map(lambda x: x.to(dtype))
    state = normal(B if sequences is None else sequences, H, *widths, V).to(torch.promote_types(dtype, torch.float32))
    return x.but(initial_state=state if initial else None)


def call(f: Callable, x: Inputs, **options: object) -> tuple[Tensor, Tensor]:
    gates = {"beta": x.beta, "log_decay": x.log_decay, "initial_state": x.initial_state}
    return f(x.queries, x.keys, x.values, **gates, **options)


def op(x: Inputs, **options: object) -> tuple[Tensor, Tensor]:
    """Outputs and final state of `running_tensor`."""
    return call(running_tensor, x, output_final_state=True, **options)


def recurrent(x: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs and final state, as the paper defines them."""
    return call(reference.recurrent, x)


def upstream(results: Iterable[Tensor]) -> list[Tensor]:
    """Gradients to begin the backward pass with: random, and the same for results of the same shape."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]


def gradients(f: Callable[[Inputs], tuple[Tensor, ...]], x: Inputs) -> dict[str, Tensor]:
    """Of every input, through every result of `f`."""
    x = x.leaves()
    results = f(x)
    names = x.named()
    return dict(zip(names, torch.autograd.grad(results, list(names.values()), upstream(results)), strict=True))


def everything(x: Inputs, dtype: torch.dtype | None = None, **options: object) -> dict[str, Tensor]:
    """Outputs, final state and all gradients of one run, from upstream gradients rounded as results of `dtype` are."""
    x, dtype = x.leaves(), dtype or x.values.dtype
    results = op(x, **options)
    rounded = (dtype, torch.promote_types(dtype, torch.float32))
    starts = [y.to(to).to(y.dtype) for y, to in zip(upstream(results), rounded, strict=True)]
    names = x.named()
    grads = torch.autograd.grad(results, list(names.values()), starts)
    results = {name: y.detach() for name, y in zip(("out", "state"), results, strict=True)}
    return results | {f"d {name}": grad for name, grad in zip(names, grads, strict=True)}


def rel(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """‖a - b‖ / ‖b‖, where ‖b‖ counts as `floor` at least; infinite for NaN, so that no bound admits it."""
    assert a.shape == b.shape, f"shapes {list(a.shape)} and {list(b.shape)}"
    a, b = a.detach().double(), b.detach().double()
    size = max(b.norm().item(), floor)
    error = (a - b).norm().item() / (size or 1.0)  # beside nothing, anything is an error
    return error if error < float("inf") else float("inf")


Results = Mapping[str, Tensor] | Iterable[Tensor]


def near(got: Results, want: Results, bound: float, floor: float = 0.0) -> None:
    """Asserts rel(got, want) <= bound for each pair, and names those that are farther."""
    got, want = ({**x} if isinstance(x, Mapping) else dict(enumerate(x)) for x in (got, want))
    assert got.keys() == want.keys()
    errors = {name: rel(got[name], want[name], floor) for name in want}
    far = {name: error for name, error in errors.items() if not error <= bound}
    assert not far, f"farther than {bound}: {far}"


def bounds(lengths: Iterable[int]) -> Tensor:
    """cu_seqlens of packed sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)


def concatenated(results: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs one after another in time, and the states of all."""
    outs, states = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(states)
