"""The chunk-parallel (UT/WY) form of the tensor delta rule and its backward, in plain torch.

This is the backend for CPUs and the specification the GPU kernels are held to; README.md beside it derives every line.
Always order 3 here (key modes of width K and R): `interface.py` brings any other order to it. For a chunk of C rows,
with κ = k⊗r and φ = q⊗u,

    G = (K Kᵀ) ⊙ (R Rᵀ)     P = tril((Q Kᵀ) ⊙ (U Rᵀ))     L = diag(β) tril(G, -1)             all chunks at once
    E = V - κ S     X = (I + L)⁻¹ diag(β) E     O = φ S + P X     S' = S + κᵀ X               chunk after chunk

A decay multiplies the two Grams by exp(g_i - g_j), rows of κS and φS by exp(g_t), rows of κ in the update by
exp(g_C - g_t) and S by exp(g_C), where g is the cumulative log decay within the chunk. Without beta, X = V.

Letters: M chunks in all, N sequences, C rows a chunk. Batched matrices are [chunks·H, rows, columns].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor

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
class Decay:
    """The factors by which a decay enters a chunk."""

    within: Tensor  # [·,C,C] exp(g_i - g_j) for j <= i; of no meaning elsewhere
    before: Tensor  # [·,C,1] exp(g_t): from the chunk's start to row t
    after: Tensor  # [·,C,1] exp(g_C - g_t): from row t to the chunk's end
    total: Tensor  # [·,1,1] exp(g_C)

    @staticmethod
    def make(log_decay: Tensor) -> "Decay":  # [·,C]
        # Sums over each span, not differences of g: beside one strong decay those would lose the weak ones.
        spans = log_decay[..., :, None].expand(*log_decay.shape, log_decay.shape[-1]).tril(-1).cumsum(-2)
        before = log_decay.cumsum(-1).exp_()[..., None]
        return Decay(spans.exp_(), before, spans[..., -1, :, None], before[..., -1:, :])


@dataclass(frozen=True)
class Chunks:
    """The inputs of some chunks, in the chunk layout and the dtype of the state."""

    q: Tensor  # [·,C,K]
    k: Tensor  # [·,C,K]
    u: Tensor  # [·,C,R]
    r: Tensor  # [·,C,R]
    v: Tensor  # [·,C,V]
    beta: Tensor  # [·,C,1]; one where the rule is additive
    decay: Decay | None

    @staticmethod
    def make(plan: Plan, inputs: Inputs) -> "Chunks":
        beta, log_decay = inputs[5:]
        dtype = torch.promote_types(inputs[4].dtype, torch.float32)
        q, k, u, r, v = (plan.split(x, dtype) for x in inputs[:5])
        beta = v.new_ones(v.shape[:2]) if beta is None else plan.split(beta, dtype)
        decay = None if log_decay is None else Decay.make(plan.split(log_decay, dtype))
        return Chunks(q, k, u, r, v, beta[..., None], decay)

    def __getitem__(self, at: slice) -> "Chunks":
        return self.map(lambda x: x[at])

    def map(self, f: Callable[[Tensor], Tensor]) -> "Chunks":
        d = self.decay
        decay = None if d is None else Decay(f(d.within), f(d.before), f(d.after), f(d.total))
        return Chunks(f(self.q), f(self.k), f(self.u), f(self.r), f(self.v), f(self.beta), decay)

    def within(self, x: Tensor) -> Tensor:
        """What rows give to later rows of their chunk, decayed in place."""
        return x if self.decay is None else x.mul_(self.decay.within)

    def before(self, x: Tensor) -> Tensor:
        """What the state gives to the rows, decayed."""
        return x if self.decay is None else x * self.decay.before

    def after(self, x: Tensor) -> Tensor:
        """What the rows give to the next state, decayed."""
        return x if self.decay is None else x * self.decay.after

    def total(self, state: Tensor) -> Tensor:
        """What the state gives to the next state, decayed."""
        return state if self.decay is None else state * self.decay.total

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
) -> Iterator[tuple[slice, Tensor | None, Tensor, Tensor]]:
    """Runs through the chunks, updating `state` in place; yields (chunks, S before them, κS, X) at each step.

    `fresh`: the state begins as zero, so that the first chunk need not read it (S is None). `keep`: the final state is
    wanted, so that the last chunk must write it. A single chunk that is fresh and not kept never forms κ.
    """
    for i, at in enumerate(steps):
        now, n = x[at], at.stop - at.start
        S = None if fresh and i == 0 else state[:n]
        writes = keep or i < len(steps) - 1
        κ = kron(now.k, now.r) if writes or S is not None else now.k
        recalled, X = torch.zeros_like(now.v), now.v
        if inverse is not None:
            if S is not None:
                recalled = now.before(κ @ S)
            X = inverse[at] @ (now.beta * (now.v - recalled))
        yield at, S, recalled, X
        if writes:
            state[:n] = now.advance(S, κ, X)


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
    inverse = None if beta is None else x.invert()
    P = x.query_gram()
    O, state = torch.empty_like(x.v), plan.split_state(initial_state, x)
    for at, S, _, X in scan(x, inverse, plan.steps, state, fresh=initial_state is None, keep=keep):
        O[at] = P[at] @ X
        if S is not None:
            O[at] += x[at].before(kron(x.q[at], x.u[at]) @ S)
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

    recalled, X = (torch.empty_like(x.v), x.v if inverse is None else torch.empty_like(x.v))
    state = plan.split_state(initial_state, x)
    starts: dict[int, Tensor | None] = {}
    for i, (at, S, recalled_at, X_at) in enumerate(
        scan(x, inverse, steps, state, fresh=initial_state is None, keep=False)
    ):
        if i % stretch == 0:
            starts[i] = None if S is None else S.clone()
        recalled[at], X[at] = recalled_at, X_at

    P = x.query_gram()
    d = replace(x, decay=None).map(torch.zeros_like)  # the gradients
    dlog, Y, dS = torch.zeros_like(x.v[..., 0]), torch.empty_like(x.v), plan.split_state(dfinal, x)
    for i, at, S in replay(x, X, steps, starts):
        now, to, dS_at = x[at], d[at], dS[: at.stop - at.start]
        heard = i < len(steps) - 1 or dfinal is not None  # else dS is zero
        κ = kron(now.k, now.r) if heard or S is not None else now.k

        dX = P[at].mT @ dO[at]
        if heard:
            κdS = now.after(κ) @ dS_at
            dX += κdS
            add(unkron(now.after(X[at]) @ dS_at.mT, now.k, now.r), to.k, to.r)
        dE = dX
        if inverse is not None:
            Y[at] = inverse[at].mT @ dX
            dE = now.beta * Y[at]
        to.v.copy_(dE)
        if S is not None:
            add(unkron(now.before(dO[at]) @ S.mT, now.q, now.u), to.q, to.u)
            if inverse is not None:
                add(unkron(now.before(-dE) @ S.mT, now.k, now.r), to.k, to.r)

        if now.decay is not None:  # log_decay of row s scales whatever passes from before s to s or later:
            if S is not None:  # from the state to rows,
                dlog[at] += from_here((now.q * to.q).sum(-1) - (dE * recalled[at]).sum(-1))
            if heard:  # from rows to the next state,
                dlog[at][:, 1:] += (X[at] * κdS).sum(-1).cumsum(-1)[:, :-1]
            if heard and S is not None:  # from the state to the next state; from rows to rows: below.
                dlog[at] += (now.total(S) * dS_at).sum((-1, -2))[:, None]

        if i > 0 or initial_state is not None:
            dS_at.copy_(now.total(dS_at)).baddbmm_(kron(now.q, now.u).mT, now.before(dO[at]))
            if inverse is not None:
                dS_at.baddbmm_(κ.mT, now.before(dE), alpha=-1)

    # What the rows of a chunk do to each other, all chunks at once.
    dP = (dO @ X.mT).tril_()
    crossing = dP * P
    if inverse is not None:
        A = x.key_gram()
        dL = (Y @ X.mT).tril_(-1).neg_()
        d.beta[..., 0] = (Y * (x.v - recalled)).sum(-1) + (dL * A).sum(-1)
        dG = dL.mul_(x.beta)
        crossing += dG * A
        add(ungram(x.within(dG), x.k, x.r, x.k, x.r), d.k, d.r, d.k, d.r)
    add(ungram(x.within(dP), x.q, x.u, x.k, x.r), d.q, d.u, d.k, d.r)
    crossing.tril_(-1)
    dlog += from_here(crossing.sum(-1) - crossing.sum(-2))

    return (
        *(plan.join(dy, y) for dy, y in zip((d.q, d.k, d.u, d.r, d.v), inputs[:5], strict=True)),
        None if beta is None else plan.join(d.beta[..., 0], beta),
        None if log_decay is None else plan.join(dlog, log_decay),
        None if initial_state is None else plan.join_state(dS, x),
    )
