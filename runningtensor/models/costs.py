"""What a model costs: parameters, floats of state, FLOPs a token and bytes of cache, layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from runningtensor.layers.baselines import Mixer
from runningtensor.layers.running_tensor import RunningTensor
from runningtensor.models.configuration_running_tensor import RunningTensorConfig
from runningtensor.models.modeling_running_tensor import RunningTensorForCausalLM


@dataclass(frozen=True)
class Block:
    """One layer of the decoder with its MLP, and what it costs. FLOPs: a multiplication and an addition are two."""

    kind: str
    state_floats: int
    parameters: int
    flops: int  # a token that is decoded; of attention, what does not grow with the context
    flops_per_context: int  # and what does, for each token before
    cache_bytes: int  # a sequence: state in float32 and window
    cache_bytes_per_token: int

    def cache(self, tokens: int) -> int:
        return self.cache_bytes + tokens * self.cache_bytes_per_token


def blocks(config: RunningTensorConfig) -> Iterator[Block]:
    with torch.device("meta"):
        model = RunningTensorForCausalLM(config)
    for layer in model.model.layers:
        mixer = layer.mixer
        matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        parameters = sum(p.numel() for p in layer.parameters())
        if isinstance(mixer, RunningTensor):
            products = 3 if mixer.delta else 2  # with the state: to correct, to write, to read
            modes = "×".join(map(str, (*mixer.widths, mixer.value_dim)))
            window = mixer.projection.compact_width * (mixer.conv.weight.shape[1] - 1)
            yield Block(
                f"{mixer.num_heads} of {modes}",
                mixer.state_floats,
                parameters,
                2 * (matrices + products * mixer.state_floats),
                0,
                4 * mixer.state_floats + itemsize(config) * window,
                0,
            )
        elif isinstance(mixer, Mixer):
            kind = f"{config.mixer} {mixer.num_heads} of {mixer.key_dim}×{mixer.value_dim}"
            state = mixer.state_floats or 0
            yield Block(kind, state, parameters, 2 * (matrices + mixer.products * state), 0, 0, 0)
        else:
            kind = f"attention {config.num_attention_heads}×{config.head_dim}"
            growing = 4 * config.num_attention_heads * config.head_dim  # scores, and their sum of values
            yield Block(kind, 0, parameters, 2 * matrices, growing, 0, kv_bytes(config))


def flops_a_token(config: RunningTensorConfig, length: int) -> float:
    """Of the forward pass, the mean over a sequence of `length` tokens; training takes three times as many.

    Counted, at two for each multiplication and its addition: every matrix, with `lm_head` and the short convolutions;
    what the rule of a mixer does with its state, two or three products of its size; the scores of attention and their
    sums of values, over the (length + 1) / 2 tokens that one of them sees in the mean. Not counted: embeddings, norms,
    gates and decays; nor what a chunk-parallel form or gradient checkpointing does besides, so that a utilisation
    computed from this is one of useful work.
    """
    seen = (length + 1) / 2
    layers = sum(block.flops + seen * block.flops_per_context for block in blocks(config))
    return layers + 2 * config.hidden_size * config.vocab_size


def itemsize(config: RunningTensorConfig) -> int:
    """Of keys, values and windows: as the weights are; bfloat16 where the configuration does not say."""
    return (config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16).itemsize


def kv_bytes(config: RunningTensorConfig) -> int:
    """What an attention layer keeps of a token."""
    return 2 * config.num_key_value_heads * config.head_dim * itemsize(config)
