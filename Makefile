# Every command of the project. `.ci/run` calls `make check`.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Other people's clients bring more packages than the product has; they get an environment of their own.
TOOLS := $(CURDIR)/.tools

# Two OpenMP threads on a core that something else uses collapse; tests that want two ask for them.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup serve model fmt lint types arch test test-ray test-gpu test-slow test-tools bench diagrams demo check clean

$(STAMP): pyproject.toml constraints.txt $(wildcard serving/kernels/src/*)
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt 'torch==2.13.0' --editable '.[bench,dev,tracing]'
	-$(VENV)/bin/pip install --quiet --constraint constraints.txt --no-deps nixl nixl-cu12 # optional; its tests skip
	touch $(STAMP)

setup: $(STAMP)

model: setup
	$(PY) scripts/fetch_model.py

serve: model
	$(VENV)/bin/pdserve serve $(ARGS)

fmt: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: setup
	$(VENV)/bin/mypy

arch: setup
	$(VENV)/bin/lint-imports
	$(PY) scripts/size.py

test: model
	$(PY) -m pytest

test-ray: model
	$(PY) -m pytest -m 'ray and not slow'

test-gpu: setup
	$(PY) -m pytest -m gpu

test-slow: model
	$(PY) -m pytest -m slow

$(TOOLS)/.installed: Makefile
	python3 -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet 'torch==2.13.0' 'lm-eval[api,hf]==0.4.13' 'guidellm==0.8.1'
	touch $@

test-tools: model $(TOOLS)/.installed
	PATH=$(TOOLS)/bin:$$PATH $(PY) -m pytest -m slow -s tests/integration/api/test_lm_eval.py tests/ray/test_load_tool.py

bench: model
	$(VENV)/bin/pdserve bench serve --requests 64 --concurrency 8

diagrams: setup
	$(PY) scripts/diagrams.py

demo: model
	$(PY) scripts/demo_local.py

check: lint types arch test test-ray

clean:
	rm -rf $(VENV)
