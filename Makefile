# `make train` watches a policy learn, `make test` runs the tests. Both work on a fresh machine with Python 3.11+:
# the first run makes .venv and installs into it, later runs start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The index that torch comes from: on Linux without an NVIDIA GPU that of its CPU builds, which takes 4 GB less than the
# build with CUDA. `make TORCH_INDEX=ADDRESS` takes another one; where it is empty, torch comes from where all else does.
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
TORCH_INDEX ?= $(if $(GPU),,$(if $(filter Linux,$(shell uname -s)),https://download.pytorch.org/whl/cpu))
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: train test long-tests engines harnesses adapters install check clean

train: $(STAMP)
	$(BIN)/agentgym train --env TextGame-v0 --algo grpo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# What takes more than a second or two: whole runs, processes that are killed.
long-tests: $(STAMP)
	$(BIN)/python -m pytest -m "long and not slow and not engine and not adapter and not harness and not docker and not gpu" $(ARGS)

# The real engines on CPU, each in an environment of its own, for `.venv/bin/python -m pytest -m engine`.
engines: $(STAMP)
	PYTHON=$(BIN)/python tests/engines/environments/build.sh sglang vllm
	@for name in sglang vllm; do echo "agentgym train --env TextGame-v0 --engine $$name --server.python \
	$$(tests/engines/environments/build.sh --path $$name)"; done

# The agents that `--agent` starts, in folders of their own, for `.venv/bin/python -m pytest -m harness`. It needs npm.
harnesses: $(STAMP)
	PYTHON=$(BIN)/python tests/rollout/agents/environments/build.sh

# The libraries of other ecosystems, the reader of GGUF and a local S3, for `.venv/bin/python -m pytest -m adapter`. One library is compiled:
# it needs a C compiler.
adapters: $(STAMP)
	$(PIP) -e '.[adapters,gguf,s3]' moto flask flask-cors

install: $(STAMP)

check:
	.ci/run

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt $(wildcard startup/*)
	@command -v $(PYTHON) >/dev/null || { echo 'there is no $(PYTHON) here: install Python 3.11 or newer, or run `make PYTHON=/path/to/python3`' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("agentgym needs Python 3.11 or newer, and $(PYTHON) is %d.%d: run `make PYTHON=python3.11`, or the path of a newer one" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) --retries 1 --timeout 20 --no-deps --index-url $(TORCH_INDEX) torch || echo 'torch cannot be had from $(TORCH_INDEX): it comes from the index that pip is set to' >&2)
	$(PIP) -e '.[train,rewards,dev]'
	@touch $@
