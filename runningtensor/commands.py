"""What commands share."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

DEVICE = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]


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
