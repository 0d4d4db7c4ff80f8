# Every target installs and builds what it needs and nothing that is current already.
# Python packages are pinned in pyproject.toml's dependency groups; tools that only one target needs are pinned here.

PIP_VERSION := 26.1
ZIGLANG := 0.17.1
CARGO_ZIGBUILD := 0.24.1
# Oldest glibc that the wheel runs on, and the GPUs it holds kernels for.
MANYLINUX := manylinux_2_28
WHEEL_CUDA_ARCHS := 80,86,89,90,100,120

# Interpreter to make .venv with; empty: the first suitable one of python3.13 to python3.10 and python3.
PYTHON ?=
# Processes that share out the files of tests; 0: this one alone, for a debugger.
WORKERS := 2
# Ranks of the tests over NCCL, at most; empty: as many as there are GPUs.
NPROC :=
# Passed on by the targets that say so: make test-python ARGS="-k scheduler -x"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
EXTENSION := python/outboard/_native.abi3.so
EXTENSION_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(wildcard build.rs) \
	$(shell find src cuda -type f -not -name '.*' 2>/dev/null)
INTEGRATIONS_STAMP := $(VENV)/.integrations
ZIG_STAMP := $(VENV)/.zig-$(ZIGLANG)-$(CARGO_ZIGBUILD)
# Panic messages name source files: in a wheel without this machine's directories.
NO_LOCAL_PATHS = --remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}/registry/src=registry --remap-path-prefix=$(CURDIR)=.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# rustup's directory, for shells that have not read its profile.
export PATH := $(PATH):$(HOME)/.cargo/bin
# pip is pinned: no advice to upgrade it.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# nvcc works through a C++ compiler: where there is C alone, the build goes without the CUDA library.
NO_CUDA = $(shell $${NVCC_CCBIN:-gcc} -x c++ -include cmath -E /dev/null >/dev/null 2>&1 || echo OUTBOARD_CUDA=off)
# As after `activate`; maturin refuses to choose between a conda environment and this one.
IN_VENV = env -u CONDA_PREFIX -u PYTHONHOME VIRTUAL_ENV="$(CURDIR)/$(VENV)" PATH="$(CURDIR)/$(BIN):$$PATH" $(NO_CUDA)

##@ Use
# These print nothing on stdout but what the program prints, so that --json can be piped.
.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: train
train: build ## Train a small GPT with outboard and with torch and compare (ARGS: the script's options)
	@$(BIN)/python examples/train_gpt.py $(ARGS)

.PHONY: doctor
doctor: build ## Say what this build and this machine can do (ARGS: --json)
	@$(BIN)/python -m outboard doctor $(ARGS)

.PHONY: bench
bench: build ## Measure the host update beside torch's fused one (ARGS: --numel, --threads, --dtype, --json)
	@$(BIN)/python -m outboard bench host $(ARGS)

##@ Develop
.PHONY: install
install: $(VENV)/.installed ## Make .venv and install the pinned packages

.PHONY: build
build: $(EXTENSION) ## Build the extension, CUDA library included, in release mode and in place

.PHONY: test
test: test-rust test-python ## Run the tests of the crate and of the Python package

.PHONY: test-rust
test-rust: | need-rust ## Test the crate alone: no Python, no torch, no CUDA
	cargo test --no-default-features

.PHONY: test-python
test-python: build ## Test the Python package (ARGS: pytest's options)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

.PHONY: lint
lint: lint-rust lint-python ## Check format, lints, types and the stub file

.PHONY: lint-rust
lint-rust: $(VENV)/.installed | need-rust
	cargo fmt --check
	cargo clippy --all-targets --no-default-features -- -D warnings
	$(IN_VENV) cargo clippy --all-targets --features python,cuda -- -D warnings

.PHONY: lint-python
lint-python: build
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest outboard._native

.PHONY: format
format: $(VENV)/.installed | need-rust ## Format Rust and Python and apply ruff's safe fixes
	cargo fmt
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

##@ Test more
.PHONY: test-exhaustive
test-exhaustive: | need-rust ## Run the crate's ignored tests, such as all 2^32 masters (minutes)
	cargo test --release --no-default-features -- --ignored

.PHONY: test-valgrind
test-valgrind: | need-rust ## Run the crate's tests under memcheck, at each ISA level that valgrind knows
	scripts/test-valgrind.sh

.PHONY: test-aarch64
test-aarch64: $(VENV)/.created | need-rust ## Cross-compile the crate's tests to aarch64 and run them under qemu
	@$(MAKE) --silent $(ZIG_STAMP) || { echo "test-aarch64: not run: pip cannot install what cross-compiles"; exit 0; }; \
	$(IN_VENV) scripts/test-aarch64.sh

.PHONY: test-integrations
test-integrations: build $(INTEGRATIONS_STAMP) ## Run the tests of training frameworks, which it installs (ARGS: pytest's options)
	$(BIN)/python -m pytest -m 'integrations and not cuda' -n $(WORKERS) --dist loadfile tests/integrations $(ARGS)

.PHONY: test-kill
test-kill: build ## End training in every way, 50 times each, and look for lost updates (OUTBOARD_KILL_REPEATS)
	OUTBOARD_KILL_REPEATS=$${OUTBOARD_KILL_REPEATS:-50} $(BIN)/python -m pytest -m '' -s tests/test_kill.py $(ARGS)

.PHONY: test-gpu
test-gpu: build ## Run the tests that need a CUDA device (ARGS: pytest's options)
	$(BIN)/python -m pytest -m cuda $(ARGS)

.PHONY: test-distributed
test-distributed: build ## Run the tests over ranks, over NCCL where there are GPUs (NPROC: at most so many ranks)
	OUTBOARD_NPROC=$(NPROC) $(BIN)/python -m pytest -m '' tests/test_distributed_*.py $(ARGS)

.PHONY: test-sanitizer
test-sanitizer: $(VENV)/.installed | need-rust ## Run the tests of the CUDA kernels under compute-sanitizer (minutes)
	$(IN_VENV) scripts/test-sanitizer.sh

##@ Ship
.PHONY: wheel
wheel: $(VENV)/.installed $(ZIG_STAMP) | need-rust ## Build the wheel for other machines into dist/
	$(IN_VENV) OUTBOARD_CUDA=require OUTBOARD_CUDA_ARCHS="$(WHEEL_CUDA_ARCHS)" RUSTFLAGS="$(NO_LOCAL_PATHS)" \
		maturin build --release --zig --compatibility $(MANYLINUX) --out dist

.PHONY: clean
clean: ## Remove what was built; .venv and runs/ stay
	rm -rf dist build $(EXTENSION) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	if command -v cargo >/dev/null; then cargo clean; fi

.PHONY: distclean
distclean: clean ## Remove .venv too
	rm -rf $(VENV)

# What is checked before a build rather than met as a linker's message.
.PHONY: need-rust
need-rust:
	@command -v cargo >/dev/null || { echo "make: cargo not found: install a Rust toolchain (rustup, stable)" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "make: cc not found: install a C compiler (gcc and the C library's headers)" >&2; exit 1; }

$(VENV)/.created: scripts/make-venv.sh
	@scripts/make-venv.sh $(VENV) $(PIP_VERSION) "$(PYTHON)"
	@touch $@

# The stamp holds the pins it was made from, so that an edit elsewhere in pyproject.toml installs nothing.
$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@sed -n '/^\[dependency-groups\]/,/^\[tool/p' pyproject.toml > $@.new
	@if cmp -s $@.new $@; then touch $@; else \
		echo "make: installing pyproject.toml's pinned packages (torch is large: minutes the first time)" >&2; \
		$(BIN)/python -m pip install --quiet --group dev; \
		cp $@.new $@; \
	fi
	@rm $@.new

# As .installed, of the group that only one target needs.
$(INTEGRATIONS_STAMP): pyproject.toml $(VENV)/.installed
	@sed -n '/^integrations = \[/,/^\]/p' pyproject.toml > $@.new
	@if cmp -s $@.new $@; then touch $@; else \
		echo "make: installing the pinned training frameworks" >&2; \
		$(BIN)/python -m pip install --quiet --group integrations; \
		cp $@.new $@; \
	fi
	@rm $@.new

$(ZIG_STAMP): | $(VENV)/.created
	@echo "make: installing zig $(ZIGLANG) and cargo-zigbuild $(CARGO_ZIGBUILD)" >&2
	@$(BIN)/python -m pip install --quiet ziglang==$(ZIGLANG) cargo-zigbuild==$(CARGO_ZIGBUILD)
	@touch $@

$(EXTENSION): $(EXTENSION_SOURCES) $(VENV)/.installed | need-rust
	@echo "make: building the extension in release mode (a minute or two from scratch)" >&2
	@$(if $(NO_CUDA),echo "make: no C++ compiler for nvcc (Debian: install g++): building without the CUDA library" >&2)
	@$(IN_VENV) maturin develop --release > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log >&2; exit 1; }
	@grep '^warning: outboard@' $(VENV)/build.log >&2 || true
	@touch $@
