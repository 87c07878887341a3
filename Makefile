# The two commands of the README are `make train` and `make test`; both set up .venv first, which is quick once it is there.
#
#   make train ARGS="experiment=chargpt"       another experiment, or any other override of conf/
#   make train TORCH=torch                     the newest PyTorch of the index, on Linux a CUDA build, not constraints.txt's
#   make train PIP_ARGS="--extra-index-url URL"    with the URL of the CPU builds that pytorch.org names: far smaller
#   make docs                                  the documentation, into site/
#   make test ARGS="-k carries"                a part of the tests
#   make test-core                             the tests that notice most faults, in a minute
#   make test-gpu TORCH=torch                  the tests that need a GPU
#   make matrix ARGS="--only torch2.8.0"       a part of the tests in other versions of Python, torch and Lightning
#   make setup PYTHON=python3.12               another Python (3.10 or newer)

VENV := .venv
BIN := $(VENV)/bin
# The Python that makes .venv: the first that is new enough and can make one.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && { echo "$$python"; break; }; done)
TORCH ?= $(shell grep '^torch==' constraints.txt)
PIP_ARGS ?=
SOURCES ?=
ARGS ?=
# Two processes; one that has nothing left takes tests over from the other.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal
# A file or two of each room.
CORE := $(addprefix tests/,step/test_equality.py step/test_step_forms.py step/test_bad_input.py plan \
	sources/test_parameter_groups.py effects/test_carries.py effects/test_host_effects.py \
	trace/test_data_reads.py trace/test_refused_host.py program/test_programs.py verify/test_compare.py \
	optimizers/test_optimizers.py inference/test_graphed.py lightning/test_digits_equality.py)
# What other releases of Python, torch and Lightning may break.
VERSIONS := $(addprefix tests/,step/test_step_forms.py effects/test_carries.py trace/test_data_reads.py \
	trace/test_refused_host.py program/test_programs.py verify/test_compare.py optimizers/test_optimizers.py \
	inference/test_graphed.py lightning/test_digits_equality.py lightning/test_callback.py \
	lightning/test_pytorch_lightning.py)

.PHONY: train test test-core test-gpu soak matrix lightning-suite setup lint format docs clean FORCE

train: setup  ## Train the digits model through Lightning with the callback.
	$(BIN)/python train.py $(ARGS)

test: setup  ## Run every test. One thread each: two processes share two cores, and the results are the same.
	$(PYTEST) --bar 480 $(ARGS)

test-core: setup  ## A file or two of each room: what notices most faults.
	$(PYTEST) --bar 60 $(CORE) $(ARGS)

test-gpu: setup  ## What needs a CUDA device or runs on both, in one process.
	$(BIN)/python -m pytest -q --device cuda $(ARGS)

soak: setup  ## What make test leaves out; and a thousand random runs, other ones each time, and a long one.
	$(PYTEST) --soak $(ARGS)
	RANDOM_RUNS=250 $(PYTEST) tests/properties/test_properties.py tests/properties/test_soak.py $(ARGS)

matrix: setup  ## A part of the tests in other versions, each in an environment of its own; see recipes/results/matrix.md.
	$(BIN)/python -m recipes.benchmarks.versions --tests $(VERSIONS) $(ARGS)

lightning-suite: setup  ## Lightning's own tests of loops and callbacks, with the callback in every fit.
	@test -n "$(SOURCES)" || { echo "name a checkout of Lightning's repository with SOURCES=..." >&2; exit 1; }
	$(BIN)/python -m recipes.benchmarks.lightning_suite "$(SOURCES)" $(ARGS)

lint: setup  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## Put every file in the one style.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-docs  ## Build the documentation into site/; a broken link is an error.
	$(BIN)/python -m mkdocs build --strict

setup: $(VENV)/.installed

# Remade when what is to be installed changes, also when that is only TORCH on the command line.
$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer with venv and ensurepip: name one with PYTHON=..., or install it (Debian: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint $(VENV)/constraints.txt "$(TORCH)" --editable ".[lightning,hydra,plot,dev]"
	@# Without a compiler the same is done in Python, and the tests of it say so.
	-$(BIN)/python -m graphplan.compare
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint $(VENV)/constraints.txt --editable ".[docs]"
	@touch $@

$(VENV)/.torch: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

clean:  ## Remove the environment and what runs wrote.
	rm -rf $(VENV) site outputs multirun lightning_logs *.egg-info .mypy_cache .pytest_cache .ruff_cache
