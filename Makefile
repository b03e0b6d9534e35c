# Everything a fresh machine needs is Python 3.11+ and make: each target sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CODE := src tests benchmarks examples

.PHONY: help demo test check unit slow format clean

help:
	@echo "make demo    install what the demonstration needs and run it"
	@echo "make test    install what the tests need; lint, type-check, test"
	@echo "make slow    the tests that need more than a minute each"
	@echo "make format  let ruff format the code"
	@echo "make clean   remove the environment and caches"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("moetta needs Python 3.11 or newer, not " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of extras: a second run installs nothing.
$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[bench]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.bench

demo: $(VENV)/.bench
	$(BIN)/moetta demo

test: check unit

check: $(VENV)/.dev
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

format: $(VENV)/.dev
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
