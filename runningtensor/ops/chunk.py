"""The chunk-parallel (UT/WY) form of the tensor delta rule and its backward, in plain torch.

This is the backend for CPUs and the specification the GPU kernels are held to; README.md beside it derives every line.
Always order 3 here (key modes of width K and R): `interface.py` brings any other order to it. For a chunk of C rows,
with κ = k⊗r and φ = q⊗u,

    G = (K Kᵀ) ⊙ (R Rᵀ)     P = tril((Q Kᵀ) ⊙ (U Rᵀ))     L = diag(β) tril(G, -1)       needs no state
    E = V - κ S     X = (I + L)⁻¹ diag(β) E     O = φ S + P X     S' = S + κᵀ X         chunk after chunk

A decay multiplies the two Grams by exp(g_i - g_j), rows of κS and φS by exp(g_t), rows of κ in the update by
exp(g_C - g_t) and S by exp(g_C), where g is the cumulative log decay within the chunk. Without beta, X = V.

Letters: M chunks in all, N sequences, C rows a chunk. Batched matrices are [chunks·H, rows, columns].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

# q, k [B,T,H,K], u, r [B,T,H,R], v [B,T,H,V], beta, log_decay [B,T,H]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Plan:
    """Where every token lies in the chunk layout.

    Chunks are ordered by their index within their sequence, and sequences by length, longest first. So step i of the
    scan is one slice: the i-th chunk of every sequence that has one. Packed sequences and plain batches then are the
    same loop, and nothing is computed for sequences that have ended.
    """

    slot: Tensor  # [B·T] row of each token in the chunk layout
    order: Tensor  # [N] the sequences, longest first
    steps: list[slice]  # the chunks [M·H] of each step; the first so many rows of the states [N·H] go with them
    heads: int
    chunk: int

    @staticmethod
    def make(values: Tensor, cu_seqlens: Tensor | None, chunk: int) -> "Plan":
        (B, T, H, _), device = values.shape, values.device
        lengths = torch.full((B,), T, device=device) if cu_seqlens is None else cu_seqlens.diff().long()
        order = lengths.argsort(descending=True, stable=True)
        rank = order.argsort()
        chunks = (lengths + chunk - 1) // chunk
        running = (chunks > torch.arange(int(chunks.max()), device=device)[:, None]).sum(1)  # sequences in each step
        first = running.cumsum(0) - running  # each step's first chunk
        sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        t = torch.arange(B * T, device=device) - (lengths.cumsum(0) - lengths)[sequence]
        slot = (first[t // chunk] + rank[sequence]) * chunk + t % chunk
        steps = [slice(a * H, (a + n) * H) for a, n in zip(first.tolist(), running.tolist(), strict=True)]
        return Plan(slot, order, steps, H, chunk)

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B,T,H,…] -> [M·H,C,…]; rows that no token fills are zero, which makes them exact no-ops."""
        rows = x.new_zeros(self.steps[-1].stop // self.heads * self.chunk, *x.shape[2:], dtype=dtype)
        rows.index_copy_(0, self.slot, x.flatten(0, 1).to(dtype))
        return rows.unflatten(0, (-1, self.chunk)).transpose(1, 2).flatten(0, 1)

    def join(self, x: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[M·H,C,…] -> [B,T,H,…], with the batch and length of `like`, and its dtype or another."""
        rows = x.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(0, 1)
        return rows[self.slot].to(dtype or like.dtype).unflatten(0, like.shape[:2])

    def split_state(self, state: Tensor | None, x: "Chunks") -> Tensor:
        """[N,H,K,R,V], or None for zero, -> [N·H,K·R,V], longest sequence first: a copy, to be updated in place."""
        if state is None:
            return x.v.new_zeros(len(self.order) * self.heads, x.k.shape[-1] * x.r.shape[-1], x.v.shape[-1])
        return state[self.order].flatten(2, 3).flatten(0, 1)

    def join_state(self, state: Tensor, x: "Chunks") -> Tensor:
        """[N·H,K·R,V] -> [N,H,K,R,V]"""
        state = state.unflatten(0, (-1, self.heads)).unflatten(2, (x.k.shape[-1], x.r.shape[-1]))
        return torch.empty_like(state).index_copy_(0, self.order, state)


@dataclass(frozen=True)
class Chunks:
    """The inputs of some chunks, in the chunk layout and the dtype of the state."""

    q: Tensor  # [·,C,K]
    k: Tensor  # [·,C,K]
    u: Tensor  # [·,C,R]
    r: Tensor  # [·,C,R]
    v: Tensor  # [·,C,V]
    beta: Tensor  # [·,C,1]; one where the rule is additive
    log_decay: Tensor | None  # [·,C]

    @staticmethod
    def make(plan: Plan, inputs: Inputs) -> "Chunks":
        beta, log_decay = inputs[5:]
        dtype = torch.promote_types(inputs[4].dtype, torch.float32)
        q, k, u, r, v = (plan.split(x, dtype) for x in inputs[:5])
        beta = v.new_ones(v.shape[:2]) if beta is None else plan.split(beta, dtype)
        return Chunks(q, k, u, r, v, beta[..., None], None if log_decay is None else plan.split(log_decay, dtype))

    def __getitem__(self, at: slice) -> "Chunks":
        return self.map(lambda x: x[at])

    def map(self, f: Callable[[Tensor], Tensor]) -> "Chunks":
        log_decay = None if self.log_decay is None else f(self.log_decay)
        return Chunks(f(self.q), f(self.k), f(self.u), f(self.r), f(self.v), f(self.beta), log_decay)

    # The decay. Always sums over a span, never differences of sums: beside one strong decay those lose the weak ones.

    def before(self, x: Tensor) -> Tensor:
        """What the state gives to the rows: times exp(g_t)."""
        return x if self.log_decay is None else x * self.log_decay.cumsum(-1).exp_()[..., None]

    def after(self, x: Tensor) -> Tensor:
        """What the rows give to the next state: times exp(g_C - g_t)."""
        if self.log_decay is None:
            return x
        return x * pad(from_here(self.log_decay[..., 1:]), (0, 1)).exp_()[..., None]

    def total(self, state: Tensor) -> Tensor:
        """What the state gives to the next state: times exp(g_C)."""
        return state if self.log_decay is None else state * self.log_decay.sum(-1).exp_()[..., None, None]

    def decay_(self, state: Tensor) -> Tensor:
        """`total`, in place."""
        return state if self.log_decay is None else state.mul_(self.log_decay.sum(-1).exp_()[..., None, None])

    def within(self, x: Tensor) -> Tensor:
        """What rows give to later rows: times exp(g_i - g_j), in place; of no meaning above the diagonal."""
        if self.log_decay is None:
            return x
        C = x.shape[-1]
        return x.mul_(self.log_decay[..., :, None].expand(-1, C, C).tril(-1).cumsum(-2).exp_())

    # The forms.

    def key_gram(self) -> Tensor:
        """tril(G, -1), decayed."""
        return self.within(gram(self.k, self.r, self.k, self.r)).tril_(-1)

    def query_gram(self) -> Tensor:
        """P, decayed."""
        return self.within(gram(self.q, self.u, self.k, self.r)).tril_()

    def invert(self) -> Tensor:
        """(I + L)⁻¹ by forward substitution. (Neumann doubling cancels to garbage in float32 when keys repeat.)"""
        L = self.key_gram().mul_(self.beta)
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
        return torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)

    def advance(self, S: Tensor | None, κ: Tensor, X: Tensor) -> Tensor:
        """S' = S + κᵀ X, decayed; S is None where it is zero."""
        κ = self.after(κ).mT
        return κ @ X if S is None else torch.baddbmm(self.total(S), κ, X)


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Row by row: [·,K], [·,R] -> [·,K·R]."""
    return (a[..., :, None] * b[..., None, :]).flatten(-2)


def unkron(dκ: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a and b from that of kron(a, b)."""
    dκ = dκ.unflatten(-1, (a.shape[-1], b.shape[-1]))
    return (dκ @ b[..., None]).squeeze(-1), (a[..., None, :] @ dκ).squeeze(-2)


def gram(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Of the rows of kron(a, b) with those of kron(c, d), neither of which is formed: (A Cᵀ) ⊙ (B Dᵀ)."""
    return (a @ c.mT).mul_(b @ d.mT)


def ungram(dG: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a, b, c and d from that of gram(a, b, c, d)."""
    dac, dbd = dG * (b @ d.mT), dG * (a @ c.mT)
    return dac @ c, dbd @ d, dac.mT @ a, dbd.mT @ b


def add(amounts: tuple[Tensor, ...], *to: Tensor) -> None:
    for x, amount in zip(to, amounts, strict=True):
        x += amount


def from_here(x: Tensor) -> Tensor:
    """Sums along the last dimension, from each place to the end."""
    return x.flip(-1).cumsum(-1).flip(-1)


def scan(
    x: Chunks, inverse: Tensor | None, steps: list[slice], state: Tensor, fresh: bool, keep: bool
) -> Iterator[tuple[slice, Chunks, Tensor | None, Tensor | None, Tensor]]:
    """Runs through the chunks, updating `state` in place; yields (at, chunks, S before them, κS, X) at each step.

    `fresh`: the state begins as zero, so that the first chunk need not read it (S and κS are None). `keep`: the final
    state is wanted, so that the last chunk must write it. A single chunk, fresh and not kept, never forms κ.
    """
    for i, at in enumerate(steps):
        now, n = x[at], at.stop - at.start
        S = None if fresh and i == 0 else state[:n]
        writes = keep or i < len(steps) - 1
        κ = kron(now.k, now.r) if writes or S is not None else now.k
        recalled, X = None, now.v
        if inverse is not None:
            recalled = None if S is None else now.before(κ @ S)
            X = inverse[at] @ (now.beta * (now.v if recalled is None else now.v - recalled))
        yield at, now, S, recalled, X
        if writes and S is None:
            torch.bmm(now.after(κ).mT, X, out=state[:n])
        elif writes:
            now.decay_(state[:n]).baddbmm_(now.after(κ).mT, X)


def replay(
    x: Chunks, X: Tensor, steps: list[slice], starts: dict[int, Tensor | None]
) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Yields (step, chunks, S before them), last step first, from the states at the start of each stretch of steps."""
    end = len(steps)
    for start in sorted(starts, reverse=True):
        states = [starts.pop(start)]
        for at, following in pairwise(steps[start:end]):
            n, S = following.stop - following.start, states[-1]
            now = x[at][:n]
            states.append(now.advance(None if S is None else S[:n], kron(now.k, now.r), X[at][:n]))
        for i in range(end - 1, start - 1, -1):
            yield i, steps[i], states.pop()
        end = start


def forward(
    inputs: Inputs,
    initial_state: Tensor | None,  # [N,H,K,R,V]
    cu_seqlens: Tensor | None,  # [N+1]
    chunk: int,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The outputs [B,T,H,V], the final state if `keep`, and with beta the rows of (I + L)⁻¹ [B,T,H,C]."""
    v, beta = inputs[4], inputs[5]
    plan = Plan.make(v, cu_seqlens, chunk)
    x = Chunks.make(plan, inputs)
    inverse = None if beta is None else torch.cat([x[at].invert() for at in plan.steps])
    O, state = torch.empty_like(x.v), plan.split_state(initial_state, x)
    for at, now, S, _, X in scan(x, inverse, plan.steps, state, fresh=initial_state is None, keep=keep):
        O[at] = now.query_gram() @ X
        if S is not None:
            O[at] += now.before(kron(now.q, now.u) @ S)
    return (
        plan.join(O, v),
        plan.join_state(state, x) if keep else None,
        None if inverse is None else plan.join(inverse, v, inverse.dtype),
    )


def backward(
    dO: Tensor,  # [B,T,H,V]
    dfinal: Tensor | None,  # [N,H,K,R,V]; None: the final state was not used
    inputs: Inputs,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor | None,  # as `forward` returned it
    chunk: int,
) -> tuple[Tensor | None, ...]:
    """The gradients of the seven inputs and of the initial state, None where that was None.

    Of size K·R it keeps only chunk states, and of these about 2·√chunks: those at the start of each stretch, from a
    first run forward, then those in between, a stretch at a time, the last stretch first.
    """
    v, beta, log_decay = inputs[4:]
    plan = Plan.make(v, cu_seqlens, chunk)
    steps, stretch = plan.steps, isqrt(len(plan.steps) - 1) + 1
    x = Chunks.make(plan, inputs)
    dO = plan.split(dO, x.v.dtype)
    inverse = None if inverse is None else plan.split(inverse, x.v.dtype)

    X, recalled = (x.v if inverse is None else torch.empty_like(x.v)), torch.zeros_like(x.v)
    state = plan.split_state(initial_state, x)
    starts: dict[int, Tensor | None] = {}
    run = scan(x, inverse, steps, state, fresh=initial_state is None, keep=False)
    for i, (at, _, S, recalled_at, X_at) in enumerate(run):
        if i % stretch == 0:
            starts[i] = None if S is None else S.clone()
        X[at] = X_at
        if recalled_at is not None:
            recalled[at] = recalled_at

    d = x.map(torch.zeros_like)  # the gradients
    dS = plan.split_state(dfinal, x)
    for i, at, S in replay(x, X, steps, starts):
        heard = i < len(steps) - 1 or dfinal is not None  # else dS is zero
        passed_on = i > 0 or initial_state is not None
        rows = None if inverse is None else inverse[at]
        dS_at = dS[: at.stop - at.start]
        chunk_backward(x[at], d[at], S, dS_at, recalled[at], X[at], dO[at], rows, heard, passed_on)
    return (
        *(plan.join(dy, y) for dy, y in zip((d.q, d.k, d.u, d.r, d.v), inputs[:5], strict=True)),
        None if beta is None else plan.join(d.beta[..., 0], beta),
        None if log_decay is None or d.log_decay is None else plan.join(d.log_decay, log_decay),
        None if initial_state is None else plan.join_state(dS, x),
    )


def chunk_backward(
    x: Chunks,
    d: Chunks,  # their gradients: added to
    S: Tensor | None,  # before them; None: zero
    dS: Tensor,  # after them on entry, before them on return
    recalled: Tensor,  # κS
    X: Tensor,
    dO: Tensor,
    inverse: Tensor | None,  # None: additive
    heard: bool,  # else dS is zero on entry
    passed_on: bool,  # else nobody wants dS on return
) -> None:
    """The lines of section 5 of README.md, in their order."""
    κ = kron(x.k, x.r) if heard or S is not None else x.k
    P = x.query_gram()

    dX = P.mT @ dO
    if heard:
        κdS = x.after(κ) @ dS
        dX += κdS
    dE = dX
    if inverse is not None:
        Y = inverse.mT @ dX
        dE = x.beta * Y
    d.v.copy_(dE)

    dP = (dO @ X.mT).tril_()
    crossing = dP * P  # what each row gives to each later row, times its gradient
    if inverse is not None:
        A = x.key_gram()
        dL = (Y @ X.mT).tril_(-1).neg_()
        d.beta[..., 0] = (Y * (x.v - recalled)).sum(-1) + (dL * A).sum(-1)
        dG = dL.mul_(x.beta)
        crossing += dG * A
        add(ungram(x.within(dG), x.k, x.r, x.k, x.r), d.k, d.r, d.k, d.r)

    if S is not None:
        add(unkron(x.before(dO) @ S.mT, x.q, x.u), d.q, d.u)
    dκ = x.after(X) @ dS.mT if heard else None
    if S is not None and inverse is not None:
        dκ = x.before(-dE) @ S.mT if dκ is None else dκ.baddbmm_(x.before(dE), S.mT, alpha=-1)
    if dκ is not None:
        add(unkron(dκ, x.k, x.r), d.k, d.r)

    if d.log_decay is not None:  # that of row s scales whatever passes from before s to s or later:
        crossing.tril_(-1)  # from row to row,
        d.log_decay.add_(from_here(crossing.sum(-1) - crossing.sum(-2)))
        if S is not None:  # from the state to rows,
            d.log_decay.add_(from_here((x.q * d.q).sum(-1) - (dE * recalled).sum(-1)))
        if heard:  # from rows to the next state,
            d.log_decay[:, 1:] += (X * κdS).sum(-1).cumsum(-1)[:, :-1]
        if heard and S is not None:  # and from the state to the next state.
            d.log_decay.add_((x.total(S) * dS).sum((-1, -2))[:, None])
    add(ungram(x.within(dP), x.q, x.u, x.k, x.r), d.q, d.u, d.k, d.r)

    if passed_on:
        x.decay_(dS).baddbmm_(kron(x.q, x.u).mT, x.before(dO))
        if inverse is not None:
            dS.baddbmm_(κ.mT, x.before(dE), alpha=-1)
