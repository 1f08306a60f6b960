"""What a pretraining run is: recipes, which derive from one another, and the models they compare.

Every model of a recipe has the width, the depth and the vocabulary of RunningTensor's; its MLP is as wide as makes the
parameters equal. Nothing here needs torch until a model is asked for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from runningtensor.models import RunningTensorConfig

SCHEDULES = ("constant", "cosine")
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")

# What a run may change when it goes on: how long it is, how it is laid out on devices, and what it shows and keeps.
# None of it changes what a step computes, except by rounding. A run with any other field changed is another run.
FREE = (
    "steps", "sequences", "device", "replicate", "activation_checkpointing", "compile", "log_every", "tensorboard",
    "validate_every", "validation_sequences", "save_every", "keep", "skip_limit",
)  # fmt: skip
COUNTS = (
    "vocab_size", "hidden_size", "layers", "heads", "value_dim", "mlp", "length", "batch", "steps", "sequences",
    "replicate", "log_every", "validation_sequences", "save_every", "keep", "skip_limit",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    model: str = "running-tensor"  # a key of MODELS
    vocab_size: int | None = 32_000  # none: as many as the data's tokenizer has
    hidden_size: int = 1024
    layers: int = 48
    heads: int = 8  # these seven are RunningTensor's; of the others they fix the number of parameters
    key_dims: tuple[int, ...] = (15, 15)  # 16 with the slot of the query-skip gates: docs/pretraining.md says why
    value_dim: int = 128
    mlp: int = 3232
    projection: str = "conconlyc"
    forget: str = "telescoping"
    output_gate: str = "silu"
    tie_embeddings: bool = False

    length: int = 4096  # tokens of a sequence
    batch: int = 128  # sequences a step, of all ranks together
    steps: int | None = None  # none: one epoch
    lr: float = 1e-3
    schedule: str = "constant"  # or "cosine", to zero at `steps`
    warmup: int = 0  # steps in which the learning rate rises linearly
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0  # of what has two dimensions
    clip: float = 0.01  # of the norm of the gradient
    dtype: str = "auto"  # that layers compute in: bfloat16 on CUDA, else float32. What the optimiser has is float32
    seed: int = 0  # of the weights and of the order of the data

    sequences: int = 4  # at most so many at a time on a rank: what memory allows; the rest of a batch comes after
    device: str = "auto"  # cuda if there is one
    replicate: int = 1  # groups of ranks, each with a whole model sharded over it: 1 shards over all ranks
    activation_checkpointing: bool = False  # layers are computed again backward, for memory
    compile: bool = False  # each layer, by torch.compile
    log_every: int = 10  # steps, between lines where there is no terminal
    tensorboard: bool = False
    validate_every: int = 1000  # steps; 0: never
    validation_sequences: int = 512  # at most
    save_every: int = 1000  # steps; at the end and when asked to stop it is saved too
    keep: int = 3  # checkpoints
    skip_limit: int = 10  # steps in a row without a finite loss and gradient that end the run

    def __post_init__(self) -> None:
        for name, known in ("model", MODELS), ("schedule", SCHEDULES), ("dtype", DTYPES), ("device", DEVICES):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, but was {getattr(self, name)!r}")
        for name in COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but was {getattr(self, name)}")
        for name in "warmup", "weight_decay", "validate_every":
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, but was {getattr(self, name)}")
        for name in "lr", "clip":
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, but was {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, but were {self.betas}")
        if not self.key_dims or min(self.key_dims) < 1:
            raise ValueError(f"key_dims must be positive, and one at least, but were {self.key_dims}")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step; the first is 0."""
        rate = self.lr * min(1.0, (step + 1) / (self.warmup + 1))
        return rate if self.schedule == "constant" else rate * (1 + math.cos(math.pi * step / steps)) / 2


# -- Recipes -----------------------------------------------------------------------------------------------------------


def paper_600m() -> Recipe:
    """The paper's training: 0.6B parameters, one epoch, on GPUs."""
    return Recipe()


def small_50m() -> Recipe:
    """50M parameters, for one GPU."""
    return replace(
        paper_600m(), hidden_size=512, layers=12, heads=8, value_dim=64, mlp=1632, tie_embeddings=True, length=2048,
        batch=64, sequences=16, validate_every=500, save_every=500,
    )  # fmt: skip


def tiny_cpu() -> Recipe:
    """A model that learns in a minute on two CPU cores."""
    return replace(
        small_50m(), vocab_size=None, hidden_size=128, layers=2, heads=4, key_dims=(12, 12), value_dim=48,
        mlp=384, length=128, batch=8, sequences=8, steps=400, lr=3e-3, warmup=20, device="cpu",
        validate_every=50, validation_sequences=32, save_every=50,
    )  # fmt: skip


RECIPES: dict[str, Callable[[], Recipe]] = {"tiny_cpu": tiny_cpu, "small_50m": small_50m, "paper_600m": paper_600m}


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """With settings such as "lr=1e-4" read as the field's type."""
    types = get_type_hints(Recipe)
    changes = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in types:
            known = ", ".join(f"{field.name}={shown(getattr(recipe, field.name))}" for field in fields(recipe))
            raise ValueError(f"a setting must be key=value, of a key there is, but was {setting!r}; there are {known}")
        try:
            changes[name] = parsed(types[name], text)
        except ValueError:
            raise ValueError(f"{name} must be {described(types[name])}, but was {text!r}") from None
    return replace(recipe, **changes)


def parsed(kind: Any, text: str) -> Any:
    if isinstance(kind, UnionType):  # with None
        return None if text.lower() == "none" else parsed(get_args(kind)[0], text)
    if get_origin(kind) is tuple:
        parts, args = text.split(","), get_args(kind)
        if args[-1] is not ... and len(parts) != len(args):
            raise ValueError
        return tuple(parsed(args[0], part) for part in parts)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    return kind(text)


def described(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return f"{described(get_args(kind)[0])} or none"
    if get_origin(kind) is tuple:
        args = get_args(kind)
        many = "" if args[-1] is ... else f"{len(args)} of: "
        return f"{many}{described(args[0])}, with commas between"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[kind]


def shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def deviations(recipe: Recipe, parameters: int, tokens: int, epochs: float) -> list[str]:
    """What differs from the paper's training, of what it says: it names neither lengths nor batches nor betas."""
    paper, ours = paper_600m(), ("projection", "forget", "output_gate")
    found = [
        f"{name} {shown(getattr(recipe, name))} (the paper: {shown(getattr(paper, name))})"
        for name in (*(ours if recipe.model == paper.model else ()), "schedule", "warmup", "weight_decay", "clip")
        if getattr(recipe, name) != getattr(paper, name)
    ]
    if recipe.lr not in (1e-3, 1e-4, 1e-5):
        found.append(f"lr {recipe.lr:g} (the paper: one of 1e-3, 1e-4, 1e-5)")
    if abs(parameters / 6e8 - 1) > 0.05:
        found.append(f"{parameters / 1e6:,.1f}M parameters (the paper: 0.6B)")
    if tokens < 9e10:
        found.append(f"{tokens:,} tokens of text (the paper: FineWeb-Edu 100BT)")
    if not 0.99 < epochs <= 1:
        found.append(f"{epochs:.3g} epochs (the paper: one)")
    return found


# -- Models ------------------------------------------------------------------------------------------------------------


def _attention(width: int, layers: int) -> dict[str, Any]:
    from runningtensor.models.configuration_running_tensor import attention_of

    return {"layer_types": ["full_attention"] * layers, **attention_of(width)}


def _gated_deltanet(width: int, layers: int) -> dict[str, Any]:
    heads = max(1, 3 * width // 512)  # of 128 and 256 channels: in all 3/4 and 3/2 of the width, as published
    return {"mixer": "gated_deltanet", "mixer_options": {"num_heads": heads, "head_dim": 3 * width // 4 // heads}}


def _deltanet(width: int, layers: int) -> dict[str, Any]:
    return {"mixer": "deltanet", "mixer_options": {"num_heads": max(1, width // 128), "expand_v": 1.0}}


def _mamba2(width: int, layers: int) -> dict[str, Any]:
    return {"mixer": "mamba2", "mixer_options": {"head_dim": min(64, width), "state_dim": min(128, width)}}


def _gla(width: int, layers: int) -> dict[str, Any]:
    return {"mixer": "gla", "mixer_options": {"num_heads": max(1, width // 256)}}


MODELS: dict[str, Callable[[int, int], dict[str, Any]]] = {  # options of the configuration, by width and depth
    "running-tensor": lambda width, layers: {},
    "attention": _attention,
    "gated-deltanet": _gated_deltanet,
    "deltanet": _deltanet,
    "mamba-2": _mamba2,
    "gla": _gla,
}


def configuration(recipe: Recipe, vocab_size: int, eos: int | None = None) -> "RunningTensorConfig":
    """Of the recipe's model, with the MLP that gives it RunningTensor's number of parameters."""
    from runningtensor.models import RunningTensorConfig

    def config(model: str, layers: int, mlp: int, vocab_size: int) -> RunningTensorConfig:
        return RunningTensorConfig(
            vocab_size=vocab_size, hidden_size=recipe.hidden_size, num_hidden_layers=layers, intermediate_size=mlp,
            num_heads=recipe.heads, key_dims=recipe.key_dims, value_dim=recipe.value_dim, projection=recipe.projection,
            forget=recipe.forget, output_gate=recipe.output_gate,
            tie_word_embeddings=recipe.tie_embeddings, eos_token_id=eos, **MODELS[model](recipe.hidden_size, layers),
        )  # fmt: skip

    mlp = recipe.mlp
    if recipe.model != "running-tensor":
        ours, theirs = (count(config(model, 1, mlp, 1)) for model in ("running-tensor", recipe.model))
        step = max(1, recipe.hidden_size // 32)  # widths that GPUs like, and fine enough for 1%
        mlp += round((ours - theirs) / (3 * recipe.hidden_size) / step) * step
        if mlp < step:
            raise ValueError(
                f"mlp must leave {recipe.model} an MLP of its own at equal parameters, but was {recipe.mlp}: at width "
                f"{recipe.hidden_size} its layer alone has {theirs - ours:,} parameters more than RunningTensor's"
            )
    return config(recipe.model, recipe.layers, mlp, vocab_size)


def count(config: "RunningTensorConfig") -> int:
    """All parameters, tied embeddings once. Makes no weights."""
    import torch

    from runningtensor.models import RunningTensorForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in RunningTensorForCausalLM(config).parameters())
