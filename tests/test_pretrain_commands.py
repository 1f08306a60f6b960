"""What a user of `runningtensor pretrain` sees and gets."""

import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="transformers comes with the extra hf")

from pretraining import losses, recipe, run, shards, train
from rich.console import Console
from transformers import AutoModelForCausalLM

from runningtensor.cli import app
from runningtensor.models.costs import flops_a_token
from runningtensor.pretrain.checkpoints import found_in
from runningtensor.pretrain.data import Shards, pack
from runningtensor.pretrain.progress import LOG, clock, read
from runningtensor.pretrain.recipes import configuration

SMALL = ("hidden_size=32", "heads=2", "key_dims=6,6", "value_dim=8", "mlp=48", "length=32", "validation_sequences=5")


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["pretrain", *map(str, words)])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = shards(tmp_path_factory.mktemp("data") / "letters", seed=0)
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [])), eos_token="</s>")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    settings = [word for setting in (*SMALL, "steps=6", "save_every=3") for word in ("--set", setting)]
    code, said = call("tiny_cpu", "--data", data, "--out", out, *settings)
    assert code == 0, said
    assert "running-tensor: 19,350 parameters" in said and "not as in the paper: warmup 20 (the paper: 0)" in said
    assert "step 6 of 6 loss" in said and "validation loss" in said and "finished after step 6" in said
    return out


def test_the_log_has_the_recipe_and_every_step(done: Path) -> None:
    first, *lines = read(done / LOG)
    assert first["recipe"]["hidden_size"] == 32 and first["origin"]["torch"] == torch.__version__
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["tokens"] == 256 * line["step"] and line["tokens_a_second"] > 0 for line in steps)
    assert [line["lr"] for line in steps] == pytest.approx([3e-3 * i / 21 for i in range(1, 7)])
    assert set(steps[0]) >= {"grad_norm", "mfu", "memory_gib", "skipped"}


def test_an_exported_model_has_the_loss_it_was_trained_to(data: Path, done: Path, tmp_path: Path) -> None:
    code, said = call("export", done, tmp_path / "model")
    assert code == 0 and "step-00000006" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    held_out = Shards(data, "validation")
    packed = pack(held_out.batch(0, 5, 32), held_out.eos)
    with torch.no_grad():
        hidden = model.model(packed.input_ids, cu_seqlens=packed.cu_seqlens).last_hidden_state
        loss = model.chunked_loss(hidden[0], packed.labels[0])
    assert abs(float(loss) - losses(done, "validation_loss")[6]) < 1e-6
    assert model.config.eos_token_id == held_out.eos and (tmp_path / "model" / "tokenizer.json").is_file()


def test_an_older_checkpoint_and_untied_weights_can_be_exported(data: Path, done: Path, tmp_path: Path) -> None:
    call("export", found_in(done)[0], tmp_path / "older")
    call("export", done, tmp_path / "newer")
    older, newer = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("older", "newer"))
    assert older.lm_head.weight is older.model.embed_tokens.weight
    assert not torch.equal(older.lm_head.weight, newer.lm_head.weight)
    run(recipe(steps=1, tie_embeddings=False, model="gla", mlp=300), data, tmp_path / "run")
    assert call("export", tmp_path / "run", tmp_path / "untied")[0] == 0
    untied = AutoModelForCausalLM.from_pretrained(tmp_path / "untied")
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_runs_are_drawn_against_each_other(done: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, said = call("plot", done, done, "--out", tmp_path / "figure.png")
    assert code == 0, said
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("tiny_cpu", "--set", "speed=1"),
            "a setting must be key=value, of a key there is, but was 'speed=1'; there are model=",
        ),
        (("tiny_cpu", "--model", "rwkv"), "model must be one of running-tensor, attention"),
        (("tiny_cpu", "--data", "nowhere"), "nowhere was not prepared. runningtensor data prepare TEXTS nowhere"),
        (("export", "nowhere", "out"), "there must be a checkpoint, or a run that has one, at nowhere"),
        (("plot", "nowhere"), "No such file"),
    ],
)
def test_wrong_words_are_one_line(words: tuple[str, ...], message: str) -> None:
    code, said = call(*words)
    assert code == 1 and message in said and "Traceback" not in said


def test_utilisation_is_of_the_peak(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runningtensor.pretrain.run.peak", lambda device, dtype: 1e12)
    said = run(recipe(steps=2, validate_every=0), data, tmp_path / "run")
    work = 3 * flops_a_token(configuration(recipe(), 257), 32)
    steps = [line for line in read(tmp_path / "run" / LOG) if "loss" in line]
    assert [x["mfu"] for x in steps] == pytest.approx([work * x["tokens_a_second"] / 1e12 for x in steps])
    assert "MFU" in said and "resumed" not in read(tmp_path / "run" / LOG)[0]


def test_tensorboard_gets_every_number(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
    with pytest.raises(ValueError, match="tensorboard=true needs tensorboard: pip install"):
        run(recipe(tensorboard=True), data, tmp_path / "run")
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "run" / "tensorboard") and purge_step == 1

        def add_scalar(self, *what: object) -> None:
            written.append(what)

        def close(self) -> None:
            written.append(("closed", 0, 0))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    run(recipe(tensorboard=True, steps=4), data, tmp_path / "run")
    assert {step: x for name, x, step in written if name == "loss"} == losses(tmp_path / "run")
    assert ("validation_loss", losses(tmp_path / "run", "validation_loss")[4], 4) in written
    assert written[-1][0] == "closed"


def test_a_terminal_has_a_bar(data: Path, tmp_path: Path) -> None:
    seen = StringIO()
    train(recipe(steps=4), data, tmp_path / "run", Console(file=seen, force_terminal=True, width=120))
    assert "4 of 4" in seen.getvalue() and "tokens/s" in seen.getvalue() and "validation loss" in seen.getvalue()


def test_time_left_is_short() -> None:
    assert [clock(s) for s in (0.4, 90, 150, 7200, 3 * 86400)] == ["0 s", "90 s", "2 min", "2.0 h", "3.0 days"]
