"""One run: a small decoder with any mixer, trained on fresh batches of the task, tested on a fixed set."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, silu

from runningtensor.bench.provenance import provenance
from runningtensor.layers.baselines import RMSNorm
from runningtensor.layers.decay import decay_groups
from runningtensor.layers.projections import OneLinear
from runningtensor.mqar import resume
from runningtensor.mqar.data import Task, validation
from runningtensor.mqar.mixers import Own, mixer
from runningtensor.mqar.record import Point, Result, Run, Score, now, point_from
from runningtensor.ops.interface import triton_refuses

__all__ = ["Point", "Recall", "Result", "Run", "Score", "train"]

WARM_UPS = 3  # steps of a task before its graph is captured: kernels are compiled in the first


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.mixer, self.mixer_norm, self.mlp_norm = mixer, RMSNorm(width, eps=1e-5), RMSNorm(width, eps=1e-5)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))[0]  # layers of models return more
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.weight)  # said here: a module of torch itself would not be compiled


class Recall(nn.Module):
    """A pre-norm decoder with tied embeddings."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embedding = Embedding(run.test.vocab_size, run.d_model)
        nn.init.normal_(self.embedding.weight, std=run.embedding_std)
        self.blocks = nn.ModuleList(
            Block(mixer(run.mixer, run.d_model, run.options), run.d_model, run.mlp * run.d_model)
            for _ in range(run.layers)
        )
        self.norm = RMSNorm(run.d_model, eps=1e-5)
        nn.init.constant_(self.norm.weight, run.last_gain)
        if run.matrix_std is not None:
            self.draw(run.matrix_std, (2 * run.layers) ** -0.5)

    def draw(self, std: float, writers: float) -> None:
        """As GPT-2 and zoology do; convolutions, gates and rates stay as they are."""
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear | OneLinear):
                nn.init.normal_(part.weight, std=std * (writers if name.endswith(("out_proj", "down")) else 1.0))
                if isinstance(part, nn.Linear) and part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states, to be multiplied by the embeddings where there is something to predict."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        """[B,P,vocabulary], at the places [B,P] of tokens [B,T]."""
        return self.read(self(tokens), places)

    def read(self, x: Tensor, places: Tensor) -> Tensor:
        return x.gather(1, places[..., None].expand(-1, -1, x.shape[2])) @ self.embedding.weight.T

    def loss(self, x: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        """Of hidden states."""
        return cross_entropy(self.read(x, places).flatten(0, 1).float(), labels.flatten())


def size(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def lower(model: nn.Module, dtype: torch.dtype) -> None:
    """Matrices in this dtype. Norms, rates and gates are few, and are precise where rounding them would be felt."""
    if isinstance(model, Own):
        return
    for p in model.parameters(recurse=False):
        if p.ndim >= 2 or isinstance(model, nn.Linear):  # whose bias goes with its matrix
            p.data = p.data.to(dtype)
    for part in model.children():
        lower(part, dtype)


# -- A step ------------------------------------------------------------------------------------------------------------


class Batch:
    """What steps of one task read, always in the same memory: a CUDA graph knows no other."""

    def __init__(self, task: Task, sequences: int, device: torch.device) -> None:
        self.task, self.steps = task, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens = torch.zeros(sequences, task.length, dtype=torch.long, device=device)
        self.places, self.labels = (
            torch.zeros(sequences, task.pairs, dtype=torch.long, device=device) for _ in range(2)
        )

    def fill(self, inputs: Tensor, places: Tensor, labels: Tensor) -> None:
        for mine, x in ((self.tokens, inputs), (self.places, places), (self.labels, labels)):
            mine.copy_(x)


def copy_all(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """A kernel for each pair of dtypes. Given several at once, torch takes one for each tensor, which would be felt."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for mine, x in zip(into, source, strict=True):
        if mine.data_ptr() != x.data_ptr():  # else it is the same memory
            alike.setdefault((mine.dtype, x.dtype), []).append((mine, x))
    for pairs in alike.values():
        torch._foreach_copy_([mine for mine, _ in pairs], [x for _, x in pairs])


class Trainer:
    """A model, the float32 copies of its parameters that the optimizer updates, and steps that never wait for a GPU."""

    def __init__(self, run: Run, device: torch.device, graph: bool) -> None:
        torch.manual_seed(run.seed)
        self.run, self.device = run, device
        self.model = Recall(run).to(device)  # drawn on the CPU: the same everywhere
        self.parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [p.detach().clone() for p in self.parameters]
        self.grads = [torch.zeros_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
            run.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32
        )
        lower(self.model, self.dtype)
        for p, master in zip(self.parameters, self.masters, strict=True):
            if p.dtype == master.dtype:
                p.data = master  # no copy of it is needed

        self.rate = torch.zeros((), device=device)  # in memory, where a graph reads it
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.masters, run.weight_decay),
            lr=self.rate,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.loss = torch.zeros((), device=device)
        self.healthy = torch.ones((), dtype=torch.bool, device=device)  # all losses so far were finite
        self.healthy_steps = torch.zeros((), dtype=torch.long, device=device)

        # Only the kernels keep to what a graph can hold; their stand-ins in torch read numbers from the GPU.
        self.graph = graph and device.type == "cuda" and triton_refuses(device, self.dtype) is None
        self.loss_of = self.model.loss
        if self.graph:
            self.pool, self.aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
            self.optimizer._warned_capturable_if_run_uncaptured = True
            self.compile()

    def compile(self, **options: Any) -> None:
        """Norms, short convolutions and the loss as few kernels: of a step of attention they were three quarters.

        Part by part: layers are alike, and so are tasks that differ in their pairs alone. Each is compiled once.
        """
        torch._dynamo.config.recompile_limit = 256  # a shape of a part each: none may be left out
        for part in (self.model.embedding, *self.model.blocks, self.model.norm):
            part.compile(dynamic=False, **options)
        self.loss_of = torch.compile(self.model.loss, dynamic=False, **options)

    def step(self, batch: Batch, rate: float) -> bool:
        """One step. False: it was one of the first of its task, which take longer."""
        self.rate.fill_(rate)
        batch.steps += 1
        if not self.graph:
            self.update(batch)
        elif batch.steps <= WARM_UPS:
            self.aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.aside):
                self.update(batch)
            torch.cuda.current_stream(self.device).wait_stream(self.aside)
        else:
            if batch.graph is None:
                batch.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(batch.graph, pool=self.pool, stream=self.aside):
                    self.update(batch)  # is written down, not done
            batch.graph.replay()
        return batch.steps > WARM_UPS + 1

    def update(self, batch: Batch) -> None:
        """Nothing here reads a number from the GPU, or depends on one."""
        loss = self.loss_of(self.model(batch.tokens), batch.places, batch.labels)
        grads = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        with torch.no_grad():
            copy_all(self.grads, grads)
            nn.utils.clip_grad_norm_(self.masters, self.run.clip)
            self.optimizer.step()
            copy_all(self.parameters, self.masters)
            self.loss.copy_(loss)
            self.healthy.logical_and_(loss.isfinite())
            self.healthy_steps.add_(self.healthy)

    def state(self) -> dict[str, Any]:
        """All that the steps after this one depend on, but the batches."""
        moments = [dict(self.optimizer.state[master]) for master in self.masters]
        health = [self.healthy, self.healthy_steps]
        return {"masters": self.masters, "moments": moments, "buffers": [*self.model.buffers()], "health": health}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Before the first step: what is made here is what graphs will know, and nothing else is moved."""
        for master, saved, moments in zip(self.masters, state["masters"], state["moments"], strict=True):
            master.copy_(saved)
            self.optimizer.state[master] = {name: moment.to(self.device) for name, moment in moments.items()}
        copy_all(self.parameters, self.masters)
        for name, all_mine in (("buffers", self.model.buffers()), ("health", (self.healthy, self.healthy_steps))):
            for mine, saved in zip(all_mine, state[name], strict=True):
                mine.copy_(saved)


class Clock:
    """Times of single steps; a GPU's are read when it has been waited for anyway."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[Any, bool]] = []
        self.ms: list[float] = []
        self.first_ms: list[float] = []

    def mark(self, usual: bool = False) -> None:
        if self.cuda:
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = 1e3 * time.perf_counter()
        self.marks.append((now, usual))

    def read(self) -> float:
        """The median of all usual steps so far. Times until the next mark are no step's."""
        for (begin, _), (end, usual) in zip(self.marks, self.marks[1:], strict=False):
            ms = begin.elapsed_time(end) if self.cuda else end - begin
            (self.ms if usual else self.first_ms).append(ms)
        self.marks.clear()
        return median(self.ms or self.first_ms)


# -- A run -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test(model: Recall, task: Task, drawn: Sequence[Tensor], batch: int) -> Score:
    guesses, (inputs, places, truths) = [], drawn
    model.eval()  # a layer of one's own may drop out
    with torch.compiler.set_stance("force_eager"):  # too few tests for other shapes to be compiled
        for x, at in zip(inputs.split(batch), places.split(batch), strict=True):
            guesses.append(model.logits(x, at).argmax(-1))
    model.train()
    return score(torch.cat(guesses).flatten().cpu(), truths.flatten().cpu(), task.vocab_size)


def score(guesses: Tensor, truths: Tensor, classes: int) -> Score:
    right = guesses == truths
    hits, guessed, occurring = (torch.bincount(x, minlength=classes) for x in (truths[right], guesses, truths))
    f1 = 2 * hits / (guessed + occurring)  # of a class: 2TP / (2TP + FP + FN)
    return Score(right.double().mean().item(), f1[occurring > 0].double().mean().item())


def setting(trainer: Trainer, result: Result) -> str:
    """What must be the same for a run to go on: times of two GPUs have no median, and code may have changed."""
    same = {
        "run": asdict(result.run),
        "shapes": [master.shape for master in trainer.masters],
        **{name: getattr(result, name) for name in ("validation", "dtype", "graph")},
        **{name: result.origin[name] for name in ("device", "torch", "triton")},
    }
    return json.dumps(same, sort_keys=True)


def train(
    run: Run,
    device: torch.device | None = None,
    graph: bool = True,
    *,
    kept: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    alone: Callable[[], object] | None = None,
) -> Iterator[Result]:
    """Yields the result, growing: after each test one point more. On CUDA, steps are graphs unless told otherwise.

    What it needs to go on is in the file `kept` after each test, and when `stop`, asked after each step, has said so:
    the run then ends with a result that is not finished. It begins with what is in that file. `alone` is called when
    all is compiled, and returns when nobody else uses the device: for times of steps.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(run, device, graph)
    model, clock = trainer.model, Clock(device)
    result = Result(
        run,
        size(model.blocks[0]),
        getattr(model.blocks[0].mixer, "state_floats", None),
        model_parameters=size(model.blocks, model.norm),
        dtype=str(trainer.dtype).removeprefix("torch."),
        graph=trainer.graph,
        origin=asdict(provenance(device)) | {"python": platform.python_version()} | ({"at_once": 1} if alone else {}),
    )
    sets = [validation(task, run.test_count) for task in run.tests]
    result.validation = " ".join(digest for _, digest in sets)
    tests = [(task, [x.to(device) for x in drawn]) for task, (drawn, _) in zip(run.tests, sets, strict=True)]

    batches = {task: Batch(task, run.sequences(task), device) for task in run.tasks}
    draws = {task: torch.Generator(device).manual_seed(1000 * run.seed + i) for i, task in enumerate(batches)}
    choice = torch.Generator().manual_seed(run.seed)  # on the host: which shape comes next must not wait for the device
    generators = [choice, *draws.values(), torch.default_generator]  # the last is for layers that drop out
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    begun, seconds, of = 0, 0.0, setting(trainer, result)
    if kept and (saved := resume.load(kept, of)):
        trainer.load(saved)
        for generator, state in zip(generators, saved["generators"], strict=True):
            generator.set_state(state)
        begun, seconds, clock.ms, clock.first_ms = (saved[name] for name in ("step", "seconds", "ms", "first_ms"))
        result.curve, result.peak_mib = [point_from(point) for point in saved["curve"]], saved["peak_mib"]
        result.origin["interrupted"] = saved["commits"]

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter() - seconds
    clock.mark()
    for step in range(begun + 1, run.steps + 1):
        task = run.tasks[int(torch.randint(len(run.tasks), (), generator=choice))]
        batches[task].fill(*task.draw(run.sequences(task), draws[task]))
        clock.mark(trainer.step(batches[task], run.rate(step)))
        if alone and step == begun + WARM_UPS + 1:
            trainer.loss.item()  # waits until the device has done it
            alone()
            clock.mark()
        asked, done = stop(), False
        tested = step % run.test_every == 0 or step == run.steps
        if not (asked or tested):
            continue
        healthy, loss = bool(trainer.healthy), trainer.loss.item()
        result.ms_a_step = clock.read()
        if tested:
            found = [test(model, task, drawn, run.tested_at_once(task)) for task, drawn in tests]
            first, *also = found
            seconds = time.perf_counter() - started
            result.curve.append(Point(step, loss, first.accuracy, seconds, first.macro_f1, also))
            done = step == run.steps or not healthy or min(score.accuracy for score in found) >= run.stop_at
        if device.type == "cuda":
            result.peak_mib = max(result.peak_mib or 0, torch.cuda.max_memory_allocated(device) / 2**20)
        if done:
            if not healthy:
                result.failed = f"the loss was not finite at step {int(trainer.healthy_steps) + 1}"
            result.finished = now()
        elif kept:
            rest = {
                "step": step,
                "seconds": time.perf_counter() - started,
                "generators": [generator.get_state() for generator in generators],
                "ms": clock.ms,
                "first_ms": clock.first_ms,
                "curve": [asdict(point) for point in result.curve],
                "peak_mib": result.peak_mib,
                "commits": [*result.origin.get("interrupted", ()), result.origin["commit"]],
            }
            resume.save(kept, of, trainer.state() | rest)
        yield result
        if done or asked:
            return
        clock.mark()
