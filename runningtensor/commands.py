"""What commands share."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape


def there(device: str | None) -> str | None:
    """Refuses a device that torch does not know or that this machine does not have."""
    if device is None:
        return None
    import torch

    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind, index = "", 0
    if kind == "cpu" or (kind == "cuda" and index < torch.cuda.device_count()):
        return device
    has = f"{torch.cuda.device_count()} that torch {torch.__version__} can use"
    raise typer.BadParameter(f"must be cpu, or cuda or cuda:N on a machine with such GPUs (here are {has}): {device!r}")


DEVICE = Annotated[str | None, typer.Option(callback=there, help="cpu or cuda; the GPU if there is one.")]


def loadable(models: str | list[str]) -> str | list[str]:
    """Refuses what is not there and cannot be a name on the hub, and says what will be looked for there."""
    for model in [models] if isinstance(models, str) else models:
        if os.path.exists(model):  # pathlib's would raise where a name is too long for one
            continue
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model) or len(model) > 96:
            raise typer.BadParameter(f"must be a folder, or owner/name on the hub, and there is no folder {model!r}")
        aside = Console(stderr=True)
        aside.print(escape(f"There is no folder {model!r} here: it is looked for on the hub."), highlight=False)
    return models


MODEL = Annotated[str, typer.Argument(callback=loadable, help="A folder, or a name on the Hugging Face hub.")]


@contextmanager
def plainly() -> Iterator[None]:
    """What the user can mend is said in one line, without a traceback; under torchrun, by which rank."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError) as error:
        rank = os.environ.get("RANK", "0")
        who = f"rank {rank}: " if rank != "0" else ""
        words = escape(who + " ".join(str(error).split()))
        Console(stderr=True).print(f"[red]{words}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
