# A fresh machine needs only Python 3.11+ and make: each target sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CODE := src tests benchmarks examples
TEXT := src docs examples/*.py benchmarks README.md CONTRIBUTING.md CHANGELOG.md

.PHONY: help demo test check unit coverage slow docs format clean

help:
	@echo "make demo      install what the demonstration needs and run it"
	@echo "make test      install what the tests need; lint, type-check, test, print the coverage"
	@echo "make coverage  after make test: the coverage of each file"
	@echo "make slow      the tests that need more than a minute each"
	@echo "make docs      build the site into site/"
	@echo "make format    format the code"
	@echo "make clean     remove the environment and caches"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("moetta needs Python 3.11 or newer, got " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras: a second run installs nothing.
$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[bench]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.bench $(VENV)/.docs

demo: $(VENV)/.bench
	$(BIN)/moetta demo

test: check unit

check: $(VENV)/.dev
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell $(TEXT)

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile --cov --cov-report=
	@echo "coverage: $$($(BIN)/coverage report --format=total) %"

coverage: $(VENV)/.dev
	$(BIN)/coverage report --sort=cover

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.dev
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

clean:
	rm -rf $(VENV) site .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
