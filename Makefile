# Every target makes the environment it needs; nothing else has to be installed.
PYTHON ?= python3
# Relative on purpose: the clone's path may hold a space.
PY := .venv/bin/python
# Python compiles what it imports; pip would take a minute to compile all of it.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(PY) $(INSTALL) -c constraints.txt
INPUTS := pyproject.toml constraints.txt Makefile

# MXNet and NVIDIA's Model Optimizer cannot share an environment with the rest.
MXNET := .venv-mxnet/bin/python
QAT := .venv-qat/bin/python
# MXNet 1.9.1 needs NumPy below 1.24, which has no build for Python 3.12.
FIND_311 = for p in "$(PYTHON)" python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo "$$p" && break; done
NO_311 = MXNet 1.9.1 and gradscale have only Python 3.11 in common, and there is no python3.11 here. \
	Call make PYTHON=/path/to/python3.11.

.PHONY: demo test test-mxnet lint bench parity format docs zoo example-qat
.DELETE_ON_ERROR:

demo: .venv/.demo
	$(PY) -m gradscale demo

test: lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	@if [ -n "$$($(FIND_311))" ]; then $(MAKE) --no-print-directory test-mxnet; \
	else echo "The tests of gradscale.mxnet were not run: $(NO_311)"; fi

test-mxnet: .venv-mxnet/.dev
	OMP_NUM_THREADS=1 $(MXNET) -m pytest tests/mxnet

lint: .venv/.dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: .venv/.dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: .venv/.dev
	$(PY) -m benchmarks.bench_step --set gpt2-124M --set adapters-4000x1024 --out benchmarks/results/step_cpu.json
	$(PY) -m benchmarks.bench_train --size tiny --out benchmarks/results/train_cpu.json
	$(PY) -m benchmarks.bench_host --out benchmarks/results/host_cpu.json
	$(PY) -m benchmarks.bench_walk --out benchmarks/results/walk.json
	$(PY) -m benchmarks.bench_defects --out benchmarks/results/defects.json
	$(PY) -m benchmarks.bench_jax --set gpt2-124M --out benchmarks/results/jax_update_cpu.json
	$(PY) -m benchmarks.bench_jax_defects --out benchmarks/results/jax_defects.json
	$(PY) -m benchmarks.bench_keras --out benchmarks/results/keras_cpu.json

zoo: .venv/.dev
	$(PY) -m tests.zoo

example-qat: .venv-qat/.made
	OMP_NUM_THREADS=1 $(QAT) examples/qat_tensorrt.py

docs: .venv/.dev
	$(PY) -m docs.render

parity: .venv/.dev
	$(PY) -m parity "$(PT_TEST)"

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradscale needs Python 3.11 or newer. Call make PYTHON=python3.11, for instance.")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.demo: .venv/.made $(INPUTS)
	@echo "Installing what the demo needs (PyTorch is large: a minute or two)."
	$(PIP) -e '.[torch,report]'
	@touch $@

.venv/.dev: .venv/.demo
	@echo "Installing what the tests need."
	$(PIP) -e '.[torch,jax,report,dev]'
	@# It requires the name tensorflow; tensorflow-cpu is the same without CUDA.
	$(PIP) --no-deps tf_keras
	@touch $@

.venv-qat/.made: pyproject.toml constraints-qat.txt Makefile
	@echo "Installing PyTorch, NVIDIA's Model Optimizer and ONNX Runtime into .venv-qat (1.4 GB)."
	$(PYTHON) -m venv .venv-qat
	@# The Model Optimizer needs the last two and does not declare them.
	$(QAT) $(INSTALL) -c constraints-qat.txt \
		-e '.[torch]' nvidia-modelopt onnx onnxruntime onnxscript requests huggingface_hub
	@touch $@

.venv-mxnet/.dev: pyproject.toml constraints-mxnet.txt Makefile
	@[ -n "$$($(FIND_311))" ] || { echo "$(NO_311)" >&2; exit 1; }
	@echo "Installing MXNet and what its tests need into .venv-mxnet."
	"$$($(FIND_311))" -m venv .venv-mxnet
	$(MXNET) $(INSTALL) -c constraints-mxnet.txt \
		-e '.[mxnet]' pytest hypothesis
	@touch $@
