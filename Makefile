# The two commands that matter: `make serve` and `make test`. Both set up all they need, and are quick the second time.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard build_tools/*.py syringa/engine/cpu/native/*.cpp syringa/engine/cpu/native/*.h)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help serve test check format bench clean

help:
	@echo "make serve    set up, fetch the default model, start the server on 127.0.0.1:8000"
	@echo "make test     set up, check style and types, run every test"
	@echo "make check    ruff and mypy only"
	@echo "make format   let ruff rewrite what it can"
	@echo "make bench    measure beside llama.cpp and vLLM (installs both; half an hour)"
	@echo "make clean    remove the virtual environments and what was built"

serve: $(VENV)/.installed
	@$(BIN)/syringa pull
	@exec $(BIN)/syringa serve $(ARGS)

test: check
	@$(BIN)/syringa pull
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@$(BIN)/syringa pull
	$(BIN)/python -m bench.cpu $(ARGS)

clean:
	rm -rf $(VENV) .venvs build *.egg-info syringa/engine/cpu/native/*.so

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
