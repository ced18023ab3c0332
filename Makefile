# `make train` trains the example, `make test` checks everything (`make test-all` every combination), `make setup` only
# creates .venv for them. In environments of their own: `make test-programs` trains with other libraries, `make docs`
# builds the site, `make test-pages` opens it and the pages of reports in a browser.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Written last, so that an interrupted installation is done again.
STAMP := .venv/.installed

# One thread per process: ranks on one machine would otherwise fight for its cores.
export OMP_NUM_THREADS := 1
# Tests start hundreds of processes that import the package: they compile it once.
unexport PYTHONDONTWRITEBYTECODE

# One queue for all tests. Three workers share two cores, because tests wait for messages, deadlines and launchers.
SHELL := bash -o pipefail
pytest := $(BIN)/python -m pytest -n 3 --dist worksteal tests --ignore tests/programs

.PHONY: help setup train test test-all test-programs lint format options pictures docs test-pages

help:
	@sed -n 1,3p Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch, Lightning and others into .venv takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[accelerate,examples,dev]"
	@touch $@

train: setup
	$(BIN)/python examples/train.py

# The cases of a day (tests/grids.py).
test: lint
	$(pytest) --sparse

test-all: lint
	$(pytest)

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

# Writes docs/options.md and the typed keyword arguments again.
options: setup
	$(BIN)/python docs/options.py
	$(BIN)/ruff format --quiet smp_strategy/config/keywords.py

# Draws the pictures of the README and the pages again.
pictures: setup
	PYTHONPATH=examples $(BIN)/python docs/pictures.py

# The site, in `site/`. The reference comes from the sources: nothing is imported, so this environment has no torch.
docs: .venv-docs/.installed
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH-$$(git log -1 --format=%ct || echo 0)} NO_MKDOCS_2_WARNING=1 \
		.venv-docs/bin/mkdocs build --quiet --strict --clean
	@echo "open site/index.html"

# Opens pages in Chromium, in both themes; screenshots are in `site/screenshots`.
test-pages: docs setup .venv-docs/.browser
	mkdir -p site/reports
	$(BIN)/python docs/sample_reports.py site/reports
	.venv-docs/bin/python docs/browser.py site

.venv-docs/.browser: .venv-docs/.installed
	.venv-docs/bin/python -c '$(EXTRA)' browser | xargs \
		.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
	@touch $@

EXTRA := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]])

.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -c '$(EXTRA)' docs | xargs \
		.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
	@touch $@
