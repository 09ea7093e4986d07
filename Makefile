# make demo:     train, score and export a GPT-2 from text on this machine, in minutes.
# make test:     run the fast tests, in about two minutes on two cores, then lint and type checks.
# make test-all: run all tests, also of faults, several processes and machines, benchmarks and extras.
# make gpu-check: test and measure this machine's GPUs, in at most 9 minutes.
# Each target first installs the packages that it needs into .venv.

PYTHON ?= python3
BIN := .venv/bin
DEMO_FLAGS ?=
GPU_FLAGS ?=

# Packages are compiled where they are first imported instead of all at once by pip: this saves half a minute.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r

.PHONY: demo test test-all gpu-check lint clean

demo: .venv/.installed
	$(BIN)/python demo.py $(DEMO_FLAGS)

test: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow"
	$(MAKE) lint

test-all: .venv/.installed-test-all
	$(BIN)/python -m pytest -n 2
	$(MAKE) lint

gpu-check: .venv/.installed-dev
	$(BIN)/python -m bench --gpu $(GPU_FLAGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .

.venv/.installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) requirements.txt
	touch $@

.venv/.installed-dev: requirements-dev.txt .venv/.installed
	$(INSTALL) requirements-dev.txt
	touch $@

.venv/.installed-test-all: requirements-test-all.txt requirements-extras.txt .venv/.installed-dev
	$(INSTALL) requirements-test-all.txt
	touch $@

clean:
	rm -rf .venv data/stdlib .mypy_cache .pytest_cache .ruff_cache .hypothesis
