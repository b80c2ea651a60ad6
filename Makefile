# Two commands for a fresh machine: `make up` runs the main job, `make test` installs what the tests need and passes them.
# Everything Python lands in .venv and .tools inside this directory; scripts/system-packages adds Debian packages when root.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help up demo test collect lint format docs snapshots coverage release bench bench-quick chaos soak lock clean

PYTHON ?= python3
UV_VERSION := 0.13.7
UV := .tools/bin/uv
export UV_PYTHON_DOWNLOADS := never
export UV_PROJECT_ENVIRONMENT := .venv
# Compiled at install: where Python may not write bytecode itself, every command would compile its imports anew.
export UV_COMPILE_BYTECODE := 1
# Most tests wait for something most of the time: four more of them than there are cores keep these busy.
TESTS_AT_ONCE := $(shell echo $$(($$(nproc) + 4)))
RUN := $(UV) run --frozen --no-sync
ifdef DEEP
export STOKER_TESTS_DEEP := 1
endif
# The major version of the PostgreSQL server that the tests start; the newest installed one when not set.
ifdef POSTGRES
export STOKER_TESTS_POSTGRES := $(POSTGRES)
endif

help:
	@echo 'make up        run Stoker here: page, worker and queue, on the GPUs of this machine or on simulated ones'
	@echo 'make demo      the same on simulated GPUs with simulated jobs'
	@echo 'make test      install what the tests need, lint, check types, run every test (DEEP=1: more repetitions)'
	@echo 'make lint      ruff, mypy and import-linter only'
	@echo 'make format    let ruff format and repair'
	@echo 'make docs      build the documentation strictly, in .cache/site'
	@echo 'make snapshots write anew what the verbs print, in tests/snapshots'
	@echo 'make coverage  run the unit tests and check the branch coverage of the pure modules'
	@echo 'make release   check version, changelog and tag, and build wheel and sdist in dist'
	@echo 'make bench     measure, as ratios against peers in the same run; appends the results to docs/performance.md'
	@echo 'make bench-quick  the main ones in two minutes; fails when a ratio is worse than the committed one'
	@echo 'make chaos     2,000 random faults on SQLite and PostgreSQL and 500 on a Slurm cluster: an hour'
	@echo '               (SEED=N repeats a run, CLUSTER=1 runs only the cluster)'
	@echo 'make soak      10,000 short jobs through one worker: its memory, descriptors and disk use must stay flat'

$(UV):
	@scripts/system-packages venv
	@$(PYTHON) -m venv .tools
	@.tools/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# What running needs, and what developing needs. The stamps make the second `make` instant.
.venv/.run-stamp: $(UV) pyproject.toml uv.lock
	@$(UV) sync --frozen --quiet --no-dev --inexact --extra web --extra notify --python $(PYTHON)
	@.venv/bin/python -m compileall -q src
	@touch $@

.venv/.dev-stamp: $(UV) pyproject.toml uv.lock
	@$(UV) sync --frozen --quiet --all-extras --python $(PYTHON)
	@.venv/bin/python -m compileall -q src
	@touch $@ .venv/.run-stamp

up: .venv/.run-stamp
	@scripts/up

demo: .venv/.run-stamp
	@.venv/bin/stoker up --demo

lint: .venv/.dev-stamp
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) mypy
	@$(RUN) lint-imports --no-cache
	@$(MAKE) --no-print-directory docs

coverage: .venv/.dev-stamp
	@$(RUN) scripts/pure-coverage

snapshots: .venv/.dev-stamp
	@$(RUN) pytest -q -n $(TESTS_AT_ONCE) --update-snapshots tests/acceptance/test_snapshots.py

# Without network; warnings, such as a broken link, fail. The variable silences a notice about a later MkDocs.
docs: .venv/.dev-stamp
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --quiet --strict

format: .venv/.dev-stamp
	@$(RUN) ruff format .
	@$(RUN) ruff check --fix .

test: .venv/.dev-stamp
	@scripts/system-packages test
	@$(MAKE) --no-print-directory -j2 lint collect
	@$(RUN) pytest -n $(TESTS_AT_ONCE) --dist worksteal

# Rewrites the assertions of all tests once, on the core that mypy leaves free. Mistakes in them are for pytest to report.
collect: .venv/.dev-stamp
	@$(RUN) pytest --collect-only -q > /dev/null || true

release: .venv/.dev-stamp
	@$(RUN) scripts/release

bench: .venv/.dev-stamp
	@scripts/system-packages test
	@scripts/system-packages bench
	@$(RUN) python -m bench --document

# Goals that are missed do not fail it, ratios that got worse do.
bench-quick: .venv/.dev-stamp
	@scripts/system-packages test
	@scripts/system-packages bench
	@$(RUN) python -m bench --quick || true
	@$(RUN) python -m bench compare

chaos: .venv/.dev-stamp
	@scripts/system-packages test
	@$(RUN) python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(CLUSTER),--on slurm)

soak: .venv/.dev-stamp
	@$(RUN) python -m tests.chaos soak

lock: $(UV)
	@$(UV) lock

clean:
	@rm -rf .venv .tools .cache dist build bench/results
