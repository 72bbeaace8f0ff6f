# `make lab` and `make test` do all set-up themselves; repeated calls redo nothing.
# PYTHON=/path/to/python3.12 takes another Python than the first one found that is new enough.

VENV := .venv
BIN := $(VENV)/bin
LAB_ARGS ?=
PYTEST_ARGS ?=

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
else
BOOTSTRAP_ARGS := --this-python
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help lab demo test lint types format doctor fetch setup clean

help: ## show this list
	@echo "Inference Engineering: Zero to Hero"
	@echo
	@awk -F ' *:.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

lab: fetch ## JupyterLab with chapter 1 open; its URL is printed last
	@$(BIN)/infer-lab lab $(LAB_ARGS)

demo: fetch ## a question answered in the terminal, every step in view
	@$(BIN)/infer-lab demo

test: fetch lint types ## everything that must hold: lint, types, unit tests, notebooks
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## style of code and notebooks
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup ## types of infer_lab
	$(BIN)/mypy

format: setup ## put right what `make lint` complains about, where that is mechanical
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

doctor: setup ## versions, device, model, cache, and anything wrong
	@$(BIN)/infer-lab doctor

fetch: setup ## get the default model, if it isn't there
	@$(BIN)/infer-lab fetch

setup: ## make .venv and install into it, if that isn't done
ifeq ($(PYTHON),)
	@echo "Python >= 3.11 is needed, and none was found. Install one, or name it:" >&2
	@echo "make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2
	@exit 1
else
	@"$(PYTHON)" bootstrap.py --venv $(VENV) $(BOOTSTRAP_ARGS)
endif

clean: ## remove .venv and caches; the model stays in your cache directory
	rm -rf $(VENV) $(VENV).removed .setup.lock *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
