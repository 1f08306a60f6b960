"""A run on the recall task learns, tests on a fixed set, repeats with its seed, and is one line of JSON."""

import json
import math
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.layers import RunningTensor
from runningtensor.mqar import train as training
from runningtensor.mqar.data import IGNORE, Task, labels_of, validation
from runningtensor.mqar.mixers import MIXERS, TiedKeys
from runningtensor.mqar.record import from_json, identity, to_json
from runningtensor.mqar.train import Batch, Clock, Recall, Trainer, score, train
from runs import CPU, EASY, LONGER, TINY, last, losses, run


def test_times_of_steps_are_taken_when_the_device_is_its_own_and_without_the_wait_for_it():
    waits, usual = [], last(train(run(steps=5, test_every=5), CPU))
    timed = last(train(run(steps=5, test_every=5), CPU, alone=lambda: waits.append(time.sleep(0.5))))
    assert len(waits) == 1 and timed.ms_a_step < 500 and timed.curve[-1].loss == usual.curve[-1].loss
    assert timed.origin["at_once"] == 1 and "at_once" not in usual.origin


def test_tied_embeddings_may_be_large_at_the_input_and_give_the_logits_of_small_ones():
    torch.manual_seed(0)
    small, large = (Recall(run(embedding_std=0.02 * n, last_gain=1 / n)) for n in (1, 5))
    assert torch.allclose(large.norm.weight, small.norm.weight / 5)
    large.load_state_dict(small.state_dict() | {"norm.weight": large.norm.weight})
    large.embedding.weight.data *= 5
    for model in (small, large):
        model.blocks = torch.nn.ModuleList()  # at first they write little
    tokens, places = torch.arange(16)[None], torch.zeros(1, 1, dtype=torch.long)
    assert torch.allclose(small.logits(tokens, places), large.logits(tokens, places), rtol=0.02, atol=1e-4)


def test_few_tokens_a_step_do_not_make_tests_slow_and_a_small_batch_bounds_them():
    few = run(tasks=(EASY, LONGER), test=LONGER, tokens_a_step=64)
    assert few.tested_at_once(LONGER) == 65536 // LONGER.length
    assert run(tasks=(EASY,), test=EASY, batch=3).tested_at_once(EASY) == 3


@pytest.mark.parametrize("mixer", ("running_tensor", "attention", "gla"))
def test_matrices_are_drawn_as_wide_as_asked_and_narrower_where_they_write_into_the_stream(mixer):
    options = {"projection": "linear"} if mixer == "running_tensor" else {}
    models = []
    for std in (None, 0.02):
        torch.manual_seed(0)
        models.append(Recall(run(mixer=mixer, options=options, d_model=128, layers=2, matrix_std=std)))
    for (name, plain), (_, drawn) in zip(*(model.state_dict().items() for model in models), strict=True):
        if name.endswith(("out_proj.weight", "down.weight")):
            assert drawn.std() == pytest.approx(0.02 / 2, rel=0.05)
        elif name.endswith(("proj.weight", "projection.weight", "gate.weight", "up.weight")):
            assert drawn.std() == pytest.approx(0.02, rel=0.05)
        elif name.endswith("proj.bias"):
            assert not drawn.any()
        else:  # embeddings, rates, convolutions, norms
            assert torch.equal(drawn, plain)


def test_a_run_learns_an_easy_task():
    result = last(train(run(steps=250, test_every=25, layers=1, lr=2e-2, stop_at=0.9), CPU))
    assert result.curve[0].accuracy < 0.9 <= result.accuracy  # two pairs: chance is a half at best
    assert result.steps_to(0.9) is not None and result.steps_to(1.01) is None


def test_a_run_repeats_with_its_seed():
    first, again, other = (last(train(run(seed=seed), CPU)) for seed in (0, 0, 1))
    assert losses(first) == losses(again)
    assert losses(first) != losses(other)
    assert first.validation == other.validation


def test_a_run_tests_as_often_as_asked_and_stops_when_it_is_good_enough():
    found = last(train(run(steps=7), CPU))
    assert [point.step for point in found.curve] == [3, 6, 7]
    assert [point.step for point in last(train(run(stop_at=0.0), CPU)).curve] == [3]


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_can_be_trained(mixer):
    result = last(train(run(mixer=mixer, options=TINY if mixer == "running_tensor" else {}, d_model=32, steps=3), CPU))
    assert len(result.curve) == 1 and result.curve[0].loss < 10


def test_nothing_is_predicted_but_what_has_a_label():
    model = Recall(run())
    tokens, labels = EASY.sample(4, torch.Generator().manual_seed(0))
    _, places, wanted = EASY.draw(4, torch.Generator().manual_seed(0))
    assert model.logits(tokens, places).shape == (4, EASY.pairs, EASY.vocab_size)
    assert labels.gather(1, places).equal(wanted) and (wanted != IGNORE).all()
    everywhere = model(tokens) @ model.embedding.weight.T
    assert torch.allclose(model.logits(tokens, places)[2, 1], everywhere[2, places[2, 1]], atol=1e-6)


# -- A step ------------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_a_plain_training_loop():
    how = run(weight_decay=0.1, clip=0.5, steps=5, schedule="cosine")
    trainer, batch = Trainer(how, CPU, graph=True), Batch(EASY, 32, CPU)
    torch.manual_seed(how.seed)
    model = Recall(how)
    matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) is two] for two in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, foreach=False)
    generator = torch.Generator().manual_seed(7)
    for step in range(1, 6):
        x, places, values = EASY.draw(32, generator)
        y = labels_of(x, places, values)
        batch.fill(x, places, values)
        trainer.step(batch, how.rate(step))
        for group in optimizer.param_groups:
            group["lr"] = how.rate(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x)[y != IGNORE] @ model.embedding.weight.T, y[y != IGNORE])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert trainer.loss.item() == pytest.approx(loss.item(), rel=1e-4)
    for p, want in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, want, atol=2e-3)


def test_compiled_it_makes_the_same_steps_and_layers_and_numbers_of_pairs_share_what_is_compiled():
    fewer = replace(EASY, pairs=EASY.pairs - 1)
    count = CompileCounterWithBackend("aot_eager")
    losses = []
    for compiled in (False, True):
        trainer = Trainer(run(layers=3), CPU, graph=True)
        if compiled:
            trainer.compile(backend=count)
        for task in (EASY, fewer):
            batch = Batch(task, 8, CPU)
            batch.fill(*task.draw(8, torch.Generator().manual_seed(0)))
            trainer.step(batch, 1e-2)
            losses.append(trainer.loss.item())
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-6)
    assert count.frame_count == 5  # embeddings, a layer, the last norm, and the loss for each number of pairs
    training.test(trainer.model, EASY, validation(EASY, 4)[0], 4)
    assert count.frame_count == 5


def test_what_a_graph_would_read_stays_where_it_is():
    trainer, batch = Trainer(run(), CPU, graph=True), Batch(EASY, 4, CPU)
    held = (batch.tokens, batch.labels, batch.places, trainer.rate, trainer.loss, *trainer.parameters)
    before = [x.data_ptr() for x in held]
    for given in (EASY.draw(4, torch.Generator().manual_seed(seed)) for seed in range(3)):
        batch.fill(*given)
        trainer.step(batch, 1e-3)
        assert all(a.equal(b) for a, b in zip((batch.tokens, batch.places, batch.labels), given, strict=True))
    assert [x.data_ptr() for x in held] == before


def test_small_updates_of_a_bfloat16_model_are_not_lost():
    trainer, batch = Trainer(run(dtype="bfloat16"), CPU, graph=True), Batch(EASY, 8, CPU)
    batch.fill(*EASY.draw(8, torch.Generator().manual_seed(0)))
    before = [master.clone() for master in trainer.masters]
    for _ in range(3):
        trainer.step(batch, 1e-6)
    matrix, master = trainer.model.blocks[0].up.weight, trainer.masters
    assert matrix.dtype == torch.bfloat16 and trainer.model.norm.weight.dtype == torch.float32
    assert all(x.dtype == torch.float32 and not x.equal(y) for x, y in zip(master, before, strict=True))
    assert all(p.equal(x.to(p.dtype)) for p, x in zip(trainer.parameters, master, strict=True))


def test_batches_may_be_given_in_tokens(monkeypatch):
    seen = set()
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, b, rate: seen.add(tuple(b.tokens.shape)) or step(self, b, rate))
    result = last(train(run(tasks=(EASY, LONGER), test=LONGER, tokens_a_step=64), CPU))
    assert seen == {(4, 16), (2, 32)}
    assert len(result.curve) == 2


def test_a_task_that_is_there_twice_is_drawn_twice_as_often(monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "step", lambda self, batch, rate: seen.append(batch.task) or True)
    last(train(run(tasks=(EASY, EASY, LONGER), steps=300, test_every=300, batch=1), CPU))
    assert seen.count(EASY) == pytest.approx(200, abs=30)


def test_the_cosine_rises_shortly_and_falls_to_nothing():
    how = run(steps=1000, schedule="cosine", lr=2.0)
    assert how.rate(1) < 0.05 and how.rate(101) == pytest.approx(2, rel=0.05) and how.rate(1000) < 1e-4
    assert how.rate(501) == pytest.approx(1.0)
    assert {run(lr=2.0).rate(step) for step in (1, 3, 6)} == {2.0}
    slow = replace(how, warm_up=400)
    assert slow.rate(100) == pytest.approx(how.rate(100) / 4) and slow.rate(401) == how.rate(401)


def test_times_are_of_usual_steps_and_not_of_what_lies_between(monkeypatch):
    now = iter((0, 9, 10, 12, 100, 101, 103)).__next__
    monkeypatch.setattr(training.time, "perf_counter", lambda: now() / 1e3)
    clock = Clock(CPU)
    for usual in (False, False, True, True):  # at 0, 9, 10 and 12
        clock.mark(usual)
    assert clock.read() == pytest.approx(1.5)
    for usual in (False, True, True):  # at 100, 101 and 103
        clock.mark(usual)
    assert clock.read() == pytest.approx(1.5)
    assert clock.ms == pytest.approx([1, 2, 1, 2])


OWN = """
import torch
from torch import nn


class Average(nn.Module):
    def __init__(self, d_model, *, gain):
        super().__init__()
        self.out = nn.Linear(d_model, d_model)
        self.gain = gain

    def forward(self, x):
        return (self.out(self.gain * x.cumsum(1)),)


class Bare(Average):
    def forward(self, x):
        return super().forward(x)[0]


class Narrow(Average):
    def forward(self, x):
        return (super().forward(x)[0][..., :1],)


class Named(Average):
    def forward(self, x):
        return {"out": super().forward(x)[0]}


class Mixed(Average):  # what rounds or refuses where all or some of it is made bfloat16
    def __init__(self, d_model):
        super().__init__(d_model, gain=0.1)
        self.conv = nn.Conv1d(d_model, d_model, 3, padding=2)
        self.scale = nn.Parameter(torch.ones(d_model))
        self.rest = nn.GRU(d_model, d_model, batch_first=True)
        self.register_buffer("turn", torch.eye(d_model).flip(0))
        self.frozen = nn.Parameter(torch.ones(d_model), requires_grad=False)

    def forward(self, x):
        x = self.conv(x.mT)[..., : x.shape[1]].mT @ self.turn
        return super().forward(self.rest(x * self.scale * self.frozen)[0])


class Dropping(Average):
    def forward(self, x):
        assert self.training == torch.is_grad_enabled()
        return super().forward(x)


class Broken(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        len(d_model)


def closed(d_model):
    layer = nn.Linear(d_model, d_model)
    return lambda x: layer(x)


number = 3
"""
GAIN: dict = {"gain": 0.1}


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_mixers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name, options=GAIN, **more: run(mixer=f"own_mixers:{name}", options=options, **more)
    sys.modules.pop("own_mixers", None)


def test_a_mixer_of_ones_own_is_named_by_its_module(own):
    mine = own("Average")
    result = last(train(mine, CPU))
    assert result.finished and result.state_floats is None and losses(result)[-1] < losses(result)[0]
    other = replace(mine, mixer="elsewhere:Average")
    assert from_json(to_json(training.Result(other, 0, None))).run == other  # read where it is not
    with pytest.raises(ValueError, match=r"package\.module:name of what can be imported, but was 'elsewhere:Average'"):
        Recall(other)


def test_a_mixer_may_return_a_tensor_or_a_tuple_that_begins_with_one(own):
    found, tokens = [], torch.arange(32).view(2, 16) % 8
    for name in ("Average", "Bare"):
        torch.manual_seed(0)
        found.append(Recall(own(name))(tokens))
    assert torch.equal(*found)


def test_options_are_those_that_are_read_again():
    mine = run(options=TINY | {"key_dims": [6, 6]})
    assert mine == run(options=TINY | {"key_dims": (6, 6)}) == from_json(to_json(training.Result(mine, 0, None))).run


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Narrow", GAIN, r"mixer must return as much as it was given, \[2, 16, \d+\], but it was \[2, 16, 1\]"),
        ("Named", GAIN, "mixer must return a tensor, or a tuple that begins with one, but it was a dict"),
        ("Average", {}, r"options must fit own_mixers:Average, but were {}: missing a required .*'gain'"),
        ("closed", {}, "mixer must make a torch.nn.Module, but 'own_mixers:closed' made a function"),
        (
            "number",
            {},
            "mixer must be a class or a function that makes a layer, but 'own_mixers:number' is of type int",
        ),
    ],
)
def test_what_is_no_mixer_is_refused(own, name, options, said):
    with pytest.raises(ValueError, match=said):
        Recall(own(name, options))(torch.arange(32).view(2, 16) % 8)


def test_what_goes_wrong_within_a_mixer_of_ones_own_is_not_blamed_on_its_options(own):
    with pytest.raises(TypeError, match="has no len"):
        Recall(own("Broken", {}))


def test_a_mixer_of_ones_own_need_not_know_bfloat16(own):
    model = Trainer(mine := own("Mixed", {}, dtype="bfloat16"), CPU, graph=False).model
    assert {p.dtype for p in model.blocks[0].mixer.parameters()} == {torch.float32}
    assert model.blocks[0].up.weight.dtype == model(torch.zeros(2, 16, dtype=torch.long)).dtype == torch.bfloat16
    result = last(train(mine, CPU))
    assert result.dtype == "bfloat16" and losses(result)[-1] < losses(result)[0]


def test_what_is_frozen_stays(own):
    trainer = Trainer(mine := own("Mixed", {}), CPU, graph=False)
    batch = Batch(mine.test, 2, CPU)
    batch.fill(*mine.test.draw(2, torch.Generator().manual_seed(0)))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.step(batch, 0.1)
    stayed = {name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])}
    assert stayed == {f"blocks.{i}.mixer.layer.frozen" for i in range(mine.layers)}


def test_a_test_is_no_training(own):
    assert last(train(own("Dropping"), CPU)).finished  # it looks itself


def test_an_interrupted_run_is_printed_as_far_as_it_came(tmp_path, monkeypatch):
    def interrupted(*_):
        yield from [last(train(run(), CPU))]
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
    out = tmp_path / "runs.jsonl"
    found = CliRunner().invoke(app, ["mqar", "train", "--device", "cpu", "--d-model", "8", "--out", str(out)])
    assert found.exit_code == 130 and from_json(found.stdout).curve and not out.read_text()
    assert "Stopped after step 6 of 1,000; not finished, and not appended" in found.stderr


# -- What is recorded --------------------------------------------------------------------------------------------------


def test_macro_f1_is_the_mean_over_classes_that_occur_as_labels():
    found = score(torch.tensor([1, 1, 2, 3]), torch.tensor([1, 2, 2, 1]), 5)
    assert found.accuracy == 0.5
    assert found.macro_f1 == pytest.approx((1 / 2 + 2 / 3) / 2)  # 3 is guessed but never right, 4 is nowhere


def test_a_record_says_all_that_is_needed_to_repeat_it_and_reads_back():
    result = last(train(run(tasks=(EASY, LONGER), also=(LONGER,), tokens_a_step=128, schedule="cosine"), CPU))
    line = to_json(result)
    assert "\n" not in line
    assert identity(from_json(line).run) == identity(result.run)
    assert from_json(line) == result
    again = last(train(from_json(line).run, CPU))
    assert losses(again) == losses(result) and again.validation == result.validation
    record = json.loads(line)
    assert {"commit", "device", "torch", "triton", "python"} <= record["origin"].keys()
    assert record["accuracy"] == result.accuracy and record["macro_f1"]["last"] == result.curve[-1].macro_f1
    assert record["id"] == identity(result.run)
    assert len(record["validation"].split()) == 2 and record["finished"] and record["ms_a_step"] > 0


def test_a_run_of_a_file_can_be_repeated_by_the_beginning_of_its_id(tmp_path):
    found = [last(train(run(seed=seed, steps=3), CPU)) for seed in (0, 1)]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(to_json(result) + "\n" for result in found))
    key = identity(found[1].run)
    again = CliRunner().invoke(app, ["mqar", "repeat", str(file), key[:8], "--device", "cpu"])
    assert again.exit_code == 0 and losses(from_json(again.stdout)) == losses(found[1])
    listed = CliRunner().invoke(app, ["mqar", "repeat", str(file)])
    assert listed.exit_code == 0 and [line[:16] for line in listed.stdout.splitlines()] == [
        identity(result.run) for result in found
    ]
    wrong = CliRunner().invoke(app, ["mqar", "repeat", str(file), "nonsense"])
    assert wrong.exit_code == 1 and "'nonsense' begins that of 0" in wrong.stderr


def test_only_the_last_of_the_results_is_finished():
    assert [bool(result.finished) for result in train(run(), CPU)] == [False, True]


def test_runs_are_the_same_only_if_all_of_them_is():
    assert identity(run()) == identity(run(options=dict(TINY)))
    others = [
        run(seed=1),
        run(lr=2e-2),
        run(also=(LONGER,)),
        run(options=TINY | {"delta": False}),
        run(tasks=(LONGER,)),
    ]
    assert len({identity(other) for other in (run(), *others)}) == 6


def test_a_loss_that_is_not_finite_ends_the_run_and_is_recorded():
    result = last(train(run(lr=1e38, steps=30), CPU))
    assert result.curve[-1].step == 3 and result.finished
    assert result.failed.startswith("the loss was not finite at step ") and int(result.failed.split()[-1]) in (2, 3)
    back = from_json(to_json(result))
    assert math.isnan(back.curve[-1].loss) and back.failed == result.failed


def test_parameters_are_counted_without_embeddings():
    result = last(train(run(steps=1), CPU))
    model = Recall(run())
    everything = sum(p.numel() for p in model.parameters())
    assert result.model_parameters == everything - model.embedding.weight.numel()
    assert result.model_parameters == 2 * result.parameters + 24  # two layers and the last norm
    assert result.state_floats == 7 * 7 * 8


def test_the_score_at_a_length_is_the_best_of_that_test():
    result = last(train(run(also=(LONGER,)), CPU))
    assert result.at(16).accuracy == result.accuracy
    assert result.at(32).accuracy == max(point.also[0].accuracy for point in result.curve)


@pytest.mark.parametrize(
    ("wrong", "match"),
    (
        ({"mixer": "lstm"}, "mixer must be one of running_tensor"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, but was 'linear'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"tasks": ()}, "tasks must hold"),
        ({"tasks": (Task(16, 2, vocab_size=32),)}, "vocab_size must be 16"),
        ({"tokens_a_step": 15}, "tokens_a_step must be at least the longest length, 16, but was 15"),
        ({"steps": 0}, "steps must be at least 1, but was 0"),
        ({"warm_up": 0}, "warm_up must be at least 1, or None, but was 0"),
        ({"matrix_std": -0.1}, "matrix_std must be at least 0 and finite, but was -0.1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0 and finite, but was -1.0"),
        ({"lr": math.inf}, "lr must be positive and finite, but was inf"),
        ({"stop_at": 99.95}, "stop_at must be from 0 to 1, or at most 2 for never, but was 99.95"),
        ({"stop_at": math.nan}, "stop_at must be"),
    ),
)
def test_a_run_that_cannot_be_is_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        run(**wrong)


# -- Tied keys ---------------------------------------------------------------------------------------------------------


def test_tied_keys_are_the_layer_of_order_3_with_equal_keys_and_queries():
    torch.manual_seed(0)
    tied, free = TiedKeys(16, 2, 6, 8), RunningTensor(16, 2, (6, 6), 8)
    x = torch.randn(2, 20, 16)
    free.out_proj.load_state_dict(tied.out_proj.state_dict())
    queries, keys, *rest = RunningTensor.front(tied, tied.projection.compact(x), 20, None, None)
    free.front = lambda *_: ((queries[0], queries[0]), (keys[0], keys[0]), *rest)
    assert torch.allclose(tied(x)[0], free(x)[0], atol=1e-6)
    assert tied.state_floats == free.state_floats and tied.order == 3


# -- On a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MIXERS)
def test_graphs_change_nothing(mixer):
    how = run(mixer=mixer, options={}, tasks=(EASY, LONGER), d_model=128, steps=24, test_every=12)
    how = replace(how, lr=1e-3, schedule="cosine")  # a graph that does not follow the learning rate is found out
    cuda = torch.device("cuda")
    captured, eager = last(train(how, cuda)), last(train(how, cuda, graph=False))
    assert captured.graph and not eager.graph and captured.dtype == "bfloat16"
    assert losses(captured) == pytest.approx(losses(eager), rel=2e-2)
    assert captured.peak_mib > 0
