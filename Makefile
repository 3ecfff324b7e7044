# `make demo` and `make test` each do all of their own set-up, in .venv and nowhere else, and skip it the next time.
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# The slowest first.
KERAS := keras-jax keras-torch keras-tensorflow
CHOICE := -m 'not thorough'
PYTEST = $(BIN)/pytest -n 2 --dist worksteal $(CHOICE)
# Of opened slots those of models: their many cases take as long as all others.
QUICK := $(filter-out tests/ops/test_opened%,$(wildcard tests/ops/test_*.py)) tests/models/test_opened_models.py \
	$(addprefix tests/,test_architecture.py test_import.py test_options.py test_watch.py projections \
	$(addprefix nn/test_,laws.py memory.py causal.py multihead.py multihead_arguments.py long.py) \
	$(addprefix models/test_,stack_identity.py stack_padding.py stack_causal.py streaming.py) \
	hf/test_hf_core.py saved)
FUZZ := 3000
# One or more for each dependency; pipelines need packages that are in no extra, and exports a newer torch.
OLDEST := tests/test_private.py $(addprefix tests/,ops/test_linformer.py ops/test_blocks.py projections/test_projections.py nn/test_multihead.py nn/test_torch_transformer.py \
	models/test_texts.py models/test_generation.py linearize/test_encoders.py saved training/test_resume.py training/test_card.py data/test_data_tables.py \
	experiments/test_pages.py cli/test_prepare_command.py cli/test_training_commands.py) $(filter-out %pipelines.py %export.py,$(wildcard tests/hf/test_*.py))
# They need TensorFlow, which is in no extra.
OTHER_BACKEND := test_keras_documents.py::test_the_known_example_runs_as_written test_keras_saving.py::test_another_backend_loads_the_files
.PHONY: demo test thorough fuzz packages oldest quick lint types tests site $(KERAS) clean

# A causal model at a length where Linformer pays, with the same time for each kind of attention.
# The same command again goes on where it was stopped, or only shows the table.
demo: $(VENV)/.cli,train
	$(BIN)/linformers compare --task clm --contenders full linformer method=learnable,k=256 --seeds 1 --seconds 55 --eval-batches 4 --n 8192 \
		--k 512 --block-size 128 --vocab-size 1024 --width 128 --depth 2 --heads 4 --batch-size 1 --learning-rate 0.004 --dropout 0 --out runs/demo
	$(BIN)/linformers report runs/demo --out runs/demo/report.html

# What must pass before a change lands: at most 10 minutes on 2 quiet cores.
test: lint
	$(MAKE) -j 2 $(KERAS) types
	$(MAKE) tests

# All of that and what takes longer: runs that are killed again and again, every size, whole products of options. Before a release.
thorough: lint
	$(MAKE) -j 2 $(KERAS) types CHOICE=
	$(MAKE) tests CHOICE=
	$(MAKE) site
	$(MAKE) oldest

# Thousands of random layers, models and calls, each time others: right, or refused with an error of this package. glibc
# fills fresh memory with large numbers, so that nothing that is read before it is written looks like zeros.
fuzz: $(VENV)/.dev
	MALLOC_PERTURB_=1 LINFORMERS_FUZZ=$(FUZZ) $(PYTEST) tests/test_fuzz.py

# Wheel and sdist in clean environments, with and without each extra; needs an index for the build backend. Before a release.
packages: $(VENV)/.dev
	$(BIN)/python tests/packages.py

# The lowest bounds of pyproject.toml, in an environment of their own. Warnings are no errors there: old packages are not written for new ones.
oldest: $(VENV)-oldest/.made
	$(VENV)-oldest/bin/python tests/oldest.py check
	timeout 30m $(VENV)-oldest/bin/pytest -n 2 --dist worksteal $(CHOICE) -o filterwarnings= $(OLDEST)
	KERAS_BACKEND=torch timeout 15m $(VENV)-oldest/bin/pytest $(CHOICE) -o filterwarnings= $(addprefix --deselect tests/keras/,$(OTHER_BACKEND)) tests/keras

# What a change most likely breaks, in less than 90 seconds.
quick: lint
	$(PYTEST) $(QUICK)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev
	$(PYTEST) --ignore tests/keras

# The documentation, into site/; a broken link, an unknown name or a page that is in no menu is an error.
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# A process has one backend, from its first import on.
$(KERAS): keras-%: $(VENV)/.dev
	KERAS_BACKEND=$* $(BIN)/pytest $(CHOICE) tests/keras

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "linformers needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cli,train $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@

$(VENV)-oldest/.made: pyproject.toml tests/oldest.py
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(PYTHON) tests/oldest.py bounds > $(@D)/oldest.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint $(@D)/oldest.txt --editable '.[cli,keras,hf,train]' \
		hypothesis pytest pytest-xdist linformer==0.2.3 linformer-pytorch==0.19.3
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
