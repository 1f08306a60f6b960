"""A run gives the same losses on any number of ranks, and however often it is killed."""

import fcntl
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers comes with the extra hf")

from pretraining import EOS, child, end, losses, recipe, run, shards, start, train, until
from rich.console import Console
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor

from runningtensor.pretrain.checkpoints import about, found_in
from runningtensor.pretrain.data import Shards, pack
from runningtensor.pretrain.engine import Predictor, Trainer, process_group
from runningtensor.pretrain.progress import LOG, read
from runningtensor.pretrain.recipes import shown
from runningtensor.pretrain.run import same_run

GOLDEN = [
    5.5309229,
    5.5194569,
    5.4874620,
    5.4103613,
    5.3384929,
    5.1903696,
    5.0565820,
    4.8618274,
    4.6932659,
    4.4902158,
    4.3653555,
    4.2082191,
    4.0418000,
    3.9236326,
    3.7697980,
    3.6423018,
    3.4804065,
    3.3808570,
    3.2428303,
    3.1275880,
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(tmp_path_factory.mktemp("data") / "letters", seed=0)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps in one go."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(recipe(), data, out)
    return out


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six of them on two ranks."""
    out = tmp_path_factory.mktemp("two") / "run"
    code, said = end(child(data, out, ranks=2, steps=6))
    assert code == 0, said
    return out


def close(out: Path, whole: Path, steps: int) -> bool:
    found, expected = losses(out), losses(whole)
    return list(found) == list(range(1, steps + 1)) and all(abs(found[i] - expected[i]) < 1e-6 for i in found)


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


# -- Ranks -------------------------------------------------------------------------------------------------------------


def test_two_ranks_equal_one(whole: Path, two: Path) -> None:
    assert close(two, whole, 6)
    assert abs(losses(two, "validation_loss")[4] - losses(whole, "validation_loss")[4]) < 1e-6
    norms = losses(two, "grad_norm"), losses(whole, "grad_norm")
    assert all(math.isclose(norms[0][i], norms[1][i], rel_tol=1e-5) for i in norms[0])


def test_replicas_equal_shards(data: Path, whole: Path, tmp_path: Path) -> None:
    code, said = end(child(data, tmp_path / "run", ranks=2, steps=4, replicate=2))
    assert code == 0, said
    assert close(tmp_path / "run", whole, 4)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(data: Path, whole: Path, two: Path, tmp_path: Path) -> None:
    out = copied(two, tmp_path / "run")
    assert "goes on after step 6" in run(recipe(), data, out)
    assert close(out, whole, 8)


def test_a_checkpoint_of_two_ranks_goes_on_with_four(data: Path, whole: Path, two: Path, tmp_path: Path) -> None:
    out = copied(two, tmp_path / "run")
    code, said = end(child(data, out, ranks=4))
    assert code == 0, said
    assert close(out, whole, 8) and about(found_in(out)[-1])["ranks"] == 4


def test_micro_batches_and_recomputed_activations_change_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    for i, changes in enumerate([{"sequences": 8}, {"sequences": 1}, {"activation_checkpointing": True}]):
        run(recipe(**changes), data, tmp_path / str(i))
        assert close(tmp_path / str(i), whole, 8)


@pytest.mark.parametrize("model", ["running-tensor", "attention"])
def test_windows_that_no_document_ends_in_are_a_batch_of_the_same_loss(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Size, bool]] = []
    forward = Predictor.forward

    def watched(self: Predictor, ids: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Any:
        seen.append((ids.shape, cu_seqlens is None))
        return forward(self, ids, labels, cu_seqlens)

    monkeypatch.setattr(Predictor, "forward", watched)
    long = recipe(model=model, mlp=300, sequences=3)
    windows = torch.randint(0, 200, (3, long.length + 1))
    whole = pack(windows, EOS)
    cut = whole._replace(cu_seqlens=torch.cat((whole.cu_seqlens, whole.cu_seqlens[-1:])))  # and one of no tokens
    with process_group(long) as (device, mesh):
        trainer = Trainer(long, Shards(shards(tmp_path / "data", seed=0), "train"), 1, device, mesh)
        with torch.no_grad():
            found = [float(trainer.summed_loss(part)) for part in (whole, cut)]
    assert seen == [((3, long.length), True), ((1, 3 * long.length), False)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_one_shard_is_gathered_once_a_step(data: Path) -> None:
    alone = recipe(sequences=8)
    with process_group(alone) as (device, mesh):
        trainer = Trainer(alone, Shards(data, "train"), 1, device, mesh)
        lm = trainer.model.lm
        (part,) = trainer.parts(trainer.train, 0, 8)
        loss = trainer.summed_loss(part)
        assert not any(isinstance(p, DTensor) for p in lm.model.layers.parameters())
        loss.backward()
        assert all(isinstance(p, DTensor) for p in lm.parameters())
        trainer.validate(trainer.train)
        assert all(isinstance(p, DTensor) for p in lm.parameters())


@pytest.mark.parametrize("model", ["running-tensor", "mamba-2"])
def test_weight_decay_is_of_matrices_and_not_of_norms_rates_and_biases(data: Path, model: str) -> None:
    stepped = []
    for decay in (0.0, 0.5):
        how = recipe(model=model, mlp=300, lr=0.1, weight_decay=decay)
        with process_group(how) as (device, mesh):
            trainer = Trainer(how, Shards(data, "train"), 1, device, mesh)
            trainer.launch(0, stop=False)
            stepped.append({name: p.full_tensor().clone() for name, p in trainer.parameters.items()})
    plain, decayed = stepped
    for name, p in plain.items():
        assert torch.equal(p, decayed[name]) is (p.ndim < 2), name


def test_layers_can_be_compiled(data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: made(self, backend="eager"))  # compiles in no time
    run(recipe(compile=True, steps=3), data, tmp_path / "run")
    assert close(tmp_path / "run", whole, 3)


@pytest.mark.parametrize("model", ["attention", "gated-deltanet", "deltanet", "mamba-2", "gla"])
def test_every_model_learns_and_goes_on(data: Path, tmp_path: Path, model: str) -> None:
    changes = {"model": model, "mlp": 300, "validate_every": 0}
    run(recipe(steps=8, **changes), data, tmp_path / "whole")
    run(recipe(steps=3, **changes), data, tmp_path / "parts")
    run(recipe(steps=8, **changes), data, tmp_path / "parts")
    found = losses(tmp_path / "whole")
    assert found[8] < found[1] - 0.3
    assert losses(tmp_path / "parts") == found


# -- Losses ------------------------------------------------------------------------------------------------------------


def test_golden_losses(data: Path, tmp_path: Path) -> None:
    run(recipe(steps=20, validate_every=0, save_every=20), data, tmp_path / "run")
    assert list(losses(tmp_path / "run").values()) == pytest.approx(GOLDEN, abs=1e-5)


def test_it_learns_real_text(tmp_path: Path) -> None:
    text = shards(tmp_path / "text")
    run(recipe(steps=80, batch=16, sequences=16, validate_every=80, save_every=80), text, tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[1] > 5.4 and max(found[i] for i in range(76, 81)) < 3.5  # of log 257 = 5.55
    assert losses(tmp_path / "run", "validation_loss")[80] < 3.5


# -- Stopped and killed ------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_bit_equal_losses(data: Path, whole: Path, tmp_path: Path) -> None:
    for steps in 1, 5, 8:
        run(recipe(steps=steps), data, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole)
    assert "finished after step 8" in run(recipe(), data, tmp_path / "run")  # and once more it does nothing
    assert losses(tmp_path / "run") == losses(whole)


def test_a_save_is_of_its_step_while_training_goes_on(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *args: time.sleep(0.5) or write(*args))
    run(recipe(save_every=4), data, tmp_path / "slow")
    (tmp_path / "run").mkdir()
    copied(tmp_path / "slow" / "step-00000004", tmp_path / "run" / "step-00000004")
    monkeypatch.undo()
    assert "goes on after step 4" in run(recipe(), data, tmp_path / "run")
    assert losses(tmp_path / "run") == {i: losses(whole)[i] for i in range(5, 9)}


SECOND_HANGS = """
from torch.distributed.checkpoint import FileSystemWriter
write, saves = FileSystemWriter.write_data, []
def hang(*args):
    saves.append(1)
    return write(*args) if len(saves) == 1 else time.sleep(1000)
FileSystemWriter.write_data = hang
"""


def test_killed_during_a_save_it_goes_on_from_the_one_before(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = child(data, out, before=SECOND_HANGS)
    until(lambda: (out / LOG).exists() and 8 in losses(out), process)  # training does not wait for the save
    assert [path.name for path in found_in(out)] == ["step-00000003"] and (out / ".step-00000006.tmp").is_dir()
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    with (out / LOG).open("a") as file:
        file.write('{"step": 9, "lo')  # as if it had been killed while it wrote
    assert "goes on after step 3" in run(recipe(), data, out)
    assert losses(out) == losses(whole)
    assert not list(out.glob(".*"))
    assert [line["resumed"] for line in read(out / LOG) if "resumed" in line] == [3]


def test_killed_at_any_moment_it_goes_on(data: Path, tmp_path: Path) -> None:
    out, changes, last = tmp_path / "run", {"save_every": 1, "validate_every": 0}, 0
    for _ in range(2):
        process = child(data, out, steps=10**6, **changes)
        until(lambda: (out / LOG).exists() and max(losses(out), default=0) > last + 1, process)  # noqa: B023
        process.kill()
        assert end(process)[0] == -signal.SIGKILL
        last = max(losses(out))
    run(recipe(steps=last + 3, **changes), data, out)
    run(recipe(steps=last + 3, **changes), data, tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole")


def test_ranks_leave_with_a_killed_torchrun_and_the_run_goes_on_without_them(data: Path, tmp_path: Path) -> None:
    out, changes = tmp_path / "run", {"save_every": 1, "validate_every": 0}
    process = child(data, out, ranks=2, steps=10**6, **changes)
    until(lambda: len(found_in(out)) > 1, process)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL  # which waits for all that hold its output
    last = max(losses(out))
    assert "goes on after step" in run(recipe(steps=last + 2, **changes), data, out)
    assert list(losses(out)) == list(range(1, last + 3))


@pytest.mark.parametrize("validate_every", [0, 1])
def test_sigterm_saves_the_last_step(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_every: int
) -> None:
    launch, changes = Trainer.launch, {"save_every": 100, "validate_every": validate_every}

    def terminated(self, step, stop):
        if step in (2, 3):  # twice, as torchrun and Slurm may both send it
            os.kill(os.getpid(), signal.SIGTERM)
        return launch(self, step, stop)

    monkeypatch.setattr(Trainer, "launch", terminated)
    assert train(recipe(**changes), data, tmp_path / "run", Console(file=StringIO())) == signal.SIGTERM
    monkeypatch.undo()
    (saved,) = found_in(tmp_path / "run")
    assert about(saved)["step"] == max(losses(tmp_path / "run")) < 8
    run(recipe(**changes), data, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole)


def test_sigterm_saves_on_all_ranks_at_one_step(data: Path, tmp_path: Path) -> None:
    out, endless = tmp_path / "run", recipe(steps=10**6, validate_every=0, save_every=10**6, batch=4)
    settings = [f"--set={field.name}={shown(getattr(endless, field.name))}" for field in fields(endless)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = [*torchrun, "runningtensor", "pretrain", "tiny_cpu", f"--data={data}", f"--out={out}", *settings]
    process = start(command)
    until(lambda: (out / LOG).exists() and len(losses(out)) > 3, process)
    process.terminate()
    code, said = end(process)
    assert code != 0 and "which is saved" in said
    (saved,) = found_in(out)
    last = about(saved)["step"]
    assert list(losses(out)) == list(range(1, last + 1))
    run(recipe(steps=last + 2, validate_every=0, batch=4), data, out)
    assert list(losses(out)) == list(range(1, last + 3))


def test_only_the_newest_checkpoints_are_kept(data: Path, tmp_path: Path) -> None:
    run(recipe(save_every=1, keep=2, steps=5), data, tmp_path / "run")
    assert [path.name for path in found_in(tmp_path / "run")] == ["step-00000004", "step-00000005"]


# -- What goes wrong ---------------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Losses of these steps are not numbers; the first is 1."""
    launch, forward, under_way = Trainer.launch, Predictor.forward, []

    def launched(self, step, stop):
        under_way[:] = [step + 1]
        return launch(self, step, stop)

    def poisoned(self, *packed):
        return forward(self, *packed) * (math.nan if self.training and under_way[0] in steps else 1)

    monkeypatch.setattr(Trainer, "launch", launched)
    monkeypatch.setattr(Predictor, "forward", poisoned)


def test_a_step_that_is_not_finite_is_skipped(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 3, 4, 6)
    said = run(recipe(validate_every=1), data, tmp_path / "run")
    validation = losses(tmp_path / "run", "validation_loss")
    assert validation[2] == validation[3] == validation[4] > validation[5] == validation[6] > validation[7]
    assert [step for step, skipped in losses(tmp_path / "run", "skipped").items() if skipped] == [3, 4, 6]
    assert losses(tmp_path / "run")[3] is None and losses(tmp_path / "run")[5] is not None
    assert "3 skipped" in said and about(found_in(tmp_path / "run")[-1])["skipped"] == 3


def test_too_many_of_them_end_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, *range(5, 100))
    with pytest.raises(FloatingPointError, match=r"3 steps in a row had no finite loss and gradient, .* step 7"):
        run(recipe(save_every=4, steps=100), data, tmp_path / "run")
    assert [path.name for path in found_in(tmp_path / "run")] == ["step-00000004"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1e-4}, "another recipe: lr was 0.003 and is 0.0001. Go on as then, or into another folder"),
        ({"key_dims": (5, 6), "seed": 1}, r"key_dims was \[6, 6\] and is \[5, 6\], seed was 0 and is 1"),
        ({"dtype": "bfloat16"}, "dtype was float32 and is bfloat16"),  # what auto was on this device
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(data: Path, whole: Path, changes: dict, message: str) -> None:
    before = (whole / LOG).read_bytes()
    with pytest.raises(ValueError, match=message):
        run(recipe(**changes), data, whole)
    assert (whole / LOG).read_bytes() == before


def test_a_checkpoint_that_is_older_than_a_setting_had_its_default(tmp_path: Path) -> None:
    now = asdict(recipe())
    then = {"recipe": {name: x for name, x in now.items() if name != "output_gate"}, "fingerprint": "data"}
    same_run(then, now, "data", tmp_path)
    with pytest.raises(ValueError, match="output_gate was silu and is sigmoid"):
        same_run(then, now | {"output_gate": "sigmoid"}, "data", tmp_path)


def test_a_cosine_cannot_be_made_longer(data: Path, tmp_path: Path) -> None:
    run(recipe(schedule="cosine", steps=2), data, tmp_path / "run")
    with pytest.raises(ValueError, match="another recipe: steps was 2 and is 3"):
        run(recipe(schedule="cosine", steps=3), data, tmp_path / "run")


def test_a_checkpoint_of_other_data_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run on other data"):
        run(recipe(), shards(tmp_path / "other", seed=1), whole)


def test_a_full_disk_is_a_clear_error_and_nothing_is_lost(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, saves, out = FileSystemWriter.write_data, [], tmp_path / "run"

    def full(*args):
        saves.append(1)
        if len(saves) > 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(
        OSError, match=r"step 6 could not be saved .*No space left .*The last checkpoint is step-00000003"
    ):
        run(recipe(), data, out)
    assert not list(out.glob(".*"))  # what was written of it makes room
    monkeypatch.undo()
    run(recipe(), data, out)
    assert losses(out) == losses(whole)


# torchrun kills the others when the first ends: none does before all have said why, or a minute has passed.
RANK_1_IS_FULL = """
import atexit, os
from torch.distributed.checkpoint import FileSystemWriter
def full(*args):
    raise OSError(28, "No space left on device")
if os.environ["RANK"] == "1":
    FileSystemWriter.write_data = full
def together():
    ended = [Path(sys.argv[2]).with_name(f"rank-{rank}-ended") for rank in range(2)]
    ended[int(os.environ["RANK"])].touch()
    late = time.monotonic() + 60
    while not all(x.exists() for x in ended) and time.monotonic() < late:
        time.sleep(0.01)
atexit.register(together)
"""


def test_a_disk_that_is_full_on_one_rank_ends_all(data: Path, tmp_path: Path) -> None:
    code, said = end(child(data, tmp_path / "run", ranks=2, before=RANK_1_IS_FULL, steps=100))
    assert code == 1 and said.count("OSError: step 3 could not be saved") == 2, said
    assert "There is no checkpoint yet" in said and not found_in(tmp_path / "run")


def test_a_truncated_shard_is_a_clear_error(data: Path, tmp_path: Path) -> None:
    cut = copied(data, tmp_path / "cut")
    os.truncate(cut / "train_00000.ds", 1000)
    with pytest.raises(ValueError, match=r"train_00000.ds must have .* bytes by meta.json, but has 1,000"):
        run(recipe(), cut, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_runs_in_one_folder_are_refused(data: Path, whole: Path) -> None:
    with (whole / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="one run at a time"):
            run(recipe(), data, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "vocabulary of 257 entries, the model 100"),
        ({"length": 10**6}, "a window needs 1,000,001"),
        ({"steps": None, "batch": 1000}, "batch must be at most an epoch, of 95 sequences, but was 1,000"),
        ({"replicate": 2}, "replicate must divide the number of ranks, 1, but was 2"),
        ({"device": "cuda"}, "device must be cpu or auto where there is no GPU"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(data: Path, tmp_path: Path, changes: dict, message: str) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=message):
        run(recipe(**changes), data, tmp_path / "run")
