# Everything from a fresh clone. `make` alone says what there is.

PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
# A file's tests share servers and models, so they stay on one of the two workers; in order, as the longest file is not last.
WHOLE_SUITE := -n 2 --dist loadscope --no-loadscope-reorder

# As a path, not as an import hook: a script beside this directory would find it, `octavo`, before the package in it.
EDITABLE := --config-settings editable_mode=compat

.DEFAULT_GOAL := help
.PHONY: help setup serve demo-model test gpu-check lint docs wheel clean

help:
	@echo "Octavo: an inference server for large language models"
	@echo
	@echo "  make serve         set up, then serve the demo model on http://127.0.0.1:8000 until Ctrl-C"
	@echo "  make serve ARGS='org/name --port 9000'"
	@echo "                     the same with another model and any flag of 'octavo serve'"
	@echo "  make setup         create $(VENV) and install the pinned dependencies, if they changed, and"
	@echo "                     compile the kernels for this CPU into your cache"
	@echo "  make demo-model    download the demo model into your cache and expand it for the tests, if it is not there"
	@echo "  make test          set up, then run the tests (offline); ARGS='tests/gateway -k stream' for some"
	@echo "  make gpu-check     check and time every kernel and a model on this machine's GPU; ARGS='--interpret' without"
	@echo "  make lint          check format, style and types"
	@echo "  make docs          write docs/settings.md from the settings in the source"
	@echo "  make wheel         build dist/octavo-VERSION-py3-none-any.whl, without the set-up"
	@echo "  make clean         remove $(VENV) and what tools left here; models in your cache stay"
	@echo
	@echo "  PYTHON=python3.12  the Python (3.11 or newer) that $(VENV) is made with"

setup: $(STAMP) $(COMPILED)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Octavo needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there)." >&2; \
	  echo "Install one and name it: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version) and installing the pinned dependencies (some minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --disable-pip-version-check -r requirements.lock
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e . $(EDITABLE)
	@touch $@

$(COMPILED): $(STAMP) $(wildcard kernels/cpu/*.py)
	@echo "Compiling kernels for this CPU into your cache (about half a minute, once)"
	@$(VENV)/bin/python -m octavo.executor.start.precompile
	@touch $@

serve: setup
	@$(VENV)/bin/octavo serve $(ARGS)

demo-model: setup
	@$(VENV)/bin/octavo pull
	@$(VENV)/bin/octavo pull --dtype bfloat16

test: demo-model
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest $(or $(ARGS),$(WHOLE_SUITE))

gpu-check: setup
	@$(VENV)/bin/python -m octavo.bench.gpu_check $(ARGS)

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: setup
	@$(VENV)/bin/python docs/settings.py > docs/settings.md

# In an environment of its own, as torch and the rest are not needed. What an older build left would come along.
wheel:
	@rm -rf build dist/octavo-*.whl
	@$(PYTHON) -m venv build/tools
	@build/tools/bin/python -m pip install --disable-pip-version-check --quiet --constraint requirements.lock setuptools
	@build/tools/bin/python -m pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build
	@ls dist/octavo-*.whl

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
