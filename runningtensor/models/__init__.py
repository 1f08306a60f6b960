"""Language models for Hugging Face transformers, known to its Auto classes once this is imported."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from runningtensor.models.cache import RunningTensorCache
from runningtensor.models.configuration_running_tensor import RunningTensorConfig
from runningtensor.models.modeling_running_tensor import RunningTensorForCausalLM, RunningTensorModel

AutoConfig.register(RunningTensorConfig.model_type, RunningTensorConfig, exist_ok=True)
AutoModel.register(RunningTensorConfig, RunningTensorModel, exist_ok=True)
AutoModelForCausalLM.register(RunningTensorConfig, RunningTensorForCausalLM, exist_ok=True)

__all__ = ["RunningTensorCache", "RunningTensorConfig", "RunningTensorForCausalLM", "RunningTensorModel"]
