"""A run from its first step or its last checkpoint to its end, or to the signal that stops it."""

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from runningtensor.bench.provenance import provenance
from runningtensor.models.costs import flops_a_token
from runningtensor.pretrain.checkpoints import Checkpoints, about, load, on_first
from runningtensor.pretrain.data import Shards
from runningtensor.pretrain.engine import Launched, Trainer, dtype_on, process_group
from runningtensor.pretrain.progress import Board, Step, memory_gib, peak
from runningtensor.pretrain.recipes import FREE, Recipe, configuration, count, deviations


def train(recipe: Recipe, data: Path, out: Path, console: Console | None = None) -> int:
    """Trains, from the last checkpoint in `out` on if there is one. Returns the signal that stopped it, or 0."""
    console = console or Console()
    shards = Shards(data, "train", seed=recipe.seed, vocab_size=recipe.vocab_size)
    windows = shards.windows(recipe.length)
    steps = recipe.steps or windows // recipe.batch
    if not steps:
        raise ValueError(f"batch must be at most an epoch, of {windows:,} sequences, but was {recipe.batch:,}")
    held_out = Shards(data, "validation", vocab_size=recipe.vocab_size) if recipe.validate_every else None
    if held_out:
        held_out.windows(recipe.length)  # raises where there is none: better now than at the first validation
    with ExitStack() as stack:
        device, mesh = stack.enter_context(process_group(recipe))
        checkpoints = Checkpoints(out, recipe.keep)
        stack.callback(checkpoints.close)
        trainer = Trainer(recipe, shards, steps, device, mesh)
        written = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(recipe).items()}  # as JSON has it
        written["dtype"] = str(dtype_on(recipe, device)).removeprefix("torch.")  # on another device, auto is another
        notes: dict[str, Any] = {"position": 0, "skipped": 0, "in_a_row": 0}
        if latest := checkpoints.latest():
            notes = about(latest)
            same_run(notes, written, shards.fingerprint, out)
            load(latest, trainer.state())
            checkpoints.step = notes["step"]
        notes |= {"recipe": written, "fingerprint": shards.fingerprint, "config": trainer.config.to_dict()}
        notes |= {"data": str(data.absolute()), "ranks": trainer.ranks, "origin": asdict(provenance(device))}
        done, boards = notes["position"] // recipe.batch, list[Board]()

        def begin() -> None:
            announce(trainer, windows, done, console)
            if (data / "tokenizer").is_dir():  # for a model that will be exported
                shutil.copytree(data / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
            header = {name: notes[name] for name in ("recipe", "data", "fingerprint", "ranks", "origin")}
            boards.append(Board(out, header, console, recipe, done, notes["skipped"], steps))
            stack.callback(boards[0].close)

        on_first(begin)
        return Run(trainer, checkpoints, boards[0] if boards else None, held_out, notes).go(done)
    raise AssertionError("an exit stack that swallows exceptions")


def same_run(notes: dict[str, Any], recipe: dict[str, Any], fingerprint: str, out: Path) -> None:
    """A ValueError, unless a checkpoint is of this recipe, but for what may change, and of this data."""
    before = asdict(Recipe()) | notes["recipe"]  # which may be older than a setting
    free = set(FREE) - ({"steps"} if recipe["schedule"] == "cosine" else set())  # which depends on their number
    if differ := [name for name in recipe if name not in free and before[name] != recipe[name]]:
        what = ", ".join(f"{name} was {before[name]} and is {recipe[name]}" for name in differ)
        raise ValueError(f"{out} has checkpoints of another recipe: {what}. Go on as then, or into another folder")
    if notes["fingerprint"] != fingerprint:
        raise ValueError(f"{out} has checkpoints of a run on other data. Go on with the same, or into another folder")


def announce(trainer: Trainer, windows: int, done: int, console: Console) -> None:
    """What there is to say before the first step."""
    recipe, config = trainer.recipe, trainer.config
    parameters = sum(p.numel() for p in trainer.parameters.values())
    ours = count(configuration(replace(recipe, model="running-tensor"), config.vocab_size))
    tokens = recipe.batch * recipe.length
    dtype = str(dtype_on(recipe, trainer.device)).removeprefix("torch.")
    lines = [
        f"{recipe.model}: {parameters:,} parameters, MLP {config.intermediate_size:,} wide"
        + (f" (running-tensor: {ours:,}, {recipe.mlp:,})" if recipe.model != "running-tensor" else ""),
        f"{trainer.steps:,} steps of {tokens:,} tokens, on {trainer.ranks} × {trainer.device.type}, {dtype}",
        *(
            f"not as in the paper: {what}"
            for what in deviations(recipe, parameters, trainer.train.tokens, trainer.steps * recipe.batch / windows)
        ),
        *([f"goes on after step {done:,}"] if done else []),
    ]
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)


@contextmanager
def signals() -> Iterator[list[int]]:
    """Gathers SIGTERM and SIGINT. Ctrl-C a second time, two seconds later or more, interrupts."""
    caught: list[int] = []
    first = 0.0

    def catch(number: int, frame: Any) -> None:
        nonlocal first
        if number == signal.SIGINT and caught and time.monotonic() > first + 2:
            raise KeyboardInterrupt
        first = first or time.monotonic()
        caught.append(number)  # again at once is no second wish: torchrun passes on what its workers have got already

    before = {number: signal.signal(number, catch) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Run:
    """The loop: a step's numbers are read when the next has been launched, on all ranks the same."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        board: Board | None,  # on rank 0
        held_out: Shards | None,
        notes: dict[str, Any],
    ) -> None:
        self.trainer, self.checkpoints, self.board, self.held_out = trainer, checkpoints, board, held_out
        self.recipe, self.notes, self.stopping = trainer.recipe, notes, False
        self.tokens = self.recipe.batch * self.recipe.length  # of a step
        full = peak(trainer.device, dtype_on(self.recipe, trainer.device))
        # Forward and backward; documents shorter than a sequence make attention's share of it smaller than counted.
        work = 3 * flops_a_token(trainer.config, self.recipe.length)
        self.utilisation = None if full is None else work / (full * trainer.ranks)  # of one token a second

    def go(self, done: int) -> int:
        recipe, steps, pending = self.recipe, self.trainer.steps, None
        with signals() as caught:
            for step in range(done, steps):
                launched = self.trainer.launch(step, bool(caught) or self.checkpoints.failed())
                if pending:
                    self.note(pending)
                pending, done = launched, step + 1
                ends = done == steps or self.stopping
                validates = self.held_out and (done % recipe.validate_every == 0 or done == steps)
                saves = done % recipe.save_every == 0 or ends
                if validates or saves:
                    self.note(pending)
                    pending = None
                if self.held_out and validates:
                    loss = self.trainer.validate(self.held_out)
                    if self.board:
                        self.board.validation(done, done * self.tokens, loss)
                if saves:
                    self.notes["position"] = done * recipe.batch
                    self.checkpoints.save(done, self.trainer.state(), self.notes)
                if ends:  # not `stopping`: this step's own numbers may have said so just now, and it was not saved
                    break
            self.checkpoints.wait()
        if self.board:
            self.board.say(f"{'stopped' if done < steps else 'finished'} after step {done:,}, which is saved")
        return (caught or [signal.SIGTERM])[0] if done < steps else 0

    def note(self, launched: Launched) -> None:
        """Reads a step's numbers, and takes from them what all ranks must agree on."""
        (loss, norm, skipped, stop), seconds = launched.read()
        self.notes["skipped"] += int(skipped)
        self.notes["in_a_row"] = self.notes["in_a_row"] + 1 if skipped else 0
        self.stopping = self.stopping or stop > 0
        if self.board:
            speed, done = self.tokens / seconds, launched.step + 1
            used = None if self.utilisation is None else self.utilisation * speed
            memory = memory_gib(self.trainer.device)
            self.board.step(
                Step(done, done * self.tokens, loss, norm, launched.lr, speed, used, memory, bool(skipped)), seconds
            )
        if self.notes["in_a_row"] >= self.recipe.skip_limit:
            raise FloatingPointError(
                f"{self.recipe.skip_limit} steps in a row had no finite loss and gradient, the last of them step "
                f"{launched.step + 1:,}: they were skipped, and checkpoints are from before. A smaller lr may help"
            )
