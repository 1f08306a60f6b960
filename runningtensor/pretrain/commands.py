"""`runningtensor pretrain`: the recipes, a figure of runs, and a run's model as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from runningtensor.commands import plainly
from runningtensor.pretrain.recipes import MODELS, RECIPES, changed

app = typer.Typer(help="Pretraining: recipes, a figure of runs, a model to use.", no_args_is_help=True)
console = Console()


def add(name: str) -> None:
    @app.command(name, help=f"{RECIPES[name].__doc__} Stopped or killed, it goes on when it is called again.")
    @plainly()
    def command(
        data: Annotated[Path, typer.Option(help="A folder that `runningtensor data prepare` made.")] = Path("data"),
        out: Annotated[
            Path | None, typer.Option(help="The run's checkpoints and log; else pretrained/RECIPE-MODEL.")
        ] = None,
        model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.")] = "running-tensor",
        settings: Annotated[
            list[str] | None, typer.Option("--set", help="key=value, such as lr=1e-4; may be repeated.")
        ] = None,
    ) -> None:
        recipe = changed(RECIPES[name](), [f"model={model}", *(settings or [])])
        from runningtensor.pretrain.run import train

        if stopped := train(recipe, data, out or Path("pretrained") / f"{name}-{recipe.model}", console):
            raise typer.Exit(128 + stopped)  # as a shell has it


for name in RECIPES:
    add(name)


@app.command()
@plainly()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="The figure.")] = Path("pretrain.png"),
) -> None:
    """Runs against each other: their losses against tokens."""
    from runningtensor.plots import plot_pretraining
    from runningtensor.pretrain.progress import LOG, read

    names = [run.resolve().name for run in runs]
    names = names if len({*names}) == len(runs) else [str(run) for run in runs]
    plot_pretraining({name: read(run / LOG) for name, run in zip(names, runs, strict=True)}, out)
    console.print(f"{len(runs)} runs → {escape(str(out))}")


@app.command()
@plainly()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run, of which it is the newest.")],
    out: Annotated[Path, typer.Argument(help="A folder that from_pretrained loads.")],
) -> None:
    """A checkpoint, of any number of ranks, as a Hugging Face folder with its tokenizer; needs no GPU."""
    from runningtensor.pretrain.checkpoints import newest
    from runningtensor.pretrain.export import export

    chosen = newest(checkpoint)
    tokenizer = export(chosen, out)
    console.print(f"{escape(str(chosen))} → {escape(str(out))}" + ("" if tokenizer else ", without a tokenizer"))
