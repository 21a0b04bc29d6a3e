# Every target is one line, under a ## line that `make help` shows.
PYTHON ?= python3
TORCH_INDEX ?= $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null && echo https://download.pytorch.org/whl/cpu)
# Triton on a CPU interprets the kernels' tests; a CUDA build of torch brings the Triton it wants.
COMMA := ,
TEST = test$(if $(TORCH_INDEX),$(COMMA)test-kernels)
SETUP = $(PYTHON) tools/setup_env.py --torch-index "$(TORCH_INDEX)" --extras
BIN = .venv/bin
# Two OpenMP threads that spin on two busy cores make torch 10-30 times slower.
CALM = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: help setup serve test test-gpu test-compat check check-slow fmt lint types floors docs resolve bench
## help         show this list
help: ; @sed -n 's/^## /  make /p' $(firstword $(MAKEFILE_LIST))
## setup        create .venv and install tetrarch; cheap when nothing changed
setup: ; @$(SETUP) "$(EXTRAS)"
## serve        serve the demo model on 127.0.0.1:30000; ARGS="MODEL --port 8000" for others
serve: setup ; @$(BIN)/tetrarch serve $(ARGS)
## test         run the tests; ARGS=tests/engine for some of them
test: EXTRAS = $(TEST)
test: setup ; $(CALM) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(ARGS)
## test-gpu     run the tests that need a GPU, with PYTHON as it is: nothing is installed
test-gpu: ; PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ARGS)
## test-compat  run the models' tests with the oldest transformers that we support
test-compat: EXTRAS = test
test-compat: setup ; @$(BIN)/python tools/setup_compat.py && PYTHONPATH=src $(CALM) .venv-compat/bin/python -m pytest -n 2 -m "not slow and not gpu" $(or $(ARGS),tests/models)
## fmt          format, and fix what ruff can fix
fmt: EXTRAS = test,check
fmt: setup ; $(BIN)/ruff format . && $(BIN)/ruff check --fix .
## lint         check format and style
lint: EXTRAS = test,check
lint: setup ; $(BIN)/ruff format --check . && $(BIN)/ruff check .
## types        check types with pyright
types: EXTRAS = test,check
types: setup ; $(BIN)/pyright
## floors       check that imports point down
floors: EXTRAS = test,check
floors: setup ; $(BIN)/lint-imports
## docs         regenerate docs/reference; ARGS=--check only compares
docs: setup ; $(BIN)/python tools/gen_reference.py $(ARGS)
## resolve      resolve constraints.txt in a dry run, as on a machine without local wheels
resolve: setup ; PIP_CONFIG_FILE=/dev/null $(BIN)/python -m pip --isolated install --dry-run --quiet --ignore-installed -c constraints.txt ".[test,check,clients,memory-saver]"
## check        lint, types, floors, docs and test: what must pass before a commit
check: EXTRAS = $(TEST),check
check: lint types floors ; @$(MAKE) --no-print-directory docs ARGS=--check && $(MAKE) --no-print-directory test
## check-slow   resolve, and the tests that take minutes or need clients
check-slow: EXTRAS = $(TEST),check,clients
check-slow: setup resolve ; $(CALM) TEST_REQUIRE=clients $(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)
## bench        run benchmarks/Q.py: make bench Q=decode_cpu
bench: setup ; $(BIN)/python benchmarks/$(Q).py $(ARGS)
