# `make test` runs every check, `make demo` the main job, `make help` lists the rest. Python 3.11 or newer and make are
# all that must be there; what else is needed goes into .venv, in the versions of constraints.txt.

PYTHON ?= python3
STRATEGY ?= fsdp

VENV := .venv
RUN := $(VENV)/bin/python -m
# There only after an install that came to its end. It holds the tree's path, since an environment can't be moved.
STAMP := $(VENV)/installed-in
PLUGINS := $(wildcard plugins/*/pyproject.toml)

# Ranks share the cores of one machine here: one thread each, so that they don't take turns on them.
export OMP_NUM_THREADS := 1
# torch's TCP store asks for the name of each peer's address: a name server that does not answer costs 5 s each time.
export RES_OPTIONS := timeout:1 attempts:1
# A hundred processes import the same sources: they compile them once, even where the environment tells Python not to.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test lint format types unit deep demo clean FORCE

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 12

install: $(STAMP)  ## make .venv, or bring it up to date

test: lint types unit  ## every check: style, types, the tests of the core, the plugins and the docs, coverage

lint: $(STAMP)  ## style and formatting
	$(RUN) ruff check
	$(RUN) ruff format --check

format: $(STAMP)  ## put right what ruff can put right
	$(RUN) ruff check --fix
	$(RUN) ruff format

# The plugins' tests are given apart: a folder's tests are the package `tests`, which each plugin has one of.
types: $(STAMP)  ## mypy, strict
	$(RUN) mypy
	@set -e; for tests in $(wildcard plugins/*/tests); do \
		echo "$(RUN) mypy $$tests"; $(RUN) mypy $$tests; done

# A file is run by one worker, from the longest on as tests/conftest.py has them, not from the one with most tests.
# tests/early.py changes nothing but the time.
PYTEST := $(RUN) pytest -p tests.early -n 2 --dist loadfile --no-loadscope-reorder

unit: $(STAMP)  ## the tests, with coverage, but for the deep ones
	$(PYTEST) -m "not deep" --cov --cov-report=term

deep: $(STAMP)  ## the tests that repeat what others try once, or combine all with all
	$(PYTEST) -m deep

demo: $(STAMP)  ## train a small language model on 2 CPU ranks; STRATEGY=ddp, fsdp or fsdp2
	PARALLEL_CORE_BACKEND=gloo PARALLEL_CORE_PARALLEL_STRATEGY=$(STRATEGY) $(RUN) torch.distributed.run --standalone --nproc-per-node 2 \
		examples/train_lm.py --config examples/parallel.toml

clean:  ## remove all that make has made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

# The build tools come first, so that the editable installs use the pinned ones and fetch none of their own.
$(STAMP): constraints.txt pyproject.toml $(PLUGINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "parallel_core needs Python 3.11 or newer, found $$($(PYTHON) --version 2>&1): name one with make PYTHON=..." >&2; \
		exit 1; }
	@rm -f $@
	@$(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) can't make a virtual environment: install its venv module (Debian and Ubuntu: python3-venv)" >&2; \
		exit 1; }
	$(RUN) pip install --quiet --constraint constraints.txt hatchling editables
	$(RUN) pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[dev]' $(foreach plugin,$(PLUGINS),--editable $(dir $(plugin)))
	@echo '$(CURDIR)' > $@
