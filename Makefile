# Every target sets up what it needs: a machine with Python 3.11, pip and venv is enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready
SECONDS ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup demo docs notebooks test lint sizes test-browser test-cluster test-hostile test-launchers test-slurm test-kubernetes test-slow test-torch conformance conformance-formats crash-detector faults fuzz bench benchmark bench-exchange clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-20s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv with everything that the other targets need

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: setup  ## train a small transformer with torch, GT, and GT on 2 workers
	$(RUN) examples/train_transformer.py

docs: setup  ## the docs site, in build/docs; a warning is an error (under a minute)
	rm -rf build/docs
	$(RUN) -m sphinx -q -W --keep-going -b html -d build/docs-cache -E -c docs/site . build/docs
	@echo "open build/docs/index.html"

notebooks: setup  ## run the notebooks of examples/ and store their outputs
	$(RUN) docs/run_notebooks.py

lint: setup  ## style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

sizes: setup  ## files and lines of gt/, with the change since docs/sizes.md was written
	@$(RUN) docs/measure_sizes.py

# Sources are compiled once, and not in each of the processes that tests start.
test: export PYTHONDONTWRITEBYTECODE =
test: lint sizes  ## lint, types and tests (under 15 minutes on 2 cores)
	$(RUN) -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-browser: setup  ## tests of web pages; installs Debian's Chromium if it is missing
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }
	$(RUN) -m pytest -m browser

test-cluster: setup  ## servers and workers on hosts made of namespaces (about 2 minutes)
	$(RUN) -m pytest -m slow tests/cluster

test-hostile: setup  ## 100,000 frames that are almost valid, to a server with workers (about 20 minutes)
	$(RUN) -m pytest -m slow tests/dispatcher/test_hostile_frames.py tests/dispatcher/test_refusals.py

test-launchers: setup  ## workers on torchrun, Ray and Dask, which are installed for it (about 5 minutes)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[ray,dask]"
	$(RUN) -m pytest tests/worker/test_torchrun.py tests/launch/test_ray_cluster.py tests/launch/test_dask_cluster.py

test-slurm: setup  ## programs as jobs of a real SLURM on this machine; installs Debian's packages if they are missing
	command -v slurmctld > /dev/null || test -x /usr/sbin/slurmctld || { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; }
	$(RUN) -m pytest -m slow tests/launch/test_slurm_cluster.py

test-kubernetes: setup  ## manifests against the schemas of Kubernetes, which it installs, and as processes on test hosts
	$(RUN) -c "import kubernetes_validate" 2> /dev/null || $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt kubernetes-validate
	$(RUN) -m pytest tests/launch/test_kubernetes.py tests/cluster/test_kubernetes_pods.py

test-slow: setup  ## tests that take minutes each
	$(RUN) -m pytest -m slow --timeout 1800

TORCH ?= 2.13.0
TORCH_VENV ?= .venv-torch-$(TORCH)
test-torch:  ## tests on another version of torch, in an environment of its own: make test-torch TORCH=2.10.0
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(TORCH_VENV)/constraints.txt torch==$(TORCH) --editable ".[dev]"
	$(TORCH_VENV)/bin/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

conformance: setup  ## torch's op database: embedded, on random layouts, under masks of gradients
	$(RUN) -m tests.conformance --jobs 2
	$(RUN) -m tests.conformance --jobs 2 --mode sharded
	$(RUN) -m tests.conformance --jobs 2 --masks
	$(RUN) -m tests.conformance --jobs 2 --mode sharded --masks
	$(RUN) -m tests.conformance --jobs 2 --tangents
	$(RUN) -m tests.conformance --jobs 2 --mode sharded --tangents

fuzz: setup  ## random programs for SECONDS (default 60)
	$(RUN) -m tests.fuzz --seconds $(SECONDS)

conformance-formats: setup  ## the same with other memory formats (up to an hour)
	$(RUN) -m tests.conformance --jobs 2 --dtype float32 --formats --samples 5
	$(RUN) -m tests.conformance --jobs 2 --dtype float32 --formats --samples 2 --mode virtual2
	$(RUN) -m tests.conformance --jobs 2 --dtype float32 --formats --samples 2 --mode sharded

crash-detector: setup  ## index operands out of range against guard pages
	$(RUN) -m tests.crash_detector --jobs 2

faults: setup  ## kill, stop and cut off processes; rewrites the table in docs/reliability.md
	$(RUN) -m pytest -m fault --write-faults

bench: setup  ## GT beside its peers; rewrites the tables in docs/benchmarks.md (about 20 minutes)
	$(RUN) -m benchmarks.comparison --write-docs

bench-exchange: setup  ## collectives between processes, beside Gloo's own and a copy
	$(RUN) benchmarks/exchange.py

benchmark: setup  ## overhead of an op, of reads, uploads and the start
	$(RUN) benchmarks/overhead.py

clean:  ## remove .venv and all caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
