# `make train` trains the example, `make test` checks everything (`make test-all` every combination), `make setup` only
# creates .venv for them. `make test-programs` trains with other libraries, in an environment of its own.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Written last, so that an interrupted installation is done again.
STAMP := .venv/.installed

# One thread per process: ranks on one machine would otherwise fight for its cores.
export OMP_NUM_THREADS := 1
# Tests start hundreds of processes that import the package: they compile it once.
unexport PYTHONDONTWRITEBYTECODE

# Two processes share the tests, a folder at a time, those that take longest first.
SHELL := bash -o pipefail
longest := integrations ranks examples parity unit
others := $(filter-out __pycache__ programs simulated $(longest),$(notdir $(patsubst %/,%,$(wildcard tests/*/))))
tests := $(addprefix test-,$(longest) $(others))

# Of grids of cases, as many as tests/grids.py says.
cases := --sparse

.PHONY: help setup train test test-all test-programs lint format picture $(tests)

help:
	@sed -n 1,2p Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[accelerate,examples,dev]"
	@touch $@

train: setup
	$(BIN)/python examples/train.py

test: lint
	@$(MAKE) --no-print-directory --jobs=2 --keep-going $(tests)

test-all: lint
	@$(MAKE) --no-print-directory --jobs=2 --keep-going $(tests) cases=

$(tests): test-%: setup
	$(BIN)/python -m pytest $(cases) tests/$* 2>&1 | sed -u "s/^/$@: /"

# Libraries that users bring along. They have packages that would change what other tests see.
test-programs: .venv-programs/.installed
	.venv-programs/bin/python -m pytest tests/programs

.venv-programs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-programs
	.venv-programs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[accelerate,examples,dev,programs]"
	@touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Draws docs/picture.svg again.
picture: setup
	PYTHONPATH=examples $(BIN)/python docs/picture.py
