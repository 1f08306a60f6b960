"""`runningtensor evaluate`: models side by side. What is finished of a model is kept, and not evaluated again."""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import runningtensor.models  # noqa: F401  known to transformers' Auto classes from here on
from runningtensor.bench.provenance import finite, installed, provenance, write_json
from runningtensor.evaluate import recall
from runningtensor.evaluate.measures import Measure
from runningtensor.evaluate.suites import SHOWN, SUITES, Task, choose, positions

Record = dict[str, Any]
# Of a model's folder: all that its answers follow from.
WEIGHTS = (".safetensors", ".bin", ".json", ".model", "vocab.txt", "merges.txt")


def evaluate(
    models: Sequence[str],
    suites: Sequence[str],
    *,
    tasks: Sequence[str] = (),
    data: Path | None = None,
    texts: Path | None = None,
    limit: int | None = None,
    batch: int = 8,
    device: str | None = None,
    dtype: str = "auto",
    max_length: int | None = None,
    seed: int = 0,
    out: Path = Path("results/evaluate"),
    console: Console | None = None,
) -> dict[str, list[Record]]:
    """Evaluates models on the tasks of suites, or the named ones of them, and returns the records of each model."""
    say = partial((console or Console()).print, highlight=False, soft_wrap=True)
    chosen = choose(suites, tasks)
    if texts is None and "recall" not in (*suites, *tasks) and any(task.suite == "recall" for task in chosen):
        say("recall is left out: it is made from --texts")
        chosen = [task for task in chosen if task.suite != "recall"]
    for option, given in ("limit", limit), ("batch", batch), ("max_length", max_length):
        if given is not None and given < 1:
            raise ValueError(f"{option} must be at least 1, but was {given}")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, but was {dtype!r}")
    shortest = min(chosen, key=needs)
    if max_length is not None and max_length < needs(shortest):
        raise ValueError(f"max_length must be at least {needs(shortest)} for {shortest.name}, but was {max_length}")
    # All that is missing is found before anything is evaluated.
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    subjects = {name: Subject(name, on, dtype, batch) for name in models}
    for model in subjects.values():
        finished(model.file(out))
    work = Work(chosen, data, texts, limit, seed)
    results: dict[str, list[Record]] = {}
    for name, model in subjects.items():
        path = model.file(out)
        known = finished(path)
        results[name], too_long = [], []
        for number, task in enumerate(chosen, start=1):
            shown = window(task, model.config, max_length)
            if shown < needs(task):
                too_long.append(task.name)
                continue
            key = {"task": task.name, "limit": limit, "shown": shown, "dtype": dtype} | work.identity(task)
            record: Record | None = next((record for record in known if record["key"] == key), None)
            if record is None:
                say(f"[bold]{escape(name)}[/], {number} of {len(chosen)}: {task.name}")
                asked: Record = {"key": key, "suite": task.suite, "metric": task.metric}
                record = asked | work.run(model, task, shown)
                known.append(record)
                write_json(path, {"model": name, "fingerprint": model.fingerprint, "results": known})
            results[name].append(record)
            if record["cut_prompts"]:
                say(f"{task.name}: {record['cut_prompts']} prompts were too long, and lost their beginning")
            if task.suite == "recall" and (
                left := [d for d in recall.DISTANCES if not record["measures"].get(f"recall/{d}")]
            ):
                say(f"recall after {left[0]:,} tokens or more is left out: too few are in the texts, or are shown")
        if too_long:
            say(f"[bold]{escape(name)}[/] is shown too little for {', '.join(too_long)}")
        if results[name]:
            say(f"[bold]{escape(name)}[/] → {escape(str(path))}")
        model.forget()
    if models and not any(results.values()):
        raise ValueError(f"a model must have {needs(shortest)} positions or more for {shortest.name}, but none has")
    return results


class Subject:
    """A model, which is loaded when it is needed."""

    def __init__(self, name: str, device: torch.device, dtype: str, batch: int) -> None:
        self.name, self.device, self.dtype, self.batch = name, device, dtype, batch
        try:
            self.config, self.tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"{name} must be a folder or on the hub, with its tokenizer, but: {why}") from error
        self.fingerprint = fingerprint(name)

    @cached_property
    def net(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.name, dtype=self.dtype).to(self.device).eval()

    @cached_property
    def lm(self) -> Any:
        from runningtensor.evaluate import harness

        return harness.Model(self.net, self.tokenizer, self.batch)

    def file(self, out: Path) -> Path:
        """Where its results are kept."""
        return out / f"{Path(self.name).resolve().name}-{self.fingerprint[:8]}.json"

    def forget(self) -> None:
        """The next model needs the memory."""
        for part in "net", "lm":
            self.__dict__.pop(part, None)


class Work:
    """Tasks with their data."""

    def __init__(
        self, tasks: Sequence[Task], data: Path | None, texts: Path | None, limit: int | None, seed: int
    ) -> None:
        self.limit, self.seed = limit, seed
        self.documents: list[str] = []
        self.loaded: dict[str, Any] = {}
        theirs = [task for task in tasks if task.suite != "recall"]
        if len(theirs) < len(tasks):
            if texts is None:
                raise ValueError(
                    "texts must be given for recall: a file or folder of texts, or what `data prepare` made"
                )
            self.documents = recall.documents(texts)
        if theirs:
            if not all(find_spec(package) for package in ("lm_eval", "accelerate", "wonderwords")):
                raise ValueError("this suite needs lm-evaluation-harness: pip install 'runningtensor[evaluate]'")
            from runningtensor.evaluate import harness

            self.loaded = harness.load_tasks(theirs, data)

    def identity(self, task: Task) -> Record:
        """What a result follows from, besides the model, the limit and what is shown."""
        if task.suite == "recall":
            return recall.identity(self.documents, self.seed)
        from runningtensor.evaluate import harness

        # Needles follow from the tokenizer, which is the model's.
        return harness.identity(self.loaded[task.name], self.limit) if task.suite != "needle" else harness.NEEDLE

    def run(self, model: Subject, task: Task, shown: int) -> Record:
        started, cut = time.perf_counter(), 0
        if task.suite == "recall":
            measures = recall.run(
                model.net,
                model.tokenizer,
                self.documents,
                shown=shown,
                limit=self.limit,
                batch=model.batch,
                seed=self.seed,
            )
        else:
            from runningtensor.evaluate import harness

            theirs = self.loaded.get(task.name) or harness.load_needle(task, model.tokenizer, self.limit)
            measures, cut = harness.run(model.lm, task, theirs, shown, self.limit)
        return {
            "measures": {name: dict(zip(Measure._fields, finite(m), strict=True)) for name, m in measures.items()},
            "cut_prompts": cut,
            "seconds": round(time.perf_counter() - started, 1),
            "origin": asdict(provenance(model.device)) | {"lm_eval": installed("lm_eval") if self.loaded else ""},
        }


def finished(path: Path) -> list[Record]:
    """The results that a file holds; none where there is no file."""
    if not path.is_file():
        return []
    try:
        records: list[Record] = json.loads(path.read_text())["results"]
        if not all(record["key"]["task"] for record in records):
            raise ValueError("a result is of no task")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must hold results as evaluate writes them, but is damaged ({error!r}): delete it to evaluate again"
        ) from error
    return records


def needs(task: Task) -> int:
    """How many tokens a model must be shown, at least."""
    return recall.LEAST if task.suite == "recall" else task.length


def window(task: Task, config: Any, max_length: int | None) -> int:
    """Tokens that a model is shown: as many as a task needs, or is given, but never more than it has positions for."""
    needed = {"language": SHOWN, "retrieval": SHOWN, "recall": recall.MOST}
    wanted = task.length or max_length or needed[task.suite]
    return min(limit for limit in (wanted, max_length, positions(config)) if limit)


def fingerprint(model: str) -> str:
    """Of the weights, the configuration and the tokenizer in a folder; on the hub, the commit."""
    folder = Path(model)
    if not folder.is_dir():
        return str(AutoConfig.from_pretrained(model)._commit_hash)
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.name.endswith(WEIGHTS)):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


# -- The table ---------------------------------------------------------------------------------------------------------


def rows(record: Record) -> list[tuple[str, str, Record]]:
    """What a table shows of a record: task, metric, measure."""
    task, measures = record["key"]["task"], record["measures"]
    if record["suite"] == "recall":
        parts = ((name, *name.split("/")) for name in measures)
        return [(f"{kind} at {int(tokens):,}", kind, measures[name]) for name, kind, tokens in parts]
    shown = [record["metric"], *(["perplexity"] if task == "lambada_openai" else [])]
    return [(task, metric, measures[metric]) for metric in shown]


def table(results: dict[str, list[Record]]) -> Table:
    """A row a task, a column a model: percent, or perplexity, ± standard error; means of accuracies of suites."""
    grid = Table("", "", *map(escape, results), box=SIMPLE, pad_edge=False)
    for column in grid.columns[2:]:
        column.justify, column.no_wrap = "right", True
    cells: dict[str, dict[tuple[str, str], dict[str, Record]]] = {}
    for name, records in results.items():
        for record in records:
            for task, metric, shown in rows(record):
                cells.setdefault(record["suite"], {}).setdefault((task, metric), {})[name] = shown
    for suite, lines in cells.items():
        for (task, metric), found in lines.items():
            grid.add_row(task, metric, *(cell(found.get(name), metric) for name in results))
        accuracies = [found for (_, metric), found in lines.items() if "perplexity" not in metric]
        # A mean of some tasks would be read as that of all.
        whole = {task.name for task in SUITES[suite]} == {task for task, _ in lines}
        if suite in ("language", "retrieval") and whole:
            grid.add_row(f"[bold]{suite}, mean", "", *(mean([a.get(name) for a in accuracies]) for name in results))
        grid.add_section()
    return grid


def cell(measure: Record | None, metric: str) -> str:
    if measure is None or measure["value"] is None:
        return "–"
    scale = 1 if "perplexity" in metric else 100
    texts = [f"{scale * x:.2f}" if scale * x < 1000 else f"{x:.3g}" for x in (measure["value"], measure["stderr"] or 0)]
    return " ± ".join(texts[: 1 if measure["stderr"] is None else 2])


def mean(measures: Sequence[Record | None]) -> str:
    """Of a suite that is complete for this model; the errors of tasks are independent."""
    found = [m for m in measures if m is not None]
    if len(found) < len(measures):
        return "–"
    errors = [m["stderr"] for m in found]
    value = {"value": sum(m["value"] for m in found) / len(found), "stderr": None}
    if None not in errors:
        value["stderr"] = math.sqrt(sum(e * e for e in errors)) / len(found)
    return f"[bold]{cell(value, '')}"
