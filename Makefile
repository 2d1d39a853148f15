# Two commands: `make demo` and `make test`. Both set themselves up in .venv and touch nothing outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-faults mutants audit format gpu browser docs clean

demo: $(READY)
	$(BIN)/sparselens demo

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2

# Kills, full disks, rotten files, nonsense from outside. Part of `make test`; alone it takes two to three minutes.
test-faults: $(READY)
	$(BIN)/pytest --numprocesses 2 tests/faults

# Does a test notice when one token of the numeric core changes? Half an hour on one core; not part of `make test`.
mutants: $(READY)
	$(BIN)/python tests/mutants.py --count 200 --seed 0

# Known vulnerabilities of what CI tests with. Needs the network; --strict: a package that cannot be looked up is an error.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation as a site in build/site, notebooks made from their sources first. A warning is an error.
docs: $(READY)
	$(BIN)/python docs/notebooks/make.py
	$(BIN)/python docs/make_site.py

# For the tests of the report in a real browser, which are skipped without it. The one target that needs root.
browser:
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

# Nearly all of their time is compiling kernels, which every process does for itself: 2 minutes with 12, 20 with one.
gpu: $(READY)
	$(BIN)/pytest -m gpu --numprocesses auto

# constraints.txt pins every version that CI tests with; torch is installed first so that pip never looks for another.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
