# Two commands do all the set-up: `make demo` and `make test`.
# MLX picks its Linux back end through an extra; BACKEND=cuda takes the other one.
PYTHON ?= python3
BACKEND ?= cpu
VENV := .venv
BIN := $(VENV)/bin

ifeq ($(shell uname -s),Darwin)
EXTRAS := lm,emulator,cli
else
EXTRAS := $(BACKEND),lm,emulator,cli
endif

.PHONY: demo mac test test-all test-peers mutants mutants-python lint clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]" --group mlx
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

demo: $(VENV)/.demo
	$(BIN)/mlx-marlin demo

# Ten minutes that check, tune and time this machine: docs/first-mac.md. QUICK=1 takes
# small shapes. Without a GPU it runs in the emulator and measures nothing.
mac: $(VENV)/.dev
	$(BIN)/python -m benchmarks.mac $(if $(QUICK),--quick)

# A file's tests share models and compiled kernels, so one process runs them.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Larger samples of the grids of which `make test` runs some cases: docs/testing.md.
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest --hypothesis-profile full -n auto --dist loadfile --no-loadscope-reorder

# Packages that define formats of weights, in an environment of their own: they bring
# PyTorch. AutoGPTQ's last wheels are for Python 3.11; only its Python code is used.
PEERS := $(VENV)/peers
WHEEL := --only-binary=:all: --platform manylinux2014_x86_64 --python-version 3.11
$(VENV)/.peers: pyproject.toml $(VENV)/.dev
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet "pip>=25.1"
	$(PEERS)/bin/python -m pip install --quiet --group peer
	$(PEERS)/bin/python -m pip install --quiet --no-deps --group peer-modules
	$(PEERS)/bin/python -m pip install --quiet --no-deps --upgrade $(WHEEL) \
		--target $(PEERS)/lib/python3.*/site-packages --group peer-wheels
	touch $@

# MLX's own Metal kernels, out of its macOS wheel, on the emulator: docs/testing.md.
test-peers: $(VENV)/.dev $(VENV)/.peers
	$(BIN)/python -m pytest -m peer -n auto tests/peers

# Plants bugs in the shaders and prints which were noticed, and by what.
mutants: $(VENV)/.dev
	$(BIN)/python -m pytest -m mutant -n auto tests/mutants

# Changes a room's Python at SAMPLE places, one at a time, and prints what no test noticed:
# docs/testing.md. Rooms: tests/mutants/python/rooms.py.
SAMPLE ?= 150
SEED ?= 1
$(VENV)/.mutation: pyproject.toml $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --group mutation
	touch $@

mutants-python: $(VENV)/.mutation
	PYTHONPATH=.:tests $(BIN)/python -m mutants.python $(ROOM) --sample $(SAMPLE) --seed $(SEED)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.metal' 'shaders/*.cu*')
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
