"""A run in a process of its own, on this machine or on one of a Ray cluster: how it is started, asked and stopped."""

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from runningtensor.bench.provenance import commit
from runningtensor.mqar.record import Result, Run, from_json, identity, now, parsed, run_from, to_json
from runningtensor.mqar.resume import NOTE

PROGRESS, RESULT = "PROGRESS ", "RESULT "  # begin the lines of a worker that are not a library's chatter
PAUSE = 0.05  # seconds between looks at the workers
GRACE = 30.0  # seconds for a run that is asked to stop; it may have to finish a test first


def work() -> None:
    """The process: a job on its standard input, progress and the result on its standard output."""
    job = json.loads(sys.stdin.readline())
    Thread(target=leave_with_parent, daemon=True).start()
    import torch

    from runningtensor.mqar.train import train

    asked = Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    device = torch.device(job["device"]) if job["device"] else None
    file = Path(job["kept"]) if job["kept"] else None
    alone = None
    if job["alone"]:
        turn = Path(job["alone"]).open("a")  # noqa: SIM115
        fcntl.flock(turn, fcntl.LOCK_SH)  # many may compile at once, while nobody's steps are timed
        alone = partial(fcntl.flock, turn, fcntl.LOCK_EX)
    for result in train(run_from(job["run"]), device, job["graph"], kept=file, stop=asked.is_set, alone=alone):
        if result.curve:
            print(f"{PROGRESS}{result.curve[-1].step} {result.accuracy}", flush=True)
    print(f"\n{RESULT}{to_json(result)}", flush=True)  # on a line of its own, whatever was printed before


def leave_with_parent() -> None:
    """The input ends when the sweep does, even if it was killed; nobody wants the result then, but the next goes on."""
    while os.read(0, 1):  # not sys.stdin: Python could not end while a thread waits in it
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def kept(running: Path | str, key: str) -> Path:
    """Where a run has what it needs to go on."""
    return Path(running) / f"{key}.pt"


class Job(Protocol):
    """A run under way."""

    def poll(self) -> Result | None: ...  # once it has ended; not finished: it was stopped, and can go on
    def progress(self) -> tuple[int, float] | None: ...  # step and accuracy; None: it cannot be known
    def stop(self) -> None: ...  # soon, when it has written what it needs to go on
    def kill(self) -> None: ...


class Worker:
    """A run in a process of this machine."""

    def __init__(
        self,
        run: Run,
        device: str | None = None,
        threads: int = 1,
        *,
        running: Path | str | None = None,
        alone: bool = False,  # of all that are, while its steps are timed; in `running` is what they do it by
        graph: bool = True,
    ) -> None:
        self.run = run
        self.result: Result | None = None  # once it has ended
        job = {
            "run": asdict(run),
            "device": device,
            "graph": graph,
            "kept": running and str(kept(running, identity(run))),
            "alone": str(Path(running) / "turn") if running and alone else None,
        }
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.size, self.said = 0, list[str]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runningtensor.mqar.workers"],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            # A GPU that refuses is an error: else torch says that there is none, and the run takes the CPU.
            env={"OMP_NUM_THREADS": str(threads), "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ},
            start_new_session=True,  # an interrupt is for the sweep, which then stops its workers
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once, which poll will find
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self, start: str) -> list[str]:
        """What follows these words in lines it said. The file is read again only when it has grown, and by pread, for
        the process writes at the position of the same file."""
        if (size := os.fstat(self.output.fileno()).st_size) != self.size:
            said = os.pread(self.output.fileno(), size, 0)
            self.size, self.said = len(said), said.decode(errors="replace").splitlines()
        return [line.removeprefix(start) for line in self.said if line.startswith(start)]

    def progress(self) -> tuple[int, float]:
        """Step and accuracy."""
        with suppress(ValueError, OSError, IndexError):  # it is asked while it ends, or in the middle of a line
            said = [line.split() for line in self.lines(PROGRESS)]
            return (int(said[-1][0]), float(said[-1][1])) if said else (0, 0.0)
        return 0, 0.0

    def poll(self) -> Result | None:
        """May be asked again: a sweep that is interrupted while it writes a result down asks for it once more."""
        code = self.process.poll()
        if self.result is None and code is not None:
            self.result = self.ended(code)
            self.close()
        return self.result

    def ended(self, code: int) -> Result:
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        if found := self.lines(RESULT):
            try:
                return parsed(found[-1])
            except ValueError as error:  # it died in the middle of it
                return failure(self.run, f"{why}: its result cannot be read: {error}")
        words = [line.strip() for line in self.lines("") if not line.startswith((PROGRESS, NOTE))]
        return failure(self.run, ": ".join((why, *[word for word in words if word][-1:])))

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        if self.output.closed:
            return
        for note in self.lines(NOTE):
            print(note)
        self.output.close()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()


def failure(run: Run, why: str) -> Result:
    return Result(run, 0, None, origin={"commit": commit()}, finished=now(), failed=" ".join(why.split())[:300])


# -- Runs elsewhere ----------------------------------------------------------------------------------------------------


def elsewhere(line: str, device: str | None, running: str, alone: bool, graph: bool) -> str:
    """What a machine of a Ray cluster does: the same as this one would. If it has the folder, runs go on there too."""
    if alone:
        Path(running).mkdir(parents=True, exist_ok=True)
    worker = Worker(run_from(json.loads(line)), device, running=running, alone=alone, graph=graph)
    while (result := worker.poll()) is None:
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # Ray's way to cancel
            worker.stop()
    return to_json(result)  # what it could go on from is the sweep's to forget, when it has written the result down


class Cluster:
    """Starts runs on a Ray cluster: RAY_ADDRESS's, or the one that runs here, or a new one of this machine alone."""

    def __init__(self, jobs: int, device: str | None, running: Path, alone: bool = False, graph: bool = True) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError("ray must be installed for --ray: pip install 'runningtensor[ray]'") from error
        self.ray, self.given = ray, (device, str(running), alone, graph)
        ray.init(log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
        gpus = int(ray.cluster_resources().get("GPU", 0)) if device in (None, "cuda") else 0
        self.jobs = jobs * max(1, gpus)
        # A run that fails is not tried again elsewhere: the sweep writes down why.
        self.elsewhere = ray.remote(num_cpus=1, num_gpus=1 / jobs if gpus else 0, max_retries=0)(elsewhere)

    def start(self, run: Run) -> "RemoteWorker":
        reference = self.elsewhere.remote(json.dumps(asdict(run)), *self.given)
        return RemoteWorker(self.ray, run, reference)

    def close(self) -> None:
        self.ray.shutdown()


class RemoteWorker:
    """A run somewhere on the cluster."""

    def __init__(self, ray: Any, run: Run, reference: Any) -> None:
        self.ray, self.run, self.reference = ray, run, reference

    def progress(self) -> None:
        return None

    def poll(self) -> Result | None:
        ready, _ = self.ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            return from_json(self.ray.get(self.reference))
        except Exception as error:  # whatever became of the machine
            return failure(self.run, f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        self.ray.cancel(self.reference)

    def kill(self) -> None:
        self.ray.cancel(self.reference, force=True)


if __name__ == "__main__":
    work()
