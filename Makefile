# `make demo` and `make test` need Python, pip and make only; each makes .venv if missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
TEST_WORKERS ?= 2
TESTS ?= not slow and not data
DEMO ?= demo
GPU_RESULTS ?= gpu-results
GPU_OPTIONS ?=
# Errors alone are printed: no warning about links of the user's, no notice of a newer pip.
INSTALL := pip install -qq --disable-pip-version-check

.PHONY: demo test lint types pytest gpu docs clean

demo: $(VENV)/demo.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.demo --out $(DEMO) --jobs $(JOBS)

# TESTS='not data' has the slow tests too; TESTS=data those on real data, named by GPCLML_DATA.
test: lint types pytest

pytest: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "$(TESTS)"

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/test.stamp
	$(BIN)/pyright --pythonpath $(BIN)/python

# Tests, speed and studies on a GPU with the packages that $(PYTHON) has; nothing is installed. What is
# finished is kept in $(GPU_RESULTS), so that the same command goes on where it was stopped.
# GPU_OPTIONS='--device cpu --small' tries it without a GPU.
gpu:
	$(PYTHON) -m benchmarks.gpu all --results $(GPU_RESULTS) $(GPU_OPTIONS)

# The site, into site/: warnings are errors.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that nothing else chooses its build.
$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(INSTALL) -c constraints.txt torch
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[bench]'
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(INSTALL) -c constraints.txt torch
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/demo.stamp

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(INSTALL) -c constraints.txt torch
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site demo
