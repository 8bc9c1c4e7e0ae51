# Everything runs from .venv, which any target makes when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
PIP_INSTALL := $(BIN)/python -m pip install -q -q --disable-pip-version-check

# What one looks at all the time; the rest of processes and crashes is for `make test`.
OTHER_FRAMEWORKS := $(wildcard $(patsubst %,tests/frameworks/test_%*.py,accelerate lightning transformers tensorflow tf_ keras jax sharded torch_ddp torch_launch torch_profiled torch_shards))
QUICK := tests/unit $(filter-out $(OTHER_FRAMEWORKS),$(wildcard tests/frameworks/test_*.py)) tests/cli/test_status.py tests/cli/test_stop_and_save.py \
	tests/processes/test_kill.py

# What bears others beside it on two cores; what measures time or fills the machine has one neighbour at most.
# Two lots mostly wait, for a SLURM of our own, for ranks, for a hang to be noticed: each has one process beside
# the first lot, and they are made so that all three end at about the same time.
# Stealing, since tests are of very different length, and those of a file share what is dear to set up.
BUSY_RANKS := $(patsubst %,tests/ranks/test_%.py,accelerate examples jax ray tensorflow)
HANGING := $(patsubst %,tests/ranks/test_%.py,hangs led_hangs two_hosts)
JOBS := $(filter-out $(BUSY_RANKS) $(HANGING),$(wildcard tests/ranks/test_*.py)) tests/slurm
WAITING := tests/hangs $(HANGING) $(patsubst %,tests/processes/test_%.py,debuggers hangs look look_stacks notebook \
	notebook_again phase signal_path supervisor_hangs supervisor_restarts two_processes)
KILLING := $(patsubst %,tests/crash/test_%.py,random_kills random_signals) $(patsubst %,tests/processes/test_%.py,long_call \
	memory_watch)
ALONE := $(patsubst %,tests/cli/test_%.py,status stop_and_save watch) $(patsubst %,tests/processes/test_%.py,handlers keeper \
	kill leader leader_warnings prompt supervisor_terminal terminal) tests/processes/progress
# Time to the first view is measured in the browser, so what is beside it is short.
BROWSER := tests/browser
WRITTEN := tests/docs tests/ui
BESIDE := tests/data tests/deaths tests/everywhere tests/examples tests/frameworks tests/mirror tests/prove tests/unit $(BUSY_RANKS) \
	$(filter-out $(ALONE) $(KILLING) $(WAITING),$(wildcard tests/cli/test_*.py tests/crash/test_*.py tests/processes/test_*.py))

LOTS := jobs waiting beside killing alone written browser
LOT = $(BIN)/python -m pytest -m 'not soak' --failures-to $(VENV)/$(1).failed

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

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
	@tools/in-memory $(BIN)/python -m pytest -q -m "not slow and not soak" -n auto --maxprocesses 4 $(QUICK)

.PHONY: test
test: $(STAMP) ## all tests but the long ones
	@tools/system-packages
	@rm -f $(addprefix $(VENV)/,$(LOTS:=.failed))
	@-tools/in-memory tools/beside $(VENV)/jobs.log "$(call LOT,jobs) $(JOBS)" \
		$(VENV)/waiting.log "$(call LOT,waiting) $(WAITING)" \
		"$(call LOT,beside) -n 2 --dist worksteal $(BESIDE)"
	@-tools/in-memory tools/beside $(VENV)/killing.log "$(call LOT,killing) $(KILLING)" "$(call LOT,alone) $(ALONE)"
	@-tools/in-memory tools/beside $(VENV)/written.log "$(call LOT,written) $(WRITTEN)" "$(call LOT,browser) $(BROWSER)"
	@tools/in-memory tools/once-more $(addprefix $(VENV)/,$(LOTS:=.failed)) -- $(BIN)/python -m pytest -m "not soak"

.PHONY: soak
soak: $(STAMP) ## the long tests
	@tools/system-packages
	@tools/in-memory $(BIN)/python -m pytest -m soak --ignore=tests/slurm
	@tools/in-memory $(BIN)/python -m pytest -m "soak or not soak" tests/slurm

.PHONY: nightly
nightly: $(STAMP) ## the tests that crowd the machine
	@tools/in-memory $(BIN)/python -m pytest -m nightly tests/load

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

# Peers are installed one by one, so that one that does not install leaves the others; the tables say so.
$(BENCH)/.installed: pyproject.toml requirements/bench.txt
	@echo "Setting up $(BENCH) (a few minutes the first time)"
	@$(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python -m pip install -q -q --disable-pip-version-check -e . >$(BENCH)/install.log 2>&1 || \
		{ cat $(BENCH)/install.log; exit 1; }
	@grep -v '^#' requirements/bench.txt | while read -r line; do \
		$(BENCH)/bin/python -m pip install -q -q --disable-pip-version-check $$line >>$(BENCH)/install.log 2>&1 || \
		echo "$$line: did not install, see $(BENCH)/install.log"; done
	@touch $@

.PHONY: bench
bench: $(BENCH)/.installed ## measure holdfast beside the limits and its peers, and write docs/benchmarks.md (20 minutes)
	@$(BENCH)/bin/python -m bench $(TOPICS); met=$$?; $(BENCH)/bin/python -m bench --pages && exit $$met

.PHONY: bench-quick
bench-quick: $(BENCH)/.installed ## the same with small states and fewer peers (3 minutes), kept apart
	@$(BENCH)/bin/python -m bench --quick $(TOPICS)

.PHONY: bench-more
bench-more: $(BENCH)/.installed ## what loaders, rules, and the keeper's watch and pulse cost
	@$(BENCH)/bin/python -m bench.loaders && $(BENCH)/bin/python -m bench.rules && \
		$(BENCH)/bin/python -m bench.watch && $(BENCH)/bin/python -m bench.pulse

.PHONY: table
table: $(STAMP) ## prove the scripts of docs/before_and_after and write their table (half an hour)
	@$(BIN)/python docs/before_and_after/measure.py

.PHONY: docs
docs: $(STAMP) ## build the documentation to site/
	@$(BIN)/mkdocs build --quiet --strict && echo "site/index.html: built"

.PHONY: pictures
pictures: $(STAMP) ## make the pictures of the README: a terminal, what a save costs, a report (6 minutes)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tools.pictures $(PICTURES)

.PHONY: clean
clean: ## remove the environments, caches and built packages
	rm -rf $(VENV) $(BENCH) build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
