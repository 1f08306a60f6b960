"""The `runningtensor` command."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from runningtensor.commands import DEVICE, MODEL, loadable, plainly
from runningtensor.mqar.commands import app as mqar
from runningtensor.pretrain.commands import app as pretrain

app = typer.Typer(help="Linear attention whose running memory is a tensor.", no_args_is_help=True, add_completion=False)
bench = typer.Typer(help="Speed and memory, beside the alternatives.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(mqar, name="mqar")
data = typer.Typer(help="Text as shards of tokens.", no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(pretrain, name="pretrain")
console = Console(width=None if sys.stdout.isatty() else 160)  # a pipe has no width, and the tables need one


@app.command()
def selfcheck(
    device: DEVICE = None,
) -> None:
    """Compare every backend on this machine with the float64 recurrence, outputs and gradients."""
    import torch

    from runningtensor.bench.provenance import installed
    from runningtensor.ops import selfcheck as check

    torch.set_num_threads(1)  # matrices this small gain nothing from threads, and lose much on a busy machine
    on = torch.device(device) if device else check.default_device()
    started = time.perf_counter()
    table = Table("backend", "dtype", "state", "error", "limit", "where it is largest", "", box=SIMPLE, pad_edge=False)
    wrong = 0
    with console.status("") as status:
        for done, total in check.precompile(check.cases(on), on):
            status.update(f"compiling kernels: {done} of {total}, {time.perf_counter() - started:.0f} s")
    with Live(table, console=console, refresh_per_second=4, vertical_overflow="visible"):
        for verdict in check.selfcheck(on):
            wrong += not verdict.right
            table.add_row(
                verdict.backend,
                verdict.dtype,
                verdict.shape,
                f"{verdict.error:.1e}",
                f"{verdict.limit:.0e}",
                verdict.worst,
                "[green]right" if verdict.right else "[bold red]WRONG",
            )
    what = f"{torch.cuda.get_device_name(on)}, Triton {installed('triton')}" if on.type == "cuda" else "CPU"
    seconds = time.perf_counter() - started
    console.print(
        f"\n{table.row_count - wrong} right, {wrong} wrong, on {what}, torch {torch.__version__}, {seconds:.0f} s"
    )
    raise typer.Exit(wrong > 0)


@app.command()
@plainly()
def demo(
    out: Annotated[Path, typer.Option(help="Where the CSV and the figure go.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="At most.", min=1)] = 600,
    minutes: Annotated[float, typer.Option(help="At most.")] = 4.5,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = 0,
) -> None:
    """Watch a tensor state learn to recall before a matrix state and Gated DeltaNet do, on two CPU cores."""
    from runningtensor.mqar.demo import demo

    demo(out, console, steps=steps, minutes=minutes, seed=seed)


@app.command()
@plainly()
def generate(
    model: MODEL,
    prompt: Annotated[str | None, typer.Option(help="What the text begins with, or goes on with.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.", min=0)] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    device: DEVICE = None,
    load_state: Annotated[Path | None, typer.Option(help="A file of --save-state, to go on from.")] = None,
    save_state: Annotated[Path | None, typer.Option(help="Where what was read and written is kept.")] = None,
) -> None:
    """Continue a prompt, printing the text as it is written."""
    if prompt is None and load_state is None:
        raise typer.BadParameter("--prompt must be given where there is no --load-state")
    from runningtensor.serve import writing

    writing.generate(model, prompt or "", max_new_tokens, temperature, device, load_state, save_state)


@app.command()
@plainly()
def chat(
    model: MODEL,
    max_new_tokens: Annotated[int, typer.Option(help="Of a reply, at most.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.7,
    device: DEVICE = None,
) -> None:
    """Talk with a model. Its state is kept from turn to turn, and in files if you like."""
    from runningtensor.serve.chat import chat

    chat(model, max_new_tokens, temperature, device)


@app.command()
@plainly()
def serve(
    model: MODEL,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen; 0: wherever there is room.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="What requests call the model; else its folder's name.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RUNNINGTENSOR_API_KEY", help="Required of every request.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a prompt and its answer, at most.", min=2)] = 32768,
    batch: Annotated[int, typer.Option(help="Answers written at a time, at most.", min=1)] = 16,
    device: DEVICE = None,
) -> None:
    """Answer requests as OpenAI's API does: completions and chat completions, streamed if asked for."""
    try:
        from runningtensor.serve.server import serve
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"{error.name} is not installed: pip install 'runningtensor[serve]'") from error

    serve(model, host, port, name, api_key, context, batch, device)


@app.command()
@plainly()
def inspect(model: MODEL) -> None:
    """A model's layers: parameters, state, work a token, and its cache beside that of attention. Loads no weights."""
    from runningtensor.models.commands import inspect

    inspect(model, console)


@app.command()
@plainly()
def export(
    model: MODEL,
    folder: Annotated[Path, typer.Argument(help="Where the model goes, with its code.")],
) -> None:
    """Save a model with all the code it needs: it then loads with trust_remote_code=True without this package."""
    from runningtensor.models.commands import export

    export(model, folder)
    console.print(f"{model} → {folder}")


@app.command()
def evaluate(
    models: Annotated[list[str], typer.Argument(callback=loadable, help="Folders, or names on the Hugging Face hub.")],
    suite: Annotated[
        list[str] | None,
        typer.Option(help="language (the default), retrieval, needle, recall or all; may be repeated."),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task of the suites; may be repeated.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data sets as local files: DIR/owner/name.")] = None,
    texts: Annotated[
        Path | None, typer.Option(help="For recall: a file or folder of texts, or what `data prepare` made.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples a task, for trying out.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 8,
    device: DEVICE = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: as the model was saved.")] = "auto",
    max_length: Annotated[
        int | None, typer.Option(help="Tokens that a model is shown; else 2,048, or what needle and recall need.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of recall.")] = 0,
    out: Annotated[Path, typer.Option(help="Where results and the figure go.")] = Path("results/evaluate"),
) -> None:
    """Compare models on downstream tasks. Stopped or killed, it goes on when it is called again."""
    from runningtensor.evaluate.run import evaluate, table
    from runningtensor.plots import plot_evaluation

    try:
        results = evaluate(
            models, suite or ["language"], tasks=task or (), data=data, texts=texts, limit=limit, batch=batch,
            device=device, dtype=dtype, max_length=max_length, seed=seed, out=out, console=console,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(table(results))
    figure = out / f"{'-'.join(suite or ['language'])}.png"
    if plot_evaluation(results, figure):
        console.print(f"→ {figure}", markup=False, highlight=False, soft_wrap=True)


@bench.command()
def ops(
    out: Annotated[Path, typer.Option(help="Where the CSV and the figure go.")] = Path("results/bench"),
    quick: Annotated[bool, typer.Option(help="What the targets need only.")] = False,
    peers: Annotated[bool, typer.Option(help="On a GPU: measure the alternatives too.")] = True,
    resume: Annotated[bool, typer.Option(help="On a GPU: keep what was measured before of this commit.")] = False,
) -> None:
    """Time and memory of the op, beside what would be used without it: on the GPU if there is one, else on the CPU."""
    import torch

    if torch.cuda.is_available():
        from runningtensor.bench import ops_gpu

        ops_gpu.main(out, quick, peers, resume)
    else:
        from runningtensor.bench import ops

        ops.main(out, quick)


PEERS = Annotated[bool, typer.Option(help="Measure the alternatives too.")]
RESUME = Annotated[bool, typer.Option(help="Keep what was measured before of this commit.")]


def on_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        console.print("There is no NVIDIA GPU here, and this measures nothing else.")
        raise typer.Exit(1)


@bench.command()
def layers(
    out: Annotated[Path, typer.Option(help="Where the CSV and the figure go.")] = Path("results/bench"),
    peers: PEERS = True,
    resume: RESUME = False,
) -> None:
    """On an NVIDIA GPU: time of the layer beside Gated DeltaNet's, and of decoding beside attention's."""
    on_gpu()
    from runningtensor.bench import layers_gpu

    layers_gpu.main(out, peers, resume)


@bench.command("pretrain")
def training(
    out: Annotated[Path, typer.Option(help="Where the CSV goes.")] = Path("results/bench"),
    peers: PEERS = True,
    resume: RESUME = False,
) -> None:
    """On an NVIDIA GPU: training throughput of models of 0.6B parameters, beside attention and Gated DeltaNet."""
    on_gpu()
    from runningtensor.bench import pretrain_gpu

    pretrain_gpu.main(out, peers, resume)


@bench.command()
def errors(
    out: Annotated[Path, typer.Option(help="Where the CSV goes.")] = Path("results/bench"),
) -> None:
    """Errors of every shape, dtype and rule against the float64 recurrence, beside their bounds."""
    from runningtensor.bench import errors

    raise typer.Exit(not errors.main(out))


@data.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Files or folders (.jsonl, .jsonl.gz, .parquet, .txt), or owner/name on the hub."),
    ],
    out: Annotated[Path, typer.Argument(help="A folder, which gets the shards.")],
    config: Annotated[str, typer.Option(help="Of a data set on the hub, such as sample-100BT.")] = "default",
    field: Annotated[str, typer.Option(help="Where the text is, in .jsonl and .parquet.")] = "text",
    validation: Annotated[float, typer.Option(help="The fraction of documents held out.")] = 0.005,
    workers: Annotated[int | None, typer.Option(help="Processes; else one a core.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or a name on the hub; else Mistral's.")] = None,
) -> None:
    """Tokenise text for pretraining. Stopped or killed, it goes on when it is called again."""
    from transformers import AutoTokenizer

    from runningtensor.pretrain.data import prepare

    chosen = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else None
    try:
        meta = prepare(inputs, out, chosen, config=config, field=field, validation=validation, workers=workers)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    for split in "train", "validation":
        console.print(f"{split}: {meta[split]['documents']:,} documents, {meta[split]['tokens']:,} tokens")
