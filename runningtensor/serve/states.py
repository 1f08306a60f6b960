"""What a model has read, as a file: the states and windows of its layers, a few megabytes however much it read.

It is a safetensors file: loading it runs no code. Its header says which model it is of, by a hash of all that decides
what that model writes: its configuration and every weight.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runningtensor.models import RunningTensorCache, RunningTensorConfig, RunningTensorForCausalLM
from runningtensor.models.cache import TensorStateLayer

FORMAT = "runningtensor state 1"
NOT_MATHEMATICS = {"initializer_range", "loss_chunk_size", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
LATER = {"output_gate": "silu"}  # options that models had not when their states were saved, and what they did then


def save_state(path: str | Path, model: RunningTensorForCausalLM, cache: RunningTensorCache, pending: Tensor) -> None:
    """Saves what `model` has read, for `load_state`.

    cache:    its `past_key_values`; of sequences without padding, where there are attention layers
    pending:  [B,n], the tokens that come next and that it has not read: at least the last one written
    """
    path = Path(path)
    check_place(path)
    held = tensors(cache)
    if not held:
        raise ValueError("cache must be of a model that has read something, but nothing has been read yet")
    batch = len(next(iter(held.values())))
    if pending.ndim != 2 or pending.shape[0] != batch or pending.shape[1] < 1 or pending.dtype != torch.long:
        raise ValueError(
            f"pending must be int64 of shape [{batch}, n >= 1], but was {pending.dtype} of shape {list(pending.shape)}"
        )
    held["pending"] = pending
    header = {"format": FORMAT, "model": fingerprint(model), "tokens": str(cache.get_seq_length())}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # what stands at `path` is always whole
    try:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, partial, header)
        os.replace(partial, path)
    except SafetensorError as error:  # which is no OSError, whatever the disk said
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """That a file can be written there."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} must be a file to save to, but is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} must be in a folder that is there, but {path.parent} is not")


def load_state(path: str | Path, model: RunningTensorForCausalLM) -> tuple[RunningTensorCache, Tensor]:
    """The cache and the pending tokens that `save_state` was given, on the model's device."""
    cache = RunningTensorCache(model.config)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not there, or is no file")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                what = header.get("format", "none")
                raise ValueError(f"{path} must be a state file of format {FORMAT!r}, but its format is {what!r}")
            if header.get("model") != fingerprint(model):
                raise ValueError(f"{path} is the state of another model: of other weights, dtype or configuration")
            held = {name: file.get_tensor(name).to(model.device, copy=True) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} must be a state file, but is cut short or of another kind: {error}") from error

    tokens, pending = int(header.get("tokens", 0)), held.pop("pending", torch.empty(0))
    batch = len(pending)
    want = {name: (t.dtype, shape(name, t, batch, tokens)) for name, t in tensors(example(model)).items()}
    got = {name: (t.dtype, list(t.shape)) for name, t in held.items()}
    vocabulary = model.config.vocab_size
    right = got == want and pending.dtype == torch.long and pending.ndim == 2 and pending.numel() > 0 and tokens > 0
    if not right or not 0 <= int(pending.min()) <= int(pending.max()) < vocabulary:
        raise ValueError(f"{path} is damaged: its tensors are not those of a state of this model")
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, TensorStateLayer):
            layer.write(held[f"{i}.window"], held[f"{i}.state"], tokens)
        else:
            layer.update(held[f"{i}.keys"], held[f"{i}.values"])
    return cache, pending


def tensors(cache: RunningTensorCache) -> dict[str, Tensor]:
    """All that a cache holds, by name: [B, …] each."""
    held: dict[str, Any] = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, TensorStateLayer):
            held[f"{i}.window"], held[f"{i}.state"] = layer.read()
        else:
            held[f"{i}.keys"], held[f"{i}.values"] = layer.keys, layer.values
    return {name: tensor for name, tensor in held.items() if tensor is not None}


@torch.no_grad()
def example(model: RunningTensorForCausalLM) -> RunningTensorCache:
    """A cache of this model, of one token."""
    cache = RunningTensorCache(model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    return cache


def shape(name: str, example: Tensor, batch: int, tokens: int) -> list[int]:
    """What the shape of a tensor must be after so many tokens: keys and values grow, states do not."""
    rest = list(example.shape[1:])
    if name.endswith((".keys", ".values")):
        rest[1] = tokens
    return [batch, *rest]


def fingerprint(model: RunningTensorForCausalLM) -> str:
    """Of the configuration and all weights. It reads them all: a second or less for each GB."""
    names = RunningTensorConfig.__annotations__.keys() - NOT_MATHEMATICS
    config = {name: getattr(model.config, name) for name in sorted(names)}
    config = {name: value for name, value in config.items() if name not in LATER or value != LATER[name]}

    def digest(named: tuple[str, Tensor]) -> list[Any]:
        name, weight = named
        data = weight.detach().cpu().flatten().view(torch.uint8).numpy().data
        return [name, str(weight.dtype), list(weight.shape), hashlib.sha256(data).hexdigest()]

    with ThreadPoolExecutor() as threads:  # sha256 lets other threads run
        weights = list(threads.map(digest, model.named_parameters()))
    return hashlib.sha256(json.dumps([config, weights]).encode()).hexdigest()
