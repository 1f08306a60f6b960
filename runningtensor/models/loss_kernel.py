"""Cross entropy and its gradient in one go, as a Triton kernel: torch passes over the logits four times."""

import triton
import triton.language as tl


@triton.jit
def loss_kernel(logits, targets, losses, V: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    """A row of `loss.cross_entropies_`. A label that there is not makes the loss a NaN."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * V
    aim = tl.load(logits + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    o = tl.arange(0, BLOCK)
    most, total = float("-inf"), 0.0
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + o, mask=start + o < V, other=float("-inf")).to(tl.float32)
        before, most = most, tl.maximum(most, tl.max(x, 0))
        base = tl.where(most == float("-inf"), 0.0, most)  # where no logit so far is finite
        total = total * tl.exp(before - base) + tl.sum(tl.exp(x - base), 0)
    for start in range(0, V, BLOCK):
        inside = start + o < V
        x = tl.load(logits + start + o, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - most) / total - (start + o == target).to(tl.float32)
        tl.store(logits + start + o, y.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + row, tl.where(target == IGNORE, 0.0, most - aim + tl.log(total)))
