# `make demo` and `make test` need Python, pip and make only; each makes .venv if missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
TEST_WORKERS ?= 2
TESTS ?= not slow and not data
DEMO ?= demo
GPU_RESULTS ?= gpu-results
GPU_STUDY ?= gpu
GPU_DEVICE ?= cuda
GPU_THREADS ?= 16
GPU_OPTIONS ?=
# Errors alone are printed: no warning about links of the user's, no notice of a newer pip.
INSTALL := pip install -qq --disable-pip-version-check

# Wheel and sdist are checked away from the checkout, so that nothing is found in it.
CHECKED := build/checked

.PHONY: demo test lint types pytest gpu docs docs-version dist verifytypes readme clean

demo: $(VENV)/demo.stamp
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.demo --out $(DEMO) --jobs $(JOBS)

# TESTS='not data' has the slow tests too; TESTS=data those on real data, named by GPCLML_DATA.
# Types are checked beside the tests, which leave a core idle while they start and end.
test: $(VENV)/test.stamp
	@$(MAKE) --no-print-directory -j 2 lint types pytest

pytest: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "$(TESTS)"

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/test.stamp
	$(BIN)/pyright --pythonpath $(BIN)/python

# Speed and tests on a GPU with the packages that $(PYTHON) has; nothing is installed. What is
# measured is kept in $(GPU_RESULTS), so that the same command goes on where it was stopped; cells that
# fail are listed in its page, gpu.md.
# GPU_STUDY=small GPU_DEVICE=cpu tries it without a GPU.
gpu:
	@mkdir -p $(GPU_RESULTS)
	-$(PYTHON) -m benchmarks.speed run --study $(GPU_STUDY) --device $(GPU_DEVICE) --beside-cpu \
		--threads $(GPU_THREADS) --results $(GPU_RESULTS)/gpu.sqlite $(GPU_OPTIONS)
	$(PYTHON) -m benchmarks.speed report --results $(GPU_RESULTS)/gpu.sqlite \
		--csv $(GPU_RESULTS)/gpu.csv > $(GPU_RESULTS)/gpu.md
	$(PYTHON) -m pytest -m cuda -q tests

# The site, into site/: warnings are errors.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The site of this release on the branch gh-pages, beside those of earlier ones; pushes nothing.
docs-version: $(VENV)/docs.stamp
	PATH=$(abspath $(BIN)):$$PATH NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases \
		$$($(BIN)/python -c 'import gpclml; print(gpclml.__version__)') latest
	PATH=$(abspath $(BIN)):$$PATH mike set-default latest

# What a release is made of; this and what follows needs the network, which `make test` does not.
dist: $(VENV)/release.stamp
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Every public name of the wheel has a type that each checker finds alike: all of them, or it fails.
verifytypes: dist
	rm -rf $(CHECKED)/types
	$(BIN)/python -m $(INSTALL) --no-deps --target $(CHECKED)/types dist/*.whl
	cd $(CHECKED) && PYTHONPATH=$$PWD/types PATH=$(abspath $(BIN)):$$PATH \
		pyright --verifytypes gpclml --ignoreexternal

# The README's code with the wheel and what it asks for, in an environment of its own.
readme: dist
	rm -rf $(CHECKED)/readme
	$(PYTHON) -m venv $(CHECKED)/readme/venv
	cd $(CHECKED)/readme && venv/bin/python -m $(INSTALL) -c $(CURDIR)/constraints.txt torch
	cd $(CHECKED)/readme && venv/bin/python -m $(INSTALL) -c $(CURDIR)/constraints.txt \
		$(CURDIR)/dist/*.whl hypothesis pytest
	cp -R README.md docs pyproject.toml tests $(CHECKED)/readme
	cd $(CHECKED)/readme && venv/bin/python -m pytest tests/test_examples.py -k README

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that nothing else chooses its build.
$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing packages into $(VENV), once."
	@$(BIN)/python -m $(INSTALL) -c constraints.txt torch
	@$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[bench]'
	@touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(INSTALL) -c constraints.txt torch
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/demo.stamp

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(INSTALL) -c constraints.txt torch
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/release.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m $(INSTALL) -c constraints.txt torch
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[release]'
	touch $@

clean:
	rm -rf $(VENV) build dist site demo
