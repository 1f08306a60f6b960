"""Tiny language models, one of each kind, with weights large enough that their logits differ."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runningtensor import RunningTensorConfig, RunningTensorForCausalLM

VOCAB = 50
LINEAR, FULL = "linear_attention", "full_attention"
KINDS: dict[str, dict] = {
    "order 2": {"key_dims": (5,)},
    "order 3": {"key_dims": (5, 5)},
    "order 4": {"key_dims": (5, 3, 4), "forget": "cumulative", "gate_conv": False},
    "one of each": {"layer_types": [LINEAR, FULL]},
    "hybrid": {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL]},
}
MIXERS: dict[str, dict] = {  # of others, and their options
    "linear_attention": {"num_heads": 2},
    "deltanet": {"num_heads": 2},
    "gated_deltanet": {"num_heads": 2, "head_dim": 6},
    "gla": {"num_heads": 2, "gate_rank": 5},
    "mamba2": {"state_dim": 7, "head_dim": 8},
}
KINDS |= {name: {"mixer": name, "mixer_options": options} for name, options in MIXERS.items()}
KINDS["gated_deltanet hybrid"] = KINDS["gated_deltanet"] | {"layer_types": [LINEAR, FULL]}
EVERY_KIND = pytest.mark.parametrize("kind", ("order 2", "order 3", "order 4", "hybrid"))
LINEAR_OR_HYBRID = pytest.mark.parametrize("kind", ("order 3", "hybrid"))
EVERY_MIXER = pytest.mark.parametrize("kind", (*MIXERS, "gated_deltanet hybrid"))


def config(kind: str = "order 3", **changes: object) -> RunningTensorConfig:
    tiny = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_heads": 2,
        "key_dims": (5, 5),
        "value_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.4,
    }
    return RunningTensorConfig(**tiny | KINDS[kind] | changes)


def build(kind: str = "order 3", dtype: torch.dtype = torch.float64, **changes: object) -> RunningTensorForCausalLM:
    torch.manual_seed(0)
    return RunningTensorForCausalLM(config(kind, **changes)).to(dtype).eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: RunningTensorForCausalLM, ids: Tensor, **options: object) -> Tensor:
    return model(ids, **options).logits


def grads(model: RunningTensorForCausalLM, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out
