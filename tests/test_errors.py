"""Bad input gets a ValueError that names the argument, what it should have been, and what it was."""

import re

import pytest
import torch
from helpers import make

from runningtensor import running_tensor, running_tensor_step

B, T, H, K, R, V = 2, 9, 3, 5, 4, 7
STATE = [B, H, K, R, V]


def sequence(**changes):
    """Arguments of `running_tensor`, all of them right but for the changes."""
    x = make(B, T, H, (K, R), V, dtype=torch.float32)
    arguments = {"queries": x.queries, "keys": x.keys, "values": x.values, "beta": x.beta, "log_decay": x.log_decay}
    return arguments | {"initial_state": x.initial_state} | changes


def packed(cu_seqlens, **changes):
    x = make(1, T, H, (K, R), V, dtype=torch.float32)
    return {"queries": x.queries, "keys": x.keys, "values": x.values, "cu_seqlens": cu_seqlens} | changes


def token(**changes):
    """Arguments of `running_tensor_step`."""
    x = make(B, T, H, (K, R), V, dtype=torch.float32)
    now = x.tokens(0)
    arguments = {"queries": now.queries, "keys": now.keys, "values": now.values, "state": x.initial_state.clone()}
    return arguments | {"beta": now.beta, "log_decay": now.log_decay} | changes


RIGHT = sequence()
Q, U = RIGHT["queries"]
K1, R1 = RIGHT["keys"]
VALUES, BETA, INITIAL = RIGHT["values"], RIGHT["beta"], RIGHT["initial_state"]

# changes to the arguments, the argument at fault, what it should be, what it was
SEQUENCE = {
    "fewer queries than keys": ({"queries": (Q,)}, "queries", "as many as keys, 2", "1 tensors"),
    "fewer keys than queries": ({"keys": (K1,)}, "queries", "as many as keys, 1", "2 tensors"),
    "no queries": ({"queries": ()}, "queries", "a tuple of order-1 tensors; for order 2 write (x,)", "empty"),
    "no keys": ({"keys": ()}, "keys", "a tuple of order-1 tensors; for order 2 write (x,)", "empty"),
    "bare query": ({"queries": Q}, "queries", "a tuple of order-1 tensors; for order 2 write (x,)", "a Tensor"),
    "bare key": ({"keys": K1}, "keys", "a tuple of order-1 tensors; for order 2 write (x,)", "a Tensor"),
    "query of another width": (
        {"queries": (Q[..., :3], U)},
        "queries[0]",
        "of shape [2, 9, 3, 5]",
        "of shape [2, 9, 3, 3]",
    ),
    "keys in another order": ({"keys": (R1, K1)}, "queries[0]", "of shape [2, 9, 3, 4]", "of shape [2, 9, 3, 5]"),
    "query of another length": (
        {"queries": (Q, U[:, :8])},
        "queries[1]",
        "of shape [2, 9, 3, 4]",
        "of shape [2, 8, 3, 4]",
    ),
    "key of another length": ({"keys": (K1[:, :8], R1)}, "keys[0]", "of shape [2, 9, 3, K]", "of shape [2, 8, 3, 5]"),
    "key of another batch": ({"keys": (K1[:1], R1)}, "keys[0]", "of shape [2, 9, 3, K]", "of shape [1, 9, 3, 5]"),
    "key of one head for all": (
        {"keys": (K1, R1[:, :, :1])},
        "keys[1]",
        "of shape [2, 9, 3, K]",
        "of shape [2, 9, 1, 4]",
    ),
    "key without heads": ({"keys": (K1, R1[:, :, 0])}, "keys[1]", "of shape [2, 9, 3, K]", "of shape [2, 9, 4]"),
    "values without heads": ({"values": VALUES[:, :, 0]}, "values", "of shape [B, T, H, V]", "of shape [2, 9, 7]"),
    "values that are a list": ({"values": [1.0]}, "values", "a tensor", "list"),
    "a key that is a list": ({"keys": (K1, [1.0])}, "keys[1]", "a tensor", "list"),
    "integer values": ({"values": VALUES.long()}, "values", "of torch.float32 or torch.bfloat16", "of torch.int64"),
    "integer query": ({"queries": (Q.int(), U)}, "queries[0]", "of torch.float32", "of torch.int32"),
    "integer key": ({"keys": (K1, R1.long())}, "keys[1]", "of torch.float32", "of torch.int64"),
    "complex values": ({"values": VALUES.cfloat()}, "values", "of torch.float32 or", "of torch.complex64"),
    "key of another dtype": ({"keys": (K1.bfloat16(), R1)}, "keys[0]", "of torch.float32", "of torch.bfloat16"),
    "query of another dtype": ({"queries": (Q, U.double())}, "queries[1]", "of torch.float32", "of torch.float64"),
    "query elsewhere": ({"queries": (Q.to("meta"), U)}, "queries[0]", "on cpu, as values are", "on meta"),
    "key elsewhere": ({"keys": (K1, R1.to("meta"))}, "keys[1]", "on cpu, as values are", "on meta"),
    "values elsewhere": ({"values": VALUES.to("meta")}, "keys[0]", "on meta, as values are", "on cpu"),
    "beta elsewhere": ({"beta": BETA.to("meta")}, "beta", "on cpu, as values are", "on meta"),
    "log_decay elsewhere": ({"log_decay": BETA.to("meta")}, "log_decay", "on cpu, as values are", "on meta"),
    "state elsewhere": ({"initial_state": INITIAL.to("meta")}, "initial_state", "on cpu, as values are", "on meta"),
    "beta for all heads": ({"beta": BETA[..., :1]}, "beta", "of shape [2, 9, 3]", "of shape [2, 9, 1]"),
    "beta with a last dimension": ({"beta": BETA[..., None]}, "beta", "of shape [2, 9, 3]", "of shape [2, 9, 3, 1]"),
    "beta that is a number": ({"beta": 0.5}, "beta", "a tensor", "float"),
    "beta of another dtype": ({"beta": BETA.double()}, "beta", "of torch.float32", "of torch.float64"),
    "log_decay with time last": (
        {"log_decay": BETA.mT},
        "log_decay",
        "of shape [2, 9, 3]",
        "of shape [2, 3, 9]",
    ),
    "integer log_decay": ({"log_decay": BETA.int()}, "log_decay", "of torch.float32", "of torch.int32"),
    "state with the value mode first": (
        {"initial_state": INITIAL.movedim(-1, 2)},
        "initial_state",
        f"of shape {STATE}",
        "of shape [2, 3, 7, 5, 4]",
    ),
    "state of one key mode": (
        {"initial_state": INITIAL.flatten(2, 3)},
        "initial_state",
        f"of shape {STATE}",
        "of shape [2, 3, 20, 7]",
    ),
    "one state too few": (
        {"initial_state": INITIAL[:1]},
        "initial_state",
        f"of shape {STATE}",
        "of shape [1, 3, 5, 4, 7]",
    ),
    "state of another dtype": (
        {"initial_state": INITIAL.double()},
        "initial_state",
        "of torch.float32",
        "of torch.float64",
    ),
    "low-precision state": (
        {"initial_state": INITIAL.bfloat16()},
        "initial_state",
        "of torch.float32",
        "of torch.bfloat16",
    ),
    "unknown backend": ({"backend": "cuda"}, "backend", "one of 'auto', 'torch'", "'cuda'"),
    "no backend": ({"backend": None}, "backend", "one of 'auto', 'torch'", "None"),
    "chunk of nothing": ({"chunk_size": 0}, "chunk_size", "an int of at least 1", "0"),
    "negative chunk": ({"chunk_size": -64}, "chunk_size", "an int of at least 1", "-64"),
    "fractional chunk": ({"chunk_size": 64.0}, "chunk_size", "an int of at least 1", "64.0"),
    "chunk that is text": ({"chunk_size": "64"}, "chunk_size", "an int of at least 1", "64"),
    "packed batch": (
        {"cu_seqlens": torch.tensor([0, 9]), "initial_state": None},
        "values",
        "of batch 1 with cu_seqlens",
        "of batch 2",
    ),
}

ENDS = "0 = c_0 <= c_1 <= … <= c_N = T = 9"
PACKED = {
    "not from 0": ([1, 9], {}, "cu_seqlens", ENDS, "1 at the start"),
    "from below 0": ([-1, 9], {}, "cu_seqlens", ENDS, "-1 at the start"),
    "decreasing": ([0, 5, 4, 9], {}, "cu_seqlens", ENDS, "decreasing from 5 to 4 at 2"),
    "beyond T and back": ([0, 12, 9], {}, "cu_seqlens", ENDS, "decreasing from 12 to 9 at 2"),
    "short of T": ([0, 4, 8], {}, "cu_seqlens", ENDS, "8 at the end"),
    "past T": ([0, 4, 10], {}, "cu_seqlens", ENDS, "10 at the end"),
    "only a start": ([0], {}, "cu_seqlens", ENDS, "0 at the end"),
    "of floats": ([0.0, 9.0], {}, "cu_seqlens", "of torch.int32 or torch.int64", "of torch.float32"),
    "of truths": ([False, True], {}, "cu_seqlens", "of torch.int32 or torch.int64", "of torch.bool"),
    "a matrix": ([[0, 9]], {}, "cu_seqlens", "of shape [N+1]", "of shape [1, 2]"),
    "empty": (torch.zeros(0, dtype=torch.int64), {}, "cu_seqlens", "[0, …, T]", "an empty tensor"),
    "elsewhere": (torch.tensor([0, 9], device="meta"), {}, "cu_seqlens", "on cpu, as values are", "on meta"),
    "with a state for the batch": (
        [0, 4, 9],
        {"initial_state": INITIAL[:1]},
        "initial_state",
        f"of shape {STATE}",
        "of shape [1, 3, 5, 4, 7]",
    ),
}

STATE_NOW = INITIAL.clone()
STEP = {
    "state of another shape": ({"state": STATE_NOW.mT}, "state", f"of shape {STATE}", "of shape [2, 3, 5, 7, 4]"),
    "state of another batch": ({"state": STATE_NOW[:1]}, "state", f"of shape {STATE}", "of shape [1, 3, 5, 4, 7]"),
    "state of another dtype": ({"state": STATE_NOW.double()}, "state", "of torch.float32", "of torch.float64"),
    "state elsewhere": ({"state": STATE_NOW.to("meta")}, "state", "on cpu, as values are", "on meta"),
    "no state": ({"state": None}, "state", "a tensor", "NoneType"),
    "non-contiguous state": (
        {"state": STATE_NOW.mT.contiguous().mT},
        "state",
        "contiguous, to be updated in place",
        "of strides (420, 140, 28, 1, 4)",
    ),
    "values with time": ({"values": VALUES}, "values", "of shape [B, H, V]", "of shape [2, 9, 3, 7]"),
    "query with time": ({"queries": (Q[:, :1], U[:, 0])}, "queries[0]", "of shape [2, 3, 5]", "of shape [2, 1, 3, 5]"),
    "key of another width": ({"keys": (K1[:, 0], K1[:, 0])}, "queries[1]", "of shape [2, 3, 5]", "of shape [2, 3, 4]"),
    "bare key": ({"keys": K1[:, 0]}, "keys", "a tuple of order-1 tensors; for order 2 write (x,)", "a Tensor"),
    "fewer keys": ({"keys": (K1[:, 0],)}, "queries", "as many as keys, 1", "2 tensors"),
    "integer values": ({"values": VALUES[:, 0].long()}, "values", "of torch.float32 or", "of torch.int64"),
    "key of another dtype": ({"keys": (K1[:, 0].half(), R1[:, 0])}, "keys[0]", "of torch.float32", "of torch.float16"),
    "beta with time": ({"beta": BETA}, "beta", "of shape [2, 3]", "of shape [2, 9, 3]"),
    "log_decay with time": ({"log_decay": BETA}, "log_decay", "of shape [2, 3]", "of shape [2, 9, 3]"),
}
TRACKED = {
    "query": {"queries": (Q[:, 0].clone().requires_grad_(), U[:, 0])},
    "key": {"keys": (K1[:, 0], R1[:, 0].clone().requires_grad_())},
    "values": {"values": VALUES[:, 0].clone().requires_grad_()},
    "state": {"state": STATE_NOW.clone().requires_grad_()},
    "beta": {"beta": BETA[:, 0].clone().requires_grad_()},
    "log_decay": {"log_decay": BETA[:, 0].clone().requires_grad_()},
}


def refused(name, should, was):
    """The whole message; `should` may go on, as a list of dtypes does."""
    return pytest.raises(
        ValueError, match=rf"^{re.escape(name)} must be {re.escape(should)}.*, but was {re.escape(was)}$"
    )


def test_what_is_changed_below_is_right_before():
    running_tensor(**sequence())
    running_tensor(**packed(torch.tensor([0, 4, 4, 9])))
    running_tensor_step(**token())


@pytest.mark.parametrize(("changes", "name", "should", "was"), SEQUENCE.values(), ids=SEQUENCE)
def test_a_sequence_that_does_not_fit_is_refused(changes, name, should, was):
    with refused(name, should, was):
        running_tensor(**sequence(**changes))


@pytest.mark.parametrize("backend", ("torch", "recurrent"))
@pytest.mark.parametrize(("cu_seqlens", "changes", "name", "should", "was"), PACKED.values(), ids=PACKED)
def test_a_packing_that_does_not_fit_is_refused(cu_seqlens, changes, name, should, was, backend):
    with refused(name, should, was):
        running_tensor(**packed(torch.as_tensor(cu_seqlens), **changes), backend=backend)


def test_a_packing_that_is_a_list_is_refused():
    with refused("cu_seqlens", "a tensor", "list"):
        running_tensor(**packed([0, 4, 9]))


@pytest.mark.parametrize("backend", ("torch", "recurrent"))
def test_a_packing_of_no_tokens_must_still_end_at_zero(backend):
    x = make(1, 0, H, (K, R), V)
    with refused("cu_seqlens", "0 = c_0 <= c_1 <= … <= c_N = T = 0", "3 at the end"):
        running_tensor(x.queries, x.keys, x.values, cu_seqlens=torch.tensor([0, 3]), backend=backend)


@pytest.mark.parametrize(("changes", "name", "should", "was"), STEP.values(), ids=STEP)
def test_a_step_that_does_not_fit_is_refused_and_writes_nothing(changes, name, should, was):
    arguments = token(**changes)
    state = arguments["state"]
    before = None if state is None else state.clone()
    with refused(name, should, was):
        running_tensor_step(**arguments)
    assert state is None or state.is_meta or state.equal(before)


@pytest.mark.parametrize("changes", TRACKED.values(), ids=TRACKED)
def test_a_step_that_would_be_differentiated_is_refused(changes):
    with refused("inputs", "under torch.no_grad()", "tensors that require grad"):
        running_tensor_step(**token(**changes))


@pytest.mark.parametrize("f", (running_tensor, running_tensor_step))
def test_an_unknown_option_is_not_swallowed(f):
    arguments = sequence() if f is running_tensor else token()
    with pytest.raises(TypeError, match="scale"):
        f(**arguments, scale=1.0)
