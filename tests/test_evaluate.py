"""Evaluation through lm-evaluation-harness, of tiny models on tiny data of the real formats."""

import json
import math
import random

import pytest
import torch
from evaluation import ASKED, CLOZE, DATA, PASSAGE, save_data, save_model, tokenizer
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.evaluate import run as command
from runningtensor.evaluate.measures import measure
from runningtensor.evaluate.suites import SUITES, choose
from runningtensor.evaluate.tasks.retrieval import contains, prompt

NEEDED = "lm_eval is not installed: pip install 'runningtensor[evaluate]'"


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """The module, with a network that cannot be reached and an empty cache."""
    pytest.importorskip("lm_eval", reason=NEEDED)
    datasets = pytest.importorskip("datasets", reason=NEEDED)
    from runningtensor.evaluate import data, harness

    monkeypatch.setattr(data, "reachable", lambda: False)
    monkeypatch.setattr(data.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return harness


def run(*arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--device", "cpu"], env={"COLUMNS": "300"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def model_of(harness, folder, kind="order 3", batch=8, **changes):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_model(folder, kind, **changes)
    net = AutoModelForCausalLM.from_pretrained(folder).eval()
    return harness.Model(net, AutoTokenizer.from_pretrained(folder), batch)


# -- Measures ----------------------------------------------------------------------------------------------------------


def test_a_mean_has_the_standard_error_of_a_mean():
    value, error, samples = measure("acc", [1, 0, 0, 1, 1])
    assert (value, samples) == (0.6, 5)
    assert error == pytest.approx(torch.tensor([1.0, 0, 0, 1, 1]).std().item() / math.sqrt(5))
    assert measure("acc", [1]).stderr is None


def test_the_error_of_a_perplexity_is_that_of_drawing_documents_again():
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(50, 150, (400,), generator=rng).double()
    likelihoods = -words * (3 + 0.5 * torch.randn(400, generator=rng).double())
    value, error, _ = measure("word_perplexity", list(zip(likelihoods.tolist(), words.tolist(), strict=True)))
    assert value == pytest.approx(math.exp(-likelihoods.sum() / words.sum()))
    again = torch.randint(400, (2000, 400), generator=rng)
    assert error == pytest.approx(torch.exp(-likelihoods[again].sum(1) / words[again].sum(1)).std().item(), rel=0.1)
    bits = measure("bits_per_byte", list(zip(likelihoods.tolist(), words.tolist(), strict=True)))
    assert bits.value == pytest.approx(math.log2(value)) and bits.stderr == pytest.approx(error / value / math.log(2))


def test_a_perplexity_beyond_all_numbers_is_infinite():
    for values in ([-800.0], [-800.0, -900.0], [(-8000.0, 10), (-9000.0, 10)]):
        assert measure("word_perplexity", values).value == math.inf
    assert measure("bits_per_byte", [(-8000.0, 10)]).value == pytest.approx(800 / math.log(2))


# -- Tasks -------------------------------------------------------------------------------------------------------------


def test_suites_and_tasks_are_chosen_by_name():
    assert choose(["all"]) == [task for suite in SUITES.values() for task in suite]
    assert [task.name for task in choose(["language", "retrieval"], ["fda", "piqa"])] == ["piqa", "fda"]
    with pytest.raises(ValueError, match="suite must be one of language, retrieval, needle, recall, all, but was x"):
        choose(["x"])
    with pytest.raises(ValueError, match=r"task must be of the suites needle: one of niah.*, but was piqa"):
        choose(["needle"], ["piqa"])


def test_a_question_follows_its_text_once():
    question = ASKED["question"]
    assert prompt(ASKED) == f"Bridges  {PASSAGE}. {question}"
    assert prompt(ASKED | {"context": f"{PASSAGE}. {question.upper()}\n"}) == f"{PASSAGE}. {question}"


def test_an_answer_is_right_wherever_it_stands_and_however_it_is_written():
    assert contains(" it was keller, I think", ASKED["answers"])
    assert not contains(" it was Kellar", ASKED["answers"])
    assert contains("costs $3.50 (a.b)", ["$3.50 (A.B)"]) and not contains("costs 3x50", ["3.50"])
    assert not contains("anything", [])


def test_every_task_runs_on_data_of_its_format_and_agrees_with_the_harness(harness, tmp_path, monkeypatch):
    seen = {}
    theirs = harness.evaluate

    def spy(*arguments, **options):
        done = theirs(*arguments, **options)
        seen.update(done["results"])
        return done

    monkeypatch.setattr(harness, "evaluate", spy)
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data")
    names = [word for task in DATA for word in ("--task", task)]
    options = ("--suite", "language", "--suite", "retrieval", "--data", data, "--out", tmp_path / "out")
    done = run(model, *options, *names)
    assert done.exit_code == 0, done.output
    (file,) = (tmp_path / "out").glob("model-*.json")
    records = json.loads(file.read_text())["results"]
    assert [record["key"]["task"] for record in records] == list(DATA)
    for record in records:
        task, measures = record["key"]["task"], record["measures"]
        assert measures[record["metric"]]["samples"] == 3 and task in done.output
        for name, found in measures.items():
            assert found["value"] == pytest.approx(seen[task][f"{name},none"]), (task, name)
    assert "language, mean" in done.output and "retrieval, mean" in done.output
    assert (tmp_path / "out" / "language-retrieval.png").is_file()
    assert "of 17" not in run(model, *options, *names).output  # all is there already
    assert "1 of 1: piqa" in run(model, *options, "--task", "piqa", "--limit", 2).output  # fewer is another result
    save_data(tmp_path / "other", "piqa", count=4)
    assert (
        "1 of 1: piqa" in run(model, *options[:4], "--data", tmp_path / "other", *options[6:], "--task", "piqa").output
    )


def test_local_data_have_all_tasks_of_language_and_retrieval():
    assert list(DATA) == [task.name for task in choose(["language", "retrieval"])]


def test_some_tasks_of_a_suite_have_no_mean(harness, tmp_path):
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data", "piqa", "winogrande")
    done = run(model, "--task", "piqa", "--task", "winogrande", "--data", data, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "winogrande" in done.output and "mean" not in done.output


def test_a_perplexity_beyond_all_numbers_costs_no_other_result(harness, tmp_path):
    from transformers import AutoModelForCausalLM

    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data", "lambada_openai", "wikitext")
    sure = AutoModelForCausalLM.from_pretrained(model)
    sure.lm_head.weight.data *= 3000
    sure.save_pretrained(model)
    options = ("--task", "lambada_openai", "--task", "wikitext", "--data", data, "--out", tmp_path / "out")
    done = run(model, *options)
    assert done.exit_code == 0, done.output
    for name in "perplexity", "word_perplexity":
        assert f" {name} " in done.output
        assert next(line for line in done.output.splitlines() if f" {name} " in line).split()[-1] == "–"
    (file,) = (tmp_path / "out").glob("model-*.json")
    lambada, wikitext = (record["measures"] for record in json.loads(file.read_text())["results"])
    assert lambada["perplexity"]["value"] is None and lambada["acc"]["value"] == 0.0
    assert wikitext["word_perplexity"]["value"] is None and wikitext["bits_per_byte"]["value"] > 100


def test_damaged_results_are_named_before_anything_is_evaluated(harness, tmp_path):
    models = [save_model(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    options = ("--task", "piqa", "--data", save_data(tmp_path / "data", "piqa"), "--out", tmp_path / "out")
    assert run(models[1], *options).exit_code == 0
    (file,) = (tmp_path / "out").glob("two-*.json")
    whole = file.read_text()
    for damaged in (whole[:200], "{}", "[]", '{"results": [{}]}', '{"results": [1]}'):
        file.write_text(damaged)
        done = run(*models, *options)
        assert done.exit_code == 1 and "1 of 1" not in done.output
        assert f"{file} must hold results" in done.output and "delete it to evaluate again" in done.output
    file.write_text(whole)
    assert run(*models, *options).exit_code == 0


@pytest.mark.parametrize("file", ("model.safetensors", "vocab.txt", "merges.txt"))
def test_a_model_with_other_weights_or_another_tokenizer_is_another_model(tmp_path, file):
    (tmp_path / file).write_text("a")
    (tmp_path / "README.md").write_text("a")
    before = command.fingerprint(str(tmp_path))
    (tmp_path / "README.md").write_text("b")
    assert command.fingerprint(str(tmp_path)) == before
    (tmp_path / file).write_text("b")
    assert command.fingerprint(str(tmp_path)) != before


def test_an_interrupted_evaluation_goes_on_after_what_was_finished(harness, tmp_path, monkeypatch):
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data", "piqa", "winogrande", "wikitext")
    names = ("--task", "piqa", "--task", "winogrande", "--task", "wikitext")
    theirs = harness.run

    def interrupted(lm, task, *rest):
        if task.name == "winogrande":
            raise KeyboardInterrupt
        return theirs(lm, task, *rest)

    monkeypatch.setattr(harness, "run", interrupted)
    assert run(model, *names, "--data", data, "--out", tmp_path / "out").exit_code != 0
    monkeypatch.setattr(harness, "run", theirs)
    output = run(model, *names, "--data", data, "--out", tmp_path / "out").output
    assert "1 of 3" not in output and "2 of 3: winogrande" in output and "3 of 3: wikitext" in output


def test_models_side_by_side_get_what_they_get_alone(harness, tmp_path):
    models = [save_model(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    options = ("--task", "wikitext", "--data", save_data(tmp_path / "data", "wikitext"))

    def results(out):
        files = sorted((tmp_path / out).glob("*.json"))
        return [json.loads(file.read_text())["results"][0]["measures"] for file in files]

    assert run(*models, *options, "--out", tmp_path / "both").exit_code == 0
    for model in models:
        run(model, *options, "--out", tmp_path / "alone")
    first, second = results("both")
    assert [first, second] == results("alone") and first != second


# -- Data --------------------------------------------------------------------------------------------------------------


def test_all_that_is_missing_is_named_with_the_command_that_gets_it(harness, tmp_path):
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data", "piqa")
    done = run(model, "--suite", "retrieval", "--suite", "language", "--data", data, "--out", tmp_path / "out")
    assert done.exit_code == 1 and "Traceback" not in done.output
    for name in ("hazyresearch/based_nq_2048", "hazyresearch/based-fda", "allenai/ai2_arc", "Rowan/hellaswag"):
        assert f"hf download {name} --repo-type dataset --local-dir {data}/{name}\n" in done.output
    assert "arc_easy needs the data set allenai/ai2_arc (ARC-Easy): it is neither in" in done.output
    assert "baber/piqa" not in done.output and not (tmp_path / "out").exists()


def test_without_a_network_data_come_from_the_cache(harness, tmp_path):
    import datasets

    from runningtensor.evaluate import data

    folder = save_data(tmp_path / "data", "piqa")
    here = datasets.load_dataset(str(folder / "baber/piqa"))
    (tmp_path / "cache/piqa").rename(tmp_path / "cache/baber___piqa")  # as if it had come from the hub
    assert data.load("baber/piqa", None, None)["validation"][:] == here["validation"][:]
    with pytest.raises(data.Missing) as missing:
        data.load("baber/other", None, None)
    assert missing.value.why == "it is not in the Hugging Face cache, and the hub cannot be reached"


def test_local_data_of_another_format_are_refused(harness, tmp_path):
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data", "based_nq")
    (data / "hazyresearch/based_nq_2048/validation.jsonl").write_text('{"text": "a", "value": "b"}\n')
    options = ("--suite", "retrieval", "--task", "based_nq", "--data", data, "--out", tmp_path / "out")
    done = run(model, *options)
    assert done.exit_code == 1 and "based_nq cannot read its data" in done.output and "context" in done.output
    (data / "hazyresearch/based_nq_2048/validation.jsonl").write_text("no JSON\n")
    done = run(model, *options)
    assert done.exit_code == 1 and "does not load" in done.output


def test_wrong_options_are_said_in_a_line(harness, tmp_path):
    model = save_model(tmp_path / "model")
    for options, words in (
        (("--dtype", "int8"), "dtype must be auto, float32, bfloat16 or float16, but was 'int8'"),
        (("--limit", 0), "limit must be at least 1, but was 0"),
        (("--suite", "x"), "suite must be one of"),
    ):
        done = run(model, *options, "--out", tmp_path / "out")
        assert done.exit_code == 1 and words in done.output
    (tmp_path / "empty").mkdir()
    done = run(tmp_path / "empty", "--out", tmp_path / "out")
    assert done.exit_code == 1 and "empty must be a folder or on the hub, with its tokenizer, but" in done.output


def test_a_figure_that_has_nothing_to_show_is_not_announced(harness, tmp_path):
    save_data(tmp_path / "data", "wikitext")
    done = run(save_model(tmp_path / "m"), "--data", tmp_path / "data", "--task", "wikitext", "--out", tmp_path / "out")
    assert done.exit_code == 0 and "perplexity" in done.output
    assert ".png" not in done.output and not list((tmp_path / "out").glob("*.png"))


# -- Likelihoods -------------------------------------------------------------------------------------------------------


LONG = "The mill by the river was sold in winter to people from town and others"


def likelihood(lm, prompt, answer):
    from lm_eval.api.instance import Instance

    return lm.loglikelihood([Instance("loglikelihood", {}, (prompt, answer), 0)], disable_tqdm=True)[0][0]


@pytest.mark.parametrize("bos", (False, True))
def test_a_prompt_before_an_answer_loses_its_beginning_and_keeps_its_first_token(harness, tmp_path, monkeypatch, bos):
    lm = model_of(harness, tmp_path)
    encode, first = lm.tok_encode, [lm.tokenizer.bos_token_id] * bos
    monkeypatch.setattr(lm, "tok_encode", lambda text, **_: first + encode(text))
    shown = []
    theirs = lm._model_call
    monkeypatch.setattr(lm, "_model_call", lambda ids: shown.append(ids.tolist()) or theirs(ids))
    prompt, answer = encode(LONG), encode(" bread and fish")
    room = 9 - len(answer)
    lm.show(8)
    found = likelihood(lm, LONG, " bread and fish")
    kept = first + prompt[len(prompt) - room + len(first) :]
    assert shown == [[kept + answer[:-1]]] and len(kept + answer) == 9 and lm.cut == 1
    with torch.no_grad():
        logits = lm.model(torch.tensor([kept + answer])).logits[0].log_softmax(-1)
    want = sum(logits[len(kept) - 1 + i, token].item() for i, token in enumerate(answer))
    assert found == pytest.approx(want, rel=1e-4)
    lm.show(len(first + prompt + answer) - 1)
    likelihood(lm, LONG, " bread and fish")
    assert shown[1] == [first + prompt + answer[:-1]] and lm.cut == 0  # it just fits


def test_an_answer_that_is_longer_than_what_is_shown_is_refused(harness, tmp_path):
    lm = model_of(harness, tmp_path)
    answer = len(lm.tok_encode(" bread and fish"))
    lm.show(answer - 1)
    with pytest.raises(ValueError, match=f"max_length, .* must be at least {answer}, .* shown {answer - 1}"):
        likelihood(lm, LONG, " bread and fish")
    lm.show(answer)
    assert math.isfinite(likelihood(lm, LONG, " bread and fish")) and lm.cut == 1


def test_prompts_that_were_cut_are_counted_and_windows_of_a_long_text_are_not(harness, tmp_path):
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data", "piqa", "wikitext")
    options = ("--task", "piqa", "--task", "wikitext", "--data", data, "--out", tmp_path / "out")
    done = run(model, *options, "--max-length", 8)
    assert "piqa: 6 prompts were too long, and lost their beginning" in done.output  # 3 questions, 2 answers to each
    assert "wikitext: " not in done.output.replace("2 of 2: ", "")
    (file,) = (tmp_path / "out").glob("model-*.json")
    assert [record["cut_prompts"] for record in json.loads(file.read_text())["results"]] == [6, 0]
    assert "too long" not in run(model, *options).output


# -- Generation --------------------------------------------------------------------------------------------------------


def written(lm, prompts, tokens=12):
    from lm_eval.api.instance import Instance

    options = {"until": [], "max_gen_toks": tokens, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, options), i) for i, text in enumerate(prompts)]
    return lm.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("kind", ("order 3", "hybrid", "gated_deltanet"))
def test_prompts_in_a_batch_are_continued_as_alone(harness, tmp_path, kind):
    prompts = ["The mill", f"{PASSAGE}. The bridge was", "People from town met in winter and", "a"]
    lm = model_of(harness, tmp_path, kind, initializer_range=0.4)
    lm.show(500)
    together = written(lm, prompts)
    assert together == [written(lm, [text])[0] for text in prompts]
    assert len(set(together)) == len(prompts)
    ids = torch.tensor([lm.tok_encode(prompts[1])])
    alone = lm.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert together[1] == tokenizer().decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_long_prompt_loses_its_beginning_and_keeps_its_question(harness, tmp_path):
    text = "Once more. " * 400 + CLOZE["text"]
    lm = model_of(harness, tmp_path)
    whole = lm.tok_encode(text)
    (cut, short), mask = lm.tok_batch_encode([text, "a"], left_truncate_len=64)
    assert cut.tolist() == whole[-64:] and lm.cut == 1
    assert mask[0].sum() == 64 and mask[1].tolist() == [0] * 63 + [1] and short[-1] == lm.tok_encode("a")[0]
    lm.add_bos_token = True
    lm.tokenizer.add_bos_token = True
    whole = [lm.tokenizer.bos_token_id, *whole]
    lm.tok_encode = lambda _: whole
    assert lm.tok_batch_encode([text], left_truncate_len=64)[0][0].tolist() == [whole[0], *whole[-63:]]


def test_retrieval_shows_what_it_is_told_to_show(harness, tmp_path, monkeypatch):
    lengths = []
    theirs = harness.Model._model_generate

    def spy(self, context, *arguments, **options):
        lengths.append(context.shape[1])
        return theirs(self, context, *arguments, **options)

    monkeypatch.setattr(harness.Model, "_model_generate", spy)
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "data", "based_drop", count=80)
    options = ("--suite", "retrieval", "--task", "based_drop", "--data", data, "--out", tmp_path / "out")
    done = run(model, *options, "--max-length", 100, "--batch", 80)
    assert lengths == [100] and "prompts were too long" in done.output
    run(model, *options, "--batch", 80)
    assert 100 < lengths[1] <= 2048


def test_a_model_is_never_shown_more_tokens_than_it_has_positions_for(harness, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer()), n_positions=128, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "gpt")
    tokenizer().save_pretrained(tmp_path / "gpt")
    data = save_data(tmp_path / "data", "based_nq", "wikitext", count=60)
    tasks = (
        "--suite",
        "all",
        "--task",
        "based_nq",
        "--task",
        "wikitext",
        "--task",
        "niah_single_1_1024",
        "--limit",
        60,
    )
    done = run(tmp_path / "gpt", *tasks, "--data", data, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "shown too little for niah_single_1_1024" in done.output
    assert "based_nq: 5" in done.output  # and more of the prompts left no room for an answer


# -- Needles -----------------------------------------------------------------------------------------------------------


def test_a_needle_is_in_a_haystack_of_its_length_and_is_the_same_every_time(harness):
    pytest.importorskip("wonderwords", reason=NEEDED)
    for task in (task for task in SUITES["needle"] if task.length in (1024, 4096)):
        samples = []
        for limit in (3, 2):
            random.seed(limit)
            samples.append(harness.load_needle(task, tokenizer(), limit))
            assert random.random() == random.Random(limit).random()  # others' numbers are as they would have been
        rows = [list(sample.eval_docs) for sample in samples]
        assert rows[0][:2] == rows[1] and len(rows[0]) == 3
        for row in rows[0]:
            (answer,) = row["outputs"]
            assert row["input"].count(answer) == 1 and answer not in row["gen_prefix"]
            length = len(tokenizer()(row["input"]).input_ids)
            assert 0.6 * task.length < length <= task.length - 128
        assert samples[0].process_results(rows[0][0], [f" {rows[0][0]['outputs'][0]}."]) == {"match": 1.0}
        assert samples[0].process_results(rows[0][0], [" 12"]) == {"match": 0.0}


def test_needles_are_looked_for_at_the_lengths_that_are_shown(harness, tmp_path):
    pytest.importorskip("wonderwords", reason=NEEDED)
    model = save_model(tmp_path / "model")
    options = ("--suite", "needle", "--max-length", 1024, "--limit", 2, "--out", tmp_path / "out")
    done = run(model, *options)
    assert done.exit_code == 0 and "niah_single_1_1024" in done.output
    assert "shown too little for niah_single_1_2048" in done.output
    (file,) = (tmp_path / "out").glob("model-*.json")
    records = json.loads(file.read_text())["results"]
    assert [record["key"]["task"] for record in records] == ["niah_single_1_1024", "niah_multikey_2_1024"]
    assert all(record["cut_prompts"] == 0 for record in records)


def test_needles_that_are_all_too_long_are_an_error(harness, tmp_path):
    pytest.importorskip("wonderwords", reason=NEEDED)
    options = ("--suite", "needle", "--limit", 2, "--out", tmp_path / "out")
    done = run(save_model(tmp_path / "model"), *options, "--max-length", 100)
    assert done.exit_code == 1 and "→" not in done.output
    assert "max_length must be at least 1024 for niah_single_1_1024, but was 100" in done.output
    done = run(save_model(tmp_path / "short", max_position_embeddings=512), *options)
    assert done.exit_code == 1 and "→" not in done.output
    assert "a model must have 1024 positions or more for niah_single_1_1024, but none has" in done.output
    assert not (tmp_path / "out").exists()


def test_only_files_that_were_written_are_named(harness, tmp_path):
    pytest.importorskip("wonderwords", reason=NEEDED)
    short = save_model(tmp_path / "short", max_position_embeddings=512)
    options = ("--suite", "needle", "--task", "niah_single_1_1024", "--limit", 1, "--out", tmp_path / "out")
    done = run(short, save_model(tmp_path / "long"), *options)
    assert done.exit_code == 0 and f"{short} is shown too little" in done.output
    named = [line.split("→ ")[1] for line in done.output.splitlines() if "→" in line]
    assert sorted(named) == sorted(str(path) for path in (tmp_path / "out").iterdir()) and len(named) == 2
