# Everything a user runs; `make help` lists it. The set-up leaves a stamp, so that a second run costs nothing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# An NVIDIA GPU takes the CUDA build of vLLM, anything else the CPU build. Override with FLAVOR=cpu or FLAVOR=gpu.
FLAVOR ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PINS := requirements/$(FLAVOR).txt requirements/model.txt
STAMP := $(VENV)/.headrace-$(FLAVOR)-$(shell cat requirements/*.txt pyproject.toml | sha256sum | cut -c1-16)
MODEL := models/smollm2-135m-instruct/config.json
# torch's CPU build has the local version +cpu, which PyPI does not carry: where pip's own sources lack it, PyTorch's index has it.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help setup demo test lint unit engine cluster soak lock clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) $(MODEL)  ## install the pinned packages and the embedded verifier into .venv and models/

$(STAMP):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, " + sys.executable + " is " + sys.version)'
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "setup: installing the pinned packages ($(FLAVOR)) into $(VENV); takes 2 to 5 minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(addprefix -r ,$(PINS)) -r requirements/dev.txt \
	  || { test $(FLAVOR) = cpu && echo "setup: once more with PyTorch's CPU index" && \
	       $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --extra-index-url $(TORCH_CPU_INDEX) $(addprefix -r ,$(PINS)) -r requirements/dev.txt; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.headrace-* && touch $@

$(MODEL): | $(STAMP)
	@echo "setup: unpacking the embedded verifier"
	@$(BIN)/python -m gen.embedded >/dev/null 2>models.log || { cat models.log; exit 1; }
	@rm -f models.log

demo: setup  ## the main job on the embedded verifier: prompts in, a measured draft out
	@$(BIN)/headrace demo

test: setup lint  ## lint, types and every test but the soak tier
	$(BIN)/python -m pytest tests/unit tests/engine tests/cluster

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit engine cluster: setup  ## one tier of the tests
	$(BIN)/python -m pytest tests/$@

soak: setup  ## the long tests; results are kept in tests/soak/RESULTS.md
	$(BIN)/python -m pytest tests/soak

lock:  ## resolve requirements/*.in again (needs uv)
	requirements/lock.sh

clean:  ## remove what setup, demo and tests made
	rm -rf $(VENV) models runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
