"""One run: a small decoder with any mixer, trained on fresh batches of the task, tested on a fixed set."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from runningtensor.layers import RunningTensor
from runningtensor.layers.baselines import BASELINES
from runningtensor.mqar.data import IGNORE, Task, stream, validation


@dataclass(frozen=True)
class Run:
    """Everything that decides the result."""

    mixer: str  # "running_tensor" or a key of BASELINES
    options: dict[str, object]  # of the mixer
    tasks: tuple[Task, ...]  # each training batch is of one of them
    test: Task
    d_model: int = 128
    layers: int = 2
    mlp: int = 3  # width of the SwiGLU, in d_model
    embedding_std: float = 0.02
    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float = 1.0
    batch: int = 128
    steps: int = 1000
    test_every: int = 50
    test_count: int = 512
    stop_at: float = 1.0  # accuracy
    seed: int = 0


@dataclass
class Point:
    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclass
class Result:
    run: Run
    parameters: int  # without embeddings, a layer
    state_floats: int | None  # a layer; None: it grows
    validation: str = ""
    curve: list[Point] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return max((point.accuracy for point in self.curve), default=0.0)

    def steps_to(self, accuracy: float) -> int | None:
        return next((point.step for point in self.curve if point.accuracy >= accuracy), None)


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.mixer, self.mixer_norm, self.mlp_norm = mixer, nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))[0]
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Recall(nn.Module):
    """A pre-norm decoder with tied embeddings."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        make: Callable[..., nn.Module] = RunningTensor if run.mixer == "running_tensor" else BASELINES[run.mixer]
        self.embedding = nn.Embedding(run.test.vocab_size, run.d_model)
        nn.init.normal_(self.embedding.weight, std=run.embedding_std)
        self.blocks = nn.ModuleList(
            Block(make(run.d_model, **run.options), run.d_model, run.mlp * run.d_model) for _ in range(run.layers)
        )
        self.norm = nn.RMSNorm(run.d_model, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states, to be multiplied by the embeddings where there is something to predict."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self(tokens)[places] @ self.embedding.weight.T


@torch.no_grad()
def test(model: Recall, inputs: Tensor, labels: Tensor, batch: int) -> float:
    """Accuracy, which is micro-F1 here: one prediction for each label."""
    right = total = 0
    for x, y in zip(inputs.split(batch), labels.split(batch), strict=True):
        places = y != IGNORE
        right += int((model.logits(x, places).argmax(-1) == y[places]).sum())
        total += int(places.sum())
    return right / total


def train(run: Run, device: torch.device | None = None) -> Iterator[Result]:
    """Yields the result, growing: after each test one point more."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(run.seed)
    model = Recall(run).to(device)
    result = Result(
        run,
        sum(p.numel() for p in model.blocks[0].parameters()),
        getattr(model.blocks[0].mixer, "state_floats", None),
    )
    inputs, labels, result.validation = validation(run.test, run.test_count)
    inputs, labels = inputs.to(device), labels.to(device)
    # Gates, taps and norms are not pulled to zero.
    groups = [[p for p in model.parameters() if (p.ndim >= 2) is matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": run.weight_decay}, {"params": groups[1], "weight_decay": 0.0}], lr=run.lr
    )
    started = time.perf_counter()
    for step, (x, y) in enumerate(stream(run.tasks, run.batch, run.seed, device), start=1):
        places = y != IGNORE
        loss = cross_entropy(model.logits(x, places), y[places])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        if step % run.test_every == 0 or step == run.steps:
            accuracy = test(model, inputs, labels, run.batch)
            result.curve.append(Point(step, loss.item(), accuracy, time.perf_counter() - started))
            yield result
            if step >= run.steps or accuracy >= run.stop_at:
                return
