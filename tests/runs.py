"""Tiny runs on the recall task."""

import torch

from runningtensor.mqar.data import Task
from runningtensor.mqar.train import Run

CPU = torch.device("cpu")
EASY = Task(16, 2, vocab_size=16)
LONGER = Task(32, 4, vocab_size=16)
TINY = {"num_heads": 1, "key_dims": (6, 6), "value_dim": 8}


def run(**changes):
    given = {"mixer": "running_tensor", "options": TINY, "tasks": (EASY,), "test": EASY, "d_model": 24, "steps": 6}
    return Run(**(given | {"batch": 32, "test_every": 3, "test_count": 64, "lr": 1e-2, "embedding_std": 0.1} | changes))


def last(found):
    *_, result = found
    return result


def losses(result):
    return [point.loss for point in result.curve]
