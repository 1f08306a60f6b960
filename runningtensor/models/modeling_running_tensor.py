"""A pre-norm decoder, as Llama and Qwen3 are, with RunningTensor layers in place of attention, or beside it.

To compare like with like, `config.mixer` puts another mixer in their place and changes nothing else.
`RunningTensorModel` gives hidden states, `RunningTensorForCausalLM` logits and a loss. Both take transformers' usual
arguments, and for packed sequences `cu_seqlens` or `position_ids` that begin anew.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, silu
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.masking_utils import create_causal_mask, find_packed_sequence_indices
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils import can_return_tuple

from runningtensor.layers.attention import attention
from runningtensor.layers.baselines import BASELINES, Mixer, refuse_padding
from runningtensor.layers.running_tensor import RunningTensor, positions
from runningtensor.models.cache import RunningTensorCache
from runningtensor.models.configuration_running_tensor import RunningTensorConfig
from runningtensor.models.loss import IGNORE, SummedLoss, only_a_matrix


def writer(width: int, hidden_size: int) -> nn.Linear:
    """A matrix that writes into the residual stream: drawn smaller the more of them there are, see `_init_weights`."""
    linear = nn.Linear(width, hidden_size, bias=False)
    linear.writes_residual = True  # type: ignore[assignment]
    return linear


class RunningTensorAttention(nn.Module):
    """Softmax attention as in Qwen3: grouped heads, RMSNorm of queries and keys, rotary positions."""

    is_causal = True

    def __init__(self, config: RunningTensorConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling = config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        q_width, kv_width = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = writer(q_width, config.hidden_size)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: RunningTensorCache | None = None,
        cu_seqlens: Tensor | None = None,  # [N+1], B = 1, and neither mask nor cache
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))  # [B,H,T,·]
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        whole = self.config._attn_implementation == "sdpa" and attention_mask is None and q.shape[2] == k.shape[2]
        if cu_seqlens is not None or whole:  # transformers' would hold all T² scores of float32
            out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cu_seqlens)
            return self.o_proj(out.flatten(2)), None
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(out.flatten(2)), weights


def rotations(position_ids: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B,T,width]. Computed, not kept: a model made on the meta device would lose a buffer."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=position_ids.device, dtype=torch.float) / width)
    angles = (position_ids[..., None].float() * frequencies).repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class RunningTensorMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: RunningTensorConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = writer(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class RunningTensorDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: RunningTensorConfig, layer_idx: int) -> None:
        super().__init__()
        self.mixer: nn.Module
        if config.layer_types[layer_idx] == "full_attention":
            self.mixer = RunningTensorAttention(config, layer_idx)
        elif config.mixer != "running_tensor":
            own = {"norm_eps": config.norm_eps} | (config.mixer_options or {})
            self.mixer = BASELINES[config.mixer](config.hidden_size, **own)
        else:
            options = ("projection", "delta", "query_skip", "forget", "gate_conv", "output_gate", "conv_size")
            self.mixer = RunningTensor(
                config.hidden_size,
                config.num_heads,
                tuple(config.key_dims),
                config.value_dim,
                norm_eps=config.norm_eps,
                layer_idx=layer_idx,
                **{name: getattr(config, name) for name in options},
            )
        self.mlp = RunningTensorMLP(config)
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.mixer_norm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class RunningTensorPreTrainedModel(PreTrainedModel):
    config: RunningTensorConfig
    config_class = RunningTensorConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["RunningTensorDecoderLayer"]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _is_stateful = True  # a state cannot be rolled back: no assisted generation

    def _init_weights(self, module: nn.Module) -> None:
        """Sets every parameter: for models made on the meta device, what `__init__` drew is gone."""
        std, shrink = self.config.initializer_range, (2 * self.config.num_hidden_layers) ** -0.5
        if isinstance(module, RunningTensor | Mixer):
            with torch.no_grad():  # what a checkpoint had stays: not all that they use is guarded by transformers
                loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
                module.reset_parameters(output_scale=shrink)
                for parameter, value in loaded:
                    parameter.copy_(value)
        elif isinstance(module, nn.Linear):
            initialization.normal_(module.weight, std=std * (shrink if hasattr(module, "writes_residual") else 1))
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=std)
        elif isinstance(module, nn.RMSNorm):
            initialization.ones_(module.weight)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # In code that is not its own, transformers skips modules without parameters of their own, as our layer is, to
        # spare loaded weights from being overwritten. `_init_weights` spares them itself.
        super()._initialize_weights(module)


class RunningTensorModel(RunningTensorPreTrainedModel):
    def __init__(self, config: RunningTensorConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RunningTensorDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,  # [B,T]
        attention_mask: Tensor | None = None,  # [B,L], L >= T with a cache
        position_ids: Tensor | None = None,  # [B,T]
        past_key_values: RunningTensorCache | None = None,
        inputs_embeds: Tensor | None = None,  # [B,T,D]
        use_cache: bool | None = None,  # default: config.use_cache, but not in training
        cu_seqlens: Tensor | None = None,  # [N+1], where packed sequences begin and end; B = 1
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [batch, tokens], but was of shape {list(attention_mask.shape)}")
        if past_key_values is not None and not isinstance(past_key_values, RunningTensorCache):
            name = type(past_key_values).__name__
            raise ValueError(f"past_key_values must be a RunningTensorCache, but was a {name}")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        T = x.shape[1]
        cu_seqlens = sequence_bounds(cu_seqlens, position_ids, attention_mask, past_key_values, kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and not self.config.has_cache:
            raise ValueError(
                f"use_cache must be False: a model of mixer {self.config.mixer!r} has no cache, but was True"
            )
        checkpointing = self.gradient_checkpointing and self.training
        if use_cache and past_key_values is None and cu_seqlens is None and not checkpointing:
            past_key_values = RunningTensorCache(self.config)

        # Our layers need these tokens' part only, and a mask that grows with every step would be compiled anew.
        masks = {"linear_attention": None if attention_mask is None else attention_mask[:, -T:], "full_attention": None}
        if attention_mask is not None and not self.config.has_cache:
            refuse_padding(attention_mask)  # once for all layers: on a GPU it waits
            masks["linear_attention"] = None
        rope = None
        if "full_attention" in self.config.layer_types:
            if position_ids is None and cu_seqlens is not None:
                position_ids = positions(cu_seqlens, T)[None]
            elif position_ids is None:
                past = 0 if past_key_values is None else past_key_values.get_seq_length()
                position_ids = torch.arange(past, past + T, device=x.device)[None]
            if cu_seqlens is None:
                masks["full_attention"] = create_causal_mask(
                    config=self.config,
                    inputs_embeds=x,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    position_ids=None,
                )
            rope = rotations(position_ids, self.config.head_dim, self.config.rope_theta, x.dtype)

        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states: list[Tensor] = []
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            if wanted:
                hidden_states.append(x)
            x = layer(
                x,
                attention_mask=masks[kind],
                past_key_values=past_key_values,
                cu_seqlens=cu_seqlens,
                position_embeddings=rope,
                position_ids=position_ids,
                **kwargs,
            )
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*hidden_states, x) if wanted else None,
        )


def sequence_bounds(
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    past_key_values: RunningTensorCache | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """cu_seqlens of packed sequences; None where nothing is packed. Nothing is where there is a mask or a cache."""
    given = cu_seqlens if cu_seqlens is not None else kwargs.get("cu_seq_lens_q")  # as data collators call it
    if given is not None and (attention_mask is not None or past_key_values is not None):
        raise ValueError("cu_seqlens must be None where there is an attention_mask or a cache: it has no padding")
    if given is not None or position_ids is None or attention_mask is not None or past_key_values is not None:
        return given
    if not torch.compiler.is_compiling() and find_packed_sequence_indices(position_ids) is None:
        return None
    if position_ids.shape[0] == 1:
        return _bounds(position_ids)
    wrong = "position_ids that begin anew must be of a batch of 1: pack the sequences one after another"
    if not torch.compiler.is_compiling():
        raise ValueError(wrong)
    torch._assert_async((position_ids.diff() == 1).all(), wrong)
    return None


@torch.library.custom_op("runningtensor::bounds", mutates_args=())
def _bounds(position_ids: Tensor) -> Tensor:
    """[1,T] to [N+1]: the places where the position is not the one before plus 1, and T. An op, as N is in the data."""
    starts = (position_ids[0].diff(prepend=position_ids[0, :1] - 2) != 1).nonzero()[:, 0]
    return pad(starts, (0, 1), value=position_ids.shape[1])


@_bounds.register_fake
def _(position_ids: Tensor) -> Tensor:
    return position_ids.new_empty(torch.library.get_ctx().new_dynamic_size(min=2))


class RunningTensorForCausalLM(RunningTensorPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RunningTensorConfig) -> None:
        super().__init__(config)
        self.model = RunningTensorModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RunningTensorCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        return_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The arguments of `RunningTensorModel.forward`, and:

        labels:              [B,T], the tokens themselves: they are shifted here. -100 is not predicted, nor is what
            begins a packed sequence.
        return_logits:       default: only without labels. The loss needs no more than `config.loss_chunk_size` tokens'
            logits at a time, the logits of a batch are often larger than the model.
        logits_to_keep:      of how many last tokens, or of which, the logits are returned; 0: of all
        num_items_in_batch:  what the loss is divided by, where a step has several batches; default: its labels
        """
        cu_seqlens = sequence_bounds(cu_seqlens, position_ids, attention_mask, past_key_values, kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if labels is not None:
            targets = pad(labels, (0, 1), value=IGNORE)[:, 1:].to(hidden.device)
            if cu_seqlens is not None:
                targets = targets.index_fill(1, cu_seqlens[1:].long() - 1, IGNORE)
            loss = self.chunked_loss(hidden.flatten(0, 1), targets.flatten(), num_items_in_batch)
        if labels is None if return_logits is None else return_logits:
            rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, rows])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def chunked_loss(self, hidden: Tensor, targets: Tensor, items: int | Tensor | None = None) -> Tensor:
        """Cross entropy, a few tokens at a time: there are never more logits than theirs."""
        size = self.config.loss_chunk_size
        compiling = torch.compiler.is_compiling()  # inductor has no product with a sum of another dtype
        if torch.is_grad_enabled() and only_a_matrix(self.lm_head) and not compiling:
            weight, kind = self.lm_head.weight, hidden.device.type
            if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:  # as it is in `linear`
                hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
            summed = SummedLoss.apply(hidden, weight, targets, size)
        else:
            rows = zip(hidden.split(size), targets.split(size), strict=True)
            summed = torch.stack([self.recomputed_loss(*few) for few in rows]).sum()
        if items is None:
            items = (targets != IGNORE).sum().clamp(min=1)
        return summed / items

    def recomputed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Whatever the head is: the logits are dropped at once and computed again backward."""

        def loss(hidden: Tensor) -> Tensor:
            logits = self.lm_head(hidden)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")

        if torch.is_grad_enabled():
            return checkpoint(loss, hidden, use_reentrant=False, preserve_rng_state=False)
        return loss(hidden)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # transformers' own cache refuses models without attention

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if not self.config.has_cache:
            if model_kwargs.get("inputs_embeds") is not None:  # transformers would drop them after the first token
                raise ValueError(f"inputs_embeds must be None: a model of mixer {self.config.mixer!r} has no cache")
            generation_config.use_cache = False
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        # `forward` would make one too, but a prompt in chunks wants it before.
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = RunningTensorCache(self.config)
