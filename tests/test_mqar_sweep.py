"""A sweep runs each run once, however often it is killed."""

import json
import time
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from runningtensor.mqar import sweep as sweeping
from runningtensor.mqar.data import Task
from runningtensor.mqar.grids import Cell
from runningtensor.mqar.record import Point, Result, Run, Score, from_json, identity, to_json
from runningtensor.mqar.sweep import Store, ordered, read, run_cells
from runningtensor.mqar.workers import failure, kept

EASY = Task(16, 2, vocab_size=16)
TINY = {"num_heads": 1, "key_dims": (4, 4), "value_dim": 4}


def run(seed=0, **changes):
    given = {"mixer": "running_tensor", "options": TINY, "tasks": (EASY,), "test": EASY, "d_model": 8, "layers": 1}
    return Run(**(given | {"batch": 2, "steps": 2, "test_every": 1, "test_count": 4, "seed": seed} | changes))


def result(run, *accuracies):
    first, *also = accuracies
    point = Point(1, 1.0, first, 1.0, first / 2, [Score(accuracy, accuracy / 2) for accuracy in also])
    return Result(run, 10, 20, curve=[point], ms_a_step=5.0, finished="2026-01-01T00:00:00Z")


class Pretended:
    """Runs that take no time: `accuracies` says what each seed finds; a seed that is not there never ends.

    A run that is asked to stop ends with what `stopping` says.
    """

    def __init__(self, accuracies, stopping=None):
        self.accuracies, self.started, self.ended, self.killed = accuracies, [], [], []
        self.stopping, self.asked, self.steps = stopping or {}, [], {}

    def __call__(self, run):
        self.started.append(run.seed)
        return Job(self, run)


class Job:
    def __init__(self, all, run):
        self.all, self.run = all, run

    def poll(self):
        found = self.all.accuracies.get(self.run.seed)
        self.all.ended.extend([self.run.seed] * (found is not None))
        if isinstance(found, Result):
            return replace(found, origin={**found.origin})
        return found if found is None else result(self.run, found)

    def progress(self):
        return self.all.steps.get(self.run.seed, 0), 0.0

    def stop(self):
        self.all.asked.append(self.run.seed)
        self.all.accuracies |= {seed: found for seed, found in self.all.stopping.items() if seed == self.run.seed}

    def kill(self):
        self.all.killed.append(self.run.seed)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sweeping, "PAUSE", 0.001)
    monkeypatch.setattr(sweeping, "GRACE", 0.1)
    monkeypatch.setattr(sweeping, "SETTLE", 0.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "grid.jsonl"


def run_all(cells, path, start, minutes=5.0, **options):
    return run_cells(cells, path, start, console=Console(file=StringIO()), minutes=minutes, **options)


def cells(*seeds):
    return [Cell(f"row {i}", 16, tuple(map(run, row))) for i, row in enumerate(seeds)]


# -- What is run -------------------------------------------------------------------------------------------------------


def test_resuming_runs_nothing_twice(path):
    first, second = Pretended({0: 0.1, 1: 0.2}), Pretended({2: 0.3})
    assert run_all(cells((0, 1)), path, first) == 0
    assert run_all(cells((0, 1, 2)), path, second) == 0
    assert first.started == [0, 1] and second.started == [2]
    assert [found.run.seed for found in read(path)] == [0, 1, 2]


def test_runs_that_are_the_same_are_run_once(path):
    start = Pretended({0: 0.1, 1: 0.2})
    run_all(cells((0, 1), (0,)), path, start)
    assert sorted(start.started) == [0, 1]


def test_what_another_grid_has_run_is_not_run_again(tmp_path):
    theirs, ours = tmp_path / "table1.jsonl", tmp_path / "table2.jsonl"
    run_all(cells((0, 1)), theirs, Pretended({0: 0.1, 1: 0.2}))
    start = Pretended({2: 0.3})
    assert run_all(cells((1, 2)), ours, start) == 0
    assert start.started == [2] and [found.run.seed for found in read(ours)] == [2]
    assert [found.run.seed for found in sweeping.known(ours)] == [0, 1, 2]


def test_a_run_that_died_here_and_was_finished_in_another_grid_counts_as_finished(tmp_path):
    theirs, ours = tmp_path / "table1.jsonl", tmp_path / "table2.jsonl"
    theirs.write_text(to_json(result(run(0), 1.0)) + "\n")
    ours.write_text(to_json(failure(run(0), "no memory")) + "\n")
    start = Pretended({})
    assert run_all(cells((0, 1)), ours, start) == 0 and not start.started
    assert [found.accuracy for found in sweeping.known(ours)] == [0.0, 1.0]


def test_what_is_known_of_a_cell_counts_though_other_runs_of_it_are_wanted(path):
    run_all(cells((0, 1, 2)), path, Pretended({0: 0.1, 1: 0.2, 2: 1.0}))
    path.write_text(path.read_text().splitlines()[-1] + "\n")  # of the third alone
    start = Pretended({})
    assert run_all(cells((0, 1, 2)), path, start, wanted=cells((0, 1))) == 0 and not start.started


def test_what_cells_that_are_not_wanted_now_need_to_go_on_is_kept(path):
    tests = {"also": (Task(32, 2, vocab_size=16),)}
    runs = tuple(run(seed, **tests) for seed in (0, 1))
    file = kept(path.parent / "running", identity(runs[1]))
    file.parent.mkdir(parents=True)
    file.touch()
    grid = [Cell("row", 16, runs), Cell("row", 32, runs)]
    start = Pretended({0: result(runs[0], 1.0, 0.5)})
    assert run_all(grid, path, start, jobs=2, wanted=grid[:1]) == 0 and start.killed == [1]
    assert file.exists()
    assert run_all(grid, path, Pretended({1: result(runs[1], 0.5, 1.0)})) == 0 and not file.exists()


def test_an_interrupt_between_two_results_loses_neither(path, monkeypatch):
    start, add, pressed = Pretended({0: 0.1, 1: 0.2}, stopping={2: 0.3}), Store.add, []

    def interrupted(store, result):
        add(store, result)
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(cells((0, 1, 2)), path, start, jobs=3)
    assert {found.run.seed for found in read(path)} == {0, 1, 2} and not start.killed


def test_a_loss_that_is_no_number_is_a_result_though_the_sweep_was_stopping(path):
    failed = replace(result(run(0), 0.1), failed="the loss was not finite at step 2")
    assert run_all(cells((0,)), path, Pretended({}, stopping={0: failed}), minutes=0.001) == 0
    assert read(path)[0].failed == failed.failed


def test_a_cell_stops_when_a_run_of_it_is_good_enough(path):
    start = Pretended({0: 0.1, 1: 0.9995, 2: 0.5, 3: 0.99949, 4: 0.2})
    assert run_all(cells((0, 1, 2), (3, 4)), path, start) == 0
    assert sorted(start.started) == [0, 1, 3, 4]
    start.started.clear()
    assert run_all(cells((0, 1, 2), (3, 4)), path, start, all_runs=True) == 0
    assert start.started == [2]


def test_runs_under_way_are_stopped_when_another_makes_them_needless(path):
    start = Pretended({1: 1.0})
    assert run_all(cells((0, 1), (2, 3, 4)), path, start, jobs=3, minutes=0.02) == 3
    assert start.started == [0, 2, 1, 3, 4] and start.killed[0] == 0  # whose place another takes
    assert [found.run.seed for found in read(path)] == [1]


def test_a_needless_run_that_ends_when_it_is_asked_is_not_killed(path):
    """Killed in the middle of a kernel, it may take those with it that share a GPU through MPS."""
    unfinished = replace(result(run(0), 0.5), finished="")
    start = Pretended({1: 1.0}, stopping={0: unfinished, 2: unfinished})
    assert run_all(cells((0, 1), (2,)), path, start, jobs=3, minutes=0.002) == 1
    assert start.asked == [0, 2] and not start.killed and [found.run.seed for found in read(path)] == [1]


def test_a_run_that_serves_several_lengths_goes_on_until_all_of_them_are_good_enough(path):
    tests = {"also": (Task(32, 2, vocab_size=16),)}
    runs = tuple(run(seed, **tests) for seed in (0, 1, 2))
    start = Pretended({0: result(runs[0], 1.0, 0.5), 1: result(runs[1], 0.2, 1.0), 2: 0.0})
    run_all([Cell("row", 16, runs), Cell("row", 32, runs)], path, start)
    assert start.started == [0, 1]


def test_no_more_runs_at_once_than_asked(path):
    start = Pretended({})
    assert run_all(cells((0, 1, 2), (3, 4, 5)), path, start, jobs=4, minutes=0.001) == 6
    assert len(start.started) == 4


def test_runs_under_way_are_stopped_at_the_deadline_and_leave_nothing(path):
    start = Pretended({0: 0.5})
    began = time.monotonic()
    assert run_all(cells((0, 1)), path, start, jobs=2, minutes=0.02) == 1
    assert time.monotonic() - began < 5
    assert start.asked == start.killed == [1] and [found.run.seed for found in read(path)] == [0]


def test_of_runs_that_are_asked_to_stop_those_that_finish_are_results(path):
    unfinished, died = replace(result(run(0), 0.5), finished=""), failure(run(1), "killed by SIGTERM")
    start = Pretended({}, stopping={0: unfinished, 1: died, 2: 0.7})
    assert run_all(cells((0, 1, 2)), path, start, jobs=3, minutes=0.001) == 2
    assert not start.killed and [found.run.seed for found in read(path)] == [2]


def test_every_row_has_a_run_before_any_has_two_and_short_ones_come_first():
    grid = [Cell("a", 1, (run(0), run(1))), Cell("b", 1, (run(2), run(3))), Cell("a", 2, (run(4),))]
    assert [each.seed for _, each in ordered(grid)] == [0, 2, 1, 3, 4]


def test_what_died_is_left_to_the_next_sweep_which_is_said(path):
    said = StringIO()
    start = Pretended({0: failure(run(0), "killed by SIGKILL"), 1: 0.1})
    assert run_cells(cells((0, 1)), path, start, console=Console(file=said, width=200)) == 1
    assert "1 runs left, 0 of them wait to go on, 1 died and are tried again by the next sweep" in said.getvalue()
    start.accuracies[0] = 0.7
    assert run_all(cells((0, 1)), path, start) == 0
    assert start.started == [0, 1, 0]
    assert Store(path).found[identity(run(0))].accuracy == 0.7


@pytest.mark.parametrize("jobs", (1, 3))
def test_a_machine_that_is_not_well_does_not_cost_a_grid(path, jobs):
    """No GPU, a full disk, a broken environment: nothing that is started lives."""
    start = Pretended({seed: failure(run(seed), "no GPU") for seed in range(20)})
    with pytest.raises(ValueError, match=f"{jobs + 3} in a row died: is the machine well. The last: no GPU"):
        run_all(cells(range(20)), path, start, jobs=jobs)
    assert len(start.started) <= 2 * jobs + 3
    well = Pretended({seed: 0.1 for seed in range(20)})
    assert run_all(cells(range(20)), path, well, jobs=jobs) == 0
    assert sorted(well.started) == list(range(20))


def test_a_row_that_always_dies_does_not_end_a_sweep(path):
    rows = [range(10), range(10, 20)]
    start = Pretended({seed: failure(run(seed), "no memory") if seed < 10 else 0.1 for row in rows for seed in row})
    assert run_all(cells(*rows), path, start, jobs=2) == 10
    assert {found.run.seed for found in read(path) if not found.failed} == set(rows[1])


def test_a_result_that_cannot_be_written_is_printed(path, monkeypatch, capsys):
    def full(number):
        raise OSError("No space left on device")

    monkeypatch.setattr(sweeping.os, "fsync", full)
    said = StringIO()
    with pytest.raises(ValueError, match=r"grid\.jsonl cannot be written, so its result is printed: No space left"):
        run_cells(cells((0, 1, 2)), path, Pretended({0: 0.5, 1: 0.25}), console=Console(file=said), jobs=3)
    printed = [from_json(line).accuracy for line in capsys.readouterr().out.splitlines()]
    assert printed == [0.5, 0.25]  # each once, and what had ended beside it too
    assert "3 runs left" in said.getvalue()


def test_runs_that_die_beside_others_are_run_again_after_them_and_alone(path):
    """On a GPU that several share, one run's wrong address ends them all, and so may its memory."""
    guilty, innocent = failure(run(0), "an illegal memory access"), failure(run(1), "an illegal memory access")
    start = Pretended({0: guilty, 1: innocent, 2: 0.2, 3: 0.3})
    together = []

    def starting(each):
        if each.seed in start.started:
            start.accuracies[1] = 0.1  # with nothing beside it
            together.append((each.seed, len(start.started) - len(start.ended)))
        return start(each)

    said = StringIO()
    run_cells(cells((0, 1, 2, 3)), path, starting, jobs=2, minutes=0.1, console=Console(file=said))
    assert said.getvalue().count("an illegal memory access (again when the others are done)") == 2
    assert start.started == [0, 1, 2, 3, 0, 1] and together == [(0, 0), (1, 0)]
    assert {found.run.seed: bool(found.failed) for found in read(path)} == {0: True, 1: False, 2: False, 3: False}


def test_a_sweep_that_was_cut_off_does_not_begin_again_with_what_died_beside_others(path):
    start = Pretended({0: failure(run(0), "an illegal memory access")})  # the others never end
    assert run_all(cells((0, 1, 2)), path, start, jobs=2, minutes=0.01) == 3
    start = Pretended({0: 0.1, 1: 0.2, 2: 0.3})
    assert run_all(cells((0, 1, 2)), path, start, jobs=2) == 0
    assert start.started == [1, 2, 0]


def test_what_died_is_tried_again_after_the_others_and_alone(path):
    dead = failure(run(0), "killed by SIGKILL")
    run_all(cells((0,)), path, Pretended({0: dead}))
    start = Pretended({0: dead, 1: 0.1, 2: 0.2})
    run_all(cells((0, 1, 2)), path, start, jobs=3, minutes=0.1)
    assert start.started == [1, 2, 0]
    assert [found.origin.get("at_once") for found in read(path)] == [1, 3, 3, 1]


def test_what_died_waits_until_needless_runs_have_left_too(path):
    dead = range(10, 14)
    path.write_text("".join(to_json(failure(run(seed), "no memory")) + "\n" for seed in dead))
    start = Pretended({0: 1.0} | dict.fromkeys(dead, 0.1))  # which makes 1 and 2 needless, and these leave late
    beside = []

    def starting(each):
        here = set(start.started) - set(start.ended) - set(start.killed)
        beside.extend((each.seed, other) for other in here if each.seed >= 10)
        return start(each)

    assert run_all(cells((0, 1, 2), (10,), (11,), (12,), (13,)), path, starting, jobs=3) == 0
    assert start.started[3:] == [10, 11, 12, 13] and not beside


def test_runs_that_cannot_say_how_far_they_are_hold_nobody_up(path, monkeypatch):
    monkeypatch.setattr(sweeping, "PATIENCE", 60.0)
    monkeypatch.setattr(Job, "progress", lambda job: None)
    start = Pretended({0: failure(run(0), "the machine is gone"), 2: 0.2})
    assert run_all(cells((0, 1, 2)), path, start, jobs=2, minutes=0.005) == 2 and start.started[:3] == [0, 1, 2]


@pytest.mark.parametrize("sign", ("it goes on", "it ends", "it is waited for no longer"))
def test_while_others_may_be_dying_of_the_same_nothing_is_started(path, monkeypatch, sign):
    monkeypatch.setattr(sweeping, "PATIENCE", 0.3 if "longer" in sign else 60.0)
    start = Pretended({0: failure(run(0), "an illegal memory access"), 2: 0.2})
    asleep = []

    def sleep(seconds):
        asleep.append(len(start.started))
        time.sleep(seconds)
        if len(asleep) == 50:
            start.steps |= {1: 800} if sign == "it goes on" else {}
            start.accuracies |= {1: 0.1} if sign == "it ends" else {}

    monkeypatch.setattr(sweeping, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    run_all(cells((0, 1, 2)), path, start, jobs=2, minutes=0.01)
    assert start.started[:3] == [0, 1, 2] and asleep[:20] == [2] * 20


def test_after_a_death_among_others_nobody_is_started_for_a_while(path, monkeypatch):
    monkeypatch.setattr(sweeping, "SETTLE", 0.3)
    start, began = Pretended({0: failure(run(0), "an illegal memory access"), 1: 0.2, 2: 0.2}), []
    run_all(cells((0, 1, 2)), path, lambda each: began.append(time.monotonic()) or start(each), jobs=2)
    assert start.started == [0, 1, 2, 0] and began[2] - began[1] > 0.3


def test_a_run_whose_loss_was_no_number_is_not_run_again(path):
    start = Pretended({0: replace(result(run(0), 0.1), failed="the loss is not finite")})
    run_all(cells((0,)), path, start)
    run_all(cells((0,)), path, start)
    assert start.started == [0]


def test_what_a_run_goes_on_from_is_removed_when_nobody_needs_it(path):
    files = [kept(path.parent / "running", identity(run(seed))) for seed in range(4)]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.touch()
    start = Pretended({0: failure(run(0), "killed by SIGKILL"), 2: 1.0})  # and 1 is needless then
    assert run_all(cells((0,), (1, 2), (3,)), path, start, jobs=4, minutes=0.01) == 2
    assert [file.exists() for file in files] == [True, False, False, True]  # what died may be tried again


# -- The file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", (1, 4, 50, -40, 0))
def test_a_last_line_that_was_cut_off_is_mended_and_run_again(path, kept):
    start = Pretended({0: 0.1, 1: 0.2, 2: 0.3})
    run_all(cells((0, 1, 2)), path, start)
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + (last[:kept] or bytes(300)))  # zeros: what a power failure may leave
    assert [found.run.seed for found in read(path)] == [0, 1]
    start.started.clear()
    assert run_all(cells((0, 1, 2)), path, start) == 0
    assert start.started == [2]
    assert [json.loads(line)["run"]["seed"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_last_line_that_lacks_only_its_end_is_kept(path):
    path.write_text(to_json(result(run(0), 0.1)))
    start = Pretended({1: 0.2})
    run_all(cells((0, 1)), path, start)
    assert start.started == [1] and [found.run.seed for found in read(path)] == [0, 1]


def test_a_line_that_is_no_result_is_not_passed_over(path):
    path.write_text(f"nonsense\n{to_json(result(run(0), 0.1))}\n")
    with pytest.raises(ValueError, match="line 1 is none"):
        read(path)


@pytest.mark.parametrize("line", (b"null", b"[1]", b"3", b'{"run": {"options": []}, "curve": []}', b"\xff\xfe"))
def test_what_is_no_result_is_named_by_file_and_line(path, line):
    path.write_bytes(to_json(result(run(0), 0.1)).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"grid\.jsonl .* line 2 is none"):
        read(path)


@pytest.mark.parametrize("text", (b"my notes", b"my notes\nand more", b'{"id": 3}', b"3", b"\xff\n{"))
def test_a_file_that_is_not_of_a_sweep_is_left_alone(path, text):
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"grid\.jsonl must hold"):
        Store(path)
    assert path.read_bytes() == text


def test_a_failure_may_say_anything(path):
    text = StringIO()
    start = Pretended({0: failure(run(0), "[/nonsense] [red]")})
    run_cells(cells((0,)), path, start, console=Console(file=text, width=200))
    assert "[/nonsense] [red]" in text.getvalue()


def test_two_sweeps_do_not_write_one_file(path):
    store = Store(path)
    with pytest.raises(ValueError, match="one sweep at a time"):
        Store(path)
    store.close()
    Store(path).close()


def test_what_is_not_finished_is_not_known(path):
    path.write_text(to_json(replace(result(run(0), 0.5), finished="")) + "\n" + to_json(result(run(1), 0.5)) + "\n")
    assert [found.run.seed for found in sweeping.known(path)] == [1]
