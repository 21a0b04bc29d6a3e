# Every target is one line. `make setup` is cheap when nothing changed.
PYTHON ?= python3
TORCH_INDEX ?= $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null && echo https://download.pytorch.org/whl/cpu)
SETUP = $(PYTHON) tools/setup_env.py --torch-index "$(TORCH_INDEX)" --extras
BIN = .venv/bin
# Two OpenMP threads that spin on two busy cores make torch 10-30 times slower.
CALM = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: setup serve test check check-slow fmt lint types floors docs resolve bench
setup: ; @$(SETUP) "$(EXTRAS)"
serve: setup ; @$(BIN)/tetrarch serve $(ARGS)
test: EXTRAS = test
test: setup ; $(CALM) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(ARGS)
fmt: EXTRAS = test,check
fmt: setup ; $(BIN)/ruff format . && $(BIN)/ruff check --fix .
lint: EXTRAS = test,check
lint: setup ; $(BIN)/ruff format --check . && $(BIN)/ruff check .
types: EXTRAS = test,check
types: setup ; $(BIN)/pyright
floors: EXTRAS = test,check
floors: setup ; $(BIN)/lint-imports
docs: setup ; $(BIN)/python tools/gen_reference.py $(ARGS)
resolve: setup ; PIP_CONFIG_FILE=/dev/null $(BIN)/python -m pip --isolated install --dry-run --quiet --ignore-installed -c constraints.txt ".[test,check,clients,memory-saver]"
check: EXTRAS = test,check
check: lint types floors ; @$(MAKE) --no-print-directory docs ARGS=--check && $(MAKE) --no-print-directory test
check-slow: EXTRAS = test,check,clients
check-slow: setup resolve ; $(CALM) TEST_REQUIRE=clients $(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)
bench: setup ; $(BIN)/python benchmarks/$(Q).py $(ARGS)
