# make demo   everything that is missing, then two workers on a slow link: Horovod, DDP, all strategies
# make demo-keras   the same in Keras
# make test   the same set-up, then the tests to run before a push, two files at a time (WORKERS=1: one)
# make test-all   all tests, also the long ones; writes tests/summary.md
# make test-fast   light tests of one process, and a small job for each strategy and framework
# make image  the container image (ENGINE=podman builds it with that)
# make docs   the site, in build/docs/index.html
# make docs-check   every command of every page, or a shorter form of it; hosts need root
# make release   the wheel and the sdist of this version in dist/, checked; nothing is uploaded.
#     TRY=python3.13 then installs the wheel with today's torch for that Python, builds Horovod, trains
# make matrix   new environments with the oldest and today's torch and TensorFlow, each tried
# make setup | lint | clean
# CUDA=1 builds for GPUs (NCCL), in an environment of its own; PYTHON=... names the Python (3.11 or newer) that .venv is made from.

PYTHON ?= python3
CUDA ?= 0
ENGINE ?= docker
WORKERS ?= 2
# Tests of a file share jobs. The longest files begin first, see tests/conftest.py.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SMOKE := tests/parallel/test_smoke.py tests/parallel/test_keras_smoke.py
IMAGE := $(if $(filter 1,$(CUDA)),cuda,cpu)
VENV := $(if $(filter 1,$(CUDA)),.venv-cuda,.venv)
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1

.PHONY: demo demo-keras test test-all test-fast image docs docs-check release matrix setup lint clean

# The site imports TensorFlow, which speaks of the processor unless told not to.
docs: export TF_CPP_MIN_LOG_LEVEL = 3
docs: export TF_ENABLE_ONEDNN_OPTS = 0
demo:
	@$(PYTHON) docker/setup_env.py --venv $(VENV) --torch-only $(if $(filter 1,$(CUDA)),--cuda)
	$(VENV)/bin/python torch_examples/demo.py

demo-keras: setup
	$(VENV)/bin/python torch_examples/demo.py --keras --plot demo-keras.png

test: setup
	$(VENV)/bin/python -m pytest $(PARALLEL) -m "not nightly and not cluster and not cuda" $(PYTEST)

test-all: export HYPOTHESIS_PROFILE = deep
test-all: setup
	rm -f build/test-all.xml
	$(VENV)/bin/python -m pytest $(PARALLEL) --junitxml=build/test-all.xml $(PYTEST); \
	status=$$?; $(if $(PYTEST),,$(VENV)/bin/python tests/summary.py build/test-all.xml;) exit $$status

test-fast: setup
	$(VENV)/bin/python -m pytest $(PARALLEL) -m "not slow and not nightly" tests/single $(SMOKE) $(PYTEST)

image:
	$(ENGINE) build -f docker/Dockerfile.$(IMAGE) -t hvd_pipe:$(IMAGE) .

docs: setup
	$(VENV)/bin/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

docs-check: setup
	$(VENV)/bin/python docs/run_commands.py $(PAGES)

release: setup
	$(VENV)/bin/python -m pip install --quiet -c docker/constraints.txt twine
	$(VENV)/bin/python docker/release.py $(addprefix --try ,$(TRY))

matrix: setup
	$(VENV)/bin/python docker/matrix/matrix.py $(CELLS)

setup:
	@$(PYTHON) docker/setup_env.py --venv $(VENV) $(if $(filter 1,$(CUDA)),--cuda)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck docker/*.sh docs/launching/*.sh .ci/run
	$(VENV)/bin/hadolint docker/Dockerfile.*
	$(VENV)/bin/python docker/check.py
	$(VENV)/bin/python docs/check.py
	$(VENV)/bin/python docs/tables.py --write || { git diff -- README.md docs; exit 1; }
	$(VENV)/bin/python docs/pictures/timelines.py
	test -z "$$(git status --porcelain docs/pictures)" || { git status docs/pictures; exit 1; }
	@$(VENV)/bin/python tests/summary.py --age

clean:
	rm -rf .venv .venv-cuda build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
