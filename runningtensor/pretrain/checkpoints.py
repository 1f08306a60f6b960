"""Checkpoints: written while training goes on, and there whole or not at all.

A run's folder has `step-00000500/` for each: the tensors as torch's Distributed Checkpoint writes them, whatever the
number of ranks, and `run.json`. They are written to `.step-00000500.tmp/`, which is renamed when all is there. What a
killed run left of one is removed by the next.
"""

import fcntl
import json
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


def on_first(work: Callable[[], T]) -> T:
    """What rank 0 finds, for all ranks; what it raises, all raise."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [work()]
        except (ValueError, OSError) as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def found_in(folder: Path) -> list[Path]:
    """The complete checkpoints, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "run.json").is_file())


def about(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "run.json").read_text())


def newest(path: Path) -> Path:
    """A checkpoint itself, or the newest of a run."""
    if (path / "run.json").is_file():
        return path
    if not (found := found_in(path)):
        raise FileNotFoundError(f"there must be a checkpoint, or a run that has one, at {path}, but there is none")
    return found[-1]


def load(checkpoint: Path, state: dict[str, Any], alone: bool = False) -> None:
    """Into the tensors of `state`, sharded or not, and no matter how they were when they were saved."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as was asked for
            dcp.load(state, checkpoint_id=checkpoint, no_dist=alone)
    except CheckpointException as error:
        raise ValueError(f"{checkpoint} cannot be read: {causes(error)}") from error


def causes(error: CheckpointException) -> str:
    """Of all ranks, each once."""
    return "; ".join(dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()))


class Checkpoints:
    """Those of a run that is under way. All methods but `failed` are for all ranks at once."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        # Of its own: a save works beside training, and messages of two threads in one group get mixed up.
        self.group = dist.new_group(backend="gloo")
        self.future: Future[Any] | None = None
        self.step, self.notes, self.error = -1, "", ""  # of the save under way, or of the last
        on_first(self._open)

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it, however this ends
        except BlockingIOError:
            self.lock.close()
            raise ValueError(f"{self.folder} must be written by one run at a time, but another is under way") from None
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path)

    def latest(self) -> Path | None:
        return on_first(lambda: next(reversed(found_in(self.folder)), None))

    def save(self, step: int, state: dict[str, Any], notes: dict[str, Any]) -> None:
        """Returns when the state was copied, and may be changed; it is written in a thread."""
        self.wait()
        if step == self.step:
            return
        self.step, self.notes = step, json.dumps({"step": step, **notes}, indent=1)
        started = dcp.async_save(state, checkpoint_id=self._tmp, process_group=self.group)
        self.future = started if isinstance(started, Future) else started.upload_completion

    @property
    def _tmp(self) -> Path:
        return self.folder / f".step-{self.step:08d}.tmp"

    def failed(self) -> bool:
        """Whether a save came to an end, and not to a good one; a good one is put in its place. Never waits."""
        if self.future is not None and self.future.done():
            self._finish()
        return bool(self.error)

    def wait(self) -> None:
        """Until what is under way is in its place; an OSError on every rank, if one of them could not write."""
        if self.future is not None:
            self._finish()
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, self.error, group=self.group)
        if any(errors):
            last = self.latest()
            raise OSError(
                f"step {self.step} could not be saved in {self.folder}: {next(filter(None, errors))}. "
                + (f"The last checkpoint is {last.name}" if last else "There is no checkpoint yet")
            )

    def _finish(self) -> None:
        assert self.future is not None
        try:
            self.future.result()  # on rank 0 it has a result when every rank has written
            if dist.get_rank() == 0:
                self._publish()
        except CheckpointException as error:
            self.error = causes(error)
        except Exception as error:  # whatever it is, all ranks must hear of it
            self.error = f"{type(error).__name__}: {error}"
        self.future = None
        if self.error and dist.get_rank() == 0:
            shutil.rmtree(self._tmp, ignore_errors=True)

    def _publish(self) -> None:
        (self._tmp / "run.json").write_text(self.notes)
        self._tmp.rename(self.folder / f"step-{self.step:08d}")
        for old in found_in(self.folder)[: -self.keep]:
            gone = self.folder / f".{old.name}.tmp"
            old.rename(gone)  # first, so that what is half removed is no checkpoint
            shutil.rmtree(gone)

    def close(self) -> None:
        """However the run ends, what is under way is brought to its end."""
        if self.future is not None:
            self._finish()
        if dist.get_rank() == 0:
            self.lock.close()
