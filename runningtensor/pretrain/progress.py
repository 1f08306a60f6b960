"""How far a run is: for tools a line of JSON a step, for people a bar, or lines where there is no terminal.

The first line of `log.jsonl` is the recipe and where it runs. A run that goes on from a checkpoint forgets the lines
of later steps, so that each step is there once, and says with a line that it went on.
"""

import json
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from runningtensor.bench.provenance import finite
from runningtensor.pretrain.recipes import Recipe

LOG = "log.jsonl"
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # FLOP/s, of dense bfloat16 products


@dataclass(frozen=True)
class Step:
    """What is known of a finished step."""

    step: int  # the first is 1
    tokens: int  # so far
    loss: float
    grad_norm: float
    lr: float
    tokens_a_second: float
    mfu: float | None  # None: the device's peak is not known
    memory_gib: float  # at most so far: of the GPU, or of the process
    skipped: bool


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAKS.items() if part in name), None)


def memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "linux" else 30)


# -- The log -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that was cut off is left out."""
    *lines, _ = path.read_text("utf-8", errors="replace").split("\n")
    try:
        found = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} must hold JSON in each line, but: {error}") from error
    if not found or "recipe" not in found[0]:
        raise ValueError(f"{path} must begin with a recipe, but {'does not' if found else 'has no line'}")
    return found


class Board:
    """What a run shows and writes down; on rank 0 alone."""

    def __init__(
        self, out: Path, header: dict[str, Any], console: Console, recipe: Recipe, done: int, skipped: int, steps: int
    ) -> None:
        self.console, self.done, self.skipped, self.steps = console, done, skipped, steps
        self.every, self.pace = recipe.log_every, 0.0
        path = out / LOG
        lines = [header]
        if done and path.exists():
            lines = [line for line in read(path) if line.get("step", line.get("resumed", 0)) <= done]
            lines.append(header | {"resumed": done})
        new = path.with_suffix(".tmp")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines))
        new.replace(path)
        self.file = path.open("a")
        self.writer: Any = None
        if recipe.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("tensorboard=true needs tensorboard: pip install 'runningtensor[pretrain]'") from error
            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=done + 1)
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.completed:,} of {task.total:,}"),
                BarColumn(),
                TextColumn("{task.description}"),
                console=console,
            )
            self.task = self.bar.add_task("", total=steps, completed=done)
            self.bar.start()

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self.file.flush()
        if self.writer:
            for name, value in record.items():
                if name not in ("step", "tokens") and value is not None:
                    self.writer.add_scalar(name, value, record["step"])

    def step(self, step: Step, seconds: float) -> None:
        self.write(asdict(step))
        self.skipped += step.skipped
        # The first step of a process takes longer: it compiles, it allocates.
        self.pace = seconds if self.pace == 0 or step.step <= self.done + 2 else 0.9 * self.pace + 0.1 * seconds
        words = [f"loss {step.loss:.4f}", f"norm {step.grad_norm:.3g}", f"{step.tokens_a_second:,.0f} tokens/s"]
        words += [f"MFU {100 * step.mfu:.1f}%"] if step.mfu is not None else []
        words += [f"{step.memory_gib:.2f} GiB", f"{clock(self.pace * (self.steps - step.step))} left"]
        words += [f"[bold red]{self.skipped:,} skipped[/]"] if self.skipped else []
        if self.bar:
            self.bar.update(self.task, completed=step.step, description="  ".join(words))
        elif step.step % self.every == 0 or step.step in (self.done + 1, self.steps) or step.skipped:
            self.say(f"step {step.step:>6,} of {self.steps:,}  " + "  ".join(words))

    def validation(self, step: int, tokens: int, loss: float) -> None:
        self.write({"step": step, "tokens": tokens, "validation_loss": loss})
        self.say(f"step {step:>6,}  validation loss {loss:.4f}")

    def say(self, words: str) -> None:
        self.console.print(words, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
        if self.writer:
            self.writer.close()
        os.fsync(self.file.fileno())
        self.file.close()


def clock(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
