# `make demo` and `make test` do everything on a fresh machine; each makes .venv first if it has to.
PYTHON ?= python3
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
DELAY_ARGS ?=
VERSUS_ARGS ?=
KILLS_ARGS ?=
DEVICE ?=
GPU_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Parsl starts its own programs by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

LOWEST := .venv-lowest
PACKAGES := .venv-packages

.PHONY: help venv system-packages demo test test-long test-lowest test-packages few-packages test-few-packages lint docs bench chaos delay delay-all storm kills versus decisions evidence gpu clean

help:
	@echo 'make demo    train two networks in the holes of this computer (options: DEMO_ARGS; 5 minutes, more on busy cores)'
	@echo 'make test    all promises, in their short forms (options: TEST_ARGS)'
	@echo 'make test-long  the long forms: workloads, whole clusters, other environments (options: TEST_ARGS)'
	@echo 'make system-packages  install what tests need beside Python, as root on Debian: Slurm, a browser, what OpenPBS needs'
	@echo 'make test-lowest  a part of the tests with the lowest versions that pyproject.toml allows'
	@echo 'make test-packages  trainings with the packages of scientists, in an environment of their own (options: TEST_ARGS)'
	@echo 'make test-few-packages  some of them, as in continuous integration'
	@echo 'make lint    ruff, mypy --strict, import-linter'
	@echo 'make docs    build the documentation into docs/_build/html'
	@echo 'make bench   measure (options: BENCH_ARGS)'
	@echo 'make chaos   strike a training 200 fragments long at random, and compare its weights (options: CHAOS_ARGS)'
	@echo 'make delay   ordinary jobs on a real Slurm cluster, without FreeTrain and with it: who starts later (35 minutes)'
	@echo 'make delay-all  the same for all of 20 seeds, with the default settings; goes on where it was ended (DELAY_ARGS="FIRST LAST"; 2 hours)'
	@echo 'make storm   a training on a real Slurm cluster that loses nodes and its scheduler for a minute'
	@echo 'make kills   kill ranks and nodes, 100 times each, and measure the next step (options: KILLS_ARGS)'
	@echo 'make versus  other systems and this one under the same kills, in turns (options: VERSUS_ARGS; 20 minutes)'
	@echo 'make decisions  the published optimiser and this one on recorded problems, where its code is at hand'
	@echo 'make evidence  replay every row of docs/evidence/replay.md again, where the public records are at hand'
	@echo 'make gpu     on a node with accelerators: what needs them, and a table in demo-out/gpu.md (DEVICE=cpu: on any computer; options: GPU_ARGS)'
	@echo 'make clean   remove what these made, .venv included'

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "parsl-freetrain needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name another one, as in make PYTHON=python3.12 $(MAKECMDGOALS)." \
	    % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c .ci/constraints.txt -e '.[test,demo,docs,replay]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m workflows.digits $(DEMO_ARGS)

# What is not there is said, and the tests that need it are skipped.
system-packages:
	@.ci/system-packages

# Many tests wait more than they compute, hence more of them at a time than there are processors.
WORKERS := --workers 9 --durations=10
test: $(INSTALLED)
	@.ci/system-packages || true
	$(BIN)/python -m pytest $(or $(strip $(TEST_ARGS)),-m 'not long' $(WORKERS))

test-long: $(INSTALLED)
	@.ci/system-packages || true
	ALL_EXAMPLES=1 $(BIN)/python -m pytest $(or $(strip $(TEST_ARGS)),-m 'long or properties' $(WORKERS))

# The lowest version of each package that we import.
LOWEST_TESTS := tests/cli/test_main.py tests/cli/test_allocate.py tests/core/allocation tests/journal tests/executor/test_interchange.py \
    tests/executor/test_training.py tests/replay/test_trace_intervals.py tests/sites/test_machines.py
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet $(PIP_ARGS) -c .ci/constraints-lowest.txt -e '.[test,replay]'
	PATH=$(CURDIR)/$(LOWEST)/bin:$$PATH $(LOWEST)/bin/python -m pytest -m 'not slurm and not pbs and not gpu' $(or $(strip $(TEST_ARGS)),$(LOWEST_TESTS))

# The packages of docs/packages.md, in the versions with which its rows were run.
test-packages:
	$(PYTHON) -m venv $(PACKAGES)
	$(PACKAGES)/bin/python -m pip install --quiet $(PIP_ARGS) -c .ci/constraints.txt -e '.[test]' $$(grep -v '^#' .ci/constraints-packages.txt)
	PATH=$(CURDIR)/$(PACKAGES)/bin:$$PATH $(PACKAGES)/bin/python -m pytest $(or $(strip $(TEST_ARGS)),tests/packages)

# Some of them in continuous integration, where .venv has most of what they need.
FEW := -k 'peft_lora or torchao or trl_sft_command or nequip_train or neuraloperator'
few-packages: $(INSTALLED)
	$(PYTHON) -m venv $(PACKAGES)-few
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$(echo $(PACKAGES)-few/lib/python*/site-packages)/base.pth
	$(PACKAGES)-few/bin/python -m pip install --quiet $(PIP_ARGS) -c .ci/constraints.txt $$(grep -E '^(nequip|neuraloperator|peft|torchao|trl)=' .ci/constraints-packages.txt)

test-few-packages: few-packages
	PATH=$(CURDIR)/$(PACKAGES)-few/bin:$$PATH $(PACKAGES)-few/bin/python -m pytest tests/packages $(or $(strip $(TEST_ARGS)),$(FEW))

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy --strict parsl_freetrain workflows site_configs tests
	$(BIN)/lint-imports

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo 'Open docs/_build/html/index.html'

bench: $(INSTALLED)
	$(BIN)/python -m pytest -s tests/benchmarks $(BENCH_ARGS)

chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos.monkey $(CHAOS_ARGS)

delay: $(INSTALLED)
	$(BIN)/python -m tests.slurm.zero_delay demo-out
	$(BIN)/python docs/zero_delay.py demo-out/zero-delay.json demo-out/zero-delay.png
	@echo 'Picture: demo-out/zero-delay.png'

# Seeds that were measured already are not run again.
delay-all: $(INSTALLED)
	$(BIN)/python -m tests.slurm.delay_all demo-out/delay-all.jsonl $(DELAY_ARGS)
	$(BIN)/python docs/delay_all.py demo-out/delay-all.jsonl demo-out/delay-all.png
	@echo 'Picture: demo-out/delay-all.png'

storm: $(INSTALLED)
	STORM=1 $(BIN)/python -m pytest -s tests/slurm/test_whole_training.py

kills: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.kills $(KILLS_ARGS)

versus: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.versus $(VERSUS_ARGS)

decisions: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.versus.decisions $(VERSUS_ARGS)

evidence: $(INSTALLED)
	$(BIN)/python -m tests.replay.evidence demo-out

gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu.run --device $(or $(DEVICE),accelerator) $(GPU_ARGS)

clean:
	rm -rf $(VENV) .venv-versus $(LOWEST) $(PACKAGES) docs/_build demo-out runinfo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
