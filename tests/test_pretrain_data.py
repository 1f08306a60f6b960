"""Shards from text, and batches from shards: nothing lost, nothing twice, nothing across a document's end."""

import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("datatrove", reason="datatrove comes with the extra pretrain")
pytest.importorskip("sentencepiece", reason="sentencepiece comes with the extra pretrain")
pytest.importorskip("mistral_common", reason="mistral-common comes with the extra pretrain")
pytest.importorskip("pyarrow", reason="pyarrow comes with the extra pretrain")
pytest.importorskip("transformers", reason="transformers comes with the extra pretrain")

import numpy as np
import pyarrow
import pyarrow.parquet

from runningtensor.pretrain import data
from runningtensor.pretrain.data import IGNORE, Shards, pack, permuted, prepare
from runningtensor.pretrain.tokenizer import mistral

WORDS = ["state", "tensor", "the", "of", "</s>", "<s>", "\n", "naïve", "🧿", "memory", "    x"]


def documents(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}.{i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for i in range(count)]


def jsonl(path: Path, texts: list[str]) -> str:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "other": 1}) + "\n" for text in texts)
    return str(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Files of every format, and their documents in order. Some are empty, some there twice."""
    folder = tmp_path_factory.mktemp("source")
    texts = [documents(60, seed) for seed in range(4)]
    files = [
        jsonl(folder / "a.jsonl", [*texts[0], "", *texts[0][:20]]),
        jsonl(folder / "b.jsonl.gz", texts[1]),
        str(folder / "c.parquet"),
        str(folder / "d.txt"),
    ]
    table = pyarrow.table({"id": list(range(61)), "text": [*texts[2], None]})
    pyarrow.parquet.write_table(table, files[2])
    Path(files[3]).write_text("\n".join(texts[3]), encoding="utf-8")
    return files, [*texts[0], *texts[0][:20], *texts[1], *texts[2], "\n".join(texts[3])]


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    prepare(source[0], out, validation=0.2, workers=2, shard_bytes=1)
    return out


def decoded(folder: Path, split: str) -> list[str]:
    shards, tokenizer = Shards(folder, split), mistral()
    stream = shards.read(0, shards.tokens).astype(np.int64)
    pieces = np.split(stream, np.flatnonzero(stream == shards.eos) + 1)
    assert pieces.pop().size == 0  # the last document too ends with </s>
    return [tokenizer.decode(piece[:-1]) for piece in pieces]


def test_every_document_survives_on_one_side(source, folder: Path) -> None:
    train, validation = decoded(folder, "train"), decoded(folder, "validation")
    assert sorted(train + validation) == sorted(source[1])
    assert not set(train) & set(validation)
    assert [text for text in source[1] if text in set(train)] == train  # in their order
    assert 0.1 < len(validation) / len(source[1]) < 0.3
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["train"]["documents"] == len(train) and meta["validation"]["documents"] == len(validation)
    assert meta["vocab_size"] == 32_000 and not list(folder.rglob("*.tmp")) and not (folder / "tmp").exists()


def test_index_is_where_documents_end(folder: Path) -> None:
    tokens = np.fromfile(folder / "train_00000.ds", "<u2")
    ends = np.fromfile(folder / "train_00000.ds.index", "<u8")
    assert (np.flatnonzero(tokens == 2) + 1 == ends).all()


def test_shards_do_not_depend_on_processes_or_files_a_shard(source, folder: Path, tmp_path: Path) -> None:
    prepare(source[0], tmp_path / "out", validation=0.2, workers=1)
    for split in "train", "validation":
        one, many = Shards(tmp_path / "out", split), Shards(folder, split)
        assert len(one.shards) == 1 < len(many.shards)
        assert (one.read(0, one.tokens) == many.read(0, many.tokens)).all()


def test_killed_it_goes_on_without_duplicates(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / f"{i}.jsonl", documents(3000, i)) for i in range(8)]
    out, whole = tmp_path / "out", tmp_path / "whole"
    code = "from pathlib import Path; from runningtensor.pretrain.data import prepare; import sys; "
    code += "prepare(sys.argv[2:], Path(sys.argv[1]), validation=0.1, workers=1, shard_bytes=1)"
    process = subprocess.Popen([sys.executable, "-c", code, str(out), *files], stderr=subprocess.DEVNULL)
    while not list(out.glob("0*.json")) and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match=r"is not complete\. runningtensor data prepare"):
        Shards(out)
    time.sleep(1)  # for the process of the pool to see it
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("0*.json")}
    assert 0 < len(kept) < len(files)
    prepare(files, out, validation=0.1, workers=1, shard_bytes=1)
    prepare(files, whole, validation=0.1, workers=1)
    assert all((out / name).stat().st_mtime_ns == written for name, written in kept.items())
    for split in "train", "validation":
        resumed, straight = Shards(out, split), Shards(whole, split)
        assert (resumed.read(0, resumed.tokens) == straight.read(0, straight.tokens)).all()


def test_finished_it_does_nothing_and_other_settings_are_refused(source, folder: Path) -> None:
    before = (folder / "train_00000.ds").stat().st_mtime_ns
    prepare(source[0], folder, validation=0.2, workers=1, shard_bytes=1)
    assert (folder / "train_00000.ds").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="was begun with other validation, sources"):
        prepare(source[0][:1], folder, validation=0.1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "there is no document in"),
        ('{"text": ""}\n\n', "there is no document in"),
        ('{"text": "a"}\n{"text": \n', "line 2 of .*a.jsonl must be JSON with 'text'"),
        ('{"body": "a"}\n', "line 1 of .*a.jsonl must be JSON with 'text', but: KeyError"),
        ('{"text": 3}\n', "'text' in line 1 of .*a.jsonl must be a string, but was 3"),
    ],
)
def test_wrong_input_is_a_clear_error(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / "meta.json").exists()


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no file of \.jsonl"):
        prepare([str(tmp_path)], tmp_path / "out")
    for name in str(tmp_path / "no.jsonl"), "folder/no.jsonl", "folder":
        with pytest.raises(FileNotFoundError, match=f"there is no file or folder {name}"):
            prepare([name], tmp_path / "out")
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ValueError, match="an input must be one of"):
        prepare([str(tmp_path / "a.csv")], tmp_path / "out")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="twice"):
        prepare([str(tmp_path), str(tmp_path / "a.txt")], tmp_path / "out")
    with pytest.raises(ValueError, match="must be empty or what an earlier call began"):
        prepare([str(tmp_path / "a.txt")], tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="has no column 'text', but body"):
        list(data.texts(str(tmp_path / "b.parquet")))


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json.1.tmp").touch()  # of a call that was killed at once
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", validation=0, workers=1)
    assert decoded(tmp_path / "out", "train") == ["a?b"]
    assert not list((tmp_path / "out").glob("*tmp"))


def test_hub_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Card:
        data = huggingface_hub.DatasetCardData(
            configs=[
                {"config_name": "default", "data_files": [{"split": "train", "path": "data/*/*"}]},
                {"config_name": "sample-10BT", "data_files": [{"split": "train", "path": "sample/10BT/*"}]},
            ]
        )

    class Files:
        def glob(self, pattern: str) -> list[str]:
            assert pattern == "datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*"
            return [pattern.replace("*", name) for name in ("001.parquet", "000.parquet", "README.md")]

        def info(self, path: str) -> dict[str, int]:
            return {"size": 7}

    monkeypatch.setattr(huggingface_hub.DatasetCard, "load", lambda name: Card())
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Files)
    where = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"
    found = data.find(["HuggingFaceFW/fineweb-edu"], "sample-10BT")
    assert found == [(f"{where}/000.parquet", 7), (f"{where}/001.parquet", 7)]
    with pytest.raises(ValueError, match="no configuration 'sample-1BT', but default, sample-10BT"):
        data.find(["HuggingFaceFW/fineweb-edu"], "sample-1BT")


def test_tokenizers_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    many, endless = mistral(), mistral()
    many.add_tokens([f"<{i}>" for i in range(40_000)])
    endless.eos_token = None
    with pytest.raises(ValueError, match="at most 65,536 entries, for uint16, but has 72,000"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", many)
    with pytest.raises(ValueError, match="must have an eos_token"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", endless)


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, 65_537, 300_001])
def test_order_is_a_permutation(size: int) -> None:
    indices = np.arange(size, dtype=np.int64)
    first, second, other = (permuted(indices, size, *key) for key in ((0, 0), (0, 1), (1, 0)))
    for order in first, second, other:
        assert (np.sort(order) == indices).all()
    if size >= 16:
        assert (first != second).any() and (first != other).any() and (first != indices).any()
    assert permuted(indices[-1:], size, 0, 0) == first[-1]  # one alone goes where it goes with the others


def test_order_is_random_enough_and_large_sizes_work() -> None:
    order = permuted(np.arange(100_000, dtype=np.int64), 100_000, 0, 0)
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    size = 10**12 + 39
    far = permuted(np.arange(size - 1000, size, dtype=np.int64), size, 0, 0)
    assert len(set(far.tolist())) == 1000 and far.min() >= 0 and far.max() < size
    assert 0.4 < np.mean(far < size / 2) < 0.6


@pytest.mark.parametrize("length", [16, 63])
def test_an_epoch_visits_every_window_once(folder: Path, length: int) -> None:
    shards = Shards(folder)
    count = shards.windows(length)
    expected = sorted(tuple(shards.read(i * length, length + 1).tolist()) for i in range(count))
    epochs = [shards.batch(epoch * count, count, length).tolist() for epoch in range(2)]
    assert all(sorted(map(tuple, epoch)) == expected for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert shards.tokens - length <= count * length + 1 <= shards.tokens + length
    assert Shards(folder, seed=1).batch(0, count, length).tolist() != epochs[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_read_the_same_batch(folder: Path, ranks: int) -> None:
    shards = Shards(folder)
    last = shards.windows(32) - 3  # a batch that begins in one epoch and ends in the next
    for position in 0, 5, last:
        parts = [shards.batch(position, 8 // ranks, 32, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), shards.batch(position, 8, 32))


def test_any_position_continues_exactly(folder: Path) -> None:
    long = Shards(folder).batch(0, 60, 32)
    for position in range(0, 56, 5):
        assert torch.equal(Shards(folder).batch(position, 4, 32), long[position : position + 4])


def test_windows_cross_the_ends_of_shards(folder: Path) -> None:
    shards = Shards(folder)
    whole = np.concatenate([np.fromfile(path, "<u2") for path in sorted(folder.glob("train_*.ds"))])
    for end in shards.ends[1:-1]:
        assert (shards.read(int(end) - 5, 11) == whole[end - 5 : end + 6]).all()
        assert (shards.read(int(end), 3) == whole[end : end + 3]).all()
    assert (shards.read(0, shards.tokens) == whole).all()


def test_no_document_crosses_a_boundary(folder: Path) -> None:
    shards = Shards(folder)
    windows = shards.batch(0, 12, 64)
    packed = pack(windows, shards.eos)
    bounds = packed.cu_seqlens.tolist()
    assert packed.input_ids.shape == packed.labels.shape == (1, 12 * 64)
    assert bounds[0] == 0 and bounds[-1] == 12 * 64 and bounds == sorted(set(bounds))
    assert set(range(0, 12 * 64 + 1, 64)) <= set(bounds)
    tokens, labels = packed.input_ids[0], packed.labels[0]
    assert torch.equal(tokens.view(12, 64), windows[:, :-1])
    for begin, end in itertools.pairwise(bounds):
        assert shards.eos not in tokens[begin : end - 1]
        assert torch.equal(labels[begin : end - 1], tokens[begin + 1 : end])
        if tokens[end - 1] == shards.eos:
            assert labels[end - 1] == IGNORE
        else:
            assert end % 64 == 0 and labels[end - 1] == windows[end // 64 - 1, -1]
    assert (labels == shards.eos).any() and (labels == IGNORE).sum() == (tokens == shards.eos).sum()


def test_pack_by_hand() -> None:
    packed = pack(torch.tensor([[5, 2, 6, 7, 2], [2, 8, 2, 9, 3]]), eos=2)
    assert packed.input_ids.tolist() == [[5, 2, 6, 7, 2, 8, 2, 9]]
    assert packed.labels.tolist() == [[2, IGNORE, 7, 2, IGNORE, 2, IGNORE, 3]]
    assert packed.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 8] and packed.cu_seqlens.dtype == torch.int32


def test_wrong_folders_are_clear_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*meta\.json: .* was not prepared"):
        Shards(tmp_path)
    with pytest.raises(ValueError, match="has a vocabulary of 32,000 entries, the model 50,257"):
        Shards(folder, vocab_size=50_257)
    with pytest.raises(ValueError, match="split must be one of train, validation, but was 'test'"):
        Shards(folder, "test")
    with pytest.raises(ValueError, match="tokens, and a window needs 100,000,001: prepare more"):
        Shards(folder, vocab_size=32_000).batch(0, 1, 100_000_000)
    with pytest.raises(ValueError, match="rank below 2, but were 0 and 2"):
        Shards(folder).batch(0, 1, 8, rank=2, ranks=2)

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    size = (copy / "train_00001.ds").stat().st_size
    os.truncate(copy / "train_00001.ds", size - 3)
    with pytest.raises(
        ValueError, match=rf"train_00001\.ds must have {size:,} bytes by meta\.json, but has {size - 3:,}"
    ):
        Shards(copy)
    (copy / "train_00001.ds").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*train_00001\.ds"):
        Shards(copy)


def test_fingerprint_tells_data_apart(folder: Path) -> None:
    assert Shards(folder).fingerprint == Shards(folder, seed=1).fingerprint
    assert Shards(folder).fingerprint != Shards(folder, "validation").fingerprint
