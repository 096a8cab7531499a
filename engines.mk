# The optional engines: their packages, and their tests. Included by the Makefile.

.PHONY: test-engines test-megatron

test-engines: test-megatron ## install the optional engines and run their tests

test-megatron: $(VENV)/.megatron ## install Megatron and run the tests that need it
	@echo "==> pytest -m megatron"
	@$(BIN)/python -m pytest -m megatron \
	  || { echo "==> tests failed. Remedy: run one by its name; $(BIN)/nereus doctor says how Megatron runs here"; exit 1; }

# Only wheels of torch, numpy and packaging are required, which are there: it lives in the same environment.
$(VENV)/.megatron: $(VENV)/.dev
	$(call install,megatron-core,-c constraints-cpu.txt -e '.[megatron]')
	@touch $@
