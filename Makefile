# Each target sets up what it needs. `make test` is everything that CI runs.
#
#   make demo    five agents, ten processes, a real etcd: killed, rolled, moved and stopped under load
#   make test    checks, then every test, with a real etcd from a wheel
#   make faults  etcd killed, frozen, wiped and cut off, at full length: about 40 minutes
#   make check   lint, types, import rules, and the examples of the documents
#   make bench   figures, as ratios within one run
#   make bench-registry  what the registry costs at 100 to 10,000 instances, in etcd and in its clients: four minutes
#   make sim-real  the same worlds simulated and of real processes, side by side: two to three minutes
#   make sim     every routing algorithm in every simulated scenario, into docs/routing.md: an hour on two cores, goes on
#                where it was broken off
#   make docs    the documentation as a site, into build/site
#
# VENV is where the virtual environment goes; PYTHON makes it (3.11 or newer).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
SIM_ARGS ?=

export PYTHONPATH := $(CURDIR)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test faults check bench bench-registry sim sim-real docs clean

demo: $(VENV)/.dev
	@$(BIN)/python -m examples.customer_service.demo

test: check
	$(BIN)/python -m pytest $(PYTEST_ARGS)

faults: $(VENV)/.dev
	$(BIN)/python -m pytest tests/faults -m 'faults or not faults' $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy agent_reach examples tests/typing
	$(BIN)/pyright -p pyproject.toml
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest --quiet tests/docs

bench: $(VENV)/.dev
	@$(BIN)/python -m tests.benchmarks.bench

bench-registry: $(VENV)/.dev
	@$(BIN)/python -m tests.benchmarks.registry

sim-real: $(VENV)/.dev
	@$(BIN)/python -m tests.simulation.reality

sim: $(VENV)/.dev
	@$(BIN)/python -m tests.simulation.report $(SIM_ARGS)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --site-dir $(CURDIR)/build/site

$(VENV)/.dev: pyproject.toml | $(VENV)/.python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Agent-Reach needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .hypothesis
