"""transformers' `generate` and `pipeline`: a cache is a matter of speed, never of what is written."""

import pytest
import torch
import transformers
from models import EVERY_KIND, LINEAR_OR_HYBRID, VOCAB, build, tokens
from packaging.version import Version
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, pipeline
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.models import RunningTensorCache

GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0", padding_side="left")


def by_hand(model, ids, new=12):
    """The likeliest token again and again, with nothing kept in between."""
    for _ in range(new):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


@EVERY_KIND
def test_greedy_text_is_the_same_with_a_cache_without_and_in_chunks(kind):
    model, ids = build(kind), tokens(2, 9)
    want = by_hand(model, ids)
    assert len(want[:, 9:].unique()) > 4  # it says something
    assert torch.equal(model.generate(ids, **GREEDY), want)
    assert torch.equal(model.generate(ids, **GREEDY, use_cache=False), want)
    for chunk in (1, 4, 20):
        assert torch.equal(model.generate(ids, **GREEDY, prefill_chunk_size=chunk), want)


@EVERY_KIND
def test_prompts_of_different_lengths_in_a_batch_are_continued_as_alone(kind):
    model, lengths = build(kind), (9, 4, 1)
    ids = tokens(3, 9)
    mask = (torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]).long()
    for options in ({}, {"prefill_chunk_size": 4}):
        together = model.generate(ids, attention_mask=mask, **GREEDY, **options)
        for row, out, n in zip(ids, together, lengths, strict=True):
            assert torch.equal(out[9:], by_hand(model, row[None, -n:])[0, n:])


@LINEAR_OR_HYBRID
@pytest.mark.parametrize("padded", (False, True))
def test_beams_are_the_same_with_a_cache_and_without(kind, padded):
    model, ids = build(kind), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    options = GREEDY | {"num_beams": 3, "num_return_sequences": 2, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


@LINEAR_OR_HYBRID
def test_samples_are_the_same_with_a_cache_and_without(kind):
    model, ids = build(kind), tokens(2, 7)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, **GREEDY | {"do_sample": True}, num_return_sequences=2, use_cache=use_cache))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], model.generate(ids, **GREEDY, num_beams=2, num_return_sequences=2))


@LINEAR_OR_HYBRID
@pytest.mark.parametrize("chunk", (None, 2))
def test_a_text_goes_on_from_a_cache(kind, chunk):
    if chunk and Version(transformers.__version__) < Version("5.22"):
        pytest.skip("older versions of transformers read the whole prompt again, whatever the model")
    model, ids = build(kind), tokens(1, 9)
    cache = RunningTensorCache(model.config)
    begun = model.generate(ids, **GREEDY | {"max_new_tokens": 5}, past_key_values=cache)
    assert cache.get_seq_length() == 13  # the last token has been written, not read
    longer = torch.cat((begun, tokens(1, 3, seed=5)), 1)
    options = {"attention_mask": torch.ones_like(longer), "prefill_chunk_size": chunk}
    done = model.generate(longer, **GREEDY, **options, past_key_values=cache)
    assert torch.equal(done, by_hand(model, longer))


def test_assisted_generation_is_refused_for_a_state_cannot_be_rolled_back():
    model = build()
    with pytest.raises(ValueError, match="stateful"):
        model.generate(tokens(1, 5), **GREEDY, assistant_model=model)


@LINEAR_OR_HYBRID
def test_a_pipeline_writes_what_generate_writes(kind):
    model, words = build(kind, dtype=torch.float32), tokenizer()
    prompts = ["w3 w14 w15 w9 w2", "w6 w5"]
    write = pipeline("text-generation", model=model, tokenizer=words)
    got = [text["generated_token_ids"] for (text,) in write(prompts, batch_size=2, return_tensors=True, **GREEDY)]
    for row, prompt in zip(got, prompts, strict=True):
        want = by_hand(model, words(prompt, return_tensors="pt").input_ids)[0].tolist()
        assert row[-len(want) :] == want
    assert write(prompts[0], **GREEDY)[0]["generated_text"].startswith(prompts[0])


# -- The commands ------------------------------------------------------------------------------------------------------


def run(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_generate_command_prints_the_text(tmp_path):
    model, words = build(dtype=torch.float32), tokenizer()
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    prompt = "w3 w14 w15"
    want = words.decode(by_hand(model, words(prompt, return_tensors="pt").input_ids, new=5)[0])
    options = ("--prompt", prompt, "--device", "cpu", "--max-new-tokens", 5)
    assert want in run("generate", tmp_path, *options)
    assert len(run("generate", tmp_path, *options, "--temperature", 1.5).split()) >= 8


def test_the_inspect_command_needs_the_configuration_only(tmp_path):
    model = build("hybrid")
    model.config.save_pretrained(tmp_path)
    lines = run("inspect", tmp_path).splitlines()
    linear, attention = (next(line for line in lines if kind in line) for kind in ("×", "attention"))
    layer = model.model.layers[0]
    assert "0–2 each" in linear and "2 of 6×6×8" in linear  # a slot more for the query-skip gates
    assert f" {layer.mixer.state_floats} " in linear
    assert f" {sum(p.numel() for p in layer.parameters()) / 1000:.3g}K " in linear
    # bfloat16, as nothing is said: three tokens before their channels are repeated, with the two at the ends.
    kept = 4 * layer.mixer.state_floats + 2 * 3 * (model.config.hidden_size + 2)
    assert linear.count(f"{kept / 1024:.3g}K") >= 3
    assert " 64K " in attention and " 2M " in attention and " 64M" in attention  # 2·2·8 numbers a token
