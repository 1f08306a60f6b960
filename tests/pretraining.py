"""Shards written by hand, of the text of this repository as bytes, and runs that take seconds."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
from rich.console import Console

from runningtensor.pretrain.progress import LOG, read
from runningtensor.pretrain.recipes import Recipe, tiny_cpu
from runningtensor.pretrain.run import train

EOS = 256
TEXT = Path(__file__).parents[1] / "LICENSE"  # prose that no change here will change


def shards(folder: Path, seed: int | None = None, documents: int = 100) -> Path:
    """Bytes of text, or, with a seed, of a few letters at random; every tenth document is held out."""
    if seed is None:
        texts = [part.encode() for part in TEXT.read_text("utf-8").split("\n\n") if part]
    else:
        rng = np.random.default_rng(seed)
        texts = [rng.integers(97, 105, rng.integers(5, 60)).astype(np.uint8).tobytes() for _ in range(documents)]
    folder.mkdir(parents=True)
    record = {}
    for split, chosen in ("validation", texts[::10]), ("train", [t for i, t in enumerate(texts) if i % 10]):
        tokens = np.concatenate([np.append(np.frombuffer(text, np.uint8).astype("<u2"), EOS) for text in chosen])
        raw = tokens.astype("<u2").tobytes()
        (folder / f"{split}_00000.ds").write_bytes(raw)
        sha = hashlib.sha256(raw).hexdigest()
        record[split] = {"file": f"{split}_00000.ds", "tokens": len(tokens), "sha256": sha}
    (folder / "meta.json").write_text(json.dumps({"vocab_size": 257, "eos": EOS, "shards": [record]}))
    return folder


def recipe(**changes: object) -> Recipe:
    """Of 8 steps, saved every 3."""
    tiny = replace(
        tiny_cpu(), hidden_size=32, heads=2, key_dims=(6, 6), value_dim=8, mlp=48, length=32, batch=8, sequences=3,
        steps=8, warmup=0, validate_every=4, validation_sequences=5, save_every=3, skip_limit=3,
    )  # fmt: skip
    return replace(tiny, **changes)


def run(recipe: Recipe, data: Path, out: Path) -> str:
    """Trains in this process, and returns what was said."""
    said = StringIO()
    assert train(recipe, data, out, Console(file=said, width=500)) == 0
    return said.getvalue()


def losses(out: Path, name: str = "loss") -> dict[int, float]:
    return {line["step"]: line[name] for line in read(out / LOG) if name in line}


CHILD = """
import json, sys, time, torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from pathlib import Path
from pretraining import recipe, train
{before}
sys.exit(train(recipe(**json.loads(sys.argv[3])), Path(sys.argv[1]), Path(sys.argv[2])))
"""


def child(data: Path, out: Path, ranks: int = 1, before: str = "", **changes: object) -> "subprocess.Popen[str]":
    """The same in processes of their own, which run the code `before` first."""
    code = CHILD.format(tests=str(Path(__file__).parent), before=before)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command = [sys.executable, "-c", code, str(data), str(out), json.dumps(changes)]
    return start([*torchrun, f"--nproc-per-node={ranks}", *command] if ranks > 1 else command)


def start(command: list[str]) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, text=True, stdout=pipe, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def end(process: "subprocess.Popen[str]", seconds: float = 120) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, said


def until(there: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 120) -> None:
    """Waits for it while the process lives."""
    deadline = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
