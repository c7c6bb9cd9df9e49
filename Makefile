# Every command a person or CI runs. `make setup` is all a fresh machine needs first; the rest call it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: setup check test demo fix bench mutants clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

check: setup
	$(BIN)/ruff format --check src tests tools bench examples
	$(BIN)/ruff check src tests tools bench examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_tree.py
	$(BIN)/codespell src tests tools bench examples docs README.md CONTRIBUTING.md CHANGELOG.md

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q -m "not gpu and not slow"

demo: setup
	$(BIN)/kvplane demo

fix: setup
	$(BIN)/ruff check --fix src tests tools bench examples
	$(BIN)/ruff format src tests tools bench examples

bench: setup
	$(BIN)/python bench/store.py

mutants: setup
	$(BIN)/python tools/mutants.py

clean:
	rm -rf build dist mutants .hypothesis .mypy_cache .ruff_cache
