"""Text as shards of tokens, and batches of them whose position is one integer.

A shard is what datatrove's DocumentTokenizer writes: `train_00000.ds`, the tokens as uint16 with </s> after each
document, and `train_00000.ds.index`, where each document ends. Beside it `00000.json` says that it is complete, and
`meta.json` that all are. A document is held out for validation by a hash of its text: whatever files it is in, and
however often, it is on one side only.

All shards of a split are one stream of tokens, cut into windows, and each epoch visits every window once in an order of
its own. That order is computed, not stored: what a step reads follows from its position, whatever the number of ranks.
"""

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from runningtensor.bench.provenance import write_json

IGNORE = -100  # no label
FORMATS = (".jsonl", ".jsonl.gz", ".parquet", ".txt")
Ints = npt.NDArray[np.int64]


# ── Inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def find(inputs: Sequence[str], config: str = "default") -> list[tuple[str, int]]:
    """The files of the inputs (files, folders, or data sets on the Hugging Face hub), each with its size in bytes."""
    files = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = [(str(p), p.stat().st_size) for p in sorted(path.rglob("*")) if p.name.endswith(FORMATS)]
        elif path.is_file():
            if not name.endswith(FORMATS):
                raise ValueError(f"an input must be one of {', '.join(FORMATS)}, but was {name}")
            found = [(name, path.stat().st_size)]
        elif name.count("/") == 1 and not name.startswith((".", "/")) and not name.endswith(FORMATS):
            found = _on_hub(name, config)
        else:
            raise FileNotFoundError(f"there is no file or folder {name}, and a data set on the hub is named owner/name")
        if not found:
            raise ValueError(f"{name} has no file of {', '.join(FORMATS)}")
        files += found
    if len({file for file, _ in files}) < len(files):
        raise ValueError("a file is among the inputs twice; name it once")
    return files


def _on_hub(name: str, config: str) -> list[tuple[str, int]]:
    """The training files of a data set's configuration, as its card names them."""
    from huggingface_hub import DatasetCard, HfFileSystem

    configs = {c["config_name"]: c["data_files"] for c in DatasetCard.load(name).data.to_dict().get("configs", [])}
    if config not in configs:
        raise ValueError(f"{name} has no configuration {config!r}, but {', '.join(configs) or 'none'}")
    entries = configs[config]
    entries = [{"path": entries}] if isinstance(entries, str) else entries
    patterns: list[str] = []
    for entry in entries:
        if entry.get("split", "train") == "train":
            patterns += [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
    hub = HfFileSystem()
    found = sorted({str(path) for pattern in patterns for path in hub.glob(f"datasets/{name}/{pattern}")})
    return [(f"hf://{path}", int(hub.info(path)["size"])) for path in found if path.endswith(FORMATS)]


def texts(path: str, field: str = "text") -> Iterator[str]:
    """The documents of a file: its lines (.jsonl), its rows (.parquet), or all of it (.txt)."""
    import fsspec

    with fsspec.open(path, "rb") as file:
        if path.endswith(".parquet"):
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(file) as table:
                if field not in table.schema_arrow.names:
                    raise ValueError(f"{path} has no column {field!r}, but {', '.join(table.schema_arrow.names)}")
                for rows in table.iter_batches(batch_size=1000, columns=[field]):
                    yield from (text or "" for text in rows.column(0).to_pylist())
        elif path.endswith(".txt"):
            yield file.read().decode("utf-8", "replace")
        else:
            lines = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[field]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"line {number} of {path} must be JSON with {field!r}, but: {error!r}") from error
                if not isinstance(text, str):
                    raise ValueError(f"{field!r} in line {number} of {path} must be a string, but was {text!r:.40}")
                yield text


# ── Preparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare(
    inputs: Sequence[str],
    out: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    config: str = "default",
    field: str = "text",
    validation: float = 0.005,
    workers: int | None = None,
    shard_bytes: int = 2**26,
    console: Console | None = None,
) -> dict[str, Any]:
    """Tokenises inputs into `out`, and returns what meta.json says. Stopped or killed, it goes on when called again.

    A shard takes whole files, and as many as make `shard_bytes`; shards are made by `workers` processes. A fraction
    `validation` of the documents is held out. Without a tokenizer, it is Mistral's.
    """
    from runningtensor.pretrain.tokenizer import mistral

    if not 0 <= validation < 1:
        raise ValueError(f"validation must be a fraction, at least 0 and below 1, but was {validation}")
    tokenizer = tokenizer or mistral()
    if len(tokenizer) > 2**16:
        raise ValueError(f"the tokenizer must have at most 65,536 entries, for uint16, but has {len(tokenizer):,}")
    if tokenizer.eos_token is None:
        raise ValueError("the tokenizer must have an eos_token, which ends documents, but has none")
    tasks: list[list[tuple[str, int]]] = []
    for file in find(inputs, config):
        if not tasks or sum(size for _, size in tasks[-1]) + file[1] > shard_bytes:
            tasks.append([])
        tasks[-1].append(file)

    model = tokenizer.backend_tokenizer.to_str()
    plan = {
        "tokenizer": hashlib.sha256(model.encode()).hexdigest(),
        "vocab_size": len(tokenizer),
        "eos": tokenizer.eos_token_id,
        "field": field,
        "validation": validation,
        "sources": [[list(file) for file in task] for task in tasks],
    }
    out.mkdir(parents=True, exist_ok=True)
    if (out / "plan.json").exists():
        before = json.loads((out / "plan.json").read_text())
        if differ := [key for key in plan if before.get(key) != plan[key]]:
            raise ValueError(f"{out} was begun with other {', '.join(differ)}: go on as then, or into an empty folder")
    elif any(path.suffix != ".tmp" for path in out.iterdir()):
        raise ValueError(f"{out} must be empty or what an earlier call began, but has other files")
    else:
        write_json(out / "plan.json", plan)
    tokenizer.save_pretrained(out / "tokenizer")

    left = [i for i in range(len(tasks)) if not (out / f"{i:05d}.json").exists()]
    if left:
        _run(out, plan, left, workers or os.cpu_count() or 1, tokenizer.eos_token, console or Console(stderr=True))
    shards = [json.loads((out / f"{i:05d}.json").read_text()) for i in range(len(tasks))]
    total = {split: {k: sum(s[split][k] for s in shards) for k in ("documents", "tokens")} for split in shards[0]}
    if not sum(counts["documents"] for counts in total.values()):
        raise ValueError(f"there is no document in {', '.join(inputs)}: every text is empty")
    meta = plan | total | {"shards": shards}
    write_json(out / "meta.json", meta)
    shutil.rmtree(out / "tmp", ignore_errors=True)
    for path in out.glob("*.tmp"):
        path.unlink()
    return meta


def _run(out: Path, plan: dict[str, Any], left: list[int], workers: int, eos: str, console: Console) -> None:
    """Makes the shards that are left, in processes, and shows how far they are."""
    sizes = [sum(size for _, size in task) for task in plan["sources"]]
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()
    # Spawned: a fork of a process with threads, which torch and tokenizers start, can hang.
    pool = ProcessPoolExecutor(min(workers, len(left)), get_context("spawn"), _end_with_parent)
    with Progress(*columns, console=console) as progress:
        done = sum(sizes) - sum(sizes[i] for i in left)
        bar = progress.add_task("tokenising", total=sum(sizes), completed=done, speed="")
        before, started = _written(out), progress.get_time()
        try:
            futures = {pool.submit(_shard, out, plan, i, eos): i for i in left}
            while futures:
                finished, _ = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                    done += sizes[futures.pop(future)]
                tokens = _written(out)
                rate = (tokens - before) / (progress.get_time() - started)
                progress.update(bar, completed=done, speed=f"{tokens / 1e6:,.1f}M tokens, {rate / 1e6:.2f}M/s")
        except BrokenProcessPool as error:
            raise RuntimeError("a process was killed, perhaps for its memory: try again with fewer workers") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _written(out: Path) -> int:
    tokens = 0
    for file in out.rglob("*.ds"):
        with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
            tokens += file.stat().st_size // 2
    return tokens


def _end_with_parent() -> None:
    """A pool's processes outlive a killed parent, and would wait for work for ever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _shard(out: Path, plan: dict[str, Any], number: int, eos: str) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer
    from loguru import logger

    logger.disable("datatrove")
    tmp = out / "tmp" / str(os.getpid())  # a process of a killed call may still be writing the same shard
    tmp.mkdir(parents=True, exist_ok=True)
    held_out: list[Document] = []

    def training() -> Iterator[Document]:
        for path, _ in plan["sources"][number]:
            for i, text in enumerate(texts(path, plan["field"])):
                if not text:
                    continue
                raw = text.encode("utf-8", "replace")  # JSON can have half of a surrogate pair, which is no text
                document = Document(text=raw.decode(), id=f"{path}:{i}")
                chosen = int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") < plan["validation"] * 2**64
                if chosen:
                    held_out.append(document)
                else:
                    yield document

    record: dict[str, Any] = {}
    for split, documents in ("train", training()), ("validation", iter(held_out)):
        step = DocumentTokenizer(
            str(tmp), str(out / "tokenizer" / "tokenizer.json"), save_filename=split, eos_token=eos,
            shuffle_documents=False, save_final_metadata=False, batch_size=100,
        )  # fmt: skip
        step.tokenizer.encode_special_tokens = True  # "</s>" in a text does not end it
        step.run(documents, rank=number)
        written, name = tmp / f"{split}_{number:05d}_unshuffled.ds", f"{split}_{number:05d}.ds"
        with written.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        index = written.with_name(written.name + ".index")
        record[split] = {
            "file": name,
            "documents": index.stat().st_size // 8,
            "tokens": written.stat().st_size // 2,
            "sha256": digest,
        }
        index.replace(out / f"{name}.index")
        written.replace(out / name)
    write_json(out / f"{number:05d}.json", record)


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def permuted(indices: Ints, size: int, seed: int, epoch: int) -> Ints:
    """Where a pseudo-random permutation of range(size) sends the indices: a Feistel network over the next power of 4.

    What falls outside range(size) goes through it again until it is inside, which leaves a permutation.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64(2**half - 1)
    keys = [hashlib.sha256(f"{seed} {epoch} {i}".encode()).digest()[:8] for i in range(6)]

    def network(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> np.uint64(half), x & mask
        for key in keys:
            mixed = right ^ np.uint64(int.from_bytes(key, "little"))
            for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):  # splitmix64's
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
            left, right = right, left ^ (mixed >> np.uint64(64 - half))
        return (left << np.uint64(half)) | right

    out = network(indices.astype(np.uint64))
    while (outside := out >= size).any():
        out[outside] = network(out[outside])
    return out.astype(np.int64)


class Shards:
    """What `prepare` wrote, as one stream of tokens: split is "train" or "validation"."""

    def __init__(self, folder: Path, split: str = "train", *, seed: int = 0, vocab_size: int | None = None) -> None:
        path = folder / "meta.json"
        if not path.is_file():
            begun = "is not complete" if (folder / "plan.json").is_file() else "was not prepared"
            raise FileNotFoundError(f"there is no {path}: {folder} {begun}. runningtensor data prepare TEXTS {folder}")
        meta = json.loads(path.read_text())
        if split not in meta["shards"][0]:
            raise ValueError(f"split must be one of {', '.join(meta['shards'][0])}, but was {split!r}")
        if vocab_size not in (None, meta["vocab_size"]):
            raise ValueError(f"{folder} has a vocabulary of {meta['vocab_size']:,} entries, the model {vocab_size:,}")
        self.folder, self.split, self.seed, self.eos = folder, split, seed, int(meta["eos"])
        self.vocab_size: int = meta["vocab_size"]
        shards = [shard[split] for shard in meta["shards"] if shard[split]["tokens"]]
        self.fingerprint = hashlib.sha256("".join(s["sha256"] for s in shards).encode()).hexdigest()  # for checkpoints
        self.shards: list[npt.NDArray[np.uint16]] = []
        for shard in shards:
            file, expected = folder / shard["file"], 2 * shard["tokens"]
            if not file.is_file():
                raise FileNotFoundError(f"there is no {file}, of {expected:,} bytes by meta.json")
            if (found := file.stat().st_size) != expected:
                raise ValueError(f"{file} must have {expected:,} bytes by meta.json, but has {found:,}")
            self.shards.append(np.memmap(file, "<u2", "r"))
        self.ends = np.cumsum([0, *map(len, self.shards)])
        self.tokens = int(self.ends[-1])

    def windows(self, length: int) -> int:
        """How many windows of length+1 tokens an epoch has: each begins with the token that is the last of another."""
        if self.tokens <= length:
            raise ValueError(
                f"{self.split} of {self.folder} has {self.tokens:,} tokens, and a window needs {length + 1:,}: "
                "prepare more text, or hold out more of it"
            )
        return (self.tokens - 1) // length

    def batch(self, position: int, sequences: int, length: int, *, rank: int = 0, ranks: int = 1) -> Tensor:
        """This rank's windows [sequences, length+1]: position + rank, position + rank + ranks, …

        The ranks together read sequences·ranks windows; the next batch is at `position` and as many more.
        """
        if position < 0 or not 0 <= rank < ranks:
            raise ValueError(f"position must be at least 0 and rank below {ranks}, but were {position} and {rank}")
        count = self.windows(length)
        epochs, places = np.divmod(position + rank + ranks * np.arange(sequences, dtype=np.int64), count)
        for epoch in np.unique(epochs):
            places[epochs == epoch] = permuted(places[epochs == epoch], count, self.seed, int(epoch))
        return torch.from_numpy(np.stack([self.read(start, length + 1) for start in places * length]).astype(np.int64))

    def read(self, start: int, count: int) -> npt.NDArray[np.uint16]:
        """Tokens of the stream, over the ends of shards."""
        first, last = np.searchsorted(self.ends, [start, start + count - 1], side="right") - 1
        parts = [
            self.shards[i][max(0, start - self.ends[i]) : start + count - self.ends[i]] for i in range(first, last + 1)
        ]
        return np.concatenate(parts)


class Packed(NamedTuple):
    input_ids: Tensor  # [1, sequences·length]
    labels: Tensor  # the next token of the same document, else IGNORE; the same places
    cu_seqlens: Tensor  # [N+1], int32: where documents, or what a window has of them, begin and end


def pack(windows: Tensor, eos: int) -> Packed:
    """Windows [sequences, length+1] as one row. A sequence ends after each </s>, which is predicted, and each window.

    The state never passes from one document to the next, nor from one window to the next.
    """
    inputs = windows[:, :-1]
    ends = inputs == eos
    labels = windows[:, 1:].masked_fill(ends, IGNORE)  # nothing tells how the next document begins
    ends = ends.clone()
    ends[:, -1] = True
    bounds = torch.nn.functional.pad(ends.flatten().nonzero().flatten() + 1, (1, 0))
    return Packed(inputs.reshape(1, -1), labels.reshape(1, -1), bounds.to(torch.int32))
