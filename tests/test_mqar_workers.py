"""A run in a process gives what it gives here, whatever becomes of the process and of the sweep."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_mqar_sweep import TINY, quick, run, run_all  # noqa: F401

from runningtensor.mqar import sweep as sweeping
from runningtensor.mqar.grids import GRIDS, Cell
from runningtensor.mqar.record import from_json, identity
from runningtensor.mqar.sweep import Store, read, run_cells, sweep
from runningtensor.mqar.train import WARM_UPS, train
from runningtensor.mqar.workers import Worker, elsewhere, kept


@pytest.fixture
def path(tmp_path):
    return tmp_path / "grid.jsonl"


def test_a_run_that_crashes_is_recorded_and_the_others_give_what_they_would_here(path):
    wrong = run(1, options=TINY | {"nonsense": 1})
    deadly = run(2, mixer="deltanet", options={})

    def started(run):
        worker = Worker(run, "cpu")
        if run == deadly:
            worker.process.kill()
        return worker

    grid = [Cell("row", 16, (wrong, deadly, run(3)))]
    assert run_all(grid, path, started, jobs=3) == 2  # which may be tried again
    found = {each.run.seed: each for each in read(path)}
    assert (
        found[1].failed.startswith("exit 1: ValueError: options must fit running_tensor")
        and "nonsense" in found[1].failed
    )
    assert found[2].failed.startswith("killed by SIGKILL")
    *_, here = train(run(3), torch.device("cpu"))
    assert found[3].run == here.run and found[3].finished and not found[3].failed
    assert [point.loss for point in found[3].curve] == [point.loss for point in here.curve]


def test_a_result_that_was_cut_off_is_a_failure():
    worker = Worker(run(0), "cpu")
    worker.process.kill()
    worker.process.wait()
    os.pwrite(worker.output.fileno(), b'\nRESULT {"id": "12\n', 0)
    assert worker.poll().failed.startswith("killed by SIGKILL: its result cannot be read")


class Interrupted(Worker):
    """Somebody presses Ctrl-C after its first test."""

    pressed = False

    def poll(self):
        if self.progress()[0] and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return super().poll()


def test_a_sweep_that_is_interrupted_goes_on_in_the_middle_of_its_run(path, monkeypatch):
    monkeypatch.setattr(sweeping, "GRACE", 20)
    long, running, text = run(0, steps=300, test_every=20), path.parent / "running", StringIO()
    grid = [Cell("row", 16, (long,))]
    with pytest.raises(KeyboardInterrupt):
        run_cells(
            grid,
            path,
            partial(Interrupted, device="cpu", running=running),
            console=Console(file=text),
        )
    assert "1 runs left, 1 of them wait to go on" in text.getvalue() and not read(path)
    assert [*running.iterdir()] == [kept(running, identity(long))]

    assert run_all(grid, path, partial(Worker, device="cpu", running=running)) == 0
    (found,) = read(path)
    *_, here = train(long, torch.device("cpu"))
    assert len(found.origin["interrupted"]) == 1 and not [*running.iterdir()]
    assert [replace(point, seconds=0) for point in found.curve] == [replace(point, seconds=0) for point in here.curve]


def test_an_interrupt_while_a_result_is_written_down_does_not_lose_it(path, monkeypatch):
    add, pressed = Store.add, []

    def interrupted(store, result):
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        add(store, result)

    monkeypatch.setattr(Store, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([Cell("row", 16, (run(0),))], path, partial(Worker, device="cpu"))
    assert [found.run.seed for found in read(path)] == [0]


def test_a_person_is_told_of_a_file_that_is_ignored(path, capsys):
    file = kept(path.parent, identity(run(0)))
    file.write_text("nonsense")
    worker = Worker(run(0), "cpu", running=path.parent)
    until(lambda: worker.process.poll() is not None, 20)
    assert worker.poll().finished and f"{file} is ignored" in capsys.readouterr().out


def test_steps_are_timed_when_nobody_else_has_a_turn(path):
    with (path.parent / "turn").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)  # another compiles
        worker = Worker(run(0, steps=8), "cpu", running=path.parent, alone=True)
        until(lambda: worker.progress()[0] == WARM_UPS, 20)
        time.sleep(0.3)
        assert worker.progress()[0] == WARM_UPS and worker.poll() is None
    until(lambda: worker.poll() is not None, 20)
    assert worker.poll().finished and worker.poll().origin["at_once"] == 1


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_mqar_workers import Cell, Worker, run, run_cells
def started(run):
    worker = Worker(run, "cpu", running=Path({path!r}).parent / "running")
    print("started", worker.process.pid, flush=True)
    return worker
run_cells([Cell("row", 16, (run(0), run(1, steps=10**6)))], Path({path!r}), started)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(what, seconds):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_sweep_that_is_killed_loses_nothing_finished_leaves_no_process_and_goes_on(path):
    program = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    sweep = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = []
    while len(pids) < 2:
        line = sweep.stdout.readline()
        assert line, "the sweep ended before it could be killed"
        pids += [int(line.split()[1])] if line.startswith("started") else []
    file = kept(path.parent / "running", identity(run(1, steps=10**6)))
    until(file.exists, 20)
    assert alive(pids[1])
    os.kill(sweep.pid, signal.SIGKILL)  # in the middle of the second run
    sweep.wait()
    sweep.stdout.close()
    try:
        until(lambda: not alive(pids[1]), 20)
    finally:
        if alive(pids[1]):  # what this test is against
            os.kill(pids[1], signal.SIGKILL)
    assert [found.run.seed for found in read(path)] == [0]
    assert torch.load(file, weights_only=True)["step"] > 0
    before = path.read_text()

    assert run_all([Cell("row", 16, (run(0), run(1)))], path, partial(Worker, device="cpu")) == 0
    assert path.read_text().startswith(before)
    assert [found.run.seed for found in read(path)] == [0, 1]


def test_a_run_over_ray_is_not_forgotten_before_its_result_is_written_down(tmp_path):
    line = elsewhere(json.dumps(asdict(run(0))), "cpu", str(tmp_path), alone=False, graph=True)
    assert from_json(line).finished
    assert torch.load(kept(tmp_path, identity(run(0))), weights_only=True)["step"] > 0  # if the sweep is killed now


def test_a_sweep_over_ray_finds_what_one_here_finds(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    grid = [Cell("row", 16, (run(0), run(1, options=TINY | {"nonsense": 1}), run(2)))]
    monkeypatch.setitem(GRIDS, "tiny", lambda: grid)
    for where, ray in (("here", False), ("there", True)):
        assert sweep("tiny", jobs=2, out=tmp_path / where, ray=ray, device="cpu", console=Console(file=StringIO())) == 1
    here, there = (Store(tmp_path / where / "tiny.jsonl").found for where in ("here", "there"))
    assert here.keys() == there.keys() and len(here) == 3
    for key in here:
        assert [point.loss for point in here[key].curve] == [point.loss for point in there[key].curve]
        assert here[key].failed == there[key].failed
    assert not [*(tmp_path / "there" / "running").iterdir()]  # the results are written down
