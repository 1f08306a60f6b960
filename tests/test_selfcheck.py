"""The self-check: what it covers, that it finds what is wrong, and the processes that compile for it."""

import subprocess
import sys

import pytest
import torch

from runningtensor.ops import chunk, selfcheck
from runningtensor.ops.selfcheck import Case

CPU = torch.device("cpu")
TINY = Case(torch.float32, (3, 2), 4, True, True, False, T=5)


@pytest.mark.parametrize(("device", "dtypes"), (("cpu", selfcheck.LIMITS), ("cuda", (torch.bfloat16,))))
def test_every_option_is_on_and_off(device, dtypes):
    found = selfcheck.cases(torch.device(device))
    assert len(found) == len(set(found))
    assert {case.dtype for case in found} == set(selfcheck.LIMITS)
    for dtype in dtypes:
        mine = [case for case in found if case.dtype == dtype]
        assert {len(case.widths) for case in mine} >= {1, 2, 3}
        for option in ("delta", "decay", "packed"):
            assert {getattr(case, option) for case in mine} == {False, True}, f"{option} in {dtype}"


def test_on_a_gpu_every_block_size_is_covered_with_every_option_on_and_off():
    found = [case for case in selfcheck.gpu_cases() if case.dtype == torch.bfloat16]
    sizes = {(case.widths, case.V, case.H > 8) for case in found}
    for widths, V in (((25, 25), 48), ((24, 24), 48), ((16, 16), 64)):  # those of Hopper's kernels
        assert {(widths, V, False), (widths, V, True)} <= sizes
        mine = [case for case in found if (case.widths, case.V) == (widths, V)]
        for option in ("delta", "decay", "packed", "states"):
            assert {getattr(case, option) for case in mine} == {False, True}
    assert ((25, 25), 64, True) in sizes  # whose values two blocks of 32 hold
    assert {case.chunk for case in found} == {16, 32, 64}


def test_a_wrong_backend_is_found(monkeypatch):
    right = chunk.backward

    def wrong(*arguments):
        first, *rest = right(*arguments)
        return first * 1.01, *rest

    monkeypatch.setattr(chunk, "backward", wrong)
    monkeypatch.setattr(selfcheck, "cases", lambda _: [TINY])
    verdicts = {verdict.backend: verdict for verdict in selfcheck.selfcheck(CPU)}
    assert not verdicts["torch"].right and verdicts["torch"].worst.startswith("dq0")
    assert verdicts["recurrent"].right


def test_without_kernels_nothing_is_compiled():
    assert list(selfcheck.precompile(selfcheck.cases(CPU), CPU)) == []


def test_a_process_that_cannot_start_is_an_error(monkeypatch):
    def start(device):
        raise OSError("no more processes")

    monkeypatch.setattr(selfcheck, "launches", lambda wanted, device: LAUNCHES)
    monkeypatch.setattr(selfcheck, "start_worker", start)
    with pytest.raises(OSError, match="no more processes"):
        list(selfcheck.precompile([TINY], CPU))


LAUNCHES = [(TINY, which) for which in range(5)]
# Answers as a worker does, with what it read to show for it; or dies of the first.
HONEST = "import sys\nfrom runningtensor.ops import selfcheck\nselfcheck.compile_launch = print\nselfcheck.work('cpu')"
DYING = "import sys, pickle; pickle.load(sys.stdin.buffer); sys.exit(1)"


@pytest.mark.parametrize("program", (HONEST, DYING), ids=("honest", "dying"))
def test_every_launch_is_given_to_a_process_once(program, monkeypatch):
    started = []

    def start(device):
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe))
        return started[-1]

    monkeypatch.setattr(selfcheck, "launches", lambda wanted, device: LAUNCHES)
    monkeypatch.setattr(selfcheck, "start_worker", start)
    monkeypatch.setattr(selfcheck.os, "sched_getaffinity", lambda _: {0})
    progress = list(selfcheck.precompile([TINY], CPU))
    assert progress == sorted(progress) and {total for _, total in progress} == {5}
    assert len(started) == (1 if program == HONEST else 5)
    assert all(process.poll() is not None for process in started)
