# Everything runs from .venv, which any target makes when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
PIP_INSTALL := $(BIN)/python -m pip install -q -q --disable-pip-version-check

# What one looks at all the time; the rest of processes and crashes is for `make test`.
QUICK := tests/unit tests/frameworks tests/cli/test_status.py tests/cli/test_stop_and_save.py \
	tests/processes/test_kill.py tests/crash/test_damage.py

# What bears another test beside it on two cores, and what measures time or fills the machine.
# The jobs of a SLURM of our own mostly wait, and so do hangs: each have a process to themselves beside the first.
# Stealing, since tests are of very different length, and those of a file share what is dear to set up.
SOME_BESIDE := $(patsubst %,tests/cli/test_%.py,adopt clean completion demo doctor errors export export_for_tensorflow \
	export_for_torch export_ranks help lint ls stacks submit verify why) $(patsubst %,tests/crash/test_%.py,commit_stages damage full_disk nothing_left \
	read_only_folder) $(patsubst %,tests/processes/test_%.py,children exit_status idle_keeper last_words ordinary_user \
	requests rules small_shm supervisor_output twenty_deaths)
WAITING := tests/hangs $(patsubst %,tests/processes/test_%.py,debuggers hangs look look_stacks notebook notebook_again phase \
	signal_path supervisor_hangs supervisor_restarts two_processes) \
	$(patsubst %,tests/ranks/test_%.py,hangs led_hangs two_hosts)
BESIDE := tests/data tests/deaths tests/everywhere tests/examples tests/frameworks tests/prove tests/unit $(SOME_BESIDE) \
	$(filter-out $(WAITING),$(wildcard tests/ranks/test_*.py))
ALONE := $(filter-out $(SOME_BESIDE) $(WAITING),$(wildcard tests/cli/test_*.py tests/crash/test_*.py tests/processes/test_*.py)) \
	tests/processes/progress

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: venv
venv: $(STAMP) ## set up .venv with holdfast and all it takes to work on it

# pip is silent while all goes well; its output is shown whole when it does not.
$(STAMP): pyproject.toml requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer. Name one that is: make venv PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -r requirements/dev.txt >$(LOG) 2>&1 && $(PIP_INSTALL) -e . >>$(LOG) 2>&1 || \
		{ cat $(LOG); exit 1; }
	@touch $@

.PHONY: demo
demo: $(STAMP) ## see a run die and come back
	@$(BIN)/holdfast demo

.PHONY: quick
quick: $(STAMP) ## the tests of the inner loop, under two minutes
	@$(BIN)/python -m pytest -q -m "not slow and not soak" -n auto --maxprocesses 4 $(QUICK)

.PHONY: test
test: $(STAMP) ## all tests but the long ones
	@tools/system-packages
	@tools/beside $(VENV)/slurm.log "$(BIN)/python -m pytest -m 'not soak' tests/slurm" \
		$(VENV)/waiting.log "$(BIN)/python -m pytest -m 'not soak' $(WAITING)" \
		"$(BIN)/python -m pytest -m 'not soak' -n 2 --dist worksteal $(BESIDE)"
	@$(BIN)/python -m pytest -m "not soak" $(ALONE)

.PHONY: soak
soak: $(STAMP) ## the long tests
	@tools/system-packages
	@$(BIN)/python -m pytest -m soak --ignore=tests/slurm
	@$(BIN)/python -m pytest -m "soak or not soak" tests/slurm

.PHONY: check
check: $(STAMP) ## lint, formatting, types, imports, file sizes
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check-file-sizes

.PHONY: format
format: $(STAMP) ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

.PHONY: bench
bench: $(STAMP) ## measure what holdfast costs a training step
	@$(BIN)/python bench/spine.py; spine=$$?; $(BIN)/python bench/loaders.py && \
		$(BIN)/python bench/ranks.py && $(BIN)/python bench/watch.py && $(BIN)/python bench/pulse.py && exit $$spine

.PHONY: table
table: $(STAMP) ## prove the scripts of docs/before_and_after and write their table (half an hour)
	@$(BIN)/python docs/before_and_after/measure.py

.PHONY: clean
clean: ## remove .venv, caches and built packages
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
