"""The model as vLLM runs it: its own modules, with states and windows in vLLM's cache.

vLLM gives all tokens of a step in one row without padding: sequences that are written come first, a token each, then
prompts or pieces of prompts. A sequence has one page of the cache a layer, with the state and the window behind it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from runningtensor.layers import RunningTensor
from runningtensor.models.modeling_running_tensor import (
    RunningTensorAttention,
    RunningTensorDecoderLayer,
    RunningTensorModel,
    rotations,
)
from runningtensor.ops import running_tensor

Shapes = tuple[tuple[int, ...], ...]
DTYPES = (torch.float32, torch.float32)  # of state and window: small windows of halves would not keep pages aligned


@dataclass
class Batch:
    """The tokens of a step, for all layers."""

    decodes: int  # the first tokens, each of a sequence of its own
    tokens: int
    cu_seqlens: Tensor  # of the tokens after them
    pages: Tensor  # [N]: where the states of all sequences are
    fresh: Tensor  # [N]: nothing has been read of it yet, and its page holds what another has left


class BatchBuilder(LinearAttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.NEVER  # a graph has rows of padding, which would write into a page too

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts = found.query_start_loc
        return Batch(
            decodes=found.num_decodes,
            tokens=common_attn_metadata.num_actual_tokens,
            cu_seqlens=starts[found.num_decodes :] - found.num_decodes,
            pages=found.state_indices_tensor.long(),
            fresh=found.seq_lens == starts.diff(),  # also of prompts of one token, which vLLM puts before longer ones
        )


class Backend(LinearAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder


class PagedLayer(nn.Module, MambaBase):
    """A RunningTensor layer whose states and windows are in vLLM's cache."""

    def __init__(self, layer: RunningTensor, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.layer, self.prefix = layer, prefix
        self.kv_cache: tuple[Tensor, ...] = ()
        vllm_config.compilation_config.static_forward_context[prefix] = self  # where vLLM looks for what has a cache

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> Shapes:
        return state_shapes(self.layer)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return DTYPES

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures what a step takes, and there is no cache yet
            return (self.layer(hidden_states[None])[0][0],)
        batch, out = metadata[self.prefix], torch.zeros_like(hidden_states)  # which may have more rows than tokens
        D, T = batch.decodes, batch.tokens
        x = self.layer.projection.compact(hidden_states)
        if D > 0:
            out[:D] = self.write(x[:D], batch.pages[:D], batch.fresh[:D])
        if T > D:
            out[D:T] = self.read(x[D:T], batch.pages[D:], batch.fresh[D:], batch.cu_seqlens)
        return (out,)

    def write(self, x: Tensor, pages: Tensor, fresh: Tensor) -> Tensor:
        """One token of each sequence: x [N,C]."""
        state, window = self.take(pages, fresh)
        source = torch.cat((window.to(x.dtype), x[:, None]), 1)
        queries, keys, values, beta, log_decay, scale, gate = self.layer.front(source, 1, None, None)
        out = self.layer.step(queries, keys, values, beta, log_decay, state)
        self.put(pages, state, source[:, 1:])
        return self.layer.back(out, gate, scale)[:, 0]

    def read(self, x: Tensor, pages: Tensor, fresh: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Many tokens of each sequence, one after another: x [T,C]."""
        state, window = self.take(pages, fresh)
        T, (N, before, C) = len(x), window.shape
        # Each sequence behind its own window: the convolution then never sees another's tokens.
        t, w, n = (torch.arange(size, device=x.device) for size in (T, before, N + 1))
        rows = t + before * torch.searchsorted(cu_seqlens, t.to(cu_seqlens.dtype), right=True)
        starts = (cu_seqlens + before * n)[:, None] + w  # [N+1,before]
        source = x.new_empty(T + before * N, C)
        source[rows], source[starts[:-1]] = x, window.to(x.dtype)
        queries, keys, values, *optional, gate = self.layer.front(source[None], len(source), None, None)
        beta, log_decay, scale = (None if y is None else y[:, rows] for y in optional)
        out, after = running_tensor(
            tuple(q[:, rows] for q in queries),
            tuple(k[:, rows] for k in keys),
            values[:, rows],
            beta=beta,
            log_decay=log_decay,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        self.put(pages, after, source[starts[1:] - before])
        return self.layer.back(out, gate[:, rows], scale)[0]

    def take(self, pages: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """States and windows of sequences, zeros of those that begin."""
        state, window = (held[pages].masked_fill_(fresh.view(-1, *[1] * (held.ndim - 1)), 0) for held in self.kv_cache)
        return state, window[:, : self.layer.conv.weight.shape[1] - 1]

    def put(self, pages: Tensor, *new: Any) -> None:
        for held, tensor in zip(self.kv_cache, new, strict=True):
            held[pages, : tensor.shape[1]] = tensor.to(held.dtype)


def state_shapes(layer: RunningTensor) -> Shapes:
    """Of a sequence's state and window, neither empty: vLLM could not lay that out."""
    state = (layer.num_heads, *layer.widths, layer.value_dim)
    return state, (max(1, layer.conv.weight.shape[1] - 1), layer.projection.compact_width)


class PagedAttention(nn.Module):
    """An attention layer whose keys and values are in vLLM's cache."""

    def __init__(self, layer: RunningTensorAttention, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.layer = layer
        self.attend = Attention(
            layer.config.num_attention_heads,
            layer.head_dim,
            layer.scaling,
            num_kv_heads=layer.config.num_key_value_heads,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
        )

    def forward(self, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor]:
        layer = self.layer
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, layer.head_dim))
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        rope = rotations(positions[None], layer.head_dim, layer.config.rope_theta, q.dtype)
        q, k = apply_rotary_pos_emb(layer.q_norm(q)[None], layer.k_norm(k)[None], *rope, unsqueeze_dim=2)
        return (layer.o_proj(self.attend(q[0].flatten(1), k[0].flatten(1), v.flatten(1))),)


class RunningTensorForVLLM(nn.Module, HasInnerState, IsHybrid):
    """Also where no layer is attention: vLLM lays out the cache by what is there."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".mixer.": ".mixer.layer."})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse(vllm_config)
        self.config = vllm_config.model_config.hf_config
        with no_init_weights():  # they will be loaded
            self.model = RunningTensorModel(self.config)
        for i, layer in enumerate(self.model.layers):
            paged: Any = PagedLayer if isinstance(layer.mixer, RunningTensor) else PagedAttention
            layer.mixer = paged(layer.mixer, vllm_config, maybe_prefix(prefix, f"model.layers.{i}.mixer"))
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,  # [T]
        positions: Tensor,  # [T]
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,  # [T,D]
    ) -> Tensor:
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.model.layers:
            x = layer(x, positions=positions)
        return self.model.norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Shapes:
        config = vllm_config.model_config.hf_config
        with torch.device("meta"):
            layer: Any = RunningTensorDecoderLayer(config, config.layer_types.index("linear_attention"))
        return state_shapes(layer.mixer)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return DTYPES

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return get_temporal_copy_spec, get_temporal_copy_spec  # whole: neither is of a token


def refuse(vllm_config: VllmConfig) -> None:
    """What would not be what was asked for."""
    wanted = {
        "mixer": (vllm_config.model_config.hf_config.mixer, "running_tensor"),
        "tensor_parallel_size": (vllm_config.parallel_config.tensor_parallel_size, 1),
        "quantization": (vllm_config.model_config.quantization, None),
        "speculative_config": (vllm_config.speculative_config, None),
    }
    for name, (was, right) in wanted.items():
        if was != right:
            raise ValueError(f"{name} must be {right!r} for a RunningTensor model in vLLM, but was {was!r}")
