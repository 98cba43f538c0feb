# Each target does all its own set-up: a virtual env, the packages, Java. Run `make` for the list.
# PYTHON=python3.12 chooses the interpreter of a new virtual env; ARGS=… goes to the program that is run.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# SPARK=4.2.1 uses that version of PySpark, in a virtual env of its own.
SPARK ?=
# Those of `make test-spark-versions`.
SPARKS ?= 4.2.1 4.3.0
# PG=13 runs the tests on that major version of PostgreSQL (13 to 18).
PG ?=
VENV := .venv$(if $(SPARK),-spark-$(SPARK))
BIN := $(VENV)/bin
ARGS ?=

# Where bytecode is not kept, each of the thousand processes that the tests start compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

WITH_JAVA = JAVA_HOME="$$(scripts/ensure_java.sh)" && export JAVA_HOME &&
WITH_PG = $(if $(PG),PENSTOCK_TEST_PG_HOME="$$(scripts/ensure_postgres.sh $(PG))" && export PENSTOCK_TEST_PG_HOME &&)

# Without a Chromium the tests of the monitor page are skipped, and say so.
WITH_CHROMIUM = PENSTOCK_TEST_CHROMIUM="$$(scripts/ensure_chromium.sh || true)" && export PENSTOCK_TEST_CHROMIUM &&
NPM = scripts/ensure_page_modules.sh && npm --prefix frontend run --silent

.PHONY: help demo test test-crash test-objects test-packaging test-soak test-spark-versions simulate faults histories history-faults docs site notebooks lint format bench page page-test page-shots clean env-demo env-dev

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: env-demo ## run the demonstration
	@$(WITH_JAVA) $(BIN)/python -m examples.flights $(ARGS)

test: env-dev ## run the tests; ARGS="-k sqlite" is for pytest, SPARK=4.2.1 and PG=13 choose versions
	@$(WITH_JAVA) $(WITH_PG) $(WITH_CHROMIUM) $(BIN)/python -m pytest $(ARGS)

test-crash: env-dev ## run every crash test, the slow cross product included
	@$(WITH_JAVA) $(WITH_PG) $(BIN)/python -m pytest -m "crash or crash_full" $(ARGS)

test-objects: env-dev ## run the tests of queues and of commits with the rows of all queues in objects, however few
	@folder=$$(mktemp -d) && PENSTOCK_TEST_PAYLOADS="$$folder" $(WITH_JAVA) $(WITH_PG) $(BIN)/python -m pytest tests/queue tests/commit $(ARGS); status=$$?; rm -rf "$$folder"; exit $$status

test-packaging: env-dev ## install the wheel into empty environments, with each extra, with the lowest and the newest versions; asks the index
	@$(WITH_JAVA) $(WITH_PG) $(BIN)/python -m pytest -m packaging -n 1 $(ARGS)

test-soak: env-dev ## run the slow tests that `make test` leaves out, but for those of crashes and packaging; an hour of it is PENSTOCK_SOAK_SECONDS=3600
	@export PENSTOCK_TEST_CODEGEN=1; $(WITH_JAVA) $(WITH_PG) $(WITH_CHROMIUM) $(BIN)/python -m pytest -m soak $(ARGS)

test-spark-versions: ## run the tests of what is used of Spark's private API, and of output modes, on each version of Spark that is supported
	@for version in $(SPARKS); do PENSTOCK_TEST_CODEGEN=1 $(MAKE) test SPARK="$$version" ARGS="tests/spark/internals tests/modes $(patsubst %,tests/continuous/test_%.py,dataframe dataframe_python user_functions) $(ARGS)" || exit 1; done

simulate: env-dev ## run the simulation of the protocols; ARGS="--seconds 600" or "--schedules 1000000" says how long, --first N --replay shows one
	@PYTHONPATH=.:src $(BIN)/python -m tests.simulation $(ARGS)

faults: env-dev ## count the schedules of the simulation until each of the planted faults is detected; ARGS="--schedules 5000 --only compaction"
	@PYTHONPATH=.:src $(BIN)/python -m tests.simulation.fault_run $(ARGS)

histories: env-dev ## play random changes of tables, rows and restarts against a PostgreSQL and a feed of it, or with --pump a pump of it; ARGS="--histories 10000 --first 1 --only add,rename"
	@$(WITH_PG) PYTHONPATH=.:src $(BIN)/python -m tests.feeds.postgres.schema_histories $(ARGS)

history-faults: env-dev ## play such histories with one of the feed's checks taken away, and count them until the loss is found; ARGS="--histories 1500 --only key"
	@$(WITH_PG) PYTHONPATH=.:src $(BIN)/python -m tests.feeds.postgres.history_faults $(ARGS)

bench: env-dev ## measure speed against peers, and write bench/report.md; ARGS="append-sqlite" chooses
	@$(WITH_JAVA) $(BIN)/python -m bench $(ARGS)

docs: env-dev ## write the reference and the tables of options anew, from the code
	@PYTHONPATH=. $(BIN)/python scripts/reference.py

site: ## build the documentation site in build/site; fails on a dead link and on a page that no other leads to
	@scripts/ensure_venv.sh .venv-docs docs
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. .venv-docs/bin/mkdocs build
	@echo "build/site/index.html"

notebooks: env-dev ## run the notebooks of examples/notebooks from top to bottom
	@$(WITH_JAVA) $(BIN)/python scripts/run_notebooks.py

lint: env-dev ## ruff, mypy, layers, imports, where Spark's private API is used, and words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python scripts/check_internals.py
	@$(BIN)/python scripts/check_imports.py
	@$(BIN)/python scripts/check_words.py

format: env-dev ## mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

page: ## build the monitor page from frontend/ into the package (needs Node.js)
	@$(NPM) build
	@python3 scripts/page_digest.py --write

page-test: ## check the types of the monitor page and run its own tests (needs Node.js)
	@$(NPM) check
	@$(NPM) test

page-shots: env-dev ## take the pictures of the monitor page for the docs (needs Chromium)
	@$(WITH_CHROMIUM) PYTHONPATH=.:src $(BIN)/python scripts/page_shots.py $(ARGS)

env-demo:
	@scripts/ensure_venv.sh $(VENV) demo "$(SPARK)"

env-dev:
	@scripts/ensure_venv.sh $(VENV) dev "$(SPARK)"

clean: ## remove everything that make made, virtual envs included
	rm -rf .venv .venv-* .postgres-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist \
		demo-output frontend/node_modules spark-warehouse metastore_db derby.log
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
