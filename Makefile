# The words everybody uses. Each does its own set-up: a virtual environment in
# .venv with what pyproject.toml asks for.
PYTHON ?= python3
# Its exact version finds a CPU build where there is one; it is installed
# first, so that nothing else asks for a larger one.
TORCH ?= torch==2.13.0
# What `sanitize` looks for: see tests/gpu/sanitize.sh.
CHECK ?= memcheck
# How many ranks `faults` kills or stops.
FAULTS ?= 1000
# What `fuzz` and `faults` draw from; a failure shows it.
SEED ?= $(shell date +%s)

BIN := .venv/bin
# Python compiles what it imports, and keeps it: tests start some hundred processes.
# pip would compile all of MAX and torch.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile
UV := $(BIN)/uv pip install -q --python $(BIN)/python

# The kinds of difference that `same-code` lets pass, and renamed variants:
# see tests/codegen/same_code.py.
ALLOW ?= machine
RENAME ?=

# Engines whose classes `test-engines` runs; `test-all` runs the first ones.
SMALL_ENGINES := torchtitan==0.3.0 megatron-core==0.16.1 nemo-automodel==0.7.0
ENGINES ?= $(SMALL_ENGINES) sglang==0.5.23 vllm==0.33.0

.PHONY: demo serve test test-all test-gpu test-engines same-code fuzz faults sanitize bench lint docs \
	format clean

demo: .venv/.installed
	$(BIN)/max-ep demo

serve: .venv/.installed-serve
	$(BIN)/python -m graphs.serve.run

# Two files at a time: one alone leaves a core idle now and then. Some go together
# (tests/conftest.py).
test: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: export MAX_EP_ALL_CASES = 1
test-all: export MAX_EP_ENGINES = build/engines
test-all: build/.small-engines test

test-gpu: .venv/.installed-dev
	$(BIN)/python -m pytest -m gpu

# Wheels of engines, without what they depend on, and of these the Python files.
UNPACK = $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d build/wheels $(1) \
	&& $(BIN)/python -m tests.torch.engines.unpack build/wheels build/engines

test-engines: export MAX_EP_ENGINES = build/engines
test-engines: export MAX_EP_ALL_CASES = 1
test-engines: .venv/.installed-dev
	$(call UNPACK,$(ENGINES))
	$(BIN)/python -m pytest tests/torch/test_engines.py

build/.small-engines: .venv/.installed-dev
	$(call UNPACK,$(SMALL_ENGINES))
	touch $@

same-code: .venv/.installed-dev
	$(BIN)/python tests/codegen/same_code.py $(BASE) --allow "$(ALLOW)" \
		$(foreach pair,$(RENAME),--rename '$(pair)')

fuzz: .venv/.installed-dev
	MAX_EP_ALL_CASES=1 MAX_EP_FUZZ_SEED=$(SEED) MAX_EP_FUZZ_CASES=16 MAX_EP_FUZZ_EXAMPLES=400 \
		$(BIN)/python -m pytest tests/cpu/test_fuzz.py

faults: .venv/.installed-dev
	MAX_EP_FUZZ_SEED=$(SEED) MAX_EP_FAULTS=$(FAULTS) \
		$(BIN)/python -m pytest tests/processes/test_faults.py -k seed

sanitize: .venv/.installed-dev
	PYTHON=$(BIN)/python tests/gpu/sanitize.sh $(CHECK)

bench: .venv/.installed-torch
	$(BIN)/max-ep bench

lint: .venv/.installed-dev
	$(BIN)/python -m pytest tests/test_house_rules.py

docs: .venv/.installed-dev
	$(BIN)/mkdocs build --strict

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/.installed-torch: .venv/.installed
	$(PIP) $(TORCH)
	touch $@

# uv, since an older pip cannot resolve what `max[serve]` asks for.
.venv/.installed-serve: .venv/.installed-torch
	$(PIP) uv
	$(UV) -e ".[serve]"
	touch $@

.venv/.installed-dev: .venv/.installed-serve
	$(UV) -e ".[dev]"
	touch $@

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mblack -q --preview -l 88 -C mojo tests/mojo

clean:
	rm -rf .venv build dist site
