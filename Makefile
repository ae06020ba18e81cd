# Shortcuts; the README has the plain commands behind them.
# Another Python: make PYTHON=/path/to/python3.12 train

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The minor release of torch that torchrl's compiled extension fits.
TORCH := $(shell sed -n 's/^torch==\([0-9]*\.[0-9]*\).*/\1/p' constraints.txt)

.PHONY: install train test lint clean

install: $(STAMP)

train: $(STAMP)
	$(BIN)/rltool train algo=ppo env=inverted_double_pendulum

test: $(STAMP)
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch that fits is used as it is, whether it lies in the environment already or in the Python it is made from.
# pip's own settings (index, proxy, cache) are the user's.
HAS_TORCH = -c 'import sys; from importlib.metadata import version; sys.exit(not version("torch").startswith("$(TORCH)."))' 2>/dev/null

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "rltool needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) $(HAS_TORCH) && echo --system-site-packages) $(VENV)
	if $(BIN)/python $(HAS_TORCH); then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -e '.[dev]'
	touch $(STAMP)
