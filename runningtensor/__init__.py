"""Linear attention whose running memory is a tensor, not a matrix."""

from runningtensor.ops import running_tensor, running_tensor_step

__version__ = "0.1.0"
__all__ = ["running_tensor", "running_tensor_step"]
