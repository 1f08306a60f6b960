"""The recall task is zoology's: its layout, its distributions, and that it is the same everywhere."""

import pytest
import torch

from runningtensor.mqar.data import IGNORE, Task, validation

TASKS = (Task(64, 4), Task(128, 32, vocab_size=256), Task(48, 12, vocab_size=128, random_filler=False))
TASK = pytest.mark.parametrize("task", TASKS, ids=str)


def draw(task, batch=64, seed=0):
    return task.sample(batch, torch.Generator().manual_seed(seed))


@TASK
def test_pairs_come_first_and_no_key_or_value_twice(task):
    inputs, _ = draw(task)
    pairs = inputs[:, : 2 * task.pairs].unflatten(1, (task.pairs, 2))
    keys, values = pairs.unbind(-1)
    half = task.vocab_size // 2
    assert (keys >= 1).all() and (keys < half).all()
    assert (values >= half).all() and (values < task.vocab_size).all()
    for row in (*keys, *values):
        assert len(row.unique()) == task.pairs


@TASK
def test_every_key_is_asked_for_once_and_labels_are_its_value_there_and_nowhere_else(task):
    inputs, labels = draw(task)
    assert (labels[:, : 2 * task.pairs] == IGNORE).all()
    for row, label in zip(inputs, labels, strict=True):
        places = (label != IGNORE).nonzero()[:, 0]
        memory = dict(row[: 2 * task.pairs].view(-1, 2).tolist())
        assert sorted(row[places].tolist()) == sorted(memory)
        assert label[places].tolist() == [memory[key] for key in row[places].tolist()]
        assert ((places - 2 * task.pairs) % 2 == 0).all()


def test_what_is_left_is_random_or_zero():
    inputs, labels = draw(Task(64, 4))
    left = inputs[:, 8:][labels[:, 8:] == IGNORE]
    assert (left == 0).float().mean() < 0.01 and left.float().mean() == pytest.approx(4096, rel=0.05)
    inputs, labels = draw(Task(64, 4, random_filler=False))
    assert (inputs[:, 8:][labels[:, 8:] == IGNORE] == 0).all()


def test_slots_follow_the_power_law():
    # One pair: the slot is drawn by p itself.
    task = Task(44, 1)
    _, labels = draw(task, 20000)
    slots = ((labels != IGNORE).nonzero()[:, 1] - 2) // 2
    p = torch.arange(1, 22).double() ** (task.power - 1)
    found = torch.bincount(slots, minlength=21) / 20000
    assert torch.allclose(found.double(), p / p.sum(), atol=0.012)


def test_several_slots_are_a_sample_without_replacement():
    # Two of three slots: P(i, j) = p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j).
    task = Task(10, 2)
    _, labels = draw(task, 20000)
    slots = ((labels != IGNORE).nonzero()[:, 1] - 4).view(-1, 2) // 2
    p = torch.arange(1, 4).double() ** (task.power - 1)
    p /= p.sum()
    for i, j in ((0, 1), (0, 2), (1, 2)):
        want = p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j]))
        found = ((slots[:, 0] == i) & (slots[:, 1] == j)).double().mean()
        assert found == pytest.approx(want.item(), abs=0.012)


def test_a_validation_set_is_known_by_its_hash():
    *_, digest = validation(Task(64, 4), 100)
    assert digest == validation(Task(64, 4), 100)[1]
    assert digest != validation(Task(64, 4), 100, seed=1)[1]


@pytest.mark.parametrize("wrong", ({"length": 63}, {"pairs": 17}, {"pairs": 0}, {"vocab_size": 8}))
def test_a_task_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"but was|but were"):
        Task(**({"length": 64, "pairs": 4} | wrong))
