"""Where the harness's tasks get their data sets: a folder of local files, the Hugging Face cache, or the hub.

A data set `owner/name` is `DIR/owner/name` as `hf download` leaves it, or a folder of `validation.jsonl` and the like,
in a folder of the configuration's name where it has one. What is missing is found before anything is evaluated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants
from huggingface_hub.utils import get_session
from lm_eval.api.task import ConfigurableTask


class Missing(FileNotFoundError):
    """A data set that is nowhere, or a local one that does not load."""

    def __init__(self, path: str, name: str | None, why: str) -> None:
        super().__init__(path, name, why)
        self.path, self.why = path, why
        self.what = path + (f" ({name})" if name not in (None, "default") else "")


def explain(missing: dict[str, Missing], data: Path | None) -> str:
    """What is missing for which tasks, and the commands that would get it."""
    lines = [f"{task} needs the data set {error.what}: {error.why}" for task, error in missing.items()]
    folder = data or Path("DATA")
    lines.append("\nWhere there is a network, the same command downloads them. Or get them there, copy the folder, and")
    lines.append(f"evaluate with --data {folder}:\n")
    for path in dict.fromkeys(error.path for error in missing.values()):
        lines.append(f"  hf download {path} --repo-type dataset --local-dir {folder}/{path}")
    lines.append("\n--task NAME, which may be repeated, leaves other tasks out.")
    return "\n".join(lines)


def load(path: str, name: str | None, data: Path | None) -> Any:
    """A data set by its name on the hub, from local files where there are some."""
    folder = data / path if data else None
    if folder and folder.is_dir():
        own = name is not None and (folder / name).is_dir()
        try:
            return datasets.load_dataset(str(folder / name) if own and name else str(folder), None if own else name)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise Missing(path, name, f"{folder} does not load: {first_line(error)}") from error
    nowhere = f"neither in {data} nor in the Hugging Face cache" if data else "not in the Hugging Face cache"
    if not reachable():
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True  # else each is tried for half a minute
    try:
        return datasets.load_dataset(path, name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = f"the hub says: {first_line(error)}" if reachable() else f"it is {nowhere}, and the hub cannot be reached"
        raise Missing(path, name, why) from error


@cache
def reachable() -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # of whichever library makes the request: of no consequence but this
        return False
    return True


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def from_folder(data: Path | None) -> Iterator[None]:
    """Tasks that are made in this context load what `load` finds: the harness has no way of saying so for all tasks."""
    theirs = ConfigurableTask.download

    def download(self: Any, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.config.custom_dataset is not None:
            theirs(self, dataset_kwargs, **kwargs)
        else:
            self.dataset = load(self.DATASET_PATH, self.DATASET_NAME, data)

    ConfigurableTask.download = download
    try:
        yield
    finally:
        ConfigurableTask.download = theirs
