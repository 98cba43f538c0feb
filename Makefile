# Each target does all its own set-up: a virtual env, the packages, Java. Run `make` for the list.
# PYTHON=python3.12 chooses the interpreter of a new virtual env; ARGS=… goes to the program that is run.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# SPARK=4.2.1 uses that version of PySpark, in a virtual env of its own.
SPARK ?=
# PG=13 runs the tests on that major version of PostgreSQL (13 to 18).
PG ?=
VENV := .venv$(if $(SPARK),-spark-$(SPARK))
BIN := $(VENV)/bin
ARGS ?=

WITH_JAVA = JAVA_HOME="$$(scripts/ensure_java.sh)" && export JAVA_HOME &&
WITH_PG = $(if $(PG),PENSTOCK_TEST_PG_HOME="$$(scripts/ensure_postgres.sh $(PG))" && export PENSTOCK_TEST_PG_HOME &&)

.PHONY: help demo test test-crash test-soak docs notebooks lint format bench clean env-demo env-dev

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: env-demo ## run the demonstration
	@$(WITH_JAVA) $(BIN)/python -m penstock.demo $(ARGS)

test: env-dev ## run the tests; ARGS="-k sqlite" is for pytest, SPARK=4.2.1 and PG=13 choose versions
	@$(WITH_JAVA) $(WITH_PG) $(BIN)/python -m pytest $(ARGS)

test-crash: env-dev ## run every crash test, the slow cross product included
	@$(WITH_JAVA) $(WITH_PG) $(BIN)/python -m pytest -m "crash or crash_full" $(ARGS)

test-soak: env-dev ## run the slow tests that `make test` leaves out, but for the crash tests; an hour of it is PENSTOCK_SOAK_SECONDS=3600
	@$(WITH_JAVA) $(WITH_PG) $(BIN)/python -m pytest -m soak $(ARGS)

bench: env-dev ## measure speed against peers
	@$(WITH_JAVA) $(BIN)/python -m bench $(ARGS)

docs: env-dev ## write the reference and the tables of options anew, from the code
	@PYTHONPATH=. $(BIN)/python scripts/reference.py

notebooks: env-dev ## run the notebooks of examples/notebooks from top to bottom
	@$(WITH_JAVA) $(BIN)/python scripts/run_notebooks.py

lint: env-dev ## ruff, mypy and the layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: env-dev ## mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

env-demo:
	@scripts/ensure_venv.sh $(VENV) demo "$(SPARK)"

env-dev:
	@scripts/ensure_venv.sh $(VENV) dev "$(SPARK)"

clean: ## remove everything that make made, virtual envs included
	rm -rf .venv .venv-* .postgres-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist \
		demo-output spark-warehouse metastore_db derby.log
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
