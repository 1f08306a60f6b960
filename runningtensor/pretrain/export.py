"""A checkpoint as a Hugging Face folder."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from runningtensor.models import RunningTensorConfig, RunningTensorForCausalLM
from runningtensor.pretrain.checkpoints import about, load


def export(checkpoint: Path, out: Path) -> bool:
    """The weights in float32, as they were trained; returns whether the run has a tokenizer, which then goes along."""
    with torch.device("meta"):
        model = RunningTensorForCausalLM(RunningTensorConfig(**about(checkpoint)["config"]))
    model.to_empty(device="cpu")
    model.tie_weights()
    load(checkpoint, {"model": {name: p.detach() for name, p in model.named_parameters()}}, alone=True)
    model.save_pretrained(out)
    tokenizer = checkpoint.parent / "tokenizer"
    if tokenizer.is_dir():
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)
    return tokenizer.is_dir()
