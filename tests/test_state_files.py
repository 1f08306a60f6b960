"""A state in a file: to go on from it is never to have stopped, and nothing else is taken for one."""

import pickle
import signal
import subprocess
import sys

import pytest
import torch
from models import EVERY_KIND, LINEAR_OR_HYBRID, build, tokens
from safetensors.torch import load_file, save_file
from speakers import SPEAKER, folder
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.models import RunningTensorCache, RunningTensorConfig
from runningtensor.serve import load_state, save_state, writing
from runningtensor.serve.chat import answer
from runningtensor.serve.conversation import Conversation
from runningtensor.serve.states import fingerprint, tensors
from runningtensor.serve.writing import Sampling, Session


@torch.no_grad()
def go_on(model, cache, pending, steps):
    """The likeliest tokens after `pending`, of which the last is not read."""
    written = []
    for _ in range(steps):
        pending = model(pending, past_key_values=cache).logits[:, -1:].argmax(-1)
        written.append(pending)
    return torch.cat(written, 1)


@EVERY_KIND
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_going_on_from_a_file_is_never_having_stopped(kind, dtype, tmp_path):
    model, ids = build(kind, dtype), tokens(2, 9)
    cache = RunningTensorCache(model.config)
    begun = go_on(model, cache, ids, 5)
    save_state(tmp_path / "state", model, cache, begun[:, -1:])
    want = go_on(model, cache, begun[:, -1:], 20)
    assert len(want.unique()) > 4  # it says something

    loaded, pending = load_state(tmp_path / "state", build(kind, dtype))
    assert loaded.get_seq_length() == 13 and torch.equal(pending, begun[:, -1:])
    assert torch.equal(go_on(model, loaded, pending, 20), want)
    left, right = tensors(cache), tensors(loaded)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_state_file_is_of_one_size_however_much_was_read(tmp_path):
    model, sizes = build(), []
    for length in (3, 3000):
        cache = RunningTensorCache(model.config)
        go_on(model, cache, tokens(1, length), 1)
        save_state(tmp_path / "state", model, cache, tokens(1, 1))
        sizes.append((tmp_path / "state").stat().st_size)
    assert 0 <= sizes[1] - sizes[0] <= 16  # the number of tokens is in it, in digits


@pytest.fixture
def state(tmp_path):
    model, path = build("hybrid"), tmp_path / "state"
    cache = RunningTensorCache(model.config)
    go_on(model, cache, tokens(1, 9), 1)
    save_state(path, model, cache, tokens(1, 1))
    return model, path


def test_the_state_of_another_model_is_refused(state):
    model, path = state
    for change in ("weight", "option"):
        other = build("hybrid", **{"norm_eps": 1e-6} if change == "option" else {})
        if change == "weight":
            other.model.layers[2].mlp.down_proj.weight.data[3, 4] += 1e-9
        with pytest.raises(ValueError, match="another model"):
            load_state(path, other)
    with pytest.raises(ValueError, match="dtype"):
        load_state(path, build("hybrid", torch.float32))
    model.config.eos_token_id = 3  # where to end is no matter of what was read
    load_state(path, model)


def test_a_file_cut_short_anywhere_is_refused(state):
    model, path = state
    whole = path.read_bytes()
    for length in (0, 5, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut short"):
            load_state(path, model)


class Trap:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_what_is_no_state_file_is_refused_and_never_unpickled(state, tmp_path):
    model, path = state
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="must be a state file"):
        load_state(path, model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a state file of format"):
        load_state(tmp_path / "model.safetensors", model)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "nowhere", model)


@pytest.mark.parametrize(
    "change",
    (
        lambda held: held.pop("3.keys"),
        lambda held: held.pop("pending"),
        lambda held: held.update(more=torch.zeros(1)),
        lambda held: held.update({"0.state": held["0.state"][:, :1]}),
        lambda held: held.update({"0.window": held["0.window"].float()}),
        lambda held: held.update({"3.values": held["3.values"][:, :, :-1]}),
        lambda held: held.update(pending=torch.tensor([[50]])),
        lambda held: held.update(pending=torch.zeros(1, 0, dtype=torch.long)),
    ),
)
def test_a_state_of_wrong_tensors_is_refused(state, change):
    model, path = state
    held = {name: tensor.contiguous() for name, tensor in load_file(path).items()}
    change(held)
    header = {"format": "runningtensor state 1", "model": fingerprint(model), "tokens": "9"}
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, path, header)
    with pytest.raises(ValueError, match="damaged"):
        load_state(path, model)


def test_an_option_that_came_later_leaves_states_of_before_as_they_were(state, monkeypatch):
    model, path = state
    fields = {name: kind for name, kind in RunningTensorConfig.__annotations__.items() if name != "output_gate"}
    now = fingerprint(model)
    monkeypatch.setattr(RunningTensorConfig, "__annotations__", fields)
    assert now == fingerprint(model)
    monkeypatch.undo()
    model.config.output_gate = "sigmoid"
    with pytest.raises(ValueError, match="another model"):
        load_state(path, model)


def test_what_cannot_be_gone_on_with_is_not_saved(state):
    model, path = state
    before = path.read_bytes()
    empty, cache = RunningTensorCache(model.config), load_state(path, model)[0]
    for held, pending in ((empty, tokens(1, 1)), (cache, tokens(2, 1)), (cache, tokens(1, 0)), (cache, tokens(1))):
        with pytest.raises(ValueError, match=r"(cache|pending) must be"):
            save_state(path, model, held, pending)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_model_without_a_cache_has_no_state(state):
    with pytest.raises(ValueError, match="has a cache, but its mixer was 'deltanet'"):
        load_state(state[1], build("deltanet"))


# -- The commands ------------------------------------------------------------------------------------------------------


def run(*arguments, code=0, **options):
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False, **options)
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


@LINEAR_OR_HYBRID
def test_generate_goes_on_from_where_it_was(kind, tmp_path):
    model, state = folder(tmp_path / "model", kind), tmp_path / "state"
    whole = run("generate", model, "--prompt", "once", "--max-new-tokens", 20)
    begun = run("generate", model, "--prompt", "once", "--max-new-tokens", 8, "--save-state", state)
    ended = run("generate", model, "--load-state", state, "--max-new-tokens", 12)
    assert begun.removesuffix("\n") + ended == whole and len(begun) == len("once") + 8 + 1

    # A text read and kept, with nothing written; then asked twice.
    run("generate", model, "--prompt", "on", "--max-new-tokens", 0, "--save-state", state)
    for _ in range(2):
        ended = run("generate", model, "--prompt", "ce", "--load-state", state, "--max-new-tokens", 20)
        assert "on" + ended == whole


def test_generate_says_what_is_wrong_in_a_line(tmp_path):
    model = folder(tmp_path / "model")
    assert "cut short" in run("generate", model, "--load-state", model / "config.json", code=1)
    assert "--prompt must be given" in run("generate", model, code=2)
    assert "at least one token" in run("generate", model, "--prompt", "", "--save-state", tmp_path / "s", code=1)
    without = folder(tmp_path / "without", "deltanet")
    assert "'deltanet'" in run("generate", without, "--prompt", "a", "--save-state", tmp_path / "s", code=1)
    assert not (tmp_path / "s").exists()


def test_where_a_state_cannot_be_kept_nothing_is_written(tmp_path):
    model = folder(tmp_path / "model")
    for place, says in ((tmp_path / "no" / "s", "is not"), (tmp_path, "is a folder")):
        said = run("generate", model, "--prompt", "once", "--save-state", place, code=1)
        assert says in said and "once" not in said


def chat(model, *lines):
    said = run("chat", model, "--temperature", 0, "--max-new-tokens", 9, input="\n".join(lines) + "\n")
    return said[said.index("\n> ") + 3 :].split("\n> ")[: len(lines)]


@pytest.mark.parametrize("template, eos", ((None, "</s>"), (SPEAKER, "</s>"), (SPEAKER, "t")))
@LINEAR_OR_HYBRID
def test_a_chat_reads_each_turn_once_and_says_what_reading_all_again_would(kind, template, eos, tmp_path):
    model, words = folder(tmp_path, kind, template, eos, loaded=True)
    lines = ("hello", "more", "still more")
    replies = chat(tmp_path, *lines)
    transcript = ""
    for line, reply in zip(lines, replies, strict=True):
        if template is None:
            transcript += "\n" * (transcript != "") + f"User: {line}\nAssistant:"
        else:
            transcript += f"[{line}]:"
        ids = words(transcript, return_tensors="pt").input_ids
        written = model.generate(ids, do_sample=False, max_new_tokens=9)[0, ids.shape[1] :]
        assert words.decode(written, skip_special_tokens=True) == reply
        transcript += reply + (eos + "\n") * (template is not None)
    assert len(set(replies)) > 1 and (min(map(len, replies)) < 9) == (eos != "</s>")  # it ended some of them itself


def test_a_chat_is_kept_in_a_file_and_taken_up_again(tmp_path):
    model, state = folder(tmp_path / "model", template=SPEAKER), tmp_path / "a state"
    first, second = chat(model, "hello", "more")
    begun = chat(model, "hello", f"/save {state}", "more")
    assert begun[0] == first and "tokens" in begun[1] and begun[2] == second
    assert chat(model, "something else", f"/load {state}", "more")[2] == second
    assert chat(model, "hello", "/reset", "more")[2] == chat(model, "more")[0] != second


def test_a_chat_says_what_is_wrong_and_goes_on(tmp_path):
    model = folder(tmp_path / "model", template=SPEAKER)
    wrong = {
        f"/load {tmp_path}/nowhere": "not there",
        f"/load {model}/config.json": "cut short",
        "/load": "/reset forgets",
        "/what": "/reset forgets",
        f"/save {tmp_path}/state": "read yet",
        f"/save {tmp_path}/nowhere/state": "is not",
        f"/save {tmp_path}": "is a folder",
    }
    *told, reply = chat(model, *wrong, "hello")
    for line, words in zip(told, wrong.values(), strict=True):
        assert words in line
    assert reply == chat(model, "hello")[0]


@pytest.fixture
def listening():
    """Ctrl-C does what it does in Python, where a shell has told its background to ignore it too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_reply_between_two_tokens(listening, monkeypatch, tmp_path):
    model, words = folder(tmp_path, template=SPEAKER, loaded=True)
    talk = Conversation(words)
    stopped, shorter = Session(model, words), Session(model, words)
    answer(shorter, talk, Sampling(max_new_tokens=3), "hello")

    def read_and_interrupt(model, ids, cache, read=writing.read, calls=[]):  # noqa: B006
        calls.append(ids)
        if len(calls) == 4:  # the prompt, and then its last token and two more
            signal.raise_signal(signal.SIGINT)
        return read(model, ids, cache)

    monkeypatch.setattr(writing, "read", read_and_interrupt)
    answer(stopped, talk, Sampling(max_new_tokens=50), "hello")
    assert stopped.pending == shorter.pending
    left, right = tensors(stopped.cache), tensors(shorter.cache)
    assert all(torch.equal(left[name], right[name]) for name in left)
    with pytest.raises(KeyboardInterrupt):  # which is itself again
        signal.raise_signal(signal.SIGINT)


def test_no_serving_package_is_needed_for_states_and_chats():
    program = """
import sys
for name in ("fastapi", "uvicorn", "openai", "pydantic"):
    sys.modules[name] = None
import runningtensor.serve.chat, runningtensor.serve.engine
"""
    subprocess.run([sys.executable, "-c", program], check=True)
