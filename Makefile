# `make demo` and `make test` each do all of their own set-up, in .venv and nowhere else, and skip it the next time.
.PHONY: demo test quick lint types tests tests-keras clean
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

# The same command again goes on where it was stopped, or only shows the table.
demo: $(VENV)/.cli,train
	$(BIN)/linformers compare --task clm --contenders linformer full --seeds 1 --n 512 --vocab-size 1024 \
		--width 128 --depth 2 --heads 4 --batch-size 8 --learning-rate 0.002 --max-steps 400 --out runs/demo
	$(BIN)/linformers report runs/demo --out runs/demo/report.html

test: lint types tests tests-keras

# What a change most likely breaks.
quick: lint $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal tests/test_architecture.py tests/test_import.py tests/test_functional.py tests/test_blocks.py \
		tests/test_attention.py tests/test_causal.py tests/test_shorten.py tests/test_streaming.py tests/hf/test_hf_core.py tests/saved

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal --ignore tests/keras

# A process has one backend, from its first import on.
tests-keras: $(VENV)/.dev
	for backend in torch jax tensorflow; do \
		KERAS_BACKEND=$$backend $(BIN)/pytest -n 2 --dist worksteal tests/keras || exit 1; done

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "linformers needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cli,train $(VENV)/.dev: $(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
