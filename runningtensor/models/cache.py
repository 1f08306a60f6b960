"""What a model keeps between calls: a state and a window for each of our layers, keys and values for attention."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from runningtensor.layers.running_tensor import keep
from runningtensor.models.configuration_running_tensor import RunningTensorConfig


class TensorStateLayer(LinearAttentionLayer, CacheLayerMixin):
    """The window of the convolution and the state, always in the same memory: `LayerState`, as transformers sees it."""

    # It can be compiled. To say so would make `generate` compile wherever it finds a GPU, which is for users to decide.
    is_compileable = False

    def __init__(self, counter: "TensorStateLayer | None" = None) -> None:
        LinearAttentionLayer.__init__(self)
        CacheLayerMixin.__init__(self)
        self.counter = counter or self  # the layer that counts for all
        self.tokens: Tensor | None = None  # on the device: a compiled or captured step must count too

    def read(self) -> tuple[Tensor | None, Tensor | None]:
        return self.conv_states[0], self.recurrent_states[0]

    def write(self, conv: Tensor, state: Tensor, tokens: int) -> None:
        new = self.recurrent_states[0] is None
        self.conv_states[0] = keep(self.conv_states[0], conv)
        self.recurrent_states[0] = keep(self.recurrent_states[0], state)
        if new:
            self.device, self.dtype = state.device, conv.dtype
            self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
            self.has_previous_state[0] = True
            if self.counter is self:
                self.tokens = torch.zeros((), dtype=torch.long, device=state.device)
            if not torch.compiler.is_compiling():
                for held in (self.conv_states[0], self.recurrent_states[0], self.tokens):
                    if held is not None:
                        torch._dynamo.mark_static_address(held)
        if self.tokens is not None:
            self.tokens.add_(tokens)

    def get_seq_length(self) -> int:
        tokens = self.counter.tokens
        return 0 if tokens is None else int(tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a RunningTensor layer has no keys and values to append to: it is written by `write`")

    def reset(self) -> None:
        super().reset()  # a state and a window of zeros are those of a sequence that begins
        if self.tokens is not None:
            self.tokens.zero_()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.recurrent_states[0] is not None:
            self.conv_states[0] = self.conv_states[0].repeat_interleave(repeats, 0)
            self.recurrent_states[0] = self.recurrent_states[0].repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.recurrent_states[0] is not None:
            self.conv_states[0] = self.conv_states[0][indices]
            self.recurrent_states[0] = self.recurrent_states[0][indices]


class RunningTensorCache(Cache):
    """Give it to a model as `past_key_values`; a model that was given none makes its own."""

    def __init__(self, config: RunningTensorConfig) -> None:
        if not config.has_cache:
            raise ValueError(f"config must be of a model that has a cache, but its mixer was {config.mixer!r}")
        layers: list[TensorStateLayer | DynamicLayer] = []
        first = None
        for kind in config.layer_types:
            layer = DynamicLayer() if kind == "full_attention" else TensorStateLayer(first)
            first = first or (layer if isinstance(layer, TensorStateLayer) else None)
            layers.append(layer)
        super().__init__(layers=layers)
        # Attention layers count their tokens as a number: where there is one, nobody need wait for a device.
        self.counting = config.layer_types.index("full_attention") if "full_attention" in config.layer_types else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[self.counting].get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.layers[self.counting].get_mask_sizes(query_length)

    def reset(self) -> None:
        for i, layer in enumerate(self.layers):
            if isinstance(layer, DynamicLayer):
                self.layers[i] = DynamicLayer()  # older versions of transformers would keep its length
            else:
                layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if any(isinstance(layer, TensorStateLayer) for layer in self.layers):
            raise NotImplementedError(
                "a RunningTensor cache cannot be cropped: the state after fewer tokens is not in the state after more. "
                "Copy it (copy.deepcopy) at the token to come back to"
            )
        super().crop(tokens_to_remove)
