"""What must not matter: where a sequence is cut, what it is packed with, what comes later, how it is chunked."""

from itertools import pairwise

import pytest
import torch
from helpers import ORDERS, WIDTHS, bounds, concatenated, gradients, make, near, op, recurrent
from hypothesis import example, given
from hypothesis import strategies as st

options = {
    "order": st.sampled_from(ORDERS[:3]),
    "delta": st.booleans(),
    "decay": st.booleans(),
    "initial": st.booleans(),
    "C": st.sampled_from((1, 3, 16, 64)),
    "seed": st.integers(0, 2**16),
}


@given(T=st.integers(0, 90), cut=st.integers(0, 90), **options)
@example(T=64, cut=0, order=3, delta=True, decay=True, initial=True, C=16, seed=0)
@example(T=64, cut=64, order=3, delta=True, decay=True, initial=True, C=16, seed=0)
def test_cutting_a_sequence_anywhere_and_carrying_the_state_changes_nothing(
    T, cut, order, delta, decay, initial, C, seed
):
    cut = min(cut, T)
    x = make(B=1, T=T, widths=WIDTHS[order], delta=delta, decay=decay, initial=initial, seed=seed)

    def in_two(x):
        out1, state = op(x.tokens(slice(cut)).but(initial_state=x.initial_state), chunk_size=C)
        out2, state = op(x.tokens(slice(cut, None)).but(initial_state=state), chunk_size=C)
        return torch.cat((out1, out2), 1), state

    near(in_two(x), recurrent(x), 1e-12)
    if T:
        near(gradients(in_two, x), gradients(lambda x: op(x, chunk_size=C), x), 1e-12)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), **options)
@example(lengths=[0, 1, 17, 0, 1, 40, 0], order=3, delta=True, decay=True, initial=True, C=16, seed=0)
@example(lengths=[0, 1, 17, 0, 1, 40, 0], order=3, delta=False, decay=False, initial=False, C=16, seed=0)
@example(lengths=[1, 1, 1], order=2, delta=True, decay=True, initial=True, C=1, seed=0)
def test_packed_sequences_equal_separate_ones(lengths, order, delta, decay, initial, C, seed):
    N, widths = len(lengths), WIDTHS[order]
    x = make(1, sum(lengths), widths=widths, delta=delta, decay=decay, initial=initial, sequences=N, seed=seed)
    cu_seqlens = bounds(lengths)

    def separate(x, form):
        states = [None] * N if x.initial_state is None else x.initial_state.split(1)
        return concatenated(
            form(x.tokens(slice(*ends)).but(initial_state=state))
            for ends, state in zip(pairwise(cu_seqlens.tolist()), states, strict=True)
        )

    want = separate(x, recurrent)
    near(op(x, chunk_size=C, cu_seqlens=cu_seqlens), want, 1e-12)
    near(op(x, backend="recurrent", cu_seqlens=cu_seqlens), want, 1e-12)
    if sum(lengths):
        want = gradients(lambda x: separate(x, recurrent), x)
        near(gradients(lambda x: op(x, chunk_size=C, cu_seqlens=cu_seqlens), x), want, 1e-12)


@pytest.mark.parametrize("backend", ("torch", "recurrent"))
def test_cu_seqlens_may_be_int32_and_strided(backend):
    x, cu_seqlens = make(B=1, T=30, sequences=3), bounds((7, 20, 3))
    want = op(x, cu_seqlens=cu_seqlens, backend=backend)
    near(op(x, cu_seqlens=cu_seqlens.int(), backend=backend), want, 0)
    near(op(x, cu_seqlens=cu_seqlens.repeat_interleave(2)[::2], backend=backend), want, 0)


def test_nothing_that_goes_wrong_in_one_sequence_reaches_another():
    x, cu_seqlens = make(B=1, T=60, sequences=3), bounds((20, 25, 15))
    want, want_states = op(x, cu_seqlens=cu_seqlens, chunk_size=16)
    values = x.values.clone()
    values[:, 20:45] = float("nan")
    out, states = op(x.but(values=values), cu_seqlens=cu_seqlens, chunk_size=16)
    assert out[:, 20:45].isnan().all() and states[1].isnan().any()  # else the test would show nothing
    for others in (slice(0, 20), slice(45, 60)):
        assert out[:, others].equal(want[:, others])
    assert states[0].equal(want_states[0]) and states[2].equal(want_states[2])


@given(
    T=st.integers(1, 130),
    sizes=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    **{name: strategy for name, strategy in options.items() if name != "C"},
)
def test_the_chunk_size_does_not_matter(T, sizes, order, delta, decay, initial, seed):
    x = make(B=1, T=T, widths=WIDTHS[order], delta=delta, decay=decay, initial=initial, seed=seed)
    a, b = sizes
    near(op(x, chunk_size=a), op(x, chunk_size=b), 1e-12)
    near(gradients(lambda x: op(x, chunk_size=a), x), gradients(lambda x: op(x, chunk_size=b), x), 1e-12)


@given(batch=st.permutations(range(3)), heads=st.permutations(range(3)), seed=st.integers(0, 2**16))
def test_batch_and_heads_may_be_permuted(batch, heads, seed):
    x = make(B=3, T=40, H=3, seed=seed)

    def permuted(y):
        return y[batch].index_select(1 if y is x.initial_state else 2, torch.tensor(heads))

    out, state = op(x, chunk_size=16)
    want = out[batch][:, :, heads], state[batch][:, heads]
    near(op(x.map(permuted), chunk_size=16), want, 1e-13)


@pytest.mark.parametrize("C", (4, 64))
@pytest.mark.parametrize("delta", (False, True), ids=("additive", "delta"))
@pytest.mark.parametrize("order", (2, 3, 4))
def test_no_output_depends_on_a_later_input_not_even_by_rounding(order, delta, C):
    T = 14
    x = make(T=T, widths=WIDTHS[order], delta=delta).leaves()
    out, _ = op(x, chunk_size=C)
    weights = torch.randn(out[:, 0].shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    tokens = {name: y for name, y in x.named().items() if name != "initial_state"}
    for t in range(T):
        grads = torch.autograd.grad((out[:, t] * weights).sum(), list(tokens.values()), retain_graph=True)
        for name, grad in zip(tokens, grads, strict=True):
            assert (grad[:, t + 1 :] == 0.0).all(), f"output {t} depends on later {name}"
            # Of the queries only its own reaches an output; of all else, what was written up to then.
            past = grad[:, t] if name.startswith("queries") else grad[:, : t + 1]
            assert (past != 0.0).all(), f"output {t} does not depend on {name}"


def test_changing_the_future_changes_no_bit_of_the_past():
    x, y = make(T=60), make(T=60, seed=1)
    out, _ = op(x, chunk_size=16)
    for t in (1, 15, 16, 17, 37, 59):

        def later(a, b, t=t):
            return torch.cat((a[:, :t], b[:, t:]), 1)

        mixed = x.but(
            queries=tuple(map(later, x.queries, y.queries)),
            keys=tuple(map(later, x.keys, y.keys)),
            values=later(x.values, y.values),
            beta=later(x.beta, y.beta),
            log_decay=later(x.log_decay, y.log_decay),
        )
        got, _ = op(mixed, chunk_size=16)
        assert got[:, :t].equal(out[:, :t])
        assert not got[:, t:].equal(out[:, t:])
