# Each target makes the environment that it needs, and installs nothing else: see tests/tiers.toml.

PYTHON ?= python3
BIN := .venv/bin
BENCH := .venv-bench
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ENVIRONMENT = @$(PYTHON) -c '$(IS_NEW_ENOUGH)' || \
	{ echo "$(PYTHON) is not Python 3.11 or newer. Name one that is: make $@ PYTHON=python3.12"; exit 1; }; \
	$(PYTHON) tools/environment.py
TIERS = $(PYTHON) tools/tiers.py

# Compiled modules are kept, whatever the shell says: each process would compile torch and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: venv
venv: ## set up .venv with holdfast, torch, and what it takes to test and check
	$(ENVIRONMENT) check

.PHONY: demo
demo: ## see a run die and come back
	$(ENVIRONMENT) demo
	@$(BIN)/holdfast demo

.PHONY: quick
quick: ## the tests of the inner loop: at most 90 seconds
	$(ENVIRONMENT) test
	@$(TIERS) quick

.PHONY: test
test: ## what the README promises, on torch and NumPy: at most 12 minutes
	$(ENVIRONMENT) test
	@$(TIERS) test

.PHONY: test-frameworks
test-frameworks: ## the other frameworks, or NAME=jax, each in an environment of its own
	$(ENVIRONMENT) test
	@$(TIERS) frameworks $(NAME)

.PHONY: nightly
nightly: ## everything else: hours. NAME=slurm runs one part of it
	$(ENVIRONMENT) test
	@$(TIERS) nightly $(NAME)

.PHONY: affected
affected: ## what the changes since BASE can break, of the tiers beside make test
	$(ENVIRONMENT) test
	@$(TIERS) affected $(if $(BASE),--base $(BASE))

.PHONY: check
check: ## lint, formatting, types, imports, file sizes, how files are opened
	$(ENVIRONMENT) check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check-file-sizes
	$(BIN)/python tools/check-opens

.PHONY: format
format: ## format the code and fix what ruff can fix
	$(ENVIRONMENT) check
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
table: ## prove the scripts of docs/before_and_after and write their table (half an hour)
	$(ENVIRONMENT) keras
	@.venv-layers/keras/bin/python docs/before_and_after/measure.py

.PHONY: docs
docs: ## build the documentation to site/
	$(ENVIRONMENT) docs
	@.venv-layers/docs/bin/mkdocs build --quiet --strict && echo "site/index.html: built"

.PHONY: pictures
pictures: ## make the pictures of the README: a terminal, what a save costs, a report (6 minutes)
	$(ENVIRONMENT) browser
	@PATH="$(CURDIR)/$(BIN):$$PATH" .venv-layers/browser/bin/python -m tools.pictures $(PICTURES)

.PHONY: clean
clean: ## remove the environments, caches and built packages
	rm -rf .venv .venv-layers $(BENCH) build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
