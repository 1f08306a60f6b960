"""An exported folder is a model that torch and transformers alone can load."""

import subprocess
import sys

import pytest
import torch
from models import build, logits, tokens
from typer.testing import CliRunner

from runningtensor.cli import app
from runningtensor.models.export import flat_sources

PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("runningtensor", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import check_imports

folder, out = sys.argv[1:]
torch.set_num_threads(1)
for file in Path(folder).glob("*.py"):
    check_imports(file)  # as is done with each file that comes from the hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.load(f"{out}/ids.pt")
with torch.no_grad():
    logits = model(ids).logits
text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
model.train()(ids, labels=ids).loss.backward()
torch.save((logits, text), f"{out}/out.pt")
assert not any(name.split(".")[0] in ("runningtensor", "triton") for name in sys.modules)
"""


@pytest.mark.parametrize("kind", ("order 3", "hybrid", "gla"))
def test_it_loads_and_writes_the_same_where_this_package_and_triton_are_not_installed(kind, tmp_path, monkeypatch):
    model, ids = build(kind, dtype=torch.float32), tokens(2, 9)
    saved, folder = tmp_path / "saved", tmp_path / "a model-1.0"  # transformers makes a module name of it
    model.save_pretrained(saved)
    assert CliRunner().invoke(app, ["export", str(saved), str(folder)], catch_exceptions=False).exit_code == 0
    torch.save(ids, tmp_path / "ids.pt")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program = [sys.executable, "-I", "-c", PROGRAM, str(folder), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got, text = torch.load(tmp_path / "out.pt")
    torch.testing.assert_close(got, logits(model, ids), rtol=0, atol=1e-5)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    assert torch.equal(text, want)


def test_exported_code_names_neither_this_package_nor_its_ops():
    sources = flat_sources("runningtensor.models.modeling_running_tensor")
    assert {"configuration_running_tensor", "layers_running_tensor", "layers_baselines", "ops_interface"} <= set(
        sources
    )
    assert "ops_triton_launch" in sources
    for source in sources.values():
        compile(source, "exported", "exec")
        assert "from runningtensor" not in source and "import runningtensor" not in source
        assert '"runningtensor::' not in source
