# `make help` lists the targets. Every torch release gets an environment folder of its own.

TORCH  ?= 2.11.0
PYTHON ?= python3
NB     ?=
FIRST  ?= 0
COUNT  ?= 50
ARGS   ?=
# PROFILE=gpu runs the experiments live on a GPU; without it they run on the CPU.
PROFILE ?= cpu

PROFILES := cpu gpu
PROFILE_ARGS_cpu := --workers 2
PROFILE_ARGS_gpu := -p device cuda
ifeq ($(filter $(PROFILE),$(PROFILES)),)
$(error PROFILE=$(PROFILE) is not known; there are: $(PROFILES))
endif

# A path with an umlaut, under LC_ALL=C: Python 3.11 reads an environment's .pth files in the locale's
# encoding, whatever PYTHONUTF8 says, and would not start.
export LC_ALL := C.UTF-8
export PYTHONUTF8 := 1

VENV  := .venv/torch-$(TORCH)
BIN   := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed
LOCK  := $(wildcard requirements/torch-$(TORCH).txt)
RUN   := PATH="$(BIN):$$PATH" "$(BIN)/omni-kv"

# The releases that are supported: `make lock` pins them, CI tests them.
LOCKED := $(patsubst requirements/torch-%.txt,%,$(sort $(wildcard requirements/torch-*.txt)))

.DEFAULT_GOAL := help
.PHONY: help report test quick fuzz lab notebook env lock lint format verdicts figures notebooks clean distclean
.DELETE_ON_ERROR:

help: ## Show this list
	@echo "Usage: make TARGET [TORCH=$(TORCH)] [PYTHON=$(PYTHON)]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

report: env ## Run every notebook and build the report from them [PROFILE=gpu]
	@rm -rf build/notebooks build/report
	$(RUN) run --all-in-order $(PROFILE_ARGS_$(PROFILE)) $(ARGS) --out build/notebooks
	$(RUN) report --executed build/notebooks --out build/report

test: lint ## Lint, type check, tests, and the notebooks against their stored verdicts
	PATH="$(BIN):$$PATH" "$(BIN)/python" -m pytest -n auto --dist loadfile --durations=12 \
	    --nbval-lax --nbval-current-env tests notebooks

quick: env ## The tests that neither compile nor start a process, for while you work
	PATH="$(BIN):$$PATH" "$(BIN)/python" -m pytest -n auto --dist loadfile -q \
	    -m "not compiles" $(ARGS) tests

fuzz: env ## The audit against plain torch.compile over random programs [FIRST=0 COUNT=50]
	PATH="$(BIN):$$PATH" TORCHINDUCTOR_VEC_ISA_OK=0 TORCHINDUCTOR_COMPILE_THREADS=1 \
	    OPENBLAS_NUM_THREADS=1 "$(BIN)/python" tests/fuzz/fuzz.py \
	    --first $(FIRST) --count $(COUNT)

lab: env ## Open the notebooks in JupyterLab
	PATH="$(BIN):$$PATH" "$(BIN)/python" -m jupyterlab notebooks

notebook: env ## Run one notebook: make notebook NB=02 [ARGS="-p NAME VALUE"]
	@test -n "$(NB)" || { echo "name a notebook: make notebook NB=02" >&2; exit 2; }
	$(RUN) run $(NB) $(ARGS) --out build/single

env: $(STAMP) ## Make the environment for this torch release, if need be

lock: env ## Pin every dependency again, for each supported torch release
	@for torch in $(LOCKED); do \
	    echo "torch==$$torch" | "$(BIN)/uv" pip compile --quiet --upgrade --universal \
	        --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
	        --extra notebooks --extra docs --extra dev --extra wild --constraint - pyproject.toml \
	        --output-file requirements/torch-$$torch.txt || exit 1; \
	    echo "requirements/torch-$$torch.txt"; \
	done

lint: env ## Check format, lint rules, layers and types
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/lint-imports" --no-logo
	"$(BIN)/mypy" --cache-dir .mypy_cache/torch-$(TORCH)

format: env ## Format the code and fix what ruff can fix
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

verdicts: env ## Record the notebooks' outcomes for this torch release
	$(RUN) verdicts record $(NB) $(ARGS)

figures: env ## Draw the pictures that the documents show
	$(RUN) figures

notebooks: env ## Execute the stored notebooks in place
	$(RUN) stored $(NB)

clean: ## Remove what was built; environments stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d \
	    -exec rm -rf {} +

distclean: clean ## Remove the environments too
	rm -rf .venv

# Installing again is needed when the dependencies change, and only then: the package is editable.
$(STAMP): pyproject.toml $(LOCK)
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	    echo "$(PYTHON) was not found: install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$$($(PYTHON) --version 2>&1) is too old: install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make environments: install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { \
	    echo "Python.h is missing and torch.compile needs it: install the headers (Debian: apt install python3-dev)" >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null 2>&1 || { \
	    echo "no C++ compiler and torch.compile needs one: install g++ (Debian: apt install g++)" >&2; exit 1; }
	@test -n "$(LOCK)" || echo "no requirements/torch-$(TORCH).txt: installing the newest of everything that goes with torch $(TORCH)"
	@test -x "$(BIN)/python" || "$(PYTHON)" -m venv $(VENV)
	@echo "installing torch $(TORCH) and what the notebooks need into $(VENV); a GPU build of torch takes minutes"
	"$(BIN)/python" -m pip install --disable-pip-version-check -qq \
	    $(addprefix -c ,$(LOCK)) -e '.[notebooks,docs,dev]' 'torch==$(TORCH)'
	@touch $@
