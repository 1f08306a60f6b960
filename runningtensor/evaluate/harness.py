"""lm-evaluation-harness: its tasks, ours in its format, RULER's needles; and a model as it wants it."""

import hashlib
import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval.tasks
import nltk
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from runningtensor.evaluate import data, suites
from runningtensor.evaluate.measures import Measure, measure

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is meant to be
THEIRS, OURS = Path(lm_eval.tasks.__file__).parent, Path(__file__).parent / "tasks"
ANSWER = {"retrieval": 48, "needle": 128}  # tokens that are generated
SAMPLES, NEEDLE = 500, {"version": 1.0}  # of each length of haystack, as in RULER


class Model(HFLM):
    """A loaded model. Prompts of different lengths are padded on the left, too long ones cut there; <s> stays."""

    def __init__(self, model: Any, tokenizer: Any, batch: int) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {model.name_or_path} must have an eos_token, but has none")
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        self.cut = 0  # prompts

    def show(self, tokens: int) -> None:
        """How many tokens it is shown and writes, together, at most."""
        self._max_length, self.cut = min(tokens, suites.positions(self.config) or tokens), 0

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rows = [self.tok_encode(string) for string in strings]
        if left_truncate_len:
            rows = [self.last(row, left_truncate_len) for row in rows]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row)
            mask[i, width - len(row) :] = 1
        return ids, mask

    def last(self, prompt: list[int], tokens: int) -> list[int]:
        """So many tokens of a prompt at most: the last ones, and <s> where it begins with that."""
        if len(prompt) <= tokens:
            return prompt
        self.cut += 1
        first = prompt[: prompt[0] == self.tokenizer.bos_token_id]
        return first + prompt[len(prompt) - tokens + len(first) :]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        # The harness would cut <s> too, and count nothing. Windows of a long text come here as well, but fit.
        fitting = []
        for text, prompt, answer in requests:
            if len(answer) > self.max_length:
                raise ValueError(
                    f"max_length, and the positions that a model has, must be at least {len(answer)}, the tokens of "
                    f"an answer, but it is shown {self.max_length}"
                )
            # The last token of the answer is not shown.
            fitting.append((text, self.last(prompt, self.max_length + 1 - len(answer)), answer))
        answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(fitting, disable_tqdm, override_bs)
        return answers

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        batch: int = self.batch_size_per_gpu  # type: ignore[has-type]
        if not getattr(self.config, "has_cache", True):
            self.batch_size_per_gpu = 1  # mixers of others take no padding
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = batch


def load_tasks(tasks: Sequence[suites.Task], folder: Path | None) -> dict[str, Any]:
    """The harness's objects of all tasks but needles, which are made for a tokenizer; or what is missing, of all."""
    tasks = [task for task in tasks if task.suite != "needle"]
    found, missing = {}, {}
    # Only the folders that are needed: to read all takes 10 s.
    where = [THEIRS / name for name in dict.fromkeys(task.folder for task in tasks) if name]
    manager = TaskManager(include_path=[*where, OURS], include_defaults=False)
    with data.from_folder(folder):
        for task in tasks:
            try:
                found[task.name] = bounded(manager.load([task.name])["tasks"][task.name])
            except data.Missing as error:
                missing[task.name] = error
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise ValueError(f"{task.name} cannot read its data, which must be as on the hub: {error!r}") from error
    if missing:
        raise FileNotFoundError(data.explain(missing, folder))
    return found


def bounded(task: Any) -> Any:
    """The task, with infinity where the harness's perplexity would raise an error, and lose the other measures too."""

    def of(aggregate: Callable[[Any], float], items: Any) -> float:
        try:
            return aggregate(items)
        except OverflowError:
            return math.inf

    aggregates = {name: partial(of, aggregate) for name, aggregate in task.aggregation().items()}
    task.aggregation = lambda: aggregates
    return task


def load_needle(task: suites.Task, tokenizer: Any, limit: int | None) -> Any:
    """RULER's task as the harness makes it, but of one length: theirs has none below 4,096, and no standard errors."""
    # It would download how to cut sentences, which RULER's essays alone need: it is told that it has.
    find, nltk.data.find = nltk.data.find, lambda *_, **__: True
    try:
        from lm_eval.tasks.ruler import common_utils, niah_utils
    finally:
        nltk.data.find = find

    def samples(**_: Any) -> Any:
        kind = "repeat" if task.name.startswith("niah_single_1") else "needle"
        before = random.getstate()
        random.seed(42)
        drawn = niah_utils.generate_samples(
            niah_utils.get_haystack(kind), max_seq_length=task.length, template=niah_utils.TEMPLATE,
            type_haystack=kind, type_needle_k="words", type_needle_v="numbers",
            num_samples=min(limit or SAMPLES, SAMPLES), TOKENIZER=tokenizer,
        )  # fmt: skip
        random.setstate(before)
        return niah_utils.download_dataset([drawn])

    def match(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        return {"match": common_utils.string_match_all(common_utils.postprocess_pred(results), [doc["outputs"]])}

    return ConfigurableTask(
        config={
            "task": task.name, "custom_dataset": samples, "test_split": "test", "output_type": "generate_until",
            "doc_to_text": "{{input}}", "doc_to_target": "{{outputs}}", "gen_prefix": "{{gen_prefix}}",
            "target_delimiter": " ", "process_results": match, "metadata": NEEDLE,
            "metric_list": [{"metric": "match", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": {"do_sample": False, "max_gen_toks": ANSWER["needle"], "until": []},
        }
    )  # fmt: skip


def identity(task: Any, limit: int | None) -> dict[str, Any]:
    """What a task's result follows from, besides the model and what it is shown."""
    documents = task.eval_docs
    digest = hashlib.sha256()
    for i in range(min(limit or len(documents), len(documents))):
        digest.update(json.dumps(documents[i], sort_keys=True, default=str).encode())
    return {"version": task.VERSION, "data": digest.hexdigest()[:16]}


def run(model: Model, task: suites.Task, theirs: Any, shown: int, limit: int | None) -> tuple[dict[str, Measure], int]:
    """All measures of a task, and the number of prompts that had to be cut. A model is shown so many tokens."""
    model.show(shown + ANSWER.get(task.suite, 0))
    done = evaluate(model, {"tasks": {task.name: theirs}}, limit=limit, bootstrap_iters=0)
    samples = done["samples"][task.name]
    return {name: measure(name, [sample[name] for sample in samples]) for name in samples[0]["metrics"]}, model.cut
