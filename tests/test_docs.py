"""What README and docs say can be done, can be done: Python runs, and so do commands, but for those that take a GPU, a
download or hours: of these it is checked that they are there and take what they are given."""

import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from runningtensor.bench import pretrain_gpu
from runningtensor.bench.provenance import Provenance, write
from runningtensor.cli import app
from runningtensor.mqar.grids import GRIDS
from runningtensor.mqar.record import Point, Result, Score, identity, now, to_json, told_apart
from runningtensor.mqar.sweep import read
from runningtensor.mqar.workers import failure

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
    """The words of each command, lines put together and comments left out; of a console, what follows a $."""
    if typed := re.findall(r"^\$ (.*)", shell, re.MULTILINE):
        shell = "\n".join(typed)
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


# What is run, and what makes it short: a few steps are enough to see that it works.
SHORT = {
    ("inspect",): [],
    ("generate",): ["--device", "cpu"],
    ("chat",): ["--device", "cpu"],
    ("export",): [],
    ("data", "prepare"): ["--validation", "0.3"],
    ("pretrain", "tiny_cpu"): ["--set", "steps=2", "--set", "validation_sequences=2"],
    ("pretrain", "small_50m"): ["--set=vocab_size=none", "--set=length=64"]
    + [f"--set={name}=1" for name in ("steps", "batch", "validation_sequences")],
    ("pretrain", "plot"): [],
    ("pretrain", "export"): [],
    ("mqar", "train"): ["--steps", "1", "--batch", "1", "--test-count", "1", "--device", "cpu"],
    ("mqar", "report"): [],
    ("mqar", "sweep"): ["--minutes", "0", "--device", "cpu"],
    ("evaluate",): ["--data", "sets", "--limit", "1", "--device", "cpu"],
}


@pytest.mark.parametrize("shell", blocks("sh", "console"))
def test_commands_do_what_they_should(shell, tmp_path, monkeypatch, free_port):
    """One after another, in a folder with texts, a small tokenizer, a layer, and a MODEL unless it is what is made."""
    for package in ("transformers", "datatrove", "matplotlib"):
        pytest.importorskip(package, reason=f"needs {package}, which comes with the extra dev")
    import evaluation
    from speakers import SPEAKER, folder, served, tokenizer

    (tmp_path / "texts").mkdir()
    parts = [part for page in PAGES for part in page.read_text().split("\n\n")]
    for file in ("texts.jsonl", "texts/a.jsonl"):
        (tmp_path / file).write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    tokenizer().save_pretrained(tmp_path / "small")
    (tmp_path / "mine.py").write_text("from runningtensor.layers.baselines import DeltaNet as layer\n")
    if "export run MODEL" not in shell:
        folder(tmp_path / "MODEL", template=SPEAKER)
    monkeypatch.chdir(tmp_path)
    if "--data data" in shell and "data prepare" not in shell:
        prepare = ["data", "prepare", "texts.jsonl", "data", "--tokenizer", "small", *SHORT["data", "prepare"]]
        assert CliRunner().invoke(app, prepare).exit_code == 0
    for words in commands(shell):
        while "=" in words[0]:  # a variable of the environment
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        if words[:2] == ["runningtensor", "serve"]:
            with served(tmp_path / words[2], "--port", free_port, *words[3:]):
                pass
        if words[0] != "runningtensor":
            continue
        short = next((SHORT[name] for n in (1, 2) if (name := tuple(words[1 : 1 + n])) in SHORT), None)
        if words[1] == "evaluate":
            pytest.importorskip("lm_eval", reason="lm-eval comes with the extra evaluate")
            for model in words[2:4]:
                evaluation.save_model(tmp_path / model)
            evaluation.save_data(tmp_path / "sets")
        if short is not None and "HuggingFaceFW/fineweb-edu" not in words:
            done = CliRunner().invoke(app, [*words[1:], *short], input="")
            assert done.exit_code == 0, f"{' '.join(words)}: {done.output} {done.exception}"


@pytest.mark.parametrize("shell", blocks("sh", "console"))
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


@pytest.mark.parametrize("file", [*sorted((ROOT / "results/mqar").glob("*.jsonl"))], ids=lambda file: file.name)
def test_runs_of_the_results_can_be_told_apart(file):
    runs = {identity(result.run): result.run for result in read(file)}
    assert len({*told_apart([*runs.values()])}) == len(runs)


def test_every_file_that_is_shown_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} points to {target}"


# -- Tables ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables():
    """docs/tables.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_number_of_a_table_is_that_of_results(tables):
    for page in tables.PAGES:
        assert tables.filled(page.read_text()) == page.read_text(), f"{page.name} is not what results/ say: make tables"


def test_a_number_that_was_typed_is_written_over(tables):
    page = (ROOT / "README.md").read_text()
    digits = str.maketrans("0123456789", "1234567890")
    typed = tables.PLACE.sub(lambda place: place[0].translate(digits), page)
    assert tables.filled(typed) == page != typed


def test_other_results_are_another_table(tables, tmp_path, monkeypatch):
    page = "<!-- demo --><!-- end -->"
    before = tables.filled(page)
    (tmp_path / "mqar").mkdir()
    measured = (ROOT / "results/mqar/demo.csv").read_text()
    (tmp_path / "mqar/demo.csv").write_text(measured.replace("40891", "40892"))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.filled(page) == before.replace("40,891", "40,892") != before


def test_every_table_has_its_place(tables):
    found = [name for page in tables.PAGES for name in re.findall(r"<!-- (\w+) -->", page.read_text()) if name != "end"]
    assert sorted(found) == sorted(tables.TABLES)


def test_what_has_no_results_has_no_table(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in tables.TABLES:
        assert tables.filled(f"<!-- {name} -->\nold\n<!-- end -->") == f"<!-- {name} --><!-- end -->"


ORIGIN = Provenance("2026-01-01T00:00Z", "abc1234", "NVIDIA H200", 16, "2.11.0", "3.7.1", "")


@pytest.mark.parametrize("name", ("recall", "table1", "table2", "changes", "capacity"))
def test_a_table_of_the_paper_comes_with_its_results(name, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    grid = "table1" if name == "recall" else name
    run = GRIDS[grid]()[0].runs[0]
    scores = [Point(200, 1.0, 0.875, 3.0, 0.5, also=[Score(0.25, 0.25) for _ in run.also])]
    (tmp_path / "mqar").mkdir()
    lines = [
        to_json(Result(run, 175_475, 120_000, curve=scores, origin=vars(ORIGIN), finished=now())),
        to_json(failure(GRIDS[grid]()[1].runs[0], "killed by SIGKILL")),  # says nothing of where it was
    ]
    (tmp_path / f"mqar/{grid}.jsonl").write_text("\n".join(lines) + "\n")
    text = tables.filled(f"<!-- {name} --><!-- end -->")
    assert "87.5" in text
    assert text.endswith("From `results/mqar`: NVIDIA H200, torch 2.11.0, commit abc1234. <!-- end -->")


def test_throughput_comes_with_its_results(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    found = {"sequences": 12, "parameters": 595_000_000, "tokens_a_second": 65_432.1, "mfu": 0.36, "peak_gib": 99.0}
    rows = [pretrain_gpu.make_row(ORIGIN, case, found) for case in pretrain_gpu.CASES]
    write(tmp_path / "bench/pretrain_gpu.csv", rows, pretrain_gpu.PretrainRow)
    text = tables.filled("<!-- throughput --><!-- end -->")
    assert text.count("| 595M | 12 × 4,096 | 65,432 | 1.00× | 36.0% | 99 GiB |") == len(rows) // 2
