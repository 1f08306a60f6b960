# Two commands on a fresh machine do everything, set-up included: `make demo` and `make test`.
# PYTHON picks the interpreter the virtual environment is made from; CONSTRAINTS= (empty) takes the newest of everything.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
# A hypervisor may advertise AMX without offering it; a bfloat16 matmul then dies with SIGILL. This keeps to what is there.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test lint bench clean

demo: .venv/demo
	$(BIN)/runningtensor demo

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/demo
	$(BIN)/runningtensor bench ops

# Reinstall only when what they depend on changes. The demo needs little of what the tests do.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e

.venv/demo: pyproject.toml $(CONSTRAINTS)
	@echo "Setting up .venv (once; PyTorch is the large part) ..."
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[bench]'
	@touch $@

.venv/ready: .venv/demo
	$(INSTALL) '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
