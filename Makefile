# `make train` trains the example, `make test` checks everything, `make setup` only creates .venv for both.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Written last, so that an interrupted installation is done again.
STAMP := .venv/.installed

# One thread per process: ranks on one machine would otherwise fight for its cores.
export OMP_NUM_THREADS := 1

.PHONY: help setup train test lint format

help:
	@sed -n 1p Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples,dev]"
	@touch $@

train: setup
	$(BIN)/python examples/train.py

test: lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
