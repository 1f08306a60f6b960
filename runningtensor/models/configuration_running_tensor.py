"""The options of a language model of RunningTensor layers."""

from typing import Any

from transformers import PreTrainedConfig

LAYER_TYPES = ("linear_attention", "full_attention")  # transformers' names; ours is the first
# Written out: an exported configuration is loaded before the layers are there.
MIXERS = ("running_tensor", "linear_attention", "deltanet", "gated_deltanet", "gla", "mamba2")


def attention_of(width: int) -> dict[str, int]:
    """Attention to compare with: at 1024 that of Qwen3-0.6B, with 16 and 8 heads of 128, and in proportion."""
    heads = max(2, width // 64)
    return {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 2 * width // heads}


class RunningTensorConfig(PreTrainedConfig):
    """A decoder of RunningTensor layers, with attention layers in between where `layer_types` says so.

    vocab_size, hidden_size, num_hidden_layers, intermediate_size:  as in every decoder; the MLP is a SwiGLU
    num_heads, key_dims, value_dim:   heads of a RunningTensor layer and the modes of their states; len(key_dims) + 1 is
        the order
    projection, delta, query_skip, forget, gate_conv, output_gate, conv_size:  the layer's own options, see
        `RunningTensor`
    mixer, mixer_options:             what the linear-attention layers are: "running_tensor", of the options above; or,
        to compare with, one of `BASELINES` and its own options. Those have no cache: `generate` reads all again for
        each token, and takes no padding
    layer_types:                      "linear_attention" (the default) or "full_attention", for each layer
    num_attention_heads, num_key_value_heads, head_dim, rope_theta:  of the full-attention layers, as in Qwen3
    norm_eps:                         of every RMSNorm
    initializer_range:                std of the embeddings and matrices; what writes into the residual stream is drawn
        smaller by √(2·num_hidden_layers), so that the stream is as large in a deep model as in a shallow one
    loss_chunk_size:                  tokens whose logits are held at a time while the loss is computed
    """

    model_type = "running_tensor"

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 48
    intermediate_size: int = 3232
    num_heads: int = 8
    key_dims: list[int] | tuple[int, ...] = (15, 15)
    value_dim: int = 128
    projection: str = "conconlyc"
    delta: bool = True
    query_skip: bool = True
    forget: str = "telescoping"
    gate_conv: bool = True
    output_gate: str = "silu"
    conv_size: int = 4
    mixer: str = "running_tensor"
    mixer_options: dict[str, Any] | None = None
    layer_types: list[str] = None  # type: ignore[assignment]
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    rope_theta: float = 1e6
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    loss_chunk_size: int = 4096
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.key_dims, tuple | list):
            raise ValueError(f"key_dims must be a tuple, a width for each key, but was {self.key_dims!r}")
        self.key_dims = list(self.key_dims)  # as JSON will have it
        if self.layer_types is None:
            self.layer_types = ["linear_attention"] * self.num_hidden_layers
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= set(LAYER_TYPES):
            raise ValueError(
                f"layer_types must be {self.num_hidden_layers} of {' and '.join(map(repr, LAYER_TYPES))}, "
                f"but was {self.layer_types}"
            )
        if self.mixer not in MIXERS:
            instead = ": for attention, say so in layer_types" if self.mixer == "attention" else ""
            raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, but was {self.mixer!r}{instead}")
        if self.mixer == "running_tensor" and self.mixer_options:
            raise ValueError(
                "mixer_options must be None for mixer 'running_tensor', whose options have names of their own, "
                f"but was {self.mixer_options}"
            )
        if not self.has_cache:
            self.use_cache = False
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, but they were "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )
        super().__post_init__(**kwargs)

    @property
    def has_cache(self) -> bool:
        """Whether every layer of the model can go on from what it has read."""
        return self.mixer == "running_tensor" or "linear_attention" not in self.layer_types
