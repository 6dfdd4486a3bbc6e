# Everything a person or CI runs. Each target makes its own virtual environment first.
#   make demo | test | test-slow | test-all | test-browser | lint | format | bench | docs | lock | clean
# PYTHON=... names the interpreter for a new environment, VENV=... its folder.

VENV ?= .venv
PYTHON ?=
find_python := requirements/find_python.sh
in_venv := $(VENV)/bin/python
# Where pyright's launcher and pip would ask the network whether they are the newest.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-browser lint format bench docs lock clean

help:
	@sed -n '2,3s/^# *//p' Makefile

# The stamp is made last, so that an install that was broken off is done again.
$(VENV)/.installed: pyproject.toml requirements/py311.txt requirements/py312.txt
	@if ! $(in_venv) -c '' 2>/dev/null; then \
	    python="$(PYTHON)"; \
	    if [ -z "$$python" ]; then python=$$($(find_python) 11 12 13 14) || \
	        { echo "No Python 3.11 or newer with the venv module was found; name one with PYTHON=..." >&2; exit 1; }; fi; \
	    echo "Making $(VENV) with $$python"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@$(in_venv) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(VENV) holds a Python older than 3.11; remove it." >&2; exit 1; }
	@lock=$$($(in_venv) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")'); \
	    echo "Installing requirements/$$lock.txt into $(VENV)"; \
	    $(in_venv) -m pip install --quiet -r requirements/$$lock.txt
	@$(in_venv) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/.installed
	$(in_venv) examples/demo.py

# Two runs: the quick tests and the examples in docstrings must pass before anything trains.
test: $(VENV)/.installed
	$(in_venv) -m pytest -n auto --dist worksteal -m "not slow" tests/unit ratrain_jax
	$(in_venv) -m pytest -n auto --dist worksteal -m "not slow" tests/e2e

# Compiled as for a user.
test-slow: $(VENV)/.installed
	RATRAIN_TEST_OPTIMIZED=1 $(in_venv) -m pytest -n auto --dist worksteal -m slow
	RATRAIN_TEST_OPTIMIZED=1 $(in_venv) -m pytest -n auto --dist loadfile tests/e2e/test_schedules_bitwise.py

# Both ends of the supported range, each where this machine has the interpreter.
test-all:
	@ran=0; \
	for minors in "11" "12 13 14"; do \
	    if python=$$($(find_python) $$minors); then \
	        folder=.venv-$$(echo $$minors | tr ' ' '-'); \
	        $(MAKE) test VENV=$$folder PYTHON="$$python" || exit 1; \
	        ran=1; \
	    else \
	        echo "Not tested: no Python 3.x with x among: $$minors"; \
	    fi; \
	done; \
	[ $$ran = 1 ]

# The report in a headless Chromium, which not everyone has; so `test` does without.
test-browser: $(VENV)/.installed
	$(in_venv) -m pytest tests/browser

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(in_venv)

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed
	@set -e; for file in benchmarks/bench_*.py benchmarks/kernels_*.py; do echo "== $$file"; $(in_venv) "$$file"; done

# Strictly: a broken link, or a name that the API pages do not find, ends the build.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(in_venv) -m mkdocs build --strict
	@echo "Open site/index.html, or with a search field: $(in_venv) -m http.server --directory site"

lock:
	requirements/lock.sh $$($(find_python) 11) requirements/py311.txt 'jax>=0.10.2,<0.11'
	requirements/lock.sh $$($(find_python) 12) requirements/py312.txt 'jax>=0.12,<0.13'

clean:
	rm -rf .venv .venv-* build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
