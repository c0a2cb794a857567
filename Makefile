# make demo   set up, make a tiny random checkpoint, generate from it under three wirings and at two TP degrees
# make test   set up, lint, type-check, run the tests
# Both need Python 3.11 or newer and pip; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO := build/demo
PROMPT := "Never wait for the network"

.PHONY: demo test browser setup clean

setup: $(READY)

# torch first and pinned, so that nothing else chooses which build of it comes
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ladder needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	rm -rf $(DEMO)
	$(BIN)/python examples/tiny_checkpoint.py $(DEMO)
	$(BIN)/ladder generate --model $(DEMO) --prompt $(PROMPT) --max-new-tokens 24 --json --wiring standard
	$(BIN)/ladder generate --model $(DEMO) --prompt $(PROMPT) --max-new-tokens 24 --json --wiring ladder
	$(BIN)/ladder generate --model $(DEMO) --prompt $(PROMPT) --max-new-tokens 24 --json --wiring ladder --tp 4
	$(BIN)/ladder generate --model $(DEMO) --prompt $(PROMPT) --max-new-tokens 24 --json --wiring "standard:2 ladder:2"
	@echo "Random weights write nonsense. Note that ladder gives the same tokens on one rank and on four."

# the report's page is clicked through in Chromium, which comes from the system; without it those tests are skipped
browser:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || test "$$(id -u)" != 0 \
	  || (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium) >/dev/null 2>&1 || true
	@command -v chromium >/dev/null || echo "no Chromium here: the report's page is not tested in a browser"

test: $(READY) browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python -m compileall -q ladder  # once, for the hundreds of processes that the tests start
	$(BIN)/pytest -n 2

clean:
	rm -rf $(VENV) build
