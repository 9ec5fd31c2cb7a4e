# make venv   a virtual environment with everything for development (CPU)
# make test   lint, types, tests
# make test-distributed   parallel layouts on up to 8 processes (longer)
# make demo   the whole pipeline on a toy workload: synth, ingest, plan, inspect, train

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# PyTorch's package index for CPU wheels; empty: pip's own configuration decides.
TORCH_INDEX ?=
JOBS ?= 2

BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per process: the tests run in parallel, and small matrices gain nothing from more.
export OMP_NUM_THREADS ?= 1

.PHONY: venv test test-distributed lint types unit demo format schemas clean

venv: $(INSTALLED)

# torch first and by itself: resolved together with the rest, pip may choose the CUDA build.
$(INSTALLED): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints-cpu.txt)"
	$(PIP) install --quiet -c constraints-cpu.txt -e ".[train,text,solver,dev]"
	touch $@

test: lint types unit

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv
	$(BIN)/mypy

unit: venv
	$(BIN)/python -m pytest -n $(JOBS)

# all layouts on up to 8 processes, and a one-machine Slurm where it is installed
test-distributed: venv
	HARTS_TEST_DISTRIBUTED=1 $(BIN)/python -m pytest tests/distributed

demo: venv
	$(BIN)/python examples/demo.py

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

schemas: venv
	$(BIN)/python -m schemas.generate

clean:
	rm -rf .venv demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
