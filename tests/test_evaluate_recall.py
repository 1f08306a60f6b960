"""Recall on real text: what is asked was said once, as far back as it says, and in the control never."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation import save_model, texts, tokenizer
from rich.console import Console
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.evaluate import recall, run
from runningtensor.evaluate.measures import measure
from runningtensor.evaluate.recall import LEAD, Tokens, documents, places, recalled, statements


@pytest.fixture(scope="module")
def examples():
    tokens = Tokens(texts(), tokenizer())
    found = [tokens.example(statement, 2048) for statement in statements(texts(), seed=0)]
    found = [example for example in found if example]
    assert len(found) > 100
    return found[:40]


def spoken(tokens):
    return tokenizer().decode(tokens.tolist())


@pytest.mark.parametrize("distance", (256, 1024, 2048))
def test_the_answer_is_in_the_prompt_once_at_the_distance_and_in_the_control_never(examples, distance):
    for example in examples:
        prompt, control = example.prompt(distance), example.prompt(distance, control=True)
        assert len(prompt) == len(control) == LEAD + distance
        assert places(prompt, example.answer) == [len(prompt) - distance]
        assert places(control, example.answer) == []
        assert places(prompt, example.cue) == [LEAD - len(example.cue), len(prompt) - len(example.cue)]
        assert np.array_equal(control[-len(example.cue) :], example.cue)


def test_a_statement_is_a_sentence_whose_answer_occurs_once_in_all_texts():
    found = statements(texts(), seed=0)
    assert len(found) > 200
    for statement in found:
        text = texts()[statement.document]
        cue, answer = text[statement.start : statement.cue], text[statement.cue : statement.answer]
        assert text[statement.start : statement.end].count(".") == 1 and len(cue.split()) >= 5
        assert answer[0] == " " and sum(text.lower().count(answer[1:].lower()) for text in texts()) == 1


def test_what_occurs_twice_is_not_asked_for():
    once = "The old mill by the river was sold to Marenko in spring."
    assert len(statements([once], seed=0)) == 1
    assert statements([once, "Then MARENKO left."], seed=0) == []


def test_prompts_are_the_documents_own_text_and_shorter_ones_are_in_longer_ones(examples):
    example = examples[0]
    short, long = spoken(example.prompt(256)), spoken(example.prompt(2048))
    assert long.startswith(short.rpartition("\n\n")[0])
    assert short.rpartition("\n\n")[2] == spoken(example.cue)
    said = spoken(np.concatenate((example.cue, example.answer, example.rest)))
    assert any(said in text for text in texts())


def test_the_seed_decides_which_statements_come_first():
    assert statements(texts(), 0) == statements(texts(), 0) != statements(texts(), 1)
    assert set(statements(texts(), 0)) == set(statements(texts(), 1))


class Copier(torch.nn.Module):
    """The token that followed the last time the last `n` tokens were read; without one, the token 0."""

    device = torch.device("cpu")

    def forward(self, ids, use_cache=None, n=4):
        logits = torch.zeros(*ids.shape, 600)
        for row, out in zip(ids.tolist(), logits, strict=True):
            seen = {}
            for i in range(n, len(row) + 1):
                out[i - 1, seen.get(tuple(row[i - n : i]), 0)] = 1
                if i < len(row):
                    seen[tuple(row[i - n : i])] = row[i]
        return SimpleNamespace(logits=logits)


def test_a_model_that_copies_recalls_all_and_guesses_nothing(examples):
    answers = [example.answer for example in examples]
    for control, share in (False, 1.0), (True, 0.0):
        prompts = np.stack([example.prompt(256, control) for example in examples])
        assert np.mean(recalled(Copier(), prompts, answers)) == share


def test_right_is_what_greedy_generation_writes_whatever_the_batch(tmp_path, examples):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path)).eval()
    prompts = np.stack([example.prompt(256) for example in examples[:6]])
    written = model.generate(torch.from_numpy(prompts), max_new_tokens=4, do_sample=False)[
        :, prompts.shape[1] :
    ].numpy()
    right, wrong = list(written), [row[::-1].copy() for row in written]
    assert not any(np.array_equal(a, b) for a, b in zip(right, wrong, strict=True))
    uneven = [answer[: 1 + i % 4] for i, answer in enumerate(right)]
    assert all(recalled(model, prompts, right)) and all(recalled(model, prompts, uneven))
    assert not any(recalled(model, prompts, wrong))
    for i in range(6):
        assert recalled(model, prompts[i : i + 1], uneven[i : i + 1]) == [True]


def test_perplexity_by_position_is_that_of_the_windows(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path)).eval()
    options = {"shown": 600, "limit": 3, "batch": 2, "seed": 0}
    measures = recall.run(model, tokenizer(), texts(), **options)
    assert [name for name in measures if name.startswith("perp")] == ["perplexity/256"]  # 512 would need 672
    windows = torch.from_numpy(Tokens(texts(), tokenizer()).windows(256, 3))
    with torch.no_grad():
        losses = torch.stack([model(row[None], labels=row[None]).loss for row in windows]).double()
    want = measure("perplexity", (-losses).tolist())
    assert measures["perplexity/256"].value == pytest.approx(want.value, rel=1e-5)
    assert measures["perplexity/256"].stderr == pytest.approx(want.stderr, rel=1e-3)


def test_texts_are_files_or_the_validation_split_of_shards(tmp_path):
    (tmp_path / "a.txt").write_text(texts()[0])
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": texts()[1]}) + "\n")
    assert documents(tmp_path) == texts()[:2]
    shards = tmp_path / "shards"
    shards.mkdir()
    words = tokenizer()
    tokens = [*words(texts()[2]).input_ids, words.eos_token_id, *words(texts()[3]).input_ids, words.eos_token_id]
    (shards / "validation_00000.ds").write_bytes(np.array(tokens, "<u2").tobytes())
    record = {"file": "validation_00000.ds", "tokens": len(tokens), "sha256": ""}
    meta = {"vocab_size": len(words), "eos": words.eos_token_id, "shards": [{"validation": record}]}
    (shards / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        documents(shards)
    words.save_pretrained(shards / "tokenizer")
    assert documents(shards) == texts()[2:]


def test_texts_without_anything_rare_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("All work and no play makes a dull boy of whoever he is. " * 200)
    model = save_model(tmp_path / "model")
    options = ("--suite", "recall", "--device", "cpu", "--out", str(tmp_path / "out"))
    done = CliRunner().invoke(app, ["evaluate", model, *options, "--texts", str(tmp_path / "a.txt")])
    assert done.exit_code == 1 and "occur once" in done.output
    done = CliRunner().invoke(app, ["evaluate", model, *options])
    assert done.exit_code == 1 and "texts must be given" in done.output


def test_all_suites_are_without_recall_where_there_are_no_texts(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(run, "Work", lambda tasks, *_: given.extend(task.suite for task in tasks))
    monkeypatch.setattr(run, "Subject", lambda *_: None)
    said = io.StringIO()
    run.evaluate([], ["all"], console=Console(file=said))
    assert {"language", "retrieval", "needle"} == {*given} and "recall is left out" in said.getvalue()
    given.clear()
    run.evaluate([], ["all"], texts=tmp_path)
    assert "recall" in given


def test_the_command_compares_models_and_goes_on_where_it_was(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(texts()))
    models = [save_model(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    options = ("--suite", "recall", "--texts", tmp_path / "a.txt", "--limit", 3, "--max-length", 700, "--device", "cpu")

    def run(*models):
        arguments = map(str, ("evaluate", *models, *options, "--out", tmp_path / "out"))
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"}, catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    first = run(models[0])
    assert "1 of 1: recall" in first and "recall at 512" in first and "control at 512" in first
    assert "recall at 1,024" not in first and "recall after 1,024 tokens or more is left out" in first
    both = run(*models)
    assert both.count("1 of 1: recall") == 1  # of the second model
    assert "1 of 1" not in run(*models)
    (file,) = (tmp_path / "out").glob("one-*.json")
    (record,) = json.loads(file.read_text())["results"]
    assert record["origin"]["torch"] == torch.__version__ and record["measures"]["recall/512"]["samples"] == 3
    assert (tmp_path / "out" / "recall.png").stat().st_size > 10_000
    save_model(tmp_path / "one", seed=5)  # other weights are another model
    assert "1 of 1: recall" in run(models[0])
