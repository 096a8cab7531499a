# Nereus on a fresh machine: `make demo` and `make test`. Every target can be run again; what is done is not redone.
#
#   PYTHON=python3.12        the interpreter that makes .venv (3.11 or later)
#   TORCH_INDEX=URL          a package index that has torch's CPU wheels; without it pip's own indexes are asked
#   EXAMPLE=ppo              the demo's campaign: adaptive (default), grpo or ppo of examples/count

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
LOG := $(VENV)/install.log
EXAMPLE ?= adaptive
DEMO := runs/demo-$(EXAMPLE)
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-ui lint format types docs clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

venv: $(VENV)/.dev ## make .venv with the CPU set-up and the developers' tools

demo: $(VENV)/.run examples/count/model/recipe.json ## train a small model to count, under plans that follow it (2 minutes)
	@echo "==> nereus run examples/count/$(EXAMPLE).yaml (a new run in $(DEMO))"
	@rm -rf $(DEMO)
	@$(BIN)/nereus run examples/count/$(EXAMPLE).yaml name=$(notdir $(DEMO)) \
	  || { echo "==> the demo failed. Remedy: the message above; then $(BIN)/nereus doctor"; exit 1; }
	@echo "==> done: open $(DEMO)/report.html in a browser; its tables say why the job moved, and why not"

test: $(VENV)/.dev ## run the tests (5 minutes on 2 cores)
	@echo "==> pytest"
	@$(BIN)/python -m pytest -n 2 \
	  || { echo "==> tests failed. Remedy: $(BIN)/python -m pytest --last-failed -x; then $(BIN)/nereus doctor"; exit 1; }

test-slow: $(VENV)/.dev ## run the long tests too (real processes at length)
	@echo "==> pytest -m slow"
	@$(BIN)/python -m pytest -m slow || { echo "==> slow tests failed. Remedy: run one by its name"; exit 1; }

test-ui: $(VENV)/.ui ## drive the web pages in Chromium (Debian: chromium, chromium-driver)
	@echo "==> pytest -m ui"
	@$(BIN)/python -m pytest -m ui -rs || { echo "==> UI tests failed. Remedy: run one by its name with -s"; exit 1; }

lint: $(VENV)/.dev ## check style and form
	@echo "==> ruff"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . || { echo "==> Remedy: make format"; exit 1; }

format: $(VENV)/.dev ## repair style and form
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

types: $(VENV)/.dev ## check types
	@echo "==> mypy --strict"
	@$(BIN)/mypy || { echo "==> Remedy: annotate what mypy names above"; exit 1; }

docs: $(VENV)/.dev ## build the documentation as a site, in site/
	@echo "==> mkdocs build"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict || { echo "==> Remedy: repair the page that is named above"; exit 1; }

clean: ## remove .venv, runs, caches and the demo's model
	rm -rf $(VENV) site runs examples/count/model .pytest_cache .mypy_cache .ruff_cache .hypothesis

# ------------------------------------------------------------------------------------------- environment
# $(1): what to say; $(2): arguments of pip install.
define install
	@echo "==> installing $(1) (output in $(LOG))"
	@$(BIN)/python -m pip install --quiet $(2) >>$(LOG) 2>&1 || { tail -n 20 $(LOG) | cut -c1-300; \
	  echo "==> installing $(1) failed. Remedy: see $(LOG); is the package index reachable? Then run make again."; exit 1; }
endef

$(VENV)/.base:
	@command -v "$(PYTHON)" >/dev/null && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "==> no Python 3.11 or later. Remedy: install one and run make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@"$(PYTHON)" -m venv $(VENV) || { echo "==> Remedy: install the venv module (Debian: python3-venv)"; exit 1; }
	@touch $@

# The CPU build of torch comes first, so that no other package pulls a GPU build of several GB.
$(VENV)/.torch: $(VENV)/.base constraints-cpu.txt
	$(call install,torch for CPU,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints-cpu.txt torch)
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(call install,nereus,-c constraints-cpu.txt -e .)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(call install,the developers' tools,-c constraints-cpu.txt -e '.[dev]')
	@touch $@

$(VENV)/.ui: $(VENV)/.dev
	$(call install,selenium,-c constraints-cpu.txt -e '.[ui]')
	@touch $@

examples/count/model/recipe.json: $(VENV)/.run
	@test -e $@ || echo "==> making the demo's model (a short warm start, 12 CPU seconds)"
	@$(BIN)/python examples/count/make_model.py || { echo "==> Remedy: remove examples/count/model, run make again"; exit 1; }
	@touch $@

include engines.mk
