"""A run on the recall task learns, tests on a fixed set, and repeats with its seed."""

import pytest
import torch

from runningtensor.layers.baselines import BASELINES
from runningtensor.mqar.data import Task
from runningtensor.mqar.train import Recall, Run, train

EASY = Task(16, 2, vocab_size=16)
TINY = {"num_heads": 1, "key_dims": (6, 6), "value_dim": 8}


def run(**changes):
    given = {"mixer": "running_tensor", "options": TINY, "tasks": (EASY,), "test": EASY, "d_model": 24, "steps": 6}
    return Run(**(given | {"batch": 32, "test_every": 3, "test_count": 64, "lr": 1e-2, "embedding_std": 0.1} | changes))


def last(found):
    *_, result = found
    return result


def test_a_run_learns_an_easy_task():
    result = last(train(run(steps=250, test_every=50, batch=64), torch.device("cpu")))
    assert result.curve[0].accuracy < 0.9 < result.accuracy  # two pairs: chance is a half at best
    assert result.steps_to(0.9) is not None and result.steps_to(1.01) is None


def test_a_run_repeats_with_its_seed():
    first, again, other = (last(train(run(seed=seed), torch.device("cpu"))) for seed in (0, 0, 1))
    assert [point.loss for point in first.curve] == [point.loss for point in again.curve]
    assert [point.loss for point in first.curve] != [point.loss for point in other.curve]
    assert first.validation == other.validation


def test_a_run_tests_as_often_as_asked_and_stops_when_it_is_good_enough():
    found = last(train(run(steps=7), torch.device("cpu")))
    assert [point.step for point in found.curve] == [3, 6, 7]
    assert [point.step for point in last(train(run(stop_at=0.0), torch.device("cpu"))).curve] == [3]


@pytest.mark.parametrize("mixer", ("running_tensor", *BASELINES))
def test_every_mixer_can_be_trained(mixer):
    result = last(train(run(mixer=mixer, options={} if mixer != "running_tensor" else TINY, d_model=32, steps=3)))
    assert len(result.curve) == 1 and result.curve[0].loss < 10


def test_nothing_is_predicted_but_what_has_a_label():
    model = Recall(run())
    tokens, labels = EASY.sample(4, torch.Generator().manual_seed(0))
    assert model.logits(tokens, labels >= 0).shape == (4 * EASY.pairs, EASY.vocab_size)
