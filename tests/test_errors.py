"""Bad input gets a ValueError that names the argument, what it should have been, and what it was."""

import re

import pytest
import torch
from helpers import make

from runningtensor import running_tensor, running_tensor_step

B, T, H, K, R, V = 2, 9, 3, 5, 4, 7
MODES = "a tuple of order-1 tensors; for order 2 write (x,)"


def sequence(**changes):
    """Arguments of `running_tensor`, all of them right but for the changes."""
    x = make(B, T, H, (K, R), V, dtype=torch.float32)
    arguments = {"queries": x.queries, "keys": x.keys, "values": x.values, "beta": x.beta, "log_decay": x.log_decay}
    return arguments | {"initial_state": x.initial_state} | changes


def packed(**changes):
    """The same for packed sequences, from no state."""
    x = make(1, T, H, (K, R), V, dtype=torch.float32)
    arguments = {"queries": x.queries, "keys": x.keys, "values": x.values, "cu_seqlens": torch.tensor([0, 4, 4, 9])}
    return arguments | changes


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

# What is changed, and what is then said; "..." stands for anything.
SEQUENCE = {
    "fewer queries than keys": ({"queries": (Q,)}, "queries must be as many as keys, 2, but was 1 tensors"),
    "fewer keys than queries": ({"keys": (K1,)}, "queries must be as many as keys, 1, but was 2 tensors"),
    "no queries": ({"queries": ()}, f"queries must be {MODES}, but was empty"),
    "no keys": ({"keys": ()}, f"keys must be {MODES}, but was empty"),
    "a bare query": ({"queries": Q}, f"queries must be {MODES}, but was a Tensor"),
    "a bare key": ({"keys": K1}, f"keys must be {MODES}, but was a Tensor"),
    "a query of another width": (
        {"queries": (Q[..., :3], U)},
        "queries[0] must be of shape [2, 9, 3, 5], but was of shape [2, 9, 3, 3]",
    ),
    "keys in another order": (
        {"keys": (R1, K1)},
        "queries[0] must be of shape [2, 9, 3, 4], but was of shape [2, 9, 3, 5]",
    ),
    "a query of another length": (
        {"queries": (Q, U[:, :8])},
        "queries[1] must be of shape [2, 9, 3, 4], but was of shape [2, 8, 3, 4]",
    ),
    "a key of another length": (
        {"keys": (K1[:, :8], R1)},
        "keys[0] must be of shape [2, 9, 3, K], but was of shape [2, 8, 3, 5]",
    ),
    "a key of another batch": (
        {"keys": (K1[:1], R1)},
        "keys[0] must be of shape [2, 9, 3, K], but was of shape [1, 9, 3, 5]",
    ),
    "a key of one head for all": (
        {"keys": (K1, R1[:, :, :1])},
        "keys[1] must be of shape [2, 9, 3, K], but was of shape [2, 9, 1, 4]",
    ),
    "a key without heads": (
        {"keys": (K1, R1[:, :, 0])},
        "keys[1] must be of shape [2, 9, 3, K], but was of shape [2, 9, 4]",
    ),
    "values without heads": (
        {"values": VALUES[:, :, 0]},
        "values must be of shape [B, T, H, V], but was of shape [2, 9, 7]",
    ),
    "values in a list": ({"values": [1.0]}, "values must be a tensor, but was list"),
    "a key in a list": ({"keys": (K1, [1.0])}, "keys[1] must be a tensor, but was list"),
    "integer values": (
        {"values": VALUES.long()},
        "values must be of torch.float32 or torch.bfloat16 or ..., but was of torch.int64",
    ),
    "complex values": (
        {"values": VALUES.cfloat()},
        "values must be of torch.float32 or ..., but was of torch.complex64",
    ),
    "an integer query": ({"queries": (Q.int(), U)}, "queries[0] must be of torch.float32, but was of torch.int32"),
    "an integer key": ({"keys": (K1, R1.long())}, "keys[1] must be of torch.float32, but was of torch.int64"),
    "a key of another dtype": (
        {"keys": (K1.bfloat16(), R1)},
        "keys[0] must be of torch.float32, but was of torch.bfloat16",
    ),
    "a query of another dtype": (
        {"queries": (Q, U.double())},
        "queries[1] must be of torch.float32, but was of torch.float64",
    ),
    "a query elsewhere": ({"queries": (Q.to("meta"), U)}, "queries[0] must be on cpu, as values are, but was on meta"),
    "a key elsewhere": ({"keys": (K1, R1.to("meta"))}, "keys[1] must be on cpu, as values are, but was on meta"),
    "values elsewhere": ({"values": VALUES.to("meta")}, "keys[0] must be on meta, as values are, but was on cpu"),
    "beta elsewhere": ({"beta": BETA.to("meta")}, "beta must be on cpu, as values are, but was on meta"),
    "a decay elsewhere": ({"log_decay": BETA.to("meta")}, "log_decay must be on cpu, as values are, but was on meta"),
    "a state elsewhere": (
        {"initial_state": INITIAL.to("meta")},
        "initial_state must be on cpu, as values are, but was on meta",
    ),
    "one beta for all heads": (
        {"beta": BETA[..., :1]},
        "beta must be of shape [2, 9, 3], but was of shape [2, 9, 1]",
    ),
    "beta with a last dimension": (
        {"beta": BETA[..., None]},
        "beta must be of shape [2, 9, 3], but was of shape [2, 9, 3, 1]",
    ),
    "beta as a number": ({"beta": 0.5}, "beta must be a tensor, but was float"),
    "beta of another dtype": ({"beta": BETA.double()}, "beta must be of torch.float32, but was of torch.float64"),
    "a decay with time last": (
        {"log_decay": BETA.mT},
        "log_decay must be of shape [2, 9, 3], but was of shape [2, 3, 9]",
    ),
    "an integer decay": ({"log_decay": BETA.int()}, "log_decay must be of torch.float32, but was of torch.int32"),
    "a state with its value mode first": (
        {"initial_state": INITIAL.movedim(-1, 2)},
        "initial_state must be of shape [2, 3, 5, 4, 7], but was of shape [2, 3, 7, 5, 4]",
    ),
    "a state of one key mode": (
        {"initial_state": INITIAL.flatten(2, 3)},
        "initial_state must be of shape [2, 3, 5, 4, 7], but was of shape [2, 3, 20, 7]",
    ),
    "a state too few": (
        {"initial_state": INITIAL[:1]},
        "initial_state must be of shape [2, 3, 5, 4, 7], but was of shape [1, 3, 5, 4, 7]",
    ),
    "a state of higher precision": (
        {"initial_state": INITIAL.double()},
        "initial_state must be of torch.float32, but was of torch.float64",
    ),
    "a state of lower precision": (
        {"initial_state": INITIAL.bfloat16()},
        "initial_state must be of torch.float32, but was of torch.bfloat16",
    ),
    "an unknown backend": ({"backend": "cuda"}, "backend must be one of 'auto', ...'torch', ..., but was 'cuda'"),
    "no backend": ({"backend": None}, "backend must be one of 'auto', ...'torch', ..., but was None"),
    "a chunk of nothing": ({"chunk_size": 0}, "chunk_size must be an int of at least 1, but was 0"),
    "a negative chunk": ({"chunk_size": -64}, "chunk_size must be an int of at least 1, but was -64"),
    "a fractional chunk": ({"chunk_size": 64.0}, "chunk_size must be an int of at least 1, but was 64.0"),
    "a chunk as text": ({"chunk_size": "64"}, "chunk_size must be an int of at least 1, but was 64"),
    "a packed batch": (
        {"cu_seqlens": torch.tensor([0, 9]), "initial_state": None},
        "values must be of batch 1 with cu_seqlens..., but was of batch 2",
    ),
}

ENDS = "cu_seqlens must be 0 = c_0 <= c_1 <= … <= c_N = T = 9, but was"
PACKED = {
    "not from 0": ({"cu_seqlens": torch.tensor([1, 9])}, f"{ENDS} 1 at the start"),
    "from below 0": ({"cu_seqlens": torch.tensor([-1, 9])}, f"{ENDS} -1 at the start"),
    "decreasing": ({"cu_seqlens": torch.tensor([0, 5, 4, 9])}, f"{ENDS} decreasing from 5 to 4 at 2"),
    "beyond T and back": ({"cu_seqlens": torch.tensor([0, 12, 9])}, f"{ENDS} decreasing from 12 to 9 at 2"),
    "short of T": ({"cu_seqlens": torch.tensor([0, 4, 8])}, f"{ENDS} 8 at the end"),
    "past T": ({"cu_seqlens": torch.tensor([0, 4, 10])}, f"{ENDS} 10 at the end"),
    "only a start": ({"cu_seqlens": torch.tensor([0])}, f"{ENDS} 0 at the end"),
    "of floats": (
        {"cu_seqlens": torch.tensor([0.0, 9.0])},
        "cu_seqlens must be of torch.int32 or torch.int64, but was of torch.float32",
    ),
    "of truths": (
        {"cu_seqlens": torch.tensor([False, True])},
        "cu_seqlens must be of torch.int32 or torch.int64, but was of torch.bool",
    ),
    "a matrix": (
        {"cu_seqlens": torch.tensor([[0, 9]])},
        "cu_seqlens must be of shape [N+1], but was of shape [1, 2]",
    ),
    "a list": ({"cu_seqlens": [0, 9]}, "cu_seqlens must be a tensor, but was list"),
    "empty": ({"cu_seqlens": torch.tensor([]).long()}, "cu_seqlens must be [0, …, T], but was an empty tensor"),
    "elsewhere": (
        {"cu_seqlens": torch.tensor([0, 9], device="meta")},
        "cu_seqlens must be on cpu, as values are, but was on meta",
    ),
    "with one state for two sequences": (
        {"cu_seqlens": torch.tensor([0, 4, 9]), "initial_state": INITIAL[:1]},
        "initial_state must be of shape [2, 3, 5, 4, 7], but was of shape [1, 3, 5, 4, 7]",
    ),
}

STEP = {
    "a state of another shape": (
        {"state": INITIAL.mT},
        "state must be of shape [2, 3, 5, 4, 7], but was of shape [2, 3, 5, 7, 4]",
    ),
    "a state of another batch": (
        {"state": INITIAL[:1]},
        "state must be of shape [2, 3, 5, 4, 7], but was of shape [1, 3, 5, 4, 7]",
    ),
    "a state of another dtype": (
        {"state": INITIAL.double()},
        "state must be of torch.float32, but was of torch.float64",
    ),
    "a state elsewhere": ({"state": INITIAL.to("meta")}, "state must be on cpu, as values are, but was on meta"),
    "no state": ({"state": None}, "state must be a tensor, but was NoneType"),
    "a state that is not contiguous": (
        {"state": INITIAL.mT.contiguous().mT},
        "state must be contiguous, to be updated in place, but was of strides (420, 140, 28, 1, 4)",
    ),
    "values with time": ({"values": VALUES}, "values must be of shape [B, H, V], but was of shape [2, 9, 3, 7]"),
    "a query with time": (
        {"queries": (Q[:, :1], U[:, 0])},
        "queries[0] must be of shape [2, 3, 5], but was of shape [2, 1, 3, 5]",
    ),
    "a key of another width": (
        {"keys": (K1[:, 0], K1[:, 0])},
        "queries[1] must be of shape [2, 3, 5], but was of shape [2, 3, 4]",
    ),
    "a bare key": ({"keys": K1[:, 0]}, f"keys must be {MODES}, but was a Tensor"),
    "fewer keys than queries": ({"keys": (K1[:, 0],)}, "queries must be as many as keys, 1, but was 2 tensors"),
    "integer values": (
        {"values": VALUES[:, 0].long()},
        "values must be of torch.float32 or ..., but was of torch.int64",
    ),
    "a key of another dtype": (
        {"keys": (K1[:, 0].half(), R1[:, 0])},
        "keys[0] must be of torch.float32, but was of torch.float16",
    ),
    "beta with time": ({"beta": BETA}, "beta must be of shape [2, 3], but was of shape [2, 9, 3]"),
    "a decay with time": ({"log_decay": BETA}, "log_decay must be of shape [2, 3], but was of shape [2, 9, 3]"),
}
TRACKED = {
    "query": {"queries": (Q[:, 0].clone().requires_grad_(), U[:, 0])},
    "key": {"keys": (K1[:, 0], R1[:, 0].clone().requires_grad_())},
    "values": {"values": VALUES[:, 0].clone().requires_grad_()},
    "state": {"state": INITIAL.clone().requires_grad_()},
    "beta": {"beta": BETA[:, 0].clone().requires_grad_()},
    "log_decay": {"log_decay": BETA[:, 0].clone().requires_grad_()},
}


def refused(message):
    return pytest.raises(ValueError, match="^" + ".*".join(map(re.escape, message.split("..."))) + "$")


def test_what_is_changed_below_is_right_before():
    running_tensor(**sequence())
    running_tensor(**packed())
    running_tensor_step(**token())


@pytest.mark.parametrize(("changes", "message"), SEQUENCE.values(), ids=SEQUENCE)
def test_a_sequence_that_does_not_fit_is_refused(changes, message):
    with refused(message):
        running_tensor(**sequence(**changes))


@pytest.mark.parametrize("backend", ("torch", "recurrent"))
@pytest.mark.parametrize(("changes", "message"), PACKED.values(), ids=PACKED)
def test_a_packing_that_does_not_fit_is_refused(changes, message, backend):
    with refused(message):
        running_tensor(**packed(**changes), backend=backend)


@pytest.mark.parametrize("backend", ("torch", "recurrent"))
def test_a_packing_of_no_tokens_must_still_end_at_zero(backend):
    x = make(1, 0, H, (K, R), V)
    with refused("cu_seqlens must be 0 = c_0 <= c_1 <= … <= c_N = T = 0, but was 3 at the end"):
        running_tensor(x.queries, x.keys, x.values, cu_seqlens=torch.tensor([0, 3]), backend=backend)


@pytest.mark.parametrize(("changes", "message"), STEP.values(), ids=STEP)
def test_a_step_that_does_not_fit_is_refused_and_writes_nothing(changes, message):
    arguments = token(**changes)
    state = arguments["state"]
    before = None if state is None else state.clone()
    with refused(message):
        running_tensor_step(**arguments)
    assert state is None or state.is_meta or state.equal(before)


@pytest.mark.parametrize("changes", TRACKED.values(), ids=TRACKED)
def test_a_step_that_would_be_differentiated_is_refused(changes):
    with refused("inputs must be under torch.no_grad()..., but was tensors that require grad"):
        running_tensor_step(**token(**changes))


@pytest.mark.parametrize(("f", "arguments"), ((running_tensor, sequence), (running_tensor_step, token)))
def test_an_unknown_option_is_not_swallowed(f, arguments):
    with pytest.raises(TypeError, match="scale"):
        f(**arguments(), scale=1.0)
