"""Steps on torch's own engine: FSDP2 on a process group, also where the group is this process alone.

What a step computes does not depend on the number of ranks, except by rounding: weights are drawn from the seed and
their names, a batch from its position, and the loss is divided by the labels of the whole batch.
"""

import copy
import gc
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from runningtensor.layers.decay import decay_groups
from runningtensor.models import RunningTensorConfig, RunningTensorForCausalLM
from runningtensor.ops.interface import known_packing
from runningtensor.pretrain.data import IGNORE, Packed, Shards, pack
from runningtensor.pretrain.recipes import Recipe, configuration

# -- Ranks -------------------------------------------------------------------------------------------------------------


@contextmanager
def process_group(recipe: Recipe) -> Iterator[tuple[torch.device, DeviceMesh]]:
    """That of torchrun, or one of this process alone; and how a model lies on it."""
    kind = recipe.device if recipe.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu or auto where there is no GPU, but was cuda")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = dist.get_world_size()
        if recipe.batch % ranks:
            raise ValueError(f"batch must be a multiple of the number of ranks, {ranks}, but was {recipe.batch}")
        if ranks % recipe.replicate:
            raise ValueError(f"replicate must divide the number of ranks, {ranks}, but was {recipe.replicate}")
        if recipe.replicate == 1:
            yield device, init_device_mesh(kind, (ranks,))
        else:
            shape = (recipe.replicate, ranks // recipe.replicate)
            yield device, init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    finally:
        gc.collect()  # a sharded model is a cycle; what it holds of the group must be gone before the group is
        dist.destroy_process_group()


def leave_with(parent: int) -> None:
    """Ranks outlive a torchrun that was killed, and nobody could start the run again beside them."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


# -- The model ---------------------------------------------------------------------------------------------------------


class Predictor(nn.Module):
    """The sum of a packed batch's losses. FSDP wants one module whose forward is all there is to do."""

    def __init__(self, lm: RunningTensorForCausalLM) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        hidden = self.lm.model(input_ids, cu_seqlens=cu_seqlens, use_cache=False).last_hidden_state
        return self.lm.chunked_loss(hidden.flatten(0, 1), labels.flatten(), 1)


def build(config: RunningTensorConfig, recipe: Recipe, device: torch.device, mesh: DeviceMesh) -> Predictor:
    """Made without weights, sharded, and only then given memory: no device ever holds the whole model."""
    with torch.device("meta"):
        lm = RunningTensorForCausalLM(copy.deepcopy(config))
    if recipe.activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=dtype_on(recipe, device), reduce_dtype=torch.float32)
    if recipe.compile:  # layers are one function to it, for rows and batches, with and without gradients, of few sizes
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for layer in lm.model.layers:
        if recipe.compile:
            layer.compile()
        if mesh.size() > 1:  # alone there is nothing to gather a layer at a time, which is a fifth of the host's work
            # With one shard, to gather a layer is only to copy it: not again for the backward pass.
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=mesh.size(-1) > 1)
    model = Predictor(lm)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    lm.tie_weights()
    initialise(lm, recipe.seed)
    return model.train()


def dtype_on(recipe: Recipe, device: torch.device) -> torch.dtype:
    if recipe.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, recipe.dtype)


@torch.no_grad()
def initialise(lm: RunningTensorForCausalLM, seed: int) -> None:
    """Each rank draws every part whole, from the seed and the part's name, and keeps its share of it.

    So weights are the same on any number of ranks, nothing is sent, and memory holds one part, in float32 on the CPU.
    """
    with torch.device("meta"):
        whole = RunningTensorForCausalLM(copy.deepcopy(lm.config))
    shares = dict(lm.named_parameters())
    parts = {f"model.layers.{i}": layer for i, layer in enumerate(whole.model.layers)}
    parts |= {"model.embed_tokens": whole.model.embed_tokens, "model.norm": whole.model.norm}
    parts |= {} if lm.config.tie_word_embeddings else {"lm_head": whole.lm_head}
    for name, part in parts.items():
        part.to_empty(device="cpu")
        torch.manual_seed(hashed(seed, name))
        part.apply(whole._init_weights)
        for key, drawn in part.named_parameters(name):
            share = shares.pop(key)
            assert isinstance(share, DTensor)
            mine = distribute_tensor(drawn, share.device_mesh, share.placements, src_data_rank=None)
            share.to_local().copy_(mine.to_local())
        part.to_empty(device="meta")
    assert not shares, f"parameters that nobody drew: {', '.join(shares)}"


def hashed(*what: object) -> int:
    return int.from_bytes(hashlib.sha256(" ".join(map(str, what)).encode()).digest()[:7])


# -- Steps -------------------------------------------------------------------------------------------------------------


class Launched:
    """Numbers of a step that the device may still be at work on: they are on their way when this is made."""

    def __init__(self, step: int, lr: float, begun: Any, numbers: Tensor) -> None:
        self.step, self.lr, self.begun, self.numbers = step, lr, begun, numbers
        if numbers.is_cuda:
            # Now, not when they are read: the copy would wait for the next step, which will have been launched.
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
        self.ended = now(numbers.device)

    def read(self) -> tuple[list[float], float]:
        """The numbers, and the seconds that the step took."""
        if isinstance(self.ended, float):
            return self.numbers.tolist(), self.ended - self.begun
        self.ended.synchronize()
        return self.numbers.tolist(), self.begun.elapsed_time(self.ended) / 1000


def now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Trainer:
    """A model, its optimiser and its data. No method but `validate` waits for the device."""

    def __init__(self, recipe: Recipe, train: Shards, steps: int, device: torch.device, mesh: DeviceMesh) -> None:
        self.recipe, self.train, self.steps, self.device = recipe, train, steps, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.config = configuration(recipe, train.vocab_size, train.eos)
        self.model: Any = build(self.config, recipe, device, mesh)
        self.parameters = dict(self.model.lm.named_parameters())
        # Fused, for it can leave a step out by a number on the device, which nobody has to wait for.
        self.optimizer: Any = torch.optim.AdamW(
            decay_groups(self.parameters.values(), recipe.weight_decay), recipe.lr, recipe.betas, fused=True
        )
        for p in self.parameters.values():  # as it would itself at the first step: a checkpoint is read into these
            self.optimizer.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": {name: self.optimizer.state[p] for name, p in self.parameters.items()},
        }

    def parts(self, shards: Shards, position: int, count: int) -> list[Packed]:
        """This rank's share of `count` sequences from a position on, packed, a few at a time."""
        share, length, few = -(-count // self.ranks), self.recipe.length, self.recipe.sequences
        windows = shards.batch(position, share, length, rank=self.rank, ranks=self.ranks)
        packed = [pack(part, shards.eos) for part in windows.split(few)]
        if self.rank + self.ranks * (share - 1) >= count:  # one more than there is, as other ranks have as many
            packed[-1].labels[:, -length:] = IGNORE
        return packed

    def to_device(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

    def summed_loss(self, part: Packed) -> Tensor:
        input_ids, labels, cu_seqlens = map(self.to_device, part)
        if len(cu_seqlens) - 1 == input_ids.shape[1] // self.recipe.length:  # nothing ends within a window
            # A batch: torch has faster attention for it than for a row, and ours has less to look at.
            return self.model(*(x.unflatten(1, (-1, self.recipe.length))[0] for x in (input_ids, labels)), None)
        return self.model(input_ids, labels, known_packing(cu_seqlens, part.cu_seqlens))

    def launch(self, step: int, stop: bool) -> Launched:
        """One step of the optimiser. `stop` is this rank's wish, and its sum over ranks is among the numbers."""
        # Whatever is random in a step follows from its number: generators need no place in a checkpoint.
        torch.manual_seed(hashed(self.recipe.seed, step, self.rank))
        begun, lr = now(self.device), self.recipe.rate(step, self.steps)
        parts = self.parts(self.train, step * self.recipe.batch, self.recipe.batch)
        labels = sum(int((part.labels != IGNORE).sum()) for part in parts)
        totals = self.to_device(torch.tensor([labels, stop]))
        dist.all_reduce(totals)
        loss = torch.zeros((), device=self.device)
        for i, part in enumerate(parts):
            # Sharded gradients are summed over shards each time, which saves memory, and over replicas once.
            self.model.set_requires_all_reduce(i == len(parts) - 1)
            summed = self.summed_loss(part)
            (summed * (self.ranks / totals[0])).backward()  # FSDP divides by the number of ranks
            loss += summed.detach()
        dist.all_reduce(loss)
        loss /= totals[0]

        norm = get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        skip = ~(loss.isfinite() & norm.isfinite())
        clip_grads_with_norm_(self.parameters.values(), self.recipe.clip, norm)
        self.optimizer.found_inf = skip.float()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Launched(step, lr, begun, torch.stack([x.double() for x in (loss, norm, skip, totals[1])]))

    @torch.no_grad()
    def validate(self, shards: Shards) -> float:
        """The loss of the same windows each time, whatever the number of ranks."""
        count = min(self.recipe.validation_sequences, shards.windows(self.recipe.length))
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        for part in self.parts(shards, 0, count):
            totals[0] += self.summed_loss(part)
            totals[1] += int((part.labels != IGNORE).sum())
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward nothing else does
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])
