"""RunningTensor models in vLLM, which finds this by its entry point `vllm.general_plugins`."""


def register() -> None:
    """Called by vLLM in each of its processes, before it knows which model it will run."""
    from vllm import ModelRegistry

    import runningtensor.models  # noqa: F401  makes the configuration known to transformers

    # By name: vLLM wants to import models itself, once it has chosen its devices.
    ModelRegistry.register_model("RunningTensorForCausalLM", "runningtensor.serve.vllm.model:RunningTensorForVLLM")
