"""However the layer is called, the tokens are the same: masked, packed, one by one, beside others."""

import pytest
import torch
from helpers import bounds, near, rel, upstream
from layers import FORGET, SOME, Cache, chunks, differentiate, draw, make, masks, run, variants
from torch import Tensor

from runningtensor.layers import running_tensor

# -- Masks -------------------------------------------------------------------------------------------------------------


KINDS = pytest.mark.parametrize("kind", ("left", "right", "interior", "random", "few", "a whole row", "all", "none"))


def without(layer, x, mask) -> Tensor:
    """Each row without its masked tokens, alone; zeros where they were."""
    rows = []
    for row, there in zip(x, mask, strict=True):
        out = run(layer, row[there][None])[0]
        rows.append(torch.zeros_like(row).masked_scatter(there[:, None], out))
    return torch.stack(rows)


@KINDS
@SOME
def test_a_masked_token_was_never_there(options, kind):
    layer, x, mask = make(**options), draw(B=4), masks(kind, 4, 9)
    got = differentiate(layer, x, attention_mask=mask)
    near(got, differentiate(layer, x, without, mask=mask), 1e-10, floor=1e-2)
    assert (got["out"][~mask] == 0).all() and (got["d x"][~mask] == 0).all()


@SOME
def test_what_a_masked_token_holds_changes_nothing_even_if_it_is_no_number(options):
    layer, x, mask = make(**options), draw(B=4), masks("random", 4, 9)
    want = differentiate(layer, x, attention_mask=mask)
    for anything in (float("nan"), float("inf"), 1e300):
        got = differentiate(layer, x.masked_fill(~mask[..., None], anything), attention_mask=mask)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", (torch.bool, torch.long, torch.float32))
def test_a_mask_may_be_of_any_dtype_and_longer_than_the_input(dtype):
    layer, x, mask = make(), draw(B=4), masks("random", 4, 9)
    want = run(layer, x, attention_mask=mask)
    for before in (torch.zeros(4, 5), torch.ones(4, 5)):
        longer = torch.cat((before.bool(), mask), 1).to(dtype)
        assert torch.equal(run(layer, x, attention_mask=longer), want)


@KINDS
@SOME
@torch.no_grad()
def test_masked_prefill_in_chunks_then_masked_decoding_leaves_the_state_of_what_was_there(options, kind):
    layer, x = make(**options), draw(B=4, T=16)
    mask = torch.cat((masks(kind, 4, 11), masks("random", 4, 5)), 1)
    cache = Cache()
    got = chunks(layer, x, (2, 1, 3, 5, *[1] * 5), mask, cache)
    assert rel(got, without(layer, x, mask)) < 1e-10
    assert (got[~mask] == 0).all()
    for b in range(4):
        alone = Cache()
        run(layer, x[b : b + 1, mask[b]], past_key_values=alone)
        near({name: y[b : b + 1] for name, y in cache.held().items()}, alone.held(), 1e-10)


@torch.no_grad()
def test_a_masked_token_leaves_the_cache_as_it_is_bit_for_bit():
    layer, x, cache = make(forget="cumulative"), draw(T=9), Cache()
    run(layer, x, past_key_values=cache)
    before = {name: y.clone() for name, y in cache.held().items()}
    for T in (1, 4):
        run(layer, draw(T=T, seed=T), attention_mask=torch.zeros(2, T), past_key_values=cache)
    assert all(torch.equal(y, before[name]) for name, y in cache.held().items())


# -- Packed sequences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("lengths", ((9,), (5, 4), (0, 5, 0, 0, 1, 2, 7, 0), (1, 1, 1, 1)), ids=str)
@SOME
def test_packed_sequences_are_as_if_apart(options, lengths, dtype):
    layer, x = make(**options), draw(B=1, T=sum(lengths))

    def apart(layer, x):
        return torch.cat([run(layer, part) for part in x.split(lengths, 1)], 1)

    got = differentiate(layer, x, cu_seqlens=bounds(lengths).to(dtype))
    near(got, differentiate(layer, x, apart), 1e-10)


# -- Decoding ----------------------------------------------------------------------------------------------------------


@FORGET
@pytest.mark.parametrize("order", (2, 3, 4))
@pytest.mark.parametrize(
    "lengths", ((1,) * 12, (12,), (7, 5), (1, 2, 3, 1, 1, 4), (5, 0, 1, 6)), ids=("tokens", "whole", "two", "any", "0")
)
def test_whole_in_chunks_and_token_by_token_are_the_same(lengths, order, forget):
    layer, x = make(order, forget=forget), draw(T=12)
    want = Cache()
    whole = run(layer, x, past_key_values=want)
    assert rel(whole, run(layer, x)) < 1e-12
    for grad in (True, False):
        got = Cache()
        with torch.set_grad_enabled(grad):
            assert rel(chunks(layer, x, lengths, cache=got), whole) < 1e-10
        near(got.held(), want.held(), 1e-10)
        assert not any(y.requires_grad for y in got.held().values())


@variants()
@torch.no_grad()
def test_decoding_writes_where_its_cache_is(options):
    layer, x, cache = make(**options), draw(T=12), Cache()
    run(layer, x[:, :4], past_key_values=cache)
    held = {name: (y, y.data_ptr()) for name, y in cache.held().items()}
    for t in range(4, 10):
        run(layer, x[:, t : t + 1], past_key_values=cache)
    run(layer, x[:, 10:], past_key_values=cache)
    for name, y in cache.held().items():
        assert y is held[name][0] and y.data_ptr() == held[name][1]


def test_a_step_is_taken_only_where_there_is_a_state_and_no_gradient(monkeypatch):
    layer, x, steps = make(), draw(T=6), []
    step = running_tensor.running_tensor_step
    monkeypatch.setattr(running_tensor, "running_tensor_step", lambda *a, **o: steps.append(1) or step(*a, **o))
    cache, other = Cache(), Cache()
    with torch.no_grad():
        run(layer, x[:, :1], past_key_values=cache)  # no state yet
        assert not steps
        run(layer, x[:, 1:2], past_key_values=cache)
        assert len(steps) == 1
        run(layer, x[:, 2:4], past_key_values=cache)
        assert len(steps) == 1
    chunks(layer, x, (1, 1, 2), cache=other)
    assert len(steps) == 1
    assert run(layer, x[:, 4:5], past_key_values=other).requires_grad
    assert len(steps) == 1
    with torch.no_grad():
        run(layer, x[:, 4:5], past_key_values=cache)
    assert len(steps) == 2
    near(cache.held(), other.held(), 1e-12)


def test_gradients_reach_the_tokens_of_this_call_and_not_those_of_an_earlier_one():
    layer, x, cache = make(), draw(T=12), Cache()
    x.requires_grad_()
    run(layer, x[:, :5], past_key_values=cache)
    later = run(layer, x[:, 5:], past_key_values=cache)
    (grad,) = torch.autograd.grad(later, x, upstream([later])[0])
    assert (grad[:, :5] == 0).all() and (grad[:, 5:] != 0).any(-1).all()


# -- Independence ------------------------------------------------------------------------------------------------------


@SOME
def test_rows_of_a_batch_do_not_meet(options):
    layer, x = make(**options), draw(B=3)
    whole = run(layer, x)
    for b in range(3):
        assert rel(run(layer, x[b : b + 1]), whole[b : b + 1]) < 1e-12


@variants()
def test_a_token_changes_what_comes_after_and_nothing_before(options):
    layer, x = make(**options), draw(T=12)
    before = run(layer, x)
    for t in (0, 5, 11):
        changed = x.clone()
        changed[:, t] += draw(T=1, seed=t)[:, 0]
        after = run(layer, changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert ((after - before)[:, t:].abs().amax(-1) > 1e-12).all()
