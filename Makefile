# Every target sets up what it needs; Python 3.11 to 3.13 and make are enough. `make help` lists them.

# Command of the Python that creates the environments; by default the first of these that fits.
PYTHON ?=
CANDIDATES := $(or $(PYTHON),python3.11 python3)
SHELL := /bin/sh

# TensorFlow 2.16 is the last version with wheels for macOS on Intel.
ifeq ($(shell uname -sm),Darwin x86_64)
CONSTRAINTS ?= constraints-oldest.txt
else
CONSTRAINTS ?= constraints.txt
endif

BENCHMARKS ?= $(filter-out _%,$(basename $(notdir $(wildcard benchmarks/*.py))))
RESULTS := build/benchmarks

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export UV_HTTP_TIMEOUT ?= 300
# Empty: tests start hundreds of processes, and each would compile every file again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-full test-changed test-rest test-faults test-alone test-oldest test-nightly test-gpu test-validation test-versions test-xla lint format benchmarks
.PHONY: docs constraints clean distclean
.PHONY: check-python check-validation
.DEFAULT_GOAL := help

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 25

demo: .venv/installed ## Train on three emulated workers of different speed (about 3 minutes).
	.venv/bin/python recipes/quickstart.py

# Two processes share the tests file by file, the files that take long first: the last one would
# leave a core idle. Those that look at what they measure run alone.
ROOMS := multi_process elastic benchmarks recipes docs strategy exactness exchange asynchronous loader callbacks \
  outside launch summation pipeline planning telemetry tensorboard fit gpu
TESTS := $(ROOMS:%=tests/%) $(patsubst %,tests/test_%.py,changed depth faults make options optional_parts packaging private_api private_graphs rooms)
PYTEST := .venv/bin/python -m pytest
# One that crashes ends the run: xdist would wait for the tests that it has lost.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: export STARTED := $(shell date +%s)
test: lint ## Lint, types, and of the tests those that find most in a short time.
	$(PYTEST) --quick $(SIDE_BY_SIDE) $(TESTS)

test-all: ## All tests at full depth, and those of the other environments.
	$(MAKE) --no-print-directory --keep-going test-full test-alone test-oldest test-validation-or-say-so

.PHONY: test-validation-or-say-so
test-validation-or-say-so:
	@if $(MAKE) -s check-validation >/dev/null 2>&1; then $(MAKE) --no-print-directory test-validation; \
	else echo "The tests of data validation were NOT run: they need Python 3.11." \
	  "make test-validation says what is wrong."; fi

test-full: lint ## Every test at full depth, but for test-alone and other environments.
	$(PYTEST) $(SIDE_BY_SIDE) -m "not alone" $(TESTS)

test-changed: lint ## The tests of what changed since yesterday, or BASE=origin/main (DEPTH=--quick).
	$(PYTEST) $(DEPTH) $(SIDE_BY_SIDE) -m "not alone" $$(.venv/bin/python tests/changed.py)

# Those of what changed come first. With MINUTES=25 it ends then, with whatever it has reached.
test-rest: export STARTED := $(or $(STARTED),$(shell date +%s))
test-rest: .venv/installed ## What `make test` leaves out, in all rooms or in some (REST="loader callbacks").
	$(PYTEST) --rest $(MINUTES:%=--minutes %) $(SIDE_BY_SIDE) -m "not alone" \
	  $(or $(REST:%=tests/%),$$(.venv/bin/python tests/changed.py --all))

# Each is a line of tests/deliberate_faults.txt.
test-faults: .venv/installed ## Do the quick tests find mistakes? Puts one after the other into a copy.
	.venv/bin/python tests/find_faults.py $(FAULTS)

test-alone: .venv/installed ## Tests that look at what they measure, one after the other.
	$(PYTEST) -m alone $(TESTS)

# All ways to train; fewer tests of each with DEPTH=--quick.
OLDEST := callbacks_across_workers exact_across_workers hybrid local_training lost_worker mistakes \
  summation_across_workers
# How iterators are saved, restored and made differs between versions of TensorFlow.
OLDEST_LOADER := tests/callbacks/test_loader_tuner.py \
  $(patsubst %,tests/loader/tuner/test_%.py,handover iterator_release)
test-oldest: .venv-oldest/installed ## Several processes and the loader controller, on the oldest TensorFlow.
	.venv-oldest/bin/python -m pytest $(DEPTH) $(SIDE_BY_SIDE) -m "not alone" \
	  $(OLDEST:%=tests/multi_process/test_%.py)
	.venv-oldest/bin/python -m pytest $(DEPTH) $(SIDE_BY_SIDE) -k "not change_no_bit" $(OLDEST_LOADER)

# Training on parts of the first GPU. CI has none.
ON_GPU := exactness pipeline fit callbacks/test_batch_balancer.py callbacks/test_any_order.py strategy \
  summation gpu
test-gpu: .venv-gpu/installed ## Training on parts of a GPU, where there is one.
	KERAS_HET_TEST_DEVICES=GPU .venv-gpu/bin/python -m pytest --quick $(SIDE_BY_SIDE) $(ON_GPU:%=tests/%)

# TensorFlow keeps what XLA has compiled for CPUs: some 800 memory maps a test, until a process ends.
test-xla: .venv/installed ## Exactness with XLA on both sides of each comparison.
	@[ -n "$(DEPTH)" ] || [ $$(cat /proc/sys/vm/max_map_count) -ge 1000000 ] || { echo "All these tests" \
	  "in two processes need more memory maps than Linux allows: sudo sysctl vm.max_map_count=1048576," \
	  "or make test-xla DEPTH=--quick." >&2; exit 2; }
	KERAS_HET_TEST_XLA=1 $(PYTEST) $(DEPTH) $(SIDE_BY_SIDE) -m "not alone" tests/exactness

# What the next release will break: private symbols, Keras's data adapters, exact numbers.
NIGHTLY := $(patsubst %,tests/%.py,test_private_api test_private_graphs test_optional_parts \
  pipeline/test_pipeline_optimizers loader/test_tf_data_adapter loader/test_keras_arrays \
  loader/test_keras_sources) tests/exactness
test-nightly: .venv-nightly/installed ## Private symbols, data adapters and exactness, on the nightly builds.
	.venv-nightly/bin/python -m pytest --quick $(SIDE_BY_SIDE) $(NIGHTLY)

# TensorFlow Data Validation needs Python 3.11 and TensorFlow 2.16.
test-validation: check-validation .venv-oldest/installed ## Data validation, in the environment of test-oldest.
	.venv-oldest/bin/python -m pytest tests/loader/validation \
	  tests/multi_process/test_validation_across_workers.py \
	  tests/recipes/test_recipes.py::test_validate_data_finds_what_the_slow_worker_gets \
	  --ignore tests/loader/validation/test_without_tfdv.py  # `make test` runs it

# Of TensorFlow and Keras, so that each version that a range in pyproject.toml begins or passes has a run.
VERSIONS ?= 2.16-3.14 2.18-3.15 2.20-3.14
ON_VERSIONS := $(patsubst %,tests/%.py,test_private_api test_private_graphs \
  multi_process/test_exact_across_workers) tests/exactness
test-versions: $(VERSIONS:%=.venv-versions/%/installed) ## Exactness, a cluster and private symbols on other versions.
	@set -e; for pair in $(VERSIONS); do echo "TensorFlow and Keras $$pair"; \
	  .venv-versions/$$pair/bin/python -m pytest --quick $(SIDE_BY_SIDE) $(ON_VERSIONS); done

lint: .venv/installed ## Style, format and types.
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/installed ## Format, and mend what ruff can mend.
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

benchmarks: .venv/installed ## Run every benchmark in full; results go to build/benchmarks.
	@mkdir -p $(RESULTS)
	@set -e; for name in $(BENCHMARKS); do \
	  echo ".venv/bin/python benchmarks/$$name.py --json $(RESULTS)/$$name.json"; \
	  .venv/bin/python benchmarks/$$name.py --json $(RESULTS)/$$name.json; \
	done

docs: .venv-docs/installed ## Build the documentation into build/site; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

COMPILE = .venv/bin/uv pip compile -q --universal --no-header --no-annotate --override overrides.txt \
  --extra dev --group cpu-build pyproject.toml
constraints: .venv/installed ## Bring the pinned versions up to date with pyproject.toml.
	$(COMPILE) --extra ray --python-version 3.11 -o constraints.txt
	$(COMPILE) --extra data-validation --python-version 3.11 -o constraints-oldest.txt

clean: ## Remove caches and results.
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find keras_het tests recipes benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Remove the environments too.
	rm -rf .venv .venv-oldest .venv-nightly .venv-gpu .venv-docs .venv-torch .venv-versions

# Shell text that sets $$python to the first candidate of version 3.$(1) to 3.$(2), or says what is
# wrong, with the reason $(3), and stops.
define find_python
python=; \
for candidate in $(CANDIDATES); do \
  if $$candidate -c 'import sys; sys.exit(not (3, $(1)) <= sys.version_info[:2] <= (3, $(2)))' \
    >/dev/null 2>&1; then python=$$candidate; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo "No usable Python to create the environment with."; \
  for candidate in $(CANDIDATES); do \
    echo "  received: $$candidate ($$($$candidate --version 2>&1 | head -n 1))"; \
  done; \
  echo "  expected: a command that starts Python 3.$(1)$(if $(filter-out $(1),$(2)), to 3.$(2)) ($(or $(3),TensorFlow and Keras have wheels for these))."; \
  echo "  to fix it: install Python 3.11 and its venv module, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; \
  exit 1; \
fi >&2
endef

# $(call install,FOLDER,CONSTRAINTS,OLDEST,NEWEST,EXTRAS): creates FOLDER, with a Python of version
# 3.OLDEST to 3.NEWEST, and installs the package with these extras.
define install
@$(call find_python,$(3),$(4)); \
set -e; \
if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
  echo "Creating $(1) with $$($$python --version)"; \
  $$python -m venv --clear $(1) || { \
    echo "$$python has no working venv module. Install it (Debian, Ubuntu: apt-get install python3.11-venv) and try again." >&2; \
    exit 1; }; \
fi; \
echo "Installing the packages of $(2) into $(1)"; \
$(1)/bin/python -m pip install --quiet --constraint $(2) uv; \
$(1)/bin/uv pip install --quiet --compile-bytecode --python $(1)/bin/python --override overrides.txt --constraint $(2) \
  --group cpu-build --editable '.[$(5)]'; \
touch $@
endef

# With Python 3.12 the environment lacks TensorFlow Data Validation, and each of its tests is skipped:
# that must not look like a success. One that stands is looked at, else the Python it is made with.
check-validation:
	@if [ -x .venv-oldest/bin/python ]; then \
	  .venv-oldest/bin/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 11))' || { \
	    echo "TensorFlow Data Validation needs an environment with Python 3.11."; \
	    echo "  received: .venv-oldest with $$(.venv-oldest/bin/python --version 2>&1)"; \
	    echo "  to fix it: rm -r .venv-oldest, and again with Python 3.11"; \
	    exit 1; } >&2; \
	else $(call find_python,11,11,TensorFlow Data Validation has no wheels for newer ones); fi

# A Python named by hand is checked even when the environment stands already.
check-python:
ifneq ($(PYTHON),)
	@$(call find_python,11,13)
endif

EXTRAS := dev,ray
.venv/installed: pyproject.toml overrides.txt $(CONSTRAINTS) | check-python
	$(call install,.venv,$(CONSTRAINTS),11,13,$(EXTRAS))

# Without constraints: `rm -r .venv-nightly` brings the builds of another night.
.venv-nightly/installed: pyproject.toml overrides-nightly.txt | check-python
	@$(call find_python,11,13); \
	set -e; \
	echo "Installing the nightly builds of Keras and TensorFlow into .venv-nightly"; \
	$$python -m venv --clear .venv-nightly; \
	.venv-nightly/bin/python -m pip install --quiet --constraint constraints.txt uv; \
	.venv-nightly/bin/uv pip install --quiet --compile-bytecode --python .venv-nightly/bin/python \
	  --prerelease allow --override overrides-nightly.txt --group nightly --editable '.[dev]'; \
	touch $@

.venv-versions/%/installed: pyproject.toml overrides.txt | check-python
	@$(call find_python,11,12); \
	set -e; \
	echo "Installing TensorFlow and Keras $* into $(@D)"; \
	$$python -m venv --clear $(@D); \
	printf '%s\n' tensorflow==$(firstword $(subst -, ,$*)).* tensorflow-cpu==$(firstword $(subst -, ,$*)).* \
	  keras==$(lastword $(subst -, ,$*)).* > $(@D)/constraints.txt; \
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt uv; \
	$(@D)/bin/uv pip install --quiet --compile-bytecode --python $(@D)/bin/python --override overrides.txt \
	  --constraint $(@D)/constraints.txt --group cpu-build --editable '.[dev]'; \
	touch $@

# TensorFlow with its CUDA libraries, where .venv has the build without them.
.venv-gpu/installed: pyproject.toml $(CONSTRAINTS) | check-python
	@$(call find_python,11,13); \
	set -e; \
	echo "Installing TensorFlow with CUDA into .venv-gpu"; \
	$$python -m venv --clear .venv-gpu; \
	.venv-gpu/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) uv; \
	.venv-gpu/bin/uv pip install --quiet --compile-bytecode --python .venv-gpu/bin/python \
	  --constraint $(CONSTRAINTS) --editable '.[cuda,dev]'; \
	touch $@

# PyTorch, a peer in benchmarks/overlap.py. On Linux on x86-64 it brings CUDA libraries unless pip is
# told of a place that has the build without them: `make .venv-torch/installed PIP_FIND_LINKS=...`.
.venv-torch/installed: | check-python
	@$(call find_python,11,13); \
	set -e; \
	echo "Installing PyTorch into .venv-torch"; \
	$$python -m venv --clear .venv-torch; \
	.venv-torch/bin/python -m pip install --quiet torch==2.13.0; \
	touch $@

# TensorFlow 2.16 has no wheels for Python 3.13, and TensorFlow Data
# Validation none for 3.12.
OLDEST_EXTRAS := dev,data-validation
.venv-oldest/installed: pyproject.toml overrides.txt constraints-oldest.txt | check-python
	$(call install,.venv-oldest,constraints-oldest.txt,11,12,$(OLDEST_EXTRAS))

# What reads the sources without importing them: no TensorFlow.
.venv-docs/installed: pyproject.toml | check-python
	@$(call find_python,11,13); \
	set -e; \
	echo "Installing what builds the documentation into .venv-docs"; \
	$$python -m venv --clear .venv-docs; \
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt uv; \
	.venv-docs/bin/uv pip install --quiet --compile-bytecode --python .venv-docs/bin/python --group docs; \
	touch $@
