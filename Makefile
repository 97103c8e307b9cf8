# Every target makes the environment it needs; nothing else has to be installed.
PYTHON ?= python3
# Relative on purpose: the clone's path may hold a space.
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt Makefile

.PHONY: demo test lint bench parity format docs zoo
.DELETE_ON_ERROR:

demo: .venv/.demo
	$(PY) -m gradscale demo

test: lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

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
