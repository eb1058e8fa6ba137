# Needs Python 3.11 or newer and make; everything else goes into .venv.
#   DEVICE=cpu|cuda  which lock file; by default whether nvidia-smi lists a GPU decides
#   PYTHON=...       the interpreter that .venv is made from
#   IMAGE=...        name and tag of the container that `make image` builds
#   ARGS="..."       further Hydra overrides for quickstart, further pytest arguments for test and quick

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help env quickstart quick test check format doctor site wheel image nightly clean

ifndef DEVICE
DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)
endif
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE=$(DEVICE) is not known; use DEVICE=cpu or DEVICE=cuda)
endif

RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$each -c '$(RECENT)' 2>/dev/null && echo $$each && break; done)

BIN := .venv/bin
STAMP := .venv/installed-$(DEVICE)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= registry.example.com/gemsmith:$(VERSION)-$(DEVICE)
QUICKSTART := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

help:
	@echo 'make quickstart   install, then train and evaluate on the bundled data (2 processes, $(DEVICE))'
	@echo 'make quick        the tests that take no processes and no compiler, in a few minutes'
	@echo 'make test         checks and the whole test suite'
	@echo 'make check        lint, format, types, and what no GPU has run since it changed'
	@echo 'make format       rewrite the source in the project format'
	@echo 'make doctor       say what fits together on this machine and how to mend what does not'
	@echo 'make site         the pages, keys and API as a site in dist/site, links checked'
	@echo 'make wheel        the package that pip and uv install, in dist/'
	@echo 'make image        the container of DEVICE=$(DEVICE), by docker: $(IMAGE)'
	@echo 'make env          install requirements/$(DEVICE).txt and this project into .venv, once'
	@echo 'make nightly      the longest tests; one row of docs/quality.md again, which must not leave its interval'
	@echo 'make clean        remove .venv and caches; runs/ stays'

env: $(STAMP)

# An environment of the other device is not converted but made anew: both builds of fbgemm write to one folder.
# One retry only: where PyTorch's index is out of reach, pip asks it in vain for every package. pip would compile on one
# core; some packages hold files that are no Python of this version.
$(STAMP): requirements/common.txt requirements/$(DEVICE).txt pyproject.toml
	@$(or $(PYTHON),false) -c '$(RECENT)' || { echo 'Python 3.11 or newer is needed and $(or $(PYTHON),python3) is not;' \
	  'name one: make env PYTHON=/path/to/python3.11'; exit 1; } >&2
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@echo 'installing requirements/$(DEVICE).txt into .venv (a minute or two)'
	@$(BIN)/python -m pip install --quiet --retries 1 --no-deps --no-compile -r requirements/$(DEVICE).txt
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

quickstart: env
	@RUN_DIR=$(QUICKSTART) NPROC=$(if $(filter cpu,$(DEVICE)),2) PATH="$(CURDIR)/$(BIN):$$PATH" \
	  launch/torchrun.sh +experiment=quickstart $(ARGS)
	@echo 'results.json, plots/, metrics.jsonl and checkpoints/ are in $(QUICKSTART)'

# Tests start some hundred processes, which load the bytecode of this repository where a container forbids to write it.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

quick: env
	$(PYTEST) -m 'not slow and not nightly' $(ARGS)

test: check
	$(PYTEST) $(ARGS)

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.gpu_ledger --check

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

nightly: env
	$(PYTEST) -m nightly
	$(BIN)/python -m tools.quality.nightly $(ARGS)

doctor: env
	@$(BIN)/python -m train.commands.doctor

# Into a folder of its own, which .venv sees while the site is built only: keys and API are read from the code.
.cache/site/installed: requirements/docs.txt | env
	@rm -rf $(@D)
	@$(BIN)/python -m pip install --quiet --retries 1 --no-deps --target $(@D) -r $<
	@touch $@

site: .cache/site/installed
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=.cache/site $(BIN)/python -m mkdocs build --strict
	@echo 'open dist/site/index.html'

# By .venv where there is one; without it pip fetches setuptools, and nothing else.
wheel:
	@if test -x $(BIN)/python; then python=$(BIN)/python isolation=--no-build-isolation; else python='$(PYTHON)'; fi; \
	  $$python -m pip wheel $$isolation --quiet --no-deps --wheel-dir dist .

image:
	docker build --build-arg DEVICE=$(DEVICE) --tag $(IMAGE) .

clean:
	rm -rf dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
