"""A folder that loads with `trust_remote_code=True` where torch and transformers are, and this package is not.

transformers imports remote code from one flat folder. So every module of ours that the model needs goes there under a
name of its own, `runningtensor.ops.chunk` as `ops_chunk.py`, with its imports rewritten; nothing else changes.
"""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

PACKAGE = "runningtensor"
MODELS = f"{PACKAGE}.models"
CLASSES = {
    "AutoConfig": "configuration_running_tensor.RunningTensorConfig",
    "AutoModel": "modeling_running_tensor.RunningTensorModel",
    "AutoModelForCausalLM": "modeling_running_tensor.RunningTensorForCausalLM",
}


def export(model: Any, folder: str | Path, tokenizer: Any = None) -> None:
    """Saves a model, its code and, if there is one, its tokenizer."""
    folder = Path(folder)
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": CLASSES}, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name, source in flat_sources(f"{MODELS}.modeling_running_tensor").items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")


def flat_sources(root: str) -> dict[str, str]:
    """The sources of a module and of all it imports from this package, by their flat names."""
    found: dict[str, str] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if flat(module) not in found:
            found[flat(module)], needed = rewritten(path_of(module).read_text(encoding="utf-8"))
            waiting += needed
    # transformers copies the files that it sees imported, without running the code that it looks at.
    others = "".join(f"    from .{name} import *\n" for name in sorted(found) if name != flat(root))
    found[flat(root)] += f"\n\nif False:\n{others}"
    # Ops are known to torch by name, and this package, or another version of this code, may have the same.
    digest = hashlib.sha256("".join(found.values()).encode()).hexdigest()[:8]
    return {name: source.replace(f'"{PACKAGE}::', f'"{PACKAGE}_{digest}::') for name, source in found.items()}


def flat(module: str) -> str:
    return module.removeprefix(f"{MODELS}.").removeprefix(f"{PACKAGE}.").replace(".", "_")


def path_of(module: str) -> Path:
    path = Path(__file__).parents[2].joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def rewritten(source: str) -> tuple[str, list[str]]:
    """A source with its imports changed for the flat folder, and the modules of ours that it imports."""
    lines = source.splitlines()
    needed: list[str] = []
    for node in sorted(ast.walk(ast.parse(source)), key=lambda node: -getattr(node, "lineno", 0)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        old = slice(node.lineno - 1, node.end_lineno)
        indent = " " * node.col_offset
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if names[0].split(".")[0] == "triton":
            # An import that is not tried is a package that transformers insists on, and on a CPU there is no Triton.
            lines[old] = [f"{indent}try:", *("    " + line for line in lines[old]), f"{indent}except ImportError:"]
            lines.insert(old.start + node.end_lineno - node.lineno + 3, f"{indent}    raise")  # type: ignore[operator]
        elif isinstance(node, ast.ImportFrom) and names[0].split(".")[0] == PACKAGE:
            new = []
            for alias in node.names:
                whole = f"{names[0]}.{alias.name}"
                module, origin, name = names[0], f".{flat(names[0])}", alias.name
                if path_of(whole).exists():
                    module, origin, name = whole, ".", flat(whole)
                local = alias.asname or alias.name
                new.append(f"{indent}from {origin} import {name}" + f" as {local}" * (local != name))
                needed.append(module)
            lines[old] = new
        elif any(name.split(".")[0] == PACKAGE for name in names):
            raise ValueError(f"write `from {PACKAGE}… import …`: `{ast.unparse(node)}` cannot be made relative")
    return "\n".join(lines) + "\n", needed
