# Two commands: `make demo` and `make test`. Both set themselves up in .venv and touch nothing outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test format gpu browser clean

demo: $(READY)
	$(BIN)/sparselens demo

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# For the tests of the report in a real browser, which are skipped without it. The one target that needs root.
browser:
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

gpu: $(READY)
	$(BIN)/pytest -m gpu

# constraints.txt pins every version that CI tests with; torch is installed first so that pip never looks for another.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
