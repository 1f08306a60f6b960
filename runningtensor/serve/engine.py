"""Many texts written at a time: one thread that owns the model, and takes texts in and lets them go between tokens.

A state has one size, so texts of any lengths are a batch without padding. Where there are attention layers, or no cache
at all, that is not so: each text is then stepped on its own.
"""

import copy
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runningtensor.models import RunningTensorCache, RunningTensorForCausalLM
from runningtensor.serve.writing import PIECE, Sampling, Writer, ends, read


@dataclass(eq=False, kw_only=True)
class Job:
    """A text to be written after the tokens `ids`.

    emit:       is given each piece of text, and whatever ended it at last; in the engine's thread
    cancelled:  set it, and no more tokens are spent
    written:    tokens so far
    """

    ids: list[int]
    sampling: Sampling
    emit: Callable[[str, str | Exception | None], None]
    cancelled: bool = False
    written: int = 0


@dataclass(eq=False)
class Row:
    """A job under way: `unread` of its prompt is left."""

    job: Job
    writer: Writer
    unread: list[int]
    cache: RunningTensorCache | None

    @property
    def over(self) -> bool:
        return self.job.cancelled or self.writer.finish is not None

    def write(self, logits: torch.Tensor) -> None:
        text = self.writer.write(logits)
        self.job.written = len(self.writer.tokens)
        if text or self.writer.finish:
            self.job.emit(text, self.writer.finish)


class Engine:
    """batch: texts that are written at a time, at most; more wait."""

    def __init__(self, model: RunningTensorForCausalLM, tokenizer: Any, batch: int) -> None:
        self.model, self.batch = model, batch
        self.tokenizer = copy.deepcopy(tokenizer)  # another thread has the other
        self.ends = ends(model)
        self.cached = model.config.has_cache
        self.together = self.cached and "full_attention" not in model.config.layer_types
        self.waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.reading: Row | None = None
        self.groups: list[list[Row]] = []  # the rows of a group share the cache of its first
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, job: Job) -> None:
        self.waiting.put(job)

    def run(self) -> None:
        while True:
            self.take()
            # A piece of one prompt, then a token for every text: a long prompt keeps nobody waiting for long.
            if self.reading is not None:
                row, self.reading = self.reading, None
                self.attempt([row], self.read)
            groups, self.groups = self.groups, []
            for group in groups:
                self.attempt(group, self.step)

    def take(self) -> None:
        """Begins with a job that waits, if there is room; waits for one where there is nothing else to do."""
        while self.reading is None and sum(map(len, self.groups)) < self.batch:
            try:
                job = self.waiting.get(block=not self.groups)
            except queue.Empty:
                return
            if not job.cancelled:
                cache = RunningTensorCache(self.model.config) if self.cached else None
                writer = Writer(self.tokenizer, self.ends, job.sampling, job.ids)
                self.reading = Row(job, writer, list(job.ids), cache)

    def attempt(self, rows: list[Row], do: Callable[[list[Row]], None]) -> None:
        try:
            do(rows)
        except Exception as error:  # out of memory, say: these texts are lost, the others go on
            for row in rows:
                row.job.emit("", error)

    def read(self, rows: list[Row]) -> None:
        (row,) = rows
        if row.over:
            return
        piece = row.unread[: PIECE if self.cached else None]
        (logits,) = read(self.model, [piece], row.cache)
        del row.unread[: len(piece)]
        if row.unread:
            self.reading = row
            return
        row.write(logits)
        if row.over:
            return
        if self.together and self.groups:
            join(self.groups[0], row)
        else:
            self.groups.append([row])

    def step(self, group: list[Row]) -> None:
        """A token for each row of a group, which is then among the groups again without those that are over."""
        cache = group[0].cache
        kept = [i for i, row in enumerate(group) if not row.over]
        if not kept:
            return
        if len(kept) < len(group) and cache is not None:
            cache.batch_select_indices(torch.tensor(kept, device=self.model.device))
        group = [group[i] for i in kept]
        group[0].cache = cache
        last = [row.writer.tokens[-1:] if self.cached else row.job.ids + row.writer.tokens for row in group]
        for row, logits in zip(group, read(self.model, last, cache), strict=True):
            row.write(logits)
        self.groups.append(group)


def join(group: list[Row], row: Row) -> None:
    """Puts the states of a row below those of a group."""
    assert group[0].cache is not None and row.cache is not None
    for ours, its in zip(group[0].cache.layers, row.cache.layers, strict=True):
        for held, new in ((ours.conv_states, its.conv_states), (ours.recurrent_states, its.recurrent_states)):
            held[0] = torch.cat((held[0], new[0]))
    row.cache = None
    group.append(row)
