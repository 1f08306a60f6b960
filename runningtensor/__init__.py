"""Linear attention whose running memory is a tensor, not a matrix."""

from typing import TYPE_CHECKING, Any

from runningtensor.layers import RunningTensor
from runningtensor.ops import running_tensor, running_tensor_step

if TYPE_CHECKING:
    from runningtensor.models import RunningTensorConfig, RunningTensorForCausalLM, RunningTensorModel

__version__ = "0.1.0"
__all__ = [
    "RunningTensor",
    "RunningTensorConfig",
    "RunningTensorForCausalLM",
    "RunningTensorModel",
    "running_tensor",
    "running_tensor_step",
]


def __getattr__(name: str) -> Any:
    """The models, when they are asked for: they need transformers, which takes seconds to import."""
    if name in __all__:
        from runningtensor import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
