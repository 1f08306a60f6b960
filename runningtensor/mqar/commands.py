"""`runningtensor mqar`: one run, a grid of runs, and the tables they fill."""

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from runningtensor.commands import DEVICE, plainly

if TYPE_CHECKING:
    from runningtensor.mqar.record import Run

app = typer.Typer(help="Recall of key-value pairs: one run, the paper's grids, its tables.", no_args_is_help=True)
console, aside = Console(), Console(stderr=True)


class Grid(StrEnum):
    table1 = "table1"
    table2 = "table2"
    capacity = "capacity"
    sizes = "sizes"
    calibration = "calibration"
    changes = "changes"
    gate = "gate"
    speed = "speed"


MIXER = typer.Option(help="running_tensor, gated_deltanet, attention, …, or your own: package.module:name.")
OPTIONS = Annotated[str, typer.Option(help="Of the mixer, as JSON.")]
OUT = Annotated[Path, typer.Option(help="Where results and figures are.")]
FILE = Annotated[Path | None, typer.Option(help="A file, which gets one line more.")]
GRAPH = Annotated[bool, typer.Option(help="On CUDA: a step as one CUDA graph.")]


def options_from(options: str) -> dict[str, object]:
    try:
        chosen = json.loads(options)
    except ValueError:
        chosen = None
    if not isinstance(chosen, dict):
        raise ValueError(f"options must be a JSON object, but were {options!r}")
    return chosen


def look_here(mixer: str) -> None:
    """A layer of one's own is likely where one is; `python -m` looks there first, too."""
    if ":" in mixer and sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())


@app.command()
@plainly()
def train(
    mixer: Annotated[str, MIXER] = "running_tensor",
    options: OPTIONS = "{}",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    length: Annotated[int, typer.Option(help="Tokens of a sequence, in the test.")] = 256,
    pairs: Annotated[int, typer.Option(help="Key-value pairs, in the test.")] = 16,
    train_on: Annotated[
        str, typer.Option(help="Tokens/pairs to train on, such as 64/4,128/8; each batch is of one. Empty: the test's.")
    ] = "",
    vocab_size: Annotated[int, typer.Option(help="Keys and values.")] = 8192,
    random_filler: Annotated[bool, typer.Option(help="Random tokens between, else zeros.")] = True,
    steps: Annotated[int, typer.Option(help="Of training.")] = 1000,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 128,
    tokens_a_step: Annotated[int | None, typer.Option(help="Instead of --batch.")] = None,
    schedule: Annotated[str, typer.Option(help="Of the learning rate: constant or cosine.")] = "constant",
    d_model: Annotated[int, typer.Option(help="Width.")] = 128,
    layers: Annotated[int, typer.Option(help="Depth.")] = 2,
    embedding_std: Annotated[float, typer.Option(help="Of the embeddings at first.")] = 0.02,
    matrix_std: Annotated[
        float | None, typer.Option(help="Of the matrices at first; else as layers draw them.")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Of what has two dimensions.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 on CUDA, else float32), float32 or bfloat16.")] = "auto",
    test_every: Annotated[int, typer.Option(help="Steps.")] = 50,
    test_count: Annotated[int, typer.Option(help="Sequences of the test.")] = 512,
    stop_at: Annotated[float, typer.Option(help="Accuracy, from 0 to 1; 2: never.")] = 1.0,
    device: DEVICE = None,
    graph: GRAPH = True,
    out: FILE = None,
) -> None:
    """One run; its record, with all that is needed to repeat it, is one line of JSON."""
    from runningtensor.mqar.data import Task
    from runningtensor.mqar.record import Run

    def task(shape: str) -> Task:
        tokens, _, pairs = shape.partition("/")
        if not (tokens.isdecimal() and pairs.isdecimal()):
            raise ValueError(f"train_on must be tokens/pairs,tokens/pairs,…, but had {shape!r}")
        return Task(int(tokens), int(pairs), vocab_size, random_filler=random_filler)

    test = Task(length, pairs, vocab_size, random_filler=random_filler)
    run = Run(
        mixer,
        options_from(options),
        tuple(map(task, train_on.split(","))) if train_on else (test,),
        test,
        lr=lr,
        seed=seed,
        steps=steps,
        batch=batch,
        tokens_a_step=tokens_a_step,
        schedule=schedule,
        d_model=d_model,
        layers=layers,
        embedding_std=embedding_std,
        matrix_std=matrix_std,
        weight_decay=weight_decay,
        dtype=dtype,
        test_every=test_every,
        test_count=test_count,
        stop_at=stop_at,
    )
    follow(run, device, graph, out)


@app.command()
@plainly()
def repeat(
    results: Annotated[Path, typer.Argument(help="A file of results, such as results/mqar/table1.jsonl.")],
    id: Annotated[str, typer.Argument(help="Of the run, or its beginning; without it, all are listed.")] = "",
    device: DEVICE = None,
    graph: GRAPH = True,
    out: FILE = None,
) -> None:
    """A run of a file of results once more."""
    from runningtensor.bench.provenance import provenance
    from runningtensor.mqar.record import identity, told_apart
    from runningtensor.mqar.sweep import read
    from runningtensor.ops.selfcheck import default_device

    if not results.is_file():
        raise ValueError(f"results must be a file, but {results} is none")
    runs = {identity(result.run): result for result in read(results)}
    if not runs:
        raise ValueError(f"results must hold some, but {results} has none")
    found = {key: result for key, result in runs.items() if key.startswith(id)}
    if id and len(found) == 1:
        ((_, result),) = found.items()
        import torch

        here = provenance(torch.device(device) if device else default_device()).device
        if (there := result.origin.get("device")) != here:
            aside.print(
                f"It was run on {there}, in {result.dtype}. On {here} batches, and with --dtype auto the dtype, may "
                "differ, and so may what comes out.",
                highlight=False,
                soft_wrap=True,
            )
        return follow(result.run, device, graph, out)
    listed = found or runs
    for key, words in zip(listed, told_apart([result.run for result in listed.values()]), strict=True):
        console.print(f"{key}  {escape(words)}", highlight=False, soft_wrap=True)
    if id:
        raise ValueError(f"id must begin that of one run in {results}, but {id!r} begins that of {len(found)}")


def follow(run: "Run", device: str | None, graph: bool, out: Path | None) -> None:
    """Trains it, says how it goes, and prints its record or appends it to a file."""
    import torch

    from runningtensor.mqar import mixers
    from runningtensor.mqar import train as training
    from runningtensor.mqar.record import to_json
    from runningtensor.mqar.sweep import Store

    # Before the run: what cannot be made, or cannot take its record, is better known now.
    look_here(run.mixer)
    mixers.mixer(run.mixer, run.d_model, run.options)
    if out and out.is_dir():
        raise ValueError(f"out must be a file, but {out} is a folder")
    if out:
        Store(out).close()
    aside.print(
        f"{run.steps:,} steps, tested every {run.test_every:,}; Ctrl-C ends it with what there is", highlight=False
    )
    result = None
    try:
        for result in training.train(run, torch.device(device) if device else None, graph):
            point = result.curve[-1]
            aside.print(
                f"step {point.step:>6,} of {run.steps:,}  loss {point.loss:6.3f}  "
                f"accuracy {100 * point.accuracy:6.2f}  macro-F1 {100 * point.macro_f1:6.2f}  "
                f"{result.ms_a_step:.1f} ms/step  {point.seconds:.0f} s",
                highlight=False,
                soft_wrap=True,
            )
    except KeyboardInterrupt:
        if result:  # not appended to a file: what is there is finished
            print(to_json(result))
        done = f"after step {result.curve[-1].step:,}" if result else "before its first test"
        aside.print(f"Stopped {done} of {run.steps:,}; not finished" + (", and not appended" if out else ""))
        raise typer.Exit(130) from None
    assert result is not None
    if out:
        try:
            store = Store(out)
        except (ValueError, OSError):  # another has it open now
            print(to_json(result))
            raise
        store.add(result)
        store.close()
        aside.print(f"Appended to {escape(str(out))}")
    else:
        print(to_json(result))
    raise typer.Exit(bool(result.failed))


@app.command()
@plainly()
def sweep(
    grid: Annotated[Grid, typer.Argument(help="What to run.")],
    minutes: Annotated[float | None, typer.Option(help="Then runs under way are stopped, to go on later.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once; with --ray, on each GPU.")] = 1,
    length: Annotated[list[int] | None, typer.Option(help="Cells of this length alone; may be repeated.")] = None,
    only: Annotated[str, typer.Option(help="The row of this name alone; else rows with these words in theirs.")] = "",
    mixer: Annotated[str, typer.Option(help="A row more, and it alone: a mixer of train's, or your own.")] = "",
    options: OPTIONS = "{}",
    lr: Annotated[list[float] | None, typer.Option(help="Runs at this learning rate alone; may be repeated.")] = None,
    runs: Annotated[
        int | None,
        typer.Option(help="The first so many of each cell; of a table, 1: one seed at 1e-3; 2: at 1e-2 too."),
    ] = None,
    out: OUT = Path("results/mqar"),
    ray: Annotated[bool, typer.Option(help="Over a Ray cluster: RAY_ADDRESS's, or this machine's.")] = False,
    device: DEVICE = None,
    graph: GRAPH = True,
    all_runs: Annotated[bool, typer.Option(help="Also of cells that have one of 99.95%.")] = False,
) -> None:
    """What is left of a grid of runs. It may be stopped or killed at any time, and goes on when it is called again."""
    from runningtensor.mqar import sweep as runner

    look_here(mixer)
    runner.sweep(
        grid.value,
        minutes,
        jobs,
        out,
        lengths=length or (),
        only=only,
        mixer=mixer,
        options=options_from(options),
        rates=lr or (),
        runs=runs,
        ray=ray,
        device=device,
        graph=graph,
        all_runs=all_runs,
        console=console,
    )


@app.command()
@plainly()
def report(
    grid: Annotated[Grid, typer.Argument(help="Which table.")],
    out: OUT = Path("results/mqar"),
    markdown: Annotated[bool, typer.Option(help="The table as Markdown.")] = False,
) -> None:
    """The paper's table beside ours, and its figure."""
    from runningtensor.mqar import report as reporting

    wide = Console(width=None if console.is_terminal and not markdown else 200)  # a pipe has no width
    reporting.report(grid.value, out, wide, markdown)
