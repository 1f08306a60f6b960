"""Many texts at a time are what each would be alone; and the server speaks OpenAI's language."""

import json
import queue
import random
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import typer.main
from models import build, tokens
from speakers import SPEAKER, folder, served, tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.pretrain.tokenizer import mistral
from runningtensor.serve.conversation import Conversation
from runningtensor.serve.engine import Engine, Job
from runningtensor.serve.writing import Printer, Sampling, Writer, draw, encode_more

# -- Tokens and text ---------------------------------------------------------------------------------------------------


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([0.0, 3.0, 2.0, -torch.inf]).log_softmax(-1)
    dice = torch.Generator().manual_seed(0)

    def shares(**options):
        sampling = Sampling(max_new_tokens=1, **options)
        drawn = torch.tensor([draw(logits, sampling, dice) for _ in range(2000)])
        return torch.bincount(drawn, minlength=4) / 2000

    assert torch.allclose(shares(temperature=1.0), logits.exp(), atol=0.04)
    assert torch.allclose(shares(temperature=2.0), (logits / 2).softmax(-1), atol=0.04)
    assert shares()[1] == shares(temperature=1e-9)[1] == shares(temperature=1.0, top_p=0.5)[1] == 1
    two = shares(temperature=1.0, top_p=0.9)  # the likeliest has 0.71, the next 0.26
    assert two[0] == 0 and abs(two[1] / two[2] - torch.e) < 0.4


def letters():
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)


def written(text, words=None, ends=(), **options):
    """The pieces that a writer makes of a text that the model insists on, and the writer."""
    words = words or letters()
    ids = words(text)["input_ids"]
    writer = Writer(words, set(ends), Sampling(max_new_tokens=options.pop("limit", len(ids)), **options), [])
    return insisted(writer, ids), writer


def insisted(writer, ids):
    """The pieces that it makes of these tokens, up to where it ends."""
    size = len(writer.tokenizer)
    logits = (torch.nn.functional.one_hot(torch.tensor(token), size).float() for token in ids)
    return [writer.write(one) for one in logits if writer.finish is None]


def test_a_character_of_several_tokens_is_shown_when_it_is_whole():
    pieces, writer = written("a é→𝄞 b")
    assert pieces == ["a", " ", "", "é", "", "", "→", "", "", "", "𝄞", " ", "b"] and writer.finish == "length"
    pieces, writer = written("a→", limit=3)  # cut off within one: shown as what it is
    assert "".join(pieces) == "a\ufffd"


@pytest.fixture(scope="module")
def pieces():
    """Mistral's: bytes where there is no piece, and a space before whatever is read."""
    for package in ("sentencepiece", "mistral_common"):
        pytest.importorskip(package, reason=f"{package} comes with the extra pretrain")
    return mistral()


@pytest.mark.parametrize("before", ("", "no. ①②③④⑤⑥"))
@pytest.mark.parametrize("text", ("①②③④⑤⑥", "鬱麤齉龗靐", "ᏣᎳᎩ ᎦᏬᏂ", "⠓⠑⠇⠇⠕ a", "no 😀😀😀😀😀!", "é\n\n ⠓  ⠑"))
def test_characters_of_bytes_are_shown_however_many_there_are(text, before, pieces):
    read = pieces(before)["input_ids"]
    ids = encode_more(pieces, text) if before else pieces(text)["input_ids"]
    writer = Writer(pieces, set(), Sampling(max_new_tokens=len(ids)), read)
    shown = insisted(writer, ids)
    assert "".join(shown) == text and max(map(len, shown)) <= 3  # and not all at the end


@pytest.mark.parametrize("whole", ("Once upon a time", "a\nUser: more\nAssistant:", "one  two\n\n three ", "x→y ①②"))
def test_a_text_read_in_parts_is_the_tokens_of_the_whole(whole, pieces):
    starts = [i for i, c in enumerate(whole) if i and c in " \n" and whole[i - 1] not in " \n"]
    for words in (pieces, letters()):
        want = words(whole)["input_ids"]
        for i in starts:
            assert words(whole[:i])["input_ids"] + encode_more(words, whole[i:]) == want
    if " " in whole:
        assert encode_more(pieces, "a time") != pieces("a time")["input_ids"]  # nobody asked for a space


@pytest.mark.parametrize("alphabet", ("①②③④⑤⑥", "鬱麤齉龗靐", "😀😁🤷", "нет да", "हिन्दी ", "a \ufffd①"))
def test_nothing_of_a_prompt_is_shown_again(alphabet, pieces):
    dice = random.Random(0)
    for words in (pieces, letters()):
        for _ in range(40):
            prompt = "".join(dice.choices(alphabet, k=dice.randrange(1, 30))) + "!"
            writer = Writer(words, set(), Sampling(max_new_tokens=99), words(prompt)["input_ids"])
            assert "".join(insisted(writer, encode_more(words, " ok, fine"))) == " ok, fine"


def test_what_is_printed_is_the_whole_text_as_it_is(pieces, capsys):
    text = "def f():\n    return 1\n  ①②③ é"
    printer = Printer(pieces)
    for token in pieces(text)["input_ids"]:
        printer.put(torch.tensor([token]))
    printer.end()
    assert capsys.readouterr().out == text


def test_what_a_newline_is_one_token_with_is_read_as_it_is():
    words = Tokenizer(BPE({"Ċ": 0, "a": 1, "ĊĊ": 2}, [("Ċ", "Ċ")]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    assert encode_more(fast, "\na") == [0, 1] and encode_more(fast, "a\n\n") == [1, 2]


def test_a_stop_sequence_is_never_shown_not_even_its_beginning():
    pieces, writer = written("one two three", stop=("two", "xyz"))
    assert pieces == ["o", "n", "e", " ", "", "", ""]
    assert (writer.finish, writer.ended) == ("stop", "two")
    pieces, writer = written("one twin", stop=("two",))  # it only looked like it
    assert pieces == ["o", "n", "e", " ", "", "", "twi", "n"] and writer.finish == "length"
    pieces, writer = written("abab", stop=("bc",))
    assert "".join(pieces) == "abab"  # nothing is held back at the end
    pieces, writer = written("aXbY", stop=("Y", "X"))
    assert "".join(pieces) == "a" and writer.ended == "X"


def test_the_token_that_ends_a_text_is_not_shown():
    words = letters()
    (end,) = words("!")["input_ids"]
    pieces, writer = written("so!no", words, ends=[end])
    assert pieces == ["s", "o", ""] and (writer.finish, writer.ended, len(writer.tokens)) == ("stop", "!", 3)


def test_words_keep_the_spaces_between_them():
    words = Tokenizer(BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4}, [("▁", "a"), ("▁", "b")]))
    words.decoder = decoders.Metaspace()  # which drops the space that begins a text
    fast = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    writer = Writer(fast, set(), Sampling(max_new_tokens=3), [3])
    assert [writer.write(torch.eye(5)[token]) for token in (4, 1, 3)] == [" b", "a", " a"]


def test_a_conversation_without_a_template_is_lines():
    talk = Conversation(tokenizer())
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert talk.prompt(messages) == "System: be kind\nUser: hello\nAssistant:"
    messages += [{"role": "assistant", "content": " hi"}, {"role": "user", "content": "more"}]
    whole = talk.prompt(messages[1:])
    assert whole == talk.first("hello") + " hi" + talk.closing + talk.later("more")
    assert talk.stop == ("\nUser:",)


def test_a_conversation_by_template_is_the_same_turn_by_turn():
    talk = Conversation(tokenizer(SPEAKER))
    assert (talk.first("a"), talk.closing, talk.later("b"), talk.stop) == ("[a]:", "</s>\n", "[b]:", ())


# -- The engine --------------------------------------------------------------------------------------------------------


def ask(engine, ids, **options):
    """A job, and the text that it will have brought, with what ended it."""
    events = queue.Queue()
    job = Job(ids=ids, sampling=Sampling(**options), emit=lambda *event: events.put(event))
    engine.submit(job)

    def wait():
        text, finish = "", None
        while finish is None:
            piece, finish = events.get(timeout=20)
            text += piece
        return text, finish

    return job, wait


@pytest.mark.parametrize("kind", ("order 3", "order 4", "hybrid", "gated_deltanet"))
@pytest.mark.parametrize("batch", (1, 3, 8))
def test_texts_written_at_a_time_are_what_each_would_be_alone(kind, batch, monkeypatch):
    monkeypatch.setattr("runningtensor.serve.engine.PIECE", 5)  # prompts are read in several goes
    model, words = build(kind, vocab_size=37), tokenizer()
    engine = Engine(model, words, batch)
    prompts = [tokens(1, length, seed=length).remainder(34).tolist()[0] for length in (1, 12, 3, 30, 7, 2)]
    limits = (9, 2, 14, 5, 1, 11)
    waits = [ask(engine, ids, max_new_tokens=n)[1] for ids, n in zip(prompts, limits, strict=True)]
    for ids, n, wait in zip(prompts, limits, waits, strict=True):
        alone = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=n)[0, len(ids) :]
        assert wait() == (words.decode(alone, skip_special_tokens=True), "length")


@pytest.mark.parametrize("kind, most", (("order 3", 3), ("hybrid", 1)))
def test_states_of_one_size_are_stepped_together(kind, most, monkeypatch):
    from runningtensor.serve import engine as module

    sizes, read = [], module.read
    monkeypatch.setattr(module, "read", lambda model, ids, cache: sizes.append(len(ids)) or read(model, ids, cache))
    engine = Engine(build(kind, vocab_size=37), tokenizer(), 3)
    for wait in [ask(engine, [ids], max_new_tokens=50)[1] for ids in range(5)]:
        assert wait()[1] == "length"
    assert max(sizes) == most


def test_a_seed_decides_what_is_drawn_whoever_is_beside():
    model = build(vocab_size=37)
    engine = Engine(model, tokenizer(), 4)
    options = {"max_new_tokens": 30, "temperature": 1.5}
    alone = ask(engine, [1, 2], seed=7, **options)[1]()
    waits = [ask(engine, [3], **options)[1], ask(engine, [1, 2], seed=7, **options)[1], ask(engine, [4], **options)[1]]
    texts = [wait() for wait in waits]
    assert texts[1] == alone and len(set(texts)) == 3


def test_a_cancelled_text_makes_room():
    engine = Engine(build(vocab_size=37), tokenizer(), 1)
    job, _ = ask(engine, [1], max_new_tokens=10**9)
    unstarted, _ = ask(engine, [2], max_new_tokens=10**9)
    _, wait = ask(engine, [3], max_new_tokens=3)
    job.cancelled = unstarted.cancelled = True
    assert wait()[1] == "length" and unstarted.written == 0


def test_an_error_ends_the_texts_that_it_is_of_and_no_others():
    engine = Engine(build(vocab_size=37), tokenizer(), 4)
    (_, before), (_, wrong), (_, after) = (ask(engine, [ids], max_new_tokens=20) for ids in (1, 99, 2))
    assert isinstance(wrong()[1], IndexError)
    assert before()[1] == after()[1] == "length"


# -- The server, as a client sees it -----------------------------------------------------------------------------------

KEY, CONTEXT = "sesame", 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"the server's tests need {package}")
    path = folder(tmp_path_factory.mktemp("served") / "tiny", template=SPEAKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with served(path, "--port", port, "--api-key", KEY, "--context", CONTEXT, "--batch", 2) as url:
        yield url


@pytest.fixture
def client(server):
    import openai

    return openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0, timeout=30)


ONCE = {"model": "tiny", "prompt": "once", "temperature": 0, "max_tokens": 12}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def likeliest(tmp_path_factory):
    model, words = folder(tmp_path_factory.mktemp("here"), template=SPEAKER, loaded=True)

    def write(prompt, new=12):
        ids = words(prompt, return_tensors="pt").input_ids
        written = model.generate(ids, do_sample=False, max_new_tokens=new)[0, ids.shape[1] :]
        return words.decode(written, skip_special_tokens=True)

    return write


def test_nobody_else_is_listened_to_unless_it_is_asked_for():
    options = {option.name: option.default for option in typer.main.get_command(app).commands["serve"].params}
    assert options["host"] == "127.0.0.1" and options["api_key"] is None


def test_an_address_that_is_taken_is_said_and_not_announced(tmp_path):
    pytest.importorskip("uvicorn", reason="a server needs uvicorn, which comes with the extra serve")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", str(folder(tmp_path)), "--port", str(port), "--device", "cpu"])
    assert done.exit_code == 1 and "in use" in done.stderr and "http://" not in done.output


@pytest.mark.parametrize("device", ("cuda:99", "foo", ""))
def test_a_device_that_is_not_there_is_refused(device):
    for command in ("serve", "chat", "generate", "evaluate"):
        done = CliRunner().invoke(app, [command, "MODEL", "--device", device])
        assert done.exit_code == 2 and "must be cpu" in done.stderr


def test_completions_and_chats_say_what_the_model_says(client, likeliest):
    done = client.completions.create(**ONCE)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (likeliest("once"), "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (4, 12, 16)
    assert done.object == "text_completion" and done.model == "tiny"
    chat = client.chat.completions.create(**HELLO)
    assert chat.choices[0].message.content == likeliest("[hello]:") and chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "length" and chat.object == "chat.completion"
    parts = HELLO | {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
    newer = {"max_completion_tokens": 12, "max_tokens": None, "n": 1, "user": "me"}
    assert client.chat.completions.create(**parts | newer).choices[0].message.content == likeliest("[hello]:")
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]


def test_a_stream_brings_the_same_text_in_pieces(client, likeliest):
    chunks = list(client.completions.create(**ONCE, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == likeliest("once") and len(chunks) == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    *chunks, last = client.chat.completions.create(**HELLO, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == likeliest("[hello]:")
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.completion_tokens == 12


@pytest.mark.parametrize("stream", (False, True))
def test_a_stop_sequence_ends_the_text_before_it(client, likeliest, stream):
    whole = likeliest("once")
    stop = whole[4:6]
    answer = client.completions.create(**ONCE, stop=[stop, "never"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_seed_and_a_temperature_do_what_they_say(client):
    texts = [
        client.completions.create(**ONCE | {"max_tokens": 40, "temperature": 1.5}, seed=seed).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_many_requests_at_a_time_are_answered_as_if_alone(client, likeliest):
    prompts = [f"once {'abcdefghij'[:n]}" for n in range(10)]

    def answer(prompt):
        stream = len(prompt) % 2 == 0
        got = client.completions.create(**ONCE | {"prompt": prompt}, stream=stream)
        return "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text

    with ThreadPoolExecutor(10) as threads:
        assert list(threads.map(answer, prompts)) == [likeliest(prompt) for prompt in prompts]


@pytest.mark.parametrize("stream", (False, True))
def test_requests_that_are_given_up_make_room(client, stream):
    import openai

    endless = ONCE | {"max_tokens": CONTEXT - 4}

    def give_up(_):
        if stream:
            answer = client.completions.create(**endless, stream=True)
            next(iter(answer))
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).completions.create(**endless)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(give_up, range(2)))
    # There is room for two, which these would have taken for minutes.
    assert client.with_options(timeout=10).completions.create(**ONCE).usage.completion_tokens == 12


@pytest.mark.parametrize(
    "change, status, says",
    (
        ({"model": "other"}, 404, "model must be 'tiny'"),
        ({"prompt": "a" * CONTEXT}, 400, "at most 100,000 tokens together"),
        ({"prompt": "a" * (65 * CONTEXT)}, 400, "6,500,000 characters"),
        ({"max_tokens": CONTEXT}, 400, "at most 100,000 tokens together"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"seed": 2**70}, 400, "seed"),
        ({"stop": ""}, 400, "stop must be"),
        ({"n": 2}, 400, "n is not offered"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"logprobs": 0}, 400, "logprobs"),
        ({"logprobs": True}, 400, "logprobs is not offered"),
        ({"prompt": "\ud800"}, 400, "half of a surrogate pair"),
        ({"model": "\ud800"}, 404, "model must be 'tiny'"),
        ({"colour": "red"}, 400, "colour is not offered"),
    ),
)
def test_what_is_wrong_is_said(server, change, status, says):
    got, error = post(server, "completions", json.dumps(ONCE | change).encode())
    assert got == status and says in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", (b"", b"{", b"[]", b"null", b'{"model": "tiny"', b"\xff\xfe", b'"' * 1000))
@pytest.mark.parametrize("path", ("completions", "chat/completions"))
def test_a_malformed_body_is_refused(server, path, body):
    assert post(server, path, body)[0] == 400


def test_messages_that_the_template_does_not_know_are_refused(server):
    for messages in ([{"role": "wizard", "content": "hello"}], [], [{"role": "user"}], "hello"):
        assert post(server, "chat/completions", json.dumps(HELLO | {"messages": messages}).encode())[0] == 400


def test_without_the_key_nothing_is_answered(server, client):
    import openai

    for key in ("wrong", "", KEY + "x"):
        status, error = post(server, "completions", json.dumps(ONCE).encode(), key=key)
        assert status == 401 and error["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**ONCE | {"model": "other"})
    with urllib.request.urlopen(f"{server}/health") as answer:
        assert answer.status == 200


def post(server, path, body, key=KEY):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{server}/v1/{path}", body, headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]
