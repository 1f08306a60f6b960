"""The chunk-parallel (UT/WY) form of the tensor delta rule and its backward, in plain torch.

This is the backend for CPUs and the specification the GPU kernels are held to; README.md beside it derives every line.
Always order 3 here (key modes of width K and R): `interface.py` brings any other order to it. For a chunk of C rows,
with κ = k⊗r and φ = q⊗u,

    G = (K Kᵀ) ⊙ (R Rᵀ)     P = tril((Q Kᵀ) ⊙ (U Rᵀ))     L = diag(β) tril(G, -1)             all chunks at once
    E = V - κ S     X = (I + L)⁻¹ diag(β) E     O = φ S + P X     S' = S + κᵀ X               chunk after chunk

A decay multiplies the two Grams by exp(g_i - g_j), rows of κS and φS by exp(g_t), rows of κ in the update by
exp(g_C - g_t) and S by exp(g_C), where g is the cumulative log decay within the chunk.

Letters: M chunks in all, N sequences, C rows a chunk. Batched matrices are [chunks·H, rows, columns].
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
        """[M·H,C,…] -> [B,T,H,…], with the batch and length of `like` and its dtype or another."""
        rows = x.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(0, 1)
        return rows[self.slot].to(dtype or like.dtype).unflatten(0, like.shape[:2])

    def split_state(self, state: Tensor | None, x: "Chunks") -> Tensor:
        """[N,H,K,R,V] or nothing -> [N·H,K·R,V], longest sequence first: a copy, to be updated in place."""
        if state is None:
            return x.v.new_zeros(len(self.order) * self.heads, x.k.shape[-1] * x.r.shape[-1], x.v.shape[-1])
        return state[self.order].flatten(2, 3).flatten(0, 1)

    def join_state(self, state: Tensor, x: "Chunks") -> Tensor:
        """[N·H,K·R,V] -> [N,H,K,R,V]"""
        state = state.unflatten(0, (-1, self.heads)).unflatten(2, (x.k.shape[-1], x.r.shape[-1]))
        return torch.empty_like(state).index_copy_(0, self.order, state)


@dataclass(frozen=True)
class Decay:
    """The factors by which log_decay [M·H,C] enters a chunk."""

    within: Tensor  # [·,C,C] exp(g_i - g_j) for j <= i
    before: Tensor  # [·,C,1] exp(g_t): from the chunk's start to row t
    after: Tensor  # [·,C,1] exp(g_C - g_t): from row t to the chunk's end
    total: Tensor  # [·,1,1] exp(g_C)

    @staticmethod
    def make(log_decay: Tensor) -> "Decay":
        g = log_decay.cumsum(-1)
        last = g[..., -1:]
        # Mask before exp: above the diagonal the difference has the wrong sign and may overflow.
        within = (g[..., :, None] - g[..., None, :]).tril_().exp_()
        return Decay(within, g.exp()[..., None], (last - g).exp()[..., None], last.exp()[..., None])

    def __getitem__(self, at: slice) -> "Decay":
        return Decay(self.within[at], self.before[at], self.after[at], self.total[at])


@dataclass(frozen=True)
class Chunks:
    """The inputs of one chunk, or of many, in the chunk layout and the dtype of the state."""

    q: Tensor  # [·,C,K]
    k: Tensor  # [·,C,K]
    u: Tensor  # [·,C,R]
    r: Tensor  # [·,C,R]
    v: Tensor  # [·,C,V]
    beta: Tensor | None  # [·,C,1]
    decay: Decay | None

    @staticmethod
    def make(plan: Plan, inputs: Inputs) -> "Chunks":
        dtype = torch.promote_types(inputs[4].dtype, torch.float32)
        *tensors, beta, log_decay = (None if x is None else plan.split(x, dtype) for x in inputs)
        return Chunks(
            *tensors,
            None if beta is None else beta[..., None],
            None if log_decay is None else Decay.make(log_decay),
        )

    def __getitem__(self, at: slice) -> "Chunks":
        beta, decay = self.beta, self.decay
        return Chunks(
            *(x[at] for x in (self.q, self.k, self.u, self.r, self.v)),
            None if beta is None else beta[at],
            None if decay is None else decay[at],
        )

    def key_gram(self) -> Tensor:
        """tril(G, -1), decayed."""
        return self.within(gram(self.k, self.r, self.k, self.r)).tril_(-1)

    def query_gram(self) -> Tensor:
        """P, decayed."""
        return self.within(gram(self.q, self.u, self.k, self.r)).tril_()

    def within(self, x: Tensor) -> Tensor:
        """Rows that meet rows of the same chunk; in place."""
        return x if self.decay is None else x.mul_(self.decay.within)

    def before(self, x: Tensor) -> Tensor:
        """Rows that meet the state the chunk began with."""
        return x if self.decay is None else x * self.decay.before

    def after(self, x: Tensor) -> Tensor:
        """Rows that meet the state the chunk ends with."""
        return x if self.decay is None else x * self.decay.after

    def total(self, state: Tensor) -> Tensor:
        """The state, across the whole chunk."""
        return state if self.decay is None else state * self.decay.total


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Row by row: [·,C,K], [·,C,R] -> [·,C,K·R]."""
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


def from_here(x: Tensor) -> Tensor:
    """Sums along the last dimension, from each place to the end."""
    return x.flip(-1).cumsum(-1).flip(-1)


def invert(x: Chunks) -> Tensor:
    """(I + L)⁻¹ by forward substitution. (Neumann doubling cancels to garbage in float32 when keys repeat.)"""
    L = x.key_gram().mul_(x.beta)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    return torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)


def advance(x: Chunks, S: Tensor | None, κ: Tensor, X: Tensor) -> Tensor:
    """S' = S + κᵀ X, decayed."""
    κ = x.after(κ).mT
    return κ @ X if S is None else torch.baddbmm(x.total(S[: len(X)]), κ, X)


def scan(
    x: Chunks, inverse: Tensor | None, steps: list[slice], state: Tensor, fresh: bool, keep: bool
) -> Iterator[tuple[slice, Tensor | None, Tensor, Tensor]]:
    """Runs through the chunks, updating `state` in place, and yields (chunks, S before them, E, X) at each step.

    `fresh`: the state is still zero, so that the first chunk need not read it (S is None). `keep`: the final state is
    wanted, so that the last chunk must write it. A single chunk that is fresh and not kept never forms κ.
    """
    for i, at in enumerate(steps):
        now, n = x[at], at.stop - at.start
        reads, writes = i > 0 or not fresh, i < len(steps) - 1 or keep
        κ = kron(now.k, now.r) if reads or writes else now.k
        E = X = now.v
        if inverse is not None:
            E = now.v - now.before(κ @ state[:n]) if reads else now.v
            X = inverse[at] @ (now.beta * E)
        yield at, state[:n] if reads else None, E, X
        if writes:
            state[:n] = advance(now, state[:n] if reads else None, κ, X)


def forward(
    inputs: Inputs,
    initial_state: Tensor | None,  # [N,H,K,R,V]
    cu_seqlens: Tensor | None,  # [N+1]
    chunk: int,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The outputs [B,T,H,V], the final state if `keep`, and with beta the rows of (I + L)⁻¹ [B,T,H,C] for `backward`."""
    plan = Plan.make(inputs[4], cu_seqlens, chunk)
    x = Chunks.make(plan, inputs)
    inverse = None if x.beta is None else invert(x)
    P = x.query_gram()
    O, state = torch.empty_like(x.v), plan.split_state(initial_state, x)
    for at, S, _, X in scan(x, inverse, plan.steps, state, fresh=initial_state is None, keep=keep):
        O[at] = P[at] @ X
        if S is not None:
            O[at] += x[at].before(kron(x.q[at], x.u[at]) @ S)
    return (
        plan.join(O, inputs[4]),
        plan.join_state(state, x) if keep else None,
        None if inverse is None else plan.join(inverse, inputs[4], inverse.dtype),
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

    Of size K·R it keeps only chunk states, and of these about 2·√(chunks): those at the start of each stretch from a
    first run forward, then those in between, a stretch at a time, the last stretch first.
    """
    plan = Plan.make(inputs[4], cu_seqlens, chunk)
    x = Chunks.make(plan, inputs)
    dO = plan.split(dO, x.v.dtype)
    inverse = None if inverse is None else plan.split(inverse, x.v.dtype)
    steps, stretch = plan.steps, isqrt(len(plan.steps) - 1) + 1

    E, X = (x.v, x.v) if inverse is None else (torch.empty_like(x.v), torch.empty_like(x.v))
    state = plan.split_state(initial_state, x)
    starts: list[Tensor | None] = []
    for i, (at, S, e, w) in enumerate(scan(x, inverse, steps, state, fresh=initial_state is None, keep=False)):
        if i % stretch == 0:
            starts.append(None if S is None else S.clone())
        if inverse is not None:
            E[at], X[at] = e, w

    P = x.query_gram()
    grads = Chunks(*(torch.zeros_like(y) for y in (x.q, x.k, x.u, x.r, x.v)), beta=None, decay=None)
    Y, dlog = torch.empty_like(x.v), torch.zeros_like(x.v[..., 0])
    dS = plan.split_state(dfinal, x)
    for first in range((len(steps) - 1) // stretch * stretch, -1, -stretch):
        states = [starts.pop()]
        for at, following in pairwise(steps[first : first + stretch]):
            n = following.stop - following.start
            now = x[at][:n]
            states.append(advance(now, states[-1], kron(now.k, now.r), X[at][:n]))
        for i in range(first + len(states) - 1, first - 1, -1):
            at, S = steps[i], states.pop()
            now, d, dSn = x[at], grads[at], dS[: at.stop - at.start]
            later = i < len(steps) - 1 or dfinal is not None  # else dS is zero
            κ = kron(now.k, now.r) if later or S is not None else now.k

            dX = P[at].mT @ dO[at]
            if later:
                dX += (κdS := now.after(κ) @ dSn)
                more(unkron(now.after(X[at]) @ dSn.mT, now.k, now.r), d.k, d.r)
            dE = dX
            if inverse is not None:
                Y[at] = inverse[at].mT @ dX
                dE = now.beta * Y[at]
            d.v.copy_(dE)
            if S is not None:
                more(unkron(now.before(dO[at]) @ S.mT, now.q, now.u), d.q, d.u)
                if inverse is not None:
                    more(unkron(now.before(-dE) @ S.mT, now.k, now.r), d.k, d.r)

            if now.decay is not None:  # log_decay of row s scales what crosses from before s to s or later:
                if S is not None:  # the state, which rows meet,
                    dlog[at] += from_here((now.q * d.q).sum(-1) - (dE * (now.v - E[at])).sum(-1))
                if later:  # rows, which the next state meets,
                    left = (X[at] * κdS).sum(-1)
                    dlog[at] += left.cumsum(-1) - left
                if S is not None and later:  # and the state, which the next state meets.
                    dlog[at] += (now.total(S) * dSn).sum((-1, -2))[:, None]

            if i > 0 or initial_state is not None:
                dSn.copy_(now.total(dSn))
                dSn.baddbmm_(kron(now.q, now.u).mT, now.before(dO[at]))
                if inverse is not None:
                    dSn.baddbmm_(κ.mT, now.before(dE), alpha=-1)

    # What the rows of a chunk do to each other, all chunks at once.
    dP = (dO @ X.mT).tril_()
    crossing = dP * P
    dbeta = None
    if inverse is not None:
        A = x.key_gram()
        dL = (Y @ X.mT).tril_(-1).neg_()
        dbeta = (Y * E).sum(-1) + (dL * A).sum(-1)
        dG = dL.mul_(x.beta)
        crossing += dG * A
        more(ungram(x.within(dG), x.k, x.r, x.k, x.r), grads.k, grads.r, grads.k, grads.r)
    more(ungram(x.within(dP), x.q, x.u, x.k, x.r), grads.q, grads.u, grads.k, grads.r)
    crossing.tril_(-1)
    dlog += from_here(crossing.sum(-1) - crossing.sum(-2))

    return (
        *(plan.join(d, like) for d, like in zip((grads.q, grads.k, grads.u, grads.r, grads.v), inputs, strict=False)),
        None if dbeta is None else plan.join(dbeta, inputs[5]),
        None if x.decay is None else plan.join(dlog, inputs[6]),
        None if initial_state is None else plan.join_state(dS, x),
    )


def more(values: tuple[Tensor, ...], *into: Tensor) -> None:
    for x, value in zip(into, values, strict=True):
        x += value
