from runningtensor.ops.interface import running_tensor
from runningtensor.ops.step import running_tensor_step

__all__ = ["running_tensor", "running_tensor_step"]
