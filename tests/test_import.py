"""`import runningtensor` needs torch and nothing else, and hardly any time."""

import subprocess
import sys

PROGRAM = """
import sys, time, torch
before, start = set(sys.modules), time.perf_counter()
import runningtensor
print(time.perf_counter() - start)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
print(*({"typer", "rich", "transformers", "matplotlib"} & set(sys.modules)))
"""


def test_importing_takes_only_torch_and_under_a_second():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    seconds, new, unwanted, _ = done.stdout.split("\n")
    assert float(seconds) < 1.0
    assert new == "runningtensor"  # beyond what torch itself had imported
    assert unwanted == ""
