"""What README and docs say can be done, can be done: Python runs, commands are there and take what they are given."""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from runningtensor.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list:
    return [
        pytest.param(code, id=f"{page.name}-{number}")
        for page in PAGES
        for number, (language, code) in enumerate(BLOCK.findall(page.read_text()), 1)
        if language in languages
    ]


def commands(shell: str) -> list[list[str]]:
    """The words of each command, lines put together and comments left out."""
    lines = [shlex.split(line, comments=True) for line in shell.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, tmp_path, free_port):
    """In a folder with texts and a MODEL, and beside a server of it where there should be one."""
    pytest.importorskip("transformers", reason="transformers comes with the extra hf")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": page.read_text()}) + "\n" for page in PAGES))
    if "MODEL" in code:
        from speakers import SPEAKER, folder

        folder(tmp_path / "MODEL", template=SPEAKER)
    if "8000" in code:
        for package in ("fastapi", "uvicorn", "openai"):
            pytest.importorskip(package, reason=f"a server needs {package}, which comes with the extra serve or dev")
        from speakers import served

        with served(tmp_path / "MODEL", "--port", free_port):
            run(code.replace("8000", str(free_port)), tmp_path)
    else:
        run(code, tmp_path)


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", blocks("sh", "bash"))
def test_commands_are_there_and_take_what_they_are_given(shell):
    for words in commands(shell):
        if "runningtensor" in words and words[0] in ("runningtensor", "torchrun", "srun", "python"):
            understood(words[words.index("runningtensor") + 1 :])
        elif words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)
        elif "/" in words[0] and words[0].endswith(".sh"):
            assert (ROOT / words[0]).is_file()


def understood(words: list[str]) -> None:
    """Every word, by the command that it is for; nothing is run."""
    command, context = typer.main.get_command(app), None
    name = "runningtensor"
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        assert rest, f"{name} is a group, and wants one of {', '.join(command.list_commands(context))}"
        name, command, words = command.resolve_command(context, rest)


def test_a_command_that_is_not_there_is_noticed():
    for wrong in (["mqar", "swep"], ["mqar", "sweep", "table1", "--minute", "3"], ["inspect"]):
        with pytest.raises(Exception, match=r"No such|Missing"):
            understood(wrong)


def test_every_file_that_is_shown_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} points to {target}"
