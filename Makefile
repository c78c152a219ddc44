# Every target does its own set-up (Debian packages, .venv, configure, build); see `make help`.
SHELL := /bin/bash
.DEFAULT_GOAL := help

BUILD := build
PYTHON := .venv/bin/python
PYTESTS := tests/torch tests/python
# Builds in several folders share ccache's objects (.ci/run says the same).
export CCACHE_NOHASHDIR ?= 1
# ON or OFF: the CUDA kernels. Empty: where there is nvcc, a GPU and a torch that can use it.
CUDA ?=
# Parallel compilers: one per core, but no more than memory allows (2 GB each).
JOBS ?= $(shell awk -v n=$$(nproc) '/MemAvailable/ {m = int($$2 / 2000000); print (m < 1 ? 1 : m < n ? m : n)}' /proc/meminfo)

.PHONY: help setup build demo test sanitize bench format check-format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install Debian packages and the virtual environment
	@scripts/setup.sh

build: setup ## build everything; the program is build/bin/fenwick
	@mkdir -p $(BUILD)
	@[[ -f $(BUILD)/CMakeCache.txt && -f $(BUILD)/build.ninja ]] || { \
		cuda=$(CUDA); \
		[[ -n $$cuda ]] || { command -v nvcc >/dev/null && $(PYTHON) -c \
			'import torch; raise SystemExit(not torch.cuda.is_available())' && cuda=ON || cuda=OFF; }; \
		cmake --preset default -DFENWICK_CUDA=$$cuda >$(BUILD)/configure.log 2>&1; \
	} || { cat $(BUILD)/configure.log; exit 1; }
	@cmake --build $(BUILD) --parallel $(JOBS)

demo: build ## verify, train, generate and measure on this machine (about 8 minutes after the build)
	@scripts/demo.sh

test: build ## run all tests
	@ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS)
	@FENWICK_TORCH_LIBRARY=$(BUILD)/lib/libfenwick_torch.so PYTHONPATH=python \
		$(PYTHON) -m pytest -q -p no:cacheprovider $(PYTESTS)

sanitize: setup ## run the core's tests under ASan and UBSan (6 minutes of processor time)
	@cmake --preset sanitize >/dev/null
	@cmake --build --preset sanitize --parallel $(JOBS)
	@ctest --preset sanitize

bench: build ## time the operators on this machine
	@$(BUILD)/bin/fenwick bench

format: setup ## rewrite the C++ sources in the project's style
	@scripts/format.sh

check-format: setup ## fail where a source is not in the project's style
	@scripts/format.sh --check

clean: ## remove the build and the demo's output (keeps .venv)
	@rm -rf build out
