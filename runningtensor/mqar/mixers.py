"""The mixers a run can name."""

from collections.abc import Callable
from importlib import import_module

from torch import Tensor, nn

from runningtensor.layers import BASELINES, RunningTensor


class TiedKeys(RunningTensor):
    """RunningTensor of order 3 whose second key and query are the first: r = k, u = q.

    That is power attention of degree 2 with a delta rule. Built as the layer of order 2, whose channels it has.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, key_dim: int = 24, value_dim: int = 48) -> None:
        super().__init__(hidden_size, num_heads, (key_dim,), value_dim)

    @property
    def order(self) -> int:
        return 3

    @property
    def widths(self) -> tuple[int, ...]:
        return super().widths * 2

    def front(
        self, source: Tensor, T: int, position: Tensor | None, mask: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        queries, keys, values, beta, log_decay, scale, gate = super().front(source, T, position, mask)
        return queries * 2, keys * 2, values, beta, log_decay, scale, gate


MIXERS: dict[str, Callable[..., nn.Module]] = {
    "running_tensor": RunningTensor,
    "running_tensor_tied": TiedKeys,
    **BASELINES,
}


def mixer(name: str) -> Callable[..., nn.Module]:
    """One of those, or module:name of one's own: name(d_model, **options) is a module that takes and returns
    [B,T,d_model], or a tuple that begins with it. It may say how many floats its state has, state_floats.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return MIXERS[name]
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"mixer must be package.module:name of what can be imported, but was {name!r}: {error}"
        ) from error
