# Two commands do everything: `make serve` runs the main job on a real model, `make test` passes the tests.
# Both create .venv first; once their packages are there, both work offline.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TOOLS  := build/tools
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PROJECT := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]
BUILD_ENV := PYTHONPATH="$(CURDIR)/$(TOOLS)" PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH"
MODEL  ?= smollm2-135m
STEPS  ?= 1000000
SEED   ?= 0
JOBS   ?= $(shell nproc 2>/dev/null || echo 1)
WORKERS ?= 2
NATIVE := $(wildcard native/*.cc native/*.h native/*.txt native/isa/*.*)

.PHONY: help install demo serve test exactness simulate sanitize lint format bench clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# Build tools stay out of the environment that runs: they are several times its size.
$(TOOLS)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade --target $(TOOLS) 'scikit-build-core>=1.0' 'nanobind>=2.4' 'cmake>=3.26' ninja
	touch $@

# The compiled part is rebuilt when its sources change; Python sources are used in place. Requirements are
# installed on their own: pip would take one that is among the build tools for installed.
$(VENV)/.installed: $(TOOLS)/.ready pyproject.toml $(NATIVE)
	$(BIN)/python -c '$(PROJECT); print(*project["dependencies"], sep="\n")' | $(PIP) install -q -r /dev/stdin
	$(BUILD_ENV) $(PIP) install -q --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -c '$(PROJECT); print(*project["optional-dependencies"]["dev"], sep="\n")' \
	  | $(PIP) install -q -r /dev/stdin
	touch $@

install: $(VENV)/.installed   ## set up .venv with loadproof in it

demo: install    ## fetch the default model and print a chat answer from it
	$(BIN)/loadproof generate $(MODEL) --chat --max-tokens 96 "Why does the sky look blue?"

serve: install   ## serve the default model on 127.0.0.1:8000, with a page at /: SERVE_ARGS="--port 9000"
	$(BIN)/loadproof serve $(MODEL) $(SERVE_ARGS)

# The real model takes all cores, so its tests run one after another; the others run side by side.
test: $(VENV)/.dev   ## set up and run the whole test suite
	$(BIN)/loadproof pull $(MODEL)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not real_model" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m real_model $(PYTEST_ARGS)

exactness: $(VENV)/.dev   ## the whole exactness matrix at every instruction-set level (long: the portable one is slow)
	LOADPROOF_EXACTNESS=full $(BIN)/python -m pytest tests/exactness $(PYTEST_ARGS)

simulate: $(VENV)/.installed   ## simulated steps of the scheduler: STEPS=20000000 SEED=7 JOBS=2; STEPS=1 replays a seed
	$(BIN)/python -m tests.simulation.run --steps $(STEPS) --seed $(SEED) --jobs $(JOBS)

sanitize: $(VENV)/.dev   ## the native part's unit tests under address and undefined-behaviour sanitizers
	$(BUILD_ENV) PYTHON="$(CURDIR)/$(BIN)/python" sh tests/sanitize.sh

lint: $(VENV)/.dev   ## ruff, mypy --strict, clang-format, the generated pages of the fixes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fixes/*.py
	for fix in fixes/*/apply.py; do $(BIN)/mypy $$fix || exit 1; done
	$(BIN)/python fixes/fixpages.py --check
	$(BIN)/mypy src tests bench/sampling.py bench/scheduling.py bench/half_pool.py bench/few_shot.py bench/serving.py
	MYPYPATH=src:bench:bench/peers $(BIN)/mypy bench/side_by_side.py bench/serving_side_by_side.py bench/scoring.py bench/few_shot_http.py bench/peers/protocol.py bench/peers/llamacpp_driver.py bench/peers/loadproof_driver.py
	$(BIN)/clang-format --dry-run --Werror native/*.cc native/*.h native/isa/*

format: $(VENV)/.dev ## rewrite sources in the enforced style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i native/*.cc native/*.h native/isa/*

bench: install   ## latency and throughput of the default model
	$(BIN)/loadproof bench $(MODEL)

clean:           ## remove everything that was set up or built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
