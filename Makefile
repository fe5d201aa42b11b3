# The two commands of the README are `make demo` and `make test`; both need Python 3.11+ (with venv) and make only.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8888
MINUTES ?= 30
SEED ?= 1
# What the sidebar is built of: when one changes, the package is installed, and with it the sidebar built, anew.
SIDEBAR := $(wildcard labextension/src/*)

.PHONY: help demo test lint chaos soak clean

help:
	@echo "make demo         install into .venv, run the tour on an embedded pool, then serve JupyterLab with it"
	@echo "make demo ONCE=1  the same, but end after the tour; the last line is its result as JSON"
	@echo "make test         install into .venv, check the style and run all tests"
	@echo "make chaos        attack a pool of real processes for MINUTES with SEED; the last line is its result as JSON"
	@echo "make soak         the tests that take longer than minutes; GPUs fail for MINUTES with SEED under steady work"
	@echo "make clean        remove what the others made"

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py $(if $(ONCE),--once) --port $(PORT)

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests
	$(BIN)/python -m pytest tests/browser

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED)

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak tests
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml $(SIDEBAR) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(SIDEBAR) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist labextension/node_modules labextension/lib labextension/check/node_modules jupyter_gpupool/labextension .pytest_cache .mypy_cache .ruff_cache .hypothesis
