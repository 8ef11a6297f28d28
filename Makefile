# Everything that a person runs. `make help` lists it; nothing else needs to be installed by hand.

VENV   ?= .venv
SYSTEM := $(shell uname -s)
# On macOS the plain wheel is the Metal one. On Linux with an NVIDIA card: make EXTRA=cuda ...
EXTRA  ?= $(if $(filter Linux,$(SYSTEM)),cpu,)
comma  := ,
EXTRAS := $(if $(EXTRA),$(EXTRA)$(comma))convert,dev,mlx-lm
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
UV_PIN := 0.13.9

# The first Python that is new enough: macOS still calls an old one `python3`.
MIN_PYTHON := import sys; sys.exit(sys.version_info < (3, 10))
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.10 python
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(MIN_PYTHON)' 2>/dev/null && echo $$p && break; done)

.PHONY: help demo cpp test test-long test-families test-all-modules lint format bench bench-full bench-cuda reference pins clean
.DEFAULT_GOAL := help

help:  ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-16s %s\n", $$1, $$2 }'

demo: $(VENV)/.installed  ## fetch a small model, convert, export, and chat with it in a new process
	@$(BIN)/funcrt demo

cpp: $(VENV)/.installed  ## build the C++ host, exported/hosts/cpp/build/funcrt_run (needs cmake and a C++ compiler)
	@command -v cmake >/dev/null || { echo "make cpp needs cmake: apt-get install cmake, brew install cmake, or pip install cmake" >&2; exit 1; }
	@cmake --log-level=NOTICE -S exported/hosts/cpp -B exported/hosts/cpp/build -DPYTHON='$(abspath $(BIN)/python)'
	@env -u MAKEFLAGS -u MAKELEVEL cmake --build exported/hosts/cpp/build --parallel $$(getconf _NPROCESSORS_ONLN)

# One BLAS thread: on tiny models more of them only wait for each other. Every core takes whole files of tests.
PYTEST := OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS:-1} $(BIN)/python -m pytest -q
WORKERS ?= $$(cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores : 4)))

test: $(VENV)/.installed  ## the tests (minutes)
	@$(PYTEST) --numprocesses $(WORKERS)

# A row that differs on purpose: python -m tests.families CASE
test-families: $(VENV)/.installed  ## the whole checklist of every model family, against the committed table (minutes)
	@OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS:-1} $(BIN)/python -m tests.families --check

test-all-modules: $(VENV)/.installed  ## every module of mlx-lm as a pure function, against the committed table, and its bundle (ten minutes)
	@OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS:-1} $(BIN)/python -m tests.reference.make_mlx_lm_modules --check
	@OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS:-1} $(BIN)/python -m tests.reference.mlx_lm_bundles

test-long: $(VENV)/.installed  ## the slow tests
	@$(PYTEST) -m long

lint: $(VENV)/.installed  ## formatting, ruff, mypy --strict
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/.installed  ## let ruff format and fix what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

BENCH := $(BIN)/python -m benchmarks

bench: $(VENV)/.installed-bench  ## measure speed against mlx-lm (a quarter of an hour)
	@$(BENCH).sequence
	@$(BENCH).ragged
	@$(BENCH).speculation
	@$(BENCH).families
	@$(BENCH).cold
	@$(BENCH).steps
	@$(BENCH).report

bench-full: bench  ## the same with long prompts and all batches, and whether engines stay as fast and small as they begin
	@$(BENCH).sequence --long
	@$(BENCH).ragged --batches
	@$(BENCH).families --llama-1b
	@$(BENCH).profiling
	@$(BENCH).endurance
	@$(BENCH).report

bench-cuda: $(VENV)/.installed-bench  ## measure everything on a CUDA GPU (half an hour on an H200; EXTRA=cuda)
	@$(BENCH).cuda
	@$(BENCH).report

# make_gguf.py needs the sources of llama.cpp besides, and is run by hand.
# torch and transformers stay out of .venv: they are needed only to make the committed golden files again.
reference: $(VENV)-reference/.installed  ## make the golden files again, and list what differs (installs torch and transformers)
	@for script in $(filter-out %_mlx_lm_modules.py %_gguf.py,$(wildcard tests/reference/make_*.py)); do echo "$$script"; $(VENV)-reference/bin/python "$$script" || exit 1; done
	@git --no-pager diff --stat -- tests/reference

pins:  ## resolve constraints.txt again, for every supported Python and platform
	@./constraints.sh $(UV_PIN)

clean:  ## remove the environments, caches and exported bundles
	rm -rf $(VENV) $(VENV)-reference .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	git clean -fdXq exported

# On Linux MLX compiles each new kernel with g++, and most of the work is one header. g++ takes it compiled,
# if that lies beside it and was made with the same options; else it compiles it as ever. It does not look
# whether that is of this header: after another MLX was installed there by hand, delete it.
KERNEL_HEADER := mlx/backend/cpu/compiled_preamble.h
PRECOMPILE = cd $(VENV)/lib/python3*/site-packages/mlx/include 2>/dev/null && [ "$(SYSTEM)" = Linux ] \
	&& rm -f $(KERNEL_HEADER).gch \
	&& g++ -w -std=c++17 -O3 -Wall -fPIC -I . -x c++-header $(KERNEL_HEADER) -o $(KERNEL_HEADER).new 2>/dev/null \
	&& mv $(KERNEL_HEADER).new $(KERNEL_HEADER).gch

# A stamp, touched last: an interrupted install starts over. A change of either file installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "funcrt needs Python 3.10 or newer, and none of these is: $(CANDIDATES)." \
		"Install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c '$(MIN_PYTHON)' || { echo "$(PYTHON) is older than Python 3.10, which funcrt needs." >&2; exit 1; }
	@echo "Installing funcrt[$(EXTRAS)] into $(VENV) with $$($(PYTHON) --version), pinned versions; about a minute ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[$(EXTRAS)]'
	@$(PRECOMPILE) || true
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "Installing mlx-lm, to compare with ..."
	@$(PIP) --editable '.[$(EXTRAS),bench]'
	@touch $@

$(VENV)-reference/.installed: tests/reference/requirements.txt
	@echo "Installing torch and transformers into $(VENV)-reference; several minutes ..."
	@$(PYTHON) -m venv $(VENV)-reference
	@$(VENV)-reference/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	@touch $@
