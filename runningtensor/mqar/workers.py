"""A run in a process of its own, on this machine or on one of a Ray cluster: how it is started, asked and stopped."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from runningtensor.bench.provenance import commit
from runningtensor.mqar.record import Result, Run, from_json, identity, now, parsed, run_from, to_json
from runningtensor.mqar.resume import NOTE, forget

PROGRESS, RESULT = "PROGRESS ", "RESULT "  # begin the lines of a worker that are not a library's chatter
PAUSE = 0.05  # seconds between looks at the workers
GRACE = 30.0  # seconds for a run that is asked to stop; it may have to finish a test first


def work() -> None:
    """The process: a job on its standard input, progress and results on its standard output.

    A job is one run, or several, of which each makes a step in turn. On a GPU each then has a stream of its own: where
    a step of one leaves room, those of others run beside it. Steps of two processes do not, they take turns.
    """
    job = json.loads(sys.stdin.readline())
    Thread(target=leave_with_parent, daemon=True).start()
    import torch

    from runningtensor.mqar.train import stepping

    asked = Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    device = torch.device(job["device"]) if job["device"] else None
    runs = [run_from(run) for run in job["runs"]]
    several = len(runs) > 1 and torch.cuda.is_available() and (device is None or device.type == "cuda")
    streams = [torch.cuda.Stream(device) if several else None for _ in runs]
    active = {}
    for run, stream in zip(runs, streams, strict=True):
        key = identity(run)
        file = kept(job["running"], key) if job["running"] else None
        active[key] = (stepping(run, device, kept=file, stop=asked.is_set), stream)
    results: dict[str, Result] = {}
    while active:
        for key, (steps, stream) in [*active.items()]:
            with torch.cuda.stream(stream):  # of None: as it was
                step = next(steps, None)
            if step is None:
                del active[key]
                # On a line of its own, whatever was printed before.
                print(f"\n{RESULT}{key} {to_json(results[key])}", flush=True)
                continue
            result, grown = step
            results[key] = result
            if grown and result.curve:
                print(f"{PROGRESS}{key} {result.curve[-1].step} {result.accuracy}", flush=True)


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
    def progress(self) -> tuple[int, float]: ...
    def stop(self) -> None: ...  # soon, when it has written what it needs to go on
    def kill(self) -> None: ...


class Process:
    """Runs in a process of this machine."""

    def __init__(
        self, runs: Sequence[Run], device: str | None = None, threads: int = 1, *, running: Path | str | None = None
    ) -> None:
        job = {"runs": [asdict(run) for run in runs], "device": device, "running": running and str(running)}
        self.left = {identity(run) for run in runs}
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.size, self.said = 0, list[str]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runningtensor.mqar.workers"],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            start_new_session=True,  # an interrupt is for the sweep, which then stops its workers
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once, which poll will find
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self) -> list[str]:
        """All it has said, read where there is more of it; by pread, for it writes at the position of the same file."""
        if (size := os.fstat(self.output.fileno()).st_size) != self.size:
            said = os.pread(self.output.fileno(), size, 0)
            self.size, self.said = len(said), said.decode(errors="replace").splitlines()
        return self.said

    def last_words(self) -> str:
        """How it ended."""
        code = self.process.returncode
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        said = (line.strip() for line in self.lines() if not line.startswith((PROGRESS, RESULT, NOTE)))
        return ": ".join((why, *[line for line in said if line][-1:]))

    def leave(self, key: str) -> None:
        """Nobody asks for this run any more. The last of them closes the door."""
        self.left.discard(key)
        if self.left or self.output.closed:
            return
        for line in self.lines():
            if line.startswith(NOTE):
                print(line.removeprefix(NOTE))
        self.output.close()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()


class Worker:
    """A run in a process, alone or with others: they are stopped and killed with it."""

    def __init__(self, run: Run, host: Process) -> None:
        self.run, self.host, self.key = run, host, identity(run)
        self.result: Result | None = None  # once it has ended

    def said(self, what: str) -> list[str]:
        """What follows these words and the key of the run in lines of the process."""
        start = f"{what}{self.key} "
        return [line.removeprefix(start) for line in self.host.lines() if line.startswith(start)]

    def progress(self) -> tuple[int, float]:
        """Step and accuracy."""
        with suppress(ValueError, OSError, IndexError):  # it is asked while it ends, or in the middle of a line
            said = [line.split() for line in self.said(PROGRESS)]
            return (int(said[-1][0]), float(said[-1][1])) if said else (0, 0.0)
        return 0, 0.0

    def poll(self) -> Result | None:
        if self.result is not None:
            return self.result
        code = self.host.process.poll()  # first: then nothing it says before its end is missed
        found, broken = self.said(RESULT), ""
        try:
            result = parsed(found[-1]) if found else None
        except ValueError as error:  # it is in the middle of it, or died there
            result, broken = None, f": its result cannot be read: {error}"
        if result is None:
            if code is None:
                return None
            result = failure(self.run, self.host.last_words() + broken)
        self.result = result
        self.host.leave(self.key)
        return result

    def stop(self) -> None:
        self.host.process.terminate()

    def kill(self) -> None:
        self.host.process.kill()
        self.host.process.wait()
        self.host.leave(self.key)


def start(runs: Sequence[Run], *where: Any, **options: Any) -> list[Worker]:
    """Runs in one process, of which each makes a step in turn."""
    host = Process(runs, *where, **options)
    return [Worker(run, host) for run in runs]


def failure(run: Run, why: str) -> Result:
    return Result(run, 0, None, origin={"commit": commit()}, finished=now(), failed=" ".join(why.split())[:300])


# -- Runs elsewhere ----------------------------------------------------------------------------------------------------


def elsewhere(line: str, device: str | None, running: str) -> str:
    """What a machine of a Ray cluster does: the same as this one would. If it has the folder, runs go on there too."""
    (worker,) = start([run_from(json.loads(line))], device, running=running)
    while (result := worker.poll()) is None:
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # Ray's way to cancel
            worker.stop()
    if result.finished and result.curve:
        forget(kept(running, identity(result.run)))
    return to_json(result)


class Cluster:
    """Starts runs on a Ray cluster: RAY_ADDRESS's, or the one that runs here, or a new one of this machine alone."""

    def __init__(self, jobs: int, device: str | None, running: Path) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError("ray must be installed for --ray: pip install 'runningtensor[ray]'") from error
        self.ray, self.device, self.running = ray, device, str(running)
        ray.init(log_to_driver=False, logging_level="warning", include_dashboard=False)
        gpus = int(ray.cluster_resources().get("GPU", 0)) if device in (None, "cuda") else 0
        self.jobs = jobs * max(1, gpus)
        # A run that fails is not tried again elsewhere: the sweep writes down why.
        self.elsewhere = ray.remote(num_cpus=1, num_gpus=1 / jobs if gpus else 0, max_retries=0)(elsewhere)

    def start(self, runs: Sequence[Run]) -> list["RemoteWorker"]:
        lines = [json.dumps(asdict(run)) for run in runs]
        references = [self.elsewhere.remote(line, self.device, self.running) for line in lines]
        return [RemoteWorker(self.ray, *both) for both in zip(runs, references, strict=True)]

    def close(self) -> None:
        self.ray.shutdown()


class RemoteWorker:
    """A run somewhere on the cluster."""

    def __init__(self, ray: Any, run: Run, reference: Any) -> None:
        self.ray, self.run, self.reference = ray, run, reference

    def progress(self) -> tuple[int, float]:
        return 0, 0.0

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
