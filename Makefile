# `make demo` and `make test` set everything up by themselves: Python 3.11+, make and a C library are enough.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
DEMO := .crossfed/demo
# Processes that run tests side by side: more than the cores, for much of the time is waiting; long laws compute more.
MORE := 2
WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + $(MORE) )))
export PATH := $(BIN):$(PATH)
# Byte code and the compiled kernel are kept, whatever the shell says: a start of Python costs a second less.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test readme wheel test-all testbed docs slow nightly lowest coverage lint format render clean
help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

env: $(VENV)/.ready ## The environment: facility, coordinator, tests and linters, as pinned in constraints.txt.
# pip would compile on one core, and says nothing until it has installed all.
PIP = bash facility/meanwhile.sh 'still installing packages' $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"found Python {sys.version.split()[0]}, expected 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[test,lint,docs]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # packages hold files for other versions of Python
	@touch $@

demo: env ## Two facilities on this machine fine-tune one small model for five rounds.
	python -m coordinator.demo --out $(DEMO)
	crossfed run --federation workflow/federation.yml

test: MORE := 4
test: env ## The test suite (5 to 10 minutes on 2 cores).
	python -m pytest -n $(WORKERS) --dist loadgroup -m 'not testbed and not slow and not readme'

readme: env ## Runs the commands of README and documentation in clean clones, the demo with them.
	python -m pytest -m readme

test-all: env ## Everything: default suite, slow and longest laws, README and documentation, testbed.
	$(MAKE) test slow nightly readme docs testbed

slow: env ## The long laws: layouts, policies, faults, simulator beside reality. SLOW="FILE ...": these alone.
	python -m pytest -n $(WORKERS) --dist loadgroup --timeout 900 $(SLOW) -m 'slow and not nightly and not testbed and not readme'

nightly: env ## The longest: every family, every cause of a fault, further federations. NIGHTLY="FILE ...": these alone.
	CROSSFED_FAMILIES=$(abspath build/families-nightly.jsonl) \
	python -m pytest -n $(WORKERS) --dist loadgroup --timeout 3600 $(NIGHTLY) -m 'nightly and not testbed and not readme'

# uv finds the oldest versions; --seed brings a new packaging, which uv would keep.
# It knows no pip.conf and takes CUDA's torch (3 GB). WORKERS and PYTEST_ADDOPTS as for test.
lowest: ## The default suite with the oldest packages that pyproject.toml admits, in build/lowest.
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/uv/bin/uv venv --quiet --seed --python $(PYTHON) --clear build/lowest
	VIRTUAL_ENV=build/lowest build/uv/bin/uv pip install --quiet --resolution lowest-direct --reinstall-package packaging -e '.[test]'
	build/lowest/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m 'not testbed and not slow and not readme'

testbed: env ## Two rounds over real sshd and real Slurm on this machine (root, Debian packages).
	python -m pytest -m 'testbed and not slow'

coverage: env ## Branch coverage of the default suite, started processes included; in build/coverage.
	python -m pytest -n $(WORKERS) --dist loadgroup -m 'not testbed and not slow and not readme' --cov --cov-report=
	python -m coverage report --skip-covered --sort=cover
	python -m coverage html -q

wheel: env ## A wheel, installed with its dependencies into a fresh environment, from which a federation runs.
	CROSSFED_WHEEL=install python -m pytest --timeout 1800 tests/house/test_wheel.py

docs: env ## The documentation, warnings as errors; in build/docs.
	python -m sphinx -W --keep-going -q -b html docs build/docs

lint: env ## ruff and mypy.
	ruff check .
	ruff format --check .
	mypy

format: env ## Format and sort.
	ruff check --fix .
	ruff format .

render: env ## Render the shipped federation again.
	crossfed render --no-paths

clean: ## Remove the demo and caches, not the environment.
	rm -rf .crossfed .pytest_cache .mypy_cache .ruff_cache build *.egg-info
