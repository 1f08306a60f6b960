"""Questions at the end of a text that answers them, as hazyresearch publishes them: context, question, answers."""

import re
from typing import Any

MARKS = re.compile(r"\[(PAR|DOC|TLE)\]")  # between the passages of TriviaQA


def prompt(doc: dict[str, Any]) -> str:
    """The text, then the question, which is the beginning of a sentence; some texts end with it already."""
    context, question = MARKS.sub("", doc["context"]).strip(), doc["question"].strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)]
    return f"{context.strip().strip('.')}. {question}"


def contains(text: str, answers: list[str]) -> bool:
    """Whether one of the answers is in the text, in capitals or not."""
    return any(answer.lower() in text.lower() for answer in answers)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"contains": float(contains(results[0], doc["answers"]))}
