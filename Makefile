# `make help` lists the targets. They need Python 3.10-3.13, make and pip; what they install goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
SHELL := bash
unexport PYTHONDONTWRITEBYTECODE # containers often set it: each process would compile PyTorch anew, 3.5 s instead of 1.5 s
.DEFAULT_GOAL := help
.PHONY: help demo demo-all test test-all test-oldest lint clean

EVERYTHING := '.[test,logging,notebooks]'
ifeq ($(origin PY),command line) # an environment that the user has prepared: install nothing
READY :=
TORCHRUN := $(PY) -m torch.distributed.run
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TORCHRUN := $(VENV)/bin/torchrun
endif

# Every step that exists, and what its default command adds. A step with `ranks` runs under torchrun.
STEPS := $(patsubst %/train.py,%,$(sort $(wildcard step*/train.py)))
STEP_TARGETS := $(foreach step,$(STEPS),$(firstword $(subst _, ,$(step))))
.PHONY: $(STEP_TARGETS)
ranks_step02 := 2
ranks_step03 := 2
flags_step03 := --zero 3
ranks_step04 := 2
flags_step04 := --tp 2
ranks_step05 := 2
flags_step05 := --pp 2
ranks_step06 := 2
flags_step06 := --cp 2
ranks_step07 := 2
flags_step07 := --experts 8 --ep 2
ranks_step08 := 8
flags_step08 := --pp 2 --cp 2 --tp 2 --dtype bfloat16

help:
	@echo 'make demo      train one run of each step on the default corpus, draw all curves, print the differences'
	@echo 'make demo-all  the same with more layouts of each step'
	@echo 'make test      ruff, then pytest'
	@echo 'make test-all  the same with every combination of flags in the parity tests'
	@echo 'make test-oldest  make test with the oldest versions that pyproject.toml allows, in .venv-oldest'
	@echo 'make lint      ruff only'
	@echo 'make stepNN    run the default command of one step and print it first ($(STEP_TARGETS))'
	@echo '               add flags with FLAGS="--steps 20"'
	@echo 'make clean     remove $(VENV), .venv-oldest and caches; runs/ stays'
	@echo
	@echo 'The first of them installs the project and its dependencies into $(VENV).'
	@echo 'PYTHON=python3.12  makes $(VENV) with another Python (3.10-3.13)'
	@echo 'PY=python          uses an environment of your own and installs nothing; it needs what'
	@echo '                   pip install -c constraints.txt -e ".[test]" installs, in any version that pyproject.toml allows;'
	@echo '                   test-all needs ".[test,logging,notebooks]"'

# One file of tests more than there are cores, in the order of tests/conftest.py: some wait, and leave a core to others;
# each worker takes seconds to begin. At most ten, as each may start eight ranks
SIDE_BY_SIDE = -q -n $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); \
  echo $$((cores < 9 ? cores + 1 : 10))) --dist loadfile --no-loadscope-reorder

demo: $(READY)
	$(PY) -m common.experiments.demo

demo-all: $(READY)
	$(PY) -m common.experiments.demo --all

test: lint
	$(PY) -m pytest $(SIDE_BY_SIDE)

test-all: lint
	$(if $(READY),$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e $(EVERYTHING))
	TEST_ALL=1 $(PY) -m pytest $(SIDE_BY_SIDE)

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

step_folder = $(filter $@_%,$(STEPS))
launcher = $(if $(ranks_$@),OMP_NUM_THREADS=1 $(TORCHRUN) --nproc_per_node $(ranks_$@),$(PY))
$(STEP_TARGETS): $(READY)
	$(launcher) $(step_folder)/train.py --run-dir runs/$@ $(flags_$@) $(FLAGS)

# The stamp is the last thing made, so an installation that failed or was interrupted is taken up again. A folder whose pip
# answers for the wanted Python is kept. pip is silent for minutes with --quiet and prints hundreds of lines without: awk
# keeps the large downloads; errors come on stderr, unfiltered. --no-compile halves the time: Python compiles what it uses.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); \
	case "$$version" in 3.10|3.11|3.12|3.13) ;; *) \
	  echo "error: $(PYTHON) is $${version:-not there}; Python 3.10 to 3.13 is needed, for example: make PYTHON=python3.12" >&2; \
	  exit 1;; esac; \
	case "$$($(VENV)/bin/python -m pip --version 2>/dev/null)" in *"(python $$version)") ;; *) \
	  echo "Making $(VENV) with Python $$version"; \
	  $(PYTHON) -m venv --clear $(VENV) || exit 1;; esac; \
	echo 'Installing PyTorch and the other dependencies (a few minutes the first time)'; \
	set -o pipefail; \
	$(VENV)/bin/python -u -m pip install --disable-pip-version-check --progress-bar off --no-compile \
	    -c $(CONSTRAINTS) -e '.[test]' \
	  | awk '/^ *Downloading .*[0-9] [MG]B\)/ { print "  " $$2, $$3, $$4; fflush() } /^Installing/ { print "  unpacking"; fflush() }' \
	  || exit 1; \
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest *.egg-info build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
