"""The `runningtensor` command."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

app = typer.Typer(help="Linear attention whose running memory is a tensor.", no_args_is_help=True, add_completion=False)
bench = typer.Typer(help="Speed and memory, beside the alternatives.", no_args_is_help=True)
app.add_typer(bench, name="bench")
console = Console()


@app.command()
def selfcheck(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
) -> None:
    """Compare every backend on this machine with the float64 recurrence, outputs and gradients."""
    import torch

    from runningtensor.ops import selfcheck as check

    torch.set_num_threads(1)  # matrices this small gain nothing from threads, and lose much on a busy machine
    started = time.perf_counter()
    table = Table("backend", "dtype", "state", "error", "limit", "where it is largest", "", box=SIMPLE, pad_edge=False)
    wrong = 0
    with Live(table, console=console, refresh_per_second=4, vertical_overflow="visible"):
        for verdict in check.selfcheck(device):
            wrong += not verdict.right
            table.add_row(
                verdict.backend,
                str(verdict.dtype).removeprefix("torch."),
                verdict.shape,
                f"{verdict.error:.1e}",
                f"{verdict.limit:.0e}",
                verdict.worst,
                "[green]right" if verdict.right else "[bold red]WRONG",
            )
    what = torch.cuda.get_device_name() if torch.cuda.is_available() and device != "cpu" else "CPU"
    seconds = time.perf_counter() - started
    console.print(
        f"\n{table.row_count - wrong} right, {wrong} wrong, on {what} with torch {torch.__version__}, {seconds:.0f} s"
    )
    raise typer.Exit(wrong > 0)


@bench.command()
def ops(
    out: Annotated[Path, typer.Option(help="Where the CSV and the figure go.")] = Path("results/bench"),
    quick: Annotated[bool, typer.Option(help="Fewer repetitions.")] = False,
) -> None:
    """Time and memory of the op, beside what would be used without it."""
    from runningtensor.bench import ops

    ops.main(out, quick)
