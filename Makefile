# make demo   plan, prove and train a small GPT-2 on four processes (about five minutes, no GPU)
# make test   the tests, but for slow ones and further cases of many (half an hour; ARGS=--whole
#             runs all of them: an hour)
# make nightly  all tests; the property tests with other examples in every run, and more of them; random
#             modules and mutated inputs of a seed that is the day's (SEED=... repeats one; hours)
# make lint   ruff, mypy, import contracts
# make parsers  what reads the files that `parloom export` writes for other frameworks, for their tests
# make docs   the documentation as a site in build/site, in an environment of its own (half a minute)
# make screenshots  pictures of reports in docs/assets, by Debian's Chromium: look at each
# make web    the program of the page that `parloom report` writes (needs npm)
#
# Each does all set-up in .venv. PYTHON=... picks the interpreter (3.11 or newer), and pip's own
# settings (PIP_INDEX_URL, pip.conf) say where packages come from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := build/docs
# Extra arguments: make test ARGS="-k zoo"
ARGS ?=
SEED ?= $(shell date +%Y%m%d)

# One thread per process: the tests and the demo start several processes on few cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: demo test nightly lint format parsers docs screenshots web clean

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

# Tests start many processes, some where nothing may be written: compiled once, not in each. One worker
# runs all tests of a file, which share fixtures and caches (by marks, as `loadgroup` does, pytest-xdist
# 3.8 groups nothing under pytest 9.2). A worker that dies names its test; with another one in its place,
# pytest-xdist waits for ever at the end.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(STAMP)
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest $(WORKERS) --durations 60 --durations-min 5 $(ARGS)

nightly: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) --whole $(ARGS)
	$(BIN)/python -m pytest $(WORKERS) --hypothesis-profile nightly --whole tests/property $(ARGS)
	PYTHONPATH=. $(BIN)/python benchmarks/random_modules.py --count 500 --seed $(SEED) --jobs 2
	PYTHONPATH=. $(BIN)/python benchmarks/fuzz.py --kind all --count 2000 --seed $(SEED) --jobs 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without dependencies, in a folder of its own: no other torch comes along, and tests that do not ask
# for it do not see it.
parsers: $(STAMP) $(VENV)/parsers/.installed

$(VENV)/parsers/.installed: tests/parsers.txt
	@rm -rf $(VENV)/parsers
	@$(BIN)/python -m pip install --quiet --no-input -c constraints.txt --no-deps --target $(VENV)/parsers -r tests/parsers.txt
	@touch $@

# Its packages are apart, without dependencies: every version is in docs/requirements.txt.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@! grep -rlE '(src|href)="https?://[^"]*\.(js|css|woff2?)' build/site || { echo "build/site loads these from a network" >&2; exit 1; }
	@echo "build/site/index.html: open it in a browser; it needs no network"

$(DOCS)/.installed: docs/requirements.txt
	@rm -rf $(DOCS)
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --no-input -c constraints.txt --no-deps -r docs/requirements.txt
	@touch $@

screenshots: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m tests.web.screenshots

web:
	cd web && npm ci --no-audit --no-fund && npm run --silent check && npm run --silent build

# The stamp is written last, so an interrupted install is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "parloom needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (two to three minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --no-input -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --no-input -c constraints.txt -e '.[hf,dev]'
	@touch $@

clean:
	rm -rf build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
