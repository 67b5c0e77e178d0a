# One command per intention; `make help` lists them.
PYTHON ?= python3
# Another place to take torch from, for example the CPU builds, which are far smaller than PyPI's Linux default:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Further arguments of test, test-gpu, sim, demo and bench: make test ARGS="-k runspec"
# Each test run simulates fresh seeds for 90 seconds; for another time: make test ARGS="--sim-seconds 20"
ARGS ?=
# Processes that run tests at once. Most tests wait for most of their time; what measures runs alone.
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help setup lint types test test-gpu lowest sim demo docs api bench hivemind clean
.DEFAULT_GOAL := help

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install dlc with its tools and most extras, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dlc needs Python 3.11 or newer: make setup PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(shell uname -s),Linux)
	$(BIN)/python -m pip install -q --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch
endif
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,plots,tensorboard,accelerate,lightning]'
	touch $@

lint: $(STAMP) ## style and formatting, by ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## static types of src, by mypy --strict
	$(BIN)/mypy --strict src

test: $(STAMP) ## the whole test suite, with the reason for every skip and the slowest tests
	$(BIN)/python -m pytest -q -rs --durations=10 -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu: $(STAMP) ## only the tests that need a CUDA device
	$(BIN)/python -m pytest -q -rs -m gpu $(ARGS)

lowest: ## the tests with the least versions of pyproject.toml, in .venv-lowest; PyPI's torch brings gigabytes
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-c constraints-lowest.txt -e '.[plots,tensorboard,wandb,accelerate,lightning]' \
		pytest pytest-xdist hypothesis psutil scipy griffelib
	.venv-lowest/bin/python -m pytest -q -rs -n $(WORKERS) --dist worksteal $(ARGS)

sim: $(STAMP) ## 10,000 seeds of the protocol simulator, on all cores; stop it at any time, it goes on there
	$(BIN)/python -m dlc.sim --peers 2:6 --seeds 0:5000 --state build/sim/few.json $(ARGS)
	$(BIN)/python -m dlc.sim --peers 2:10 --seeds 5000:8000 --state build/sim/some.json $(ARGS)
	$(BIN)/python -m dlc.sim --peers 2:16 --seeds 8000:10000 --state build/sim/many.json $(ARGS)

demo: $(STAMP) ## three peers on this machine train one model; one is killed, one joins
	$(BIN)/dlc demo $(ARGS)

docs: $(STAMP) ## write docs/run-toml.md anew, from src/dlc/runspec.py
	$(BIN)/python -m dlc.cli.reference > docs/run-toml.md

api: $(STAMP) ## write docs/api.md anew, from the docstrings of src
	$(BIN)/python docs/api.py > docs/api.md.new && mv docs/api.md.new docs/api.md

bench: $(STAMP) ## time our all-reduce beside torch.distributed's Gloo
	$(BIN)/python benchmarks/allreduce.py $(ARGS)

hivemind: ## make .venv-hivemind with Hivemind 1.1.12, for benchmarks/side_by_side.py and wan.py
	test -x .venv-hivemind/bin/python || $(PYTHON) -m venv .venv-hivemind
	.venv-hivemind/bin/python -m pip install -q setuptools wheel
	.venv-hivemind/bin/python -m pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt \
		hivemind==1.1.12

clean: ## remove .venv, caches and build outputs
	rm -rf .venv .venv-hivemind .venv-lowest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
