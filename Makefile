# Every target makes the environment that it needs (.venv, or one beside it for another TORCH), but
# for gpu, which takes what PYTHON has.
#
#   make train                              train the example, fused
#   make train ARGS="--fusion coalesced"    with options of examples/train_gpt.py
#   make test                               all tests but those left to the nightly jobs
#   make test ARGS="-m 'not slow'"          those that need a few minutes
#   make test ARGS=--nightly                all tests
#   make test ARGS="-n 0 tests/traced"      some of them, in one process
#   make bench ARGS="--model mlp"           training steps beside torch's own methods; ARGS=--quick
#   make fuzz ARGS="--seeds 0:100"          random trainings beside eager DDP; --case N for one
#   make faults ARGS="-k kill-1-step"       trainings with a rank that dies, stops or fails
#   make torch-tests                        torch's own DDP tests, without and under the flag
#   make gpu                                what needs a GPU, in minutes; ARGS=--list names the parts
#   make docs                               the guide and all other pages, into site/
#   make check                              format, lint, types, then all tests
#
# PYTHON   the Python to make the environment with
# TORCH    torch==VERSION, or torch for the newest that setup.py allows
# ARGS     handed on to the example, to pytest or to the tool

PYTHON ?= python3
TORCH ?=
ARGS ?=

RUN = exec $(PYTHON) tools/setup_env.py --torch "$(TORCH)" --

.PHONY: train test bench fuzz faults torch-tests gpu lint check format
.PHONY: clean docs

train:
	@$(RUN) python examples/train_gpt.py $(ARGS)

test:
	@$(RUN) python -m pytest -n auto --maxprocesses 4 --dist loadgroup $(ARGS)

bench:
	@$(RUN) python tools/bench.py $(ARGS)

fuzz:
	@$(RUN) python tools/fuzz.py $(ARGS)

faults:
	@$(RUN) python tools/faults.py $(ARGS)

torch-tests:
	@$(RUN) python tools/torch_tests.py $(ARGS)

gpu:
	@exec $(PYTHON) tools/gpu.py $(ARGS)

lint:
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) mypy

docs:
	@$(RUN) mkdocs build --strict

check: lint test

format:
	@$(RUN) ruff format .
	@$(RUN) ruff check --fix .

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
