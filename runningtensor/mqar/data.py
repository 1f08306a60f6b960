"""The task: key-value pairs first, then every key once more, somewhere; its value is to be predicted there.

As zoology makes it (Arora et al. 2023): tokens 1 to V/2-1 are keys and V/2 to V-1 are values, each at most once in a
sequence. `pairs` of them take the first 2·pairs places. What is left is cut into slots of two places; each key appears
again at the beginning of a slot, slots drawn without replacement by a power law with exponent a-1, so that most come
early. All other places hold random tokens, or zeros.
"""

import hashlib
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

IGNORE = -100  # no label


@dataclass(frozen=True)
class Task:
    length: int
    pairs: int
    vocab_size: int = 8192
    power: float = 0.01
    random_filler: bool = True

    def __post_init__(self) -> None:
        if self.length % 2 or self.length < 4 * self.pairs or self.pairs < 1:
            raise ValueError(
                "length must be even and at least 4 times pairs, and pairs at least 1, but were "
                f"{self.length} and {self.pairs}"
            )
        if self.vocab_size // 2 - 1 < self.pairs:
            raise ValueError(f"vocab_size must have a key for each of {self.pairs} pairs, but was {self.vocab_size}")

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels [batch,length], drawn on the generator's device."""
        drawn = self.draw(batch, generator)
        return drawn[0], labels_of(*drawn)

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs [batch,length], and where and what is to be predicted [batch,pairs]."""
        device, half = generator.device, self.vocab_size // 2

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=device)

        def without_replacement(count: int) -> Tensor:
            return uniform(batch, count).topk(self.pairs).indices

        keys = 1 + without_replacement(half - 1)
        values = half + without_replacement(self.vocab_size - half)
        slots = (self.length - 2 * self.pairs) // 2
        # The largest of log p + Gumbel noise are a sample without replacement.
        noise = -torch.log(-torch.log(uniform(batch, slots).double().clamp(1e-300, 1 - 1e-16)))
        places = 2 * self.pairs + 2 * (log_weights(slots, self.power, device) + noise).topk(self.pairs).indices

        inputs = torch.zeros(batch, self.length, dtype=torch.long, device=device)
        inputs[:, 0 : 2 * self.pairs : 2], inputs[:, 1 : 2 * self.pairs : 2] = keys, values
        inputs.scatter_(1, places, keys)
        if self.random_filler:
            filler = torch.randint(self.vocab_size, inputs.shape, generator=generator, device=device)
            inputs = torch.where(inputs == 0, filler, inputs)
        return inputs, places, values


@cache
def log_weights(slots: int, power: float, device: torch.device) -> Tensor:
    return (torch.arange(1, slots + 1, device=device).double() ** (power - 1)).log()


def labels_of(inputs: Tensor, places: Tensor, values: Tensor) -> Tensor:
    return torch.full_like(inputs, IGNORE).scatter_(1, places, values)


def validation(task: Task, count: int, seed: int = 2**31) -> tuple[tuple[Tensor, Tensor, Tensor], str]:
    """A fixed set, drawn on the CPU so that it is the same everywhere, and a hash that identifies it."""
    drawn = task.draw(count, torch.Generator().manual_seed(seed))
    content = drawn[0].numpy().tobytes() + labels_of(*drawn).numpy().tobytes()
    return drawn, hashlib.sha256(content).hexdigest()[:16]
