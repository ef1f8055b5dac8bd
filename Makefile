# `make demo` and `make test` are the two commands of a new clone; .ci/run calls them. `make` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One profile everywhere. Tests and benches leave the binding out: they need no interpreter then, and pyo3 is not
# rebuilt each time cargo follows maturin or the other way round. The price: dependencies whose features the binding
# widens (candle among them) are compiled twice, once with it and once without.
CARGO_FLAGS := --release
EMULATOR := target/emulator
SOURCES := Cargo.toml Cargo.lock pyproject.toml README.md \
	$(shell find rust python/specpilot_rs -type f ! -name '*.so' ! -path '*/__pycache__/*')

# What maturin told pyo3's build script; clippy tells it the same, or the next wheel would rebuild pyo3.
PYO3_ENV = PYO3_BUILD_EXTENSION_MODULE=1 PYO3_PYTHON=$(abspath $(BIN)/python) \
	PYO3_CONFIG_FILE=$(firstword $(wildcard $(abspath target/maturin)/pyo3-config-*.txt))

.PHONY: help
help: ## Print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: tools
tools:
	@command -v cargo >/dev/null || { echo "error: cargo is missing; install Rust 1.89 or newer (rustup)" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "error: cc is missing; install a C compiler (Debian: build-essential)" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing; install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), expected 3.11 or newer; set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "error: $(PYTHON) has no venv module (Debian: apt install python3-venv)" >&2; exit 1; }

$(BIN)/python: | tools
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(SOURCES) | $(BIN)/python
	@echo "Building and installing specpilot_rs (minutes the first time) ..."
	@$(PIP) install --quiet .
	@touch $@

$(VENV)/installed-test: $(SOURCES) | $(BIN)/python
	@echo "Building and installing specpilot_rs with what its tests need (minutes the first time) ..."
	@$(PIP) install --quiet '.[test]'
	@touch $(VENV)/installed $@

.PHONY: demo
demo: tools $(VENV)/installed ## Install into .venv and generate from the bundled pair, plain and speculative
	@$(BIN)/python -m specpilot_rs.demo

.PHONY: test
test: lint rust-test python-test test-emulated ## Everything that CI checks

.PHONY: lint
lint: tools $(VENV)/installed-test ## Formatting, lints, types, stubs
	cargo fmt --all --check
	$(PYO3_ENV) cargo clippy $(CARGO_FLAGS) --features python --all-targets -- -D warnings
	cargo clippy $(CARGO_FLAGS) --package ptx-emulator --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest specpilot_rs._core

.PHONY: rust-test
rust-test: tools ## Rust tests
	@if cargo nextest --version >/dev/null 2>&1; then set -x; cargo nextest run $(CARGO_FLAGS) --workspace; \
	else set -x; cargo test $(CARGO_FLAGS) --workspace; fi

.PHONY: python-test
python-test: tools $(VENV)/installed-test ## Python tests
	$(BIN)/pytest -n 2 --dist loadfile

# Under the names by which programs look for a driver.
.PHONY: emulator
emulator: tools
	cargo build $(CARGO_FLAGS) --package ptx-emulator
	@mkdir -p $(EMULATOR)
	@for name in libcuda.so libcuda.so.1; do ln -sf ../release/libptx_emulator.so $(EMULATOR)/$$name; done

.PHONY: test-emulated
test-emulated: emulator $(VENV)/installed-test ## Small ones of the tests that need a GPU, on an emulated driver
	$(BIN)/python -m tests.cuda.emulated

.PHONY: test-emulated-slow
test-emulated-slow: emulator $(VENV)/installed-test ## All of them that an emulated driver can run: hours
	$(BIN)/python -m tests.cuda.emulated --all

.PHONY: test-cuda
test-cuda: tools $(VENV)/installed-test ## The tests that need a GPU
	$(BIN)/pytest tests/cuda

.PHONY: test-sanitizer
test-sanitizer: tools $(VENV)/installed-test ## Kernel tests under compute-sanitizer; needs a GPU
	$(BIN)/specpilot precompile
	$(BIN)/python tests/cuda/sanitizer.py

.PHONY: test-slow
test-slow: tools $(VENV)/installed-test ## The full grids, and ten minutes of damaged files
	$(BIN)/pytest -m slow
	cargo test $(CARGO_FLAGS) --lib -- --ignored --nocapture

.PHONY: bench
bench: tools ## Kernel benchmarks
	cargo bench

.PHONY: format
format: tools $(VENV)/installed-test ## Format Rust and Python in place
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## Remove the venv and everything built
	rm -rf $(VENV) target
