# Every target sets up what it needs: a machine with Python 3.11, pip and venv is enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready
SECONDS ?= 60

.PHONY: setup demo test lint test-slow conformance conformance-formats crash-detector faults fuzz benchmark clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: setup
	$(RUN) examples/train_transformer.py

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test: lint
	$(RUN) -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: setup
	$(RUN) -m pytest -m slow --timeout 1800

conformance: setup
	$(RUN) -m tests.conformance --jobs 2
	$(RUN) -m tests.conformance --jobs 2 --mode sharded
	$(RUN) -m tests.conformance --jobs 2 --masks
	$(RUN) -m tests.conformance --jobs 2 --mode sharded --masks
	$(RUN) -m tests.conformance --jobs 2 --tangents
	$(RUN) -m tests.conformance --jobs 2 --mode sharded --tangents

fuzz: setup
	$(RUN) -m tests.fuzz --seconds $(SECONDS)

conformance-formats: setup
	$(RUN) -m tests.conformance --jobs 2 --dtype float32 --formats --samples 5
	$(RUN) -m tests.conformance --jobs 2 --dtype float32 --formats --samples 2 --mode virtual2
	$(RUN) -m tests.conformance --jobs 2 --dtype float32 --formats --samples 2 --mode sharded

crash-detector: setup
	$(RUN) -m tests.crash_detector --jobs 2

faults: setup
	$(RUN) -m pytest -m fault --write-faults

benchmark: setup
	$(RUN) benchmarks/overhead.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
