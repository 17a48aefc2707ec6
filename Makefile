# make demo and make test are all a newcomer needs; both make .venv and install into it by themselves.
PYTHON ?= python3
export PYTHON
# what another project put there must not be found instead of what constraints.txt names
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-capture test-slow check bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo:  ## from a captured trace to a report of hit rate against bytes moved (CAPTURE=no: without torch)
	@CAPTURE='$(CAPTURE)' sh scripts/demo.sh

test:  ## all tests that take seconds
	@sh scripts/venv.sh dev
	@.venv/bin/python -m pytest -m "not slow" -n 2

test-capture:  ## the tests of capture and live mode; installs torch
	@sh scripts/venv.sh dev capture
	@.venv/bin/python -m pytest -m "not slow" -n 2 $(wildcard tests/test_capture*.py tests/test_demo*.py tests/test_live*.py tests/test_gpu*.py)

test-slow:  ## the tests that take minutes
	@sh scripts/venv.sh dev
	@.venv/bin/python -m pytest -m slow

check:  ## format, lint and types
	@sh scripts/venv.sh dev
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m mypy

bench:  ## speed of the kernels and of starting, beside libcachesim
	@sh scripts/venv.sh dev
	@.venv/bin/python scripts/bench.py
	@.venv/bin/python scripts/bench_curve.py
	@.venv/bin/python scripts/bench_policies.py

clean:  ## remove the environment, caches and what demo and bench wrote
	@rm -rf .venv out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
