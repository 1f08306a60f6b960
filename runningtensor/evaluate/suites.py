"""What is evaluated: suites of tasks, and the measure of each that tables show. Results hold the other measures too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 2048  # tokens that a task of language or retrieval shows at most: what the literature compares at
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)  # of haystacks, with 128 tokens for the answer


@dataclass(frozen=True)
class Task:
    name: str  # lm-evaluation-harness's, where it is theirs
    suite: str
    metric: str
    folder: str = ""  # of its file among the harness's tasks; empty: it is ours
    length: int = 0  # of a haystack, in tokens


LANGUAGE = {
    "lambada_openai": ("lambada", "acc"),
    "hellaswag": ("hellaswag", "acc_norm"),
    "piqa": ("piqa", "acc"),
    "arc_easy": ("arc", "acc"),
    "arc_challenge": ("arc", "acc_norm"),
    "winogrande": ("winogrande", "acc"),
    "social_iqa": ("siqa", "acc"),
    "boolq": ("super_glue/boolq", "acc"),
    "openbookqa": ("openbookqa", "acc_norm"),
    "sciq": ("sciq", "acc"),
    "wikitext": ("wikitext", "word_perplexity"),
}
# The harness's nq_open, triviaqa and drop are other tasks: the first two ask without a text to read.
RETRIEVAL = {
    "swde": "swde",
    "fda": "fda",
    "squad_completion": "squad_completion",
    "based_nq": "",
    "based_triviaqa": "",
    "based_drop": "",
}
NEEDLES = ("niah_single_1", "niah_multikey_2")  # RULER's

SUITES: dict[str, list[Task]] = {
    "language": [Task(name, "language", metric, folder) for name, (folder, metric) in LANGUAGE.items()],
    "retrieval": [Task(name, "retrieval", "contains", folder) for name, folder in RETRIEVAL.items()],
    "needle": [Task(f"{name}_{n}", "needle", "match", "ruler", n) for name in NEEDLES for n in LENGTHS],
    "recall": [Task("recall", "recall", "recall")],
}


def choose(suites: Sequence[str], names: Sequence[str] = ()) -> list[Task]:
    """The tasks of the suites, or of these only those that are named."""
    known = {"all": [task for suite in SUITES.values() for task in suite]} | SUITES
    if wrong := [suite for suite in suites if suite not in known]:
        raise ValueError(f"suite must be one of {', '.join([*SUITES, 'all'])}, but was {', '.join(wrong)}")
    tasks = list(dict.fromkeys(task for suite in suites for task in known[suite]))
    if wrong := [name for name in names if name not in {task.name for task in tasks}]:
        raise ValueError(
            f"task must be of the suites {', '.join(suites)}: one of {', '.join(task.name for task in tasks)}, "
            f"but was {', '.join(wrong)}"
        )
    return [task for task in tasks if not names or task.name in names]


def positions(config: Any) -> int | None:
    """How many tokens a model was made for, where its configuration says so."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
