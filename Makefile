# One virtual environment for everything, made when a target first needs it and reused after that.
#
#   make demo      train a small GPT under every composition, print the table, draw the picture
#   make test      run the tests and the doctests, in minutes
#   make test-all  the same with slow forms and more examples, as CI does; installs DeepSpeed to compare with,
#                  in an environment of its own
#   make lint      check style and types   make format    rewrite the style
#   make figures   print the size of the house: lines, imports, parameters, names, folders
#   make docs      build the site (docs/_build/html, a folder for each version)
#   make bench     a training step beside DDP and FSDP2 on two local ranks
#   make bench-deepspeed    the same beside DeepSpeed, in an environment of its own; it compiles C++, so the first run takes minutes
#   make bench-facade       one DeepSpeed script with DeepSpeed and with zfun's names for it, in the same environment
#   make gpu       tests, kernels, steps and waits on one GPU in at most 8 minutes, and a page of results; on a box with Python and
#                  a driver it makes an environment of its own first. If PYTHON or .venv has all that is needed, nothing is
#                  installed
#   make release   build the wheel and the sdist, check them, and tag the version; uploads nothing
#   make clean     remove the environments and what was built
#
# Variables, each with a default:
#   PYTHON        the interpreter that makes the environment: python3, 3.11 or newer
#   VENV          where the environment stands: .venv
#   TORCH         the torch to install: torch==2.13.0
#   TORCH_FLAGS   more flags for pip when it installs torch: none. On Linux, pip's default torch brings the CUDA libraries
#                 (gigabytes); for the CPU build, pass the index that pytorch.org names for it:
#                     make demo TORCH_FLAGS="--index-url <index of the CPU wheels>"
#   DEMO_FLAGS    flags for `zfun demo`, e.g. DEMO_FLAGS="--ranks 4 --steps 20"
#   PYTEST_FLAGS  flags for pytest, e.g. PYTEST_FLAGS="-k layout"
#   BENCH_FLAGS   flags for benchmarks/step.py, e.g. BENCH_FLAGS="--preset many --rounds 10"
#   GPU_FLAGS     flags for benchmarks/gpu/report.py, e.g. GPU_FLAGS="--only kernels waits"
#   DEEPSPEED     the DeepSpeed to install: deepspeed==0.19.8

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
GPU_FLAGS ?=
DEEPSPEED ?= deepspeed==0.19.8

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEEPSPEED_VENV := $(VENV)-deepspeed
DEEPSPEED_PIP := $(DEEPSPEED_VENV)/bin/python -m pip --disable-pip-version-check
GPU_VENV := $(VENV)-gpu
GPU_PIP := $(GPU_VENV)/bin/python -m pip --disable-pip-version-check
# The tests start hundreds of processes that import zfun, which would each compile it again.
unexport PYTHONDONTWRITEBYTECODE

CODE := benchmarks conftest.py docs examples hatch_build.py notebooks tests tools zfun

# A test in one process keeps one core busy, so such tests run side by side, a file in one process.
# Tests that start processes have all cores, one test after the other.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8 --dist loadfile
pytest = $(if $(PYTEST_FLAGS),$(BIN)/python -m pytest $(1),\
	$(BIN)/python -m pytest -m "not processes" $(SIDE_BY_SIDE) $(1); first=$$?; \
	$(BIN)/python -m pytest -m processes $(1) tests && exit $$first)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format figures docs bench bench-deepspeed bench-facade gpu release clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.base
	$(BIN)/zfun demo $(DEMO_FLAGS)

test: $(VENV)/.test
	$(call pytest,$(PYTEST_FLAGS))

# Slow forms are longer than the time limit of pyproject.toml, which is for those of `make test`.
# DeepSpeed runs the script that the page "From DeepSpeed" shows first.
test-all: export ZFUN_TESTS = all
test-all: export ZFUN_DEEPSPEED_PYTHON = $(abspath $(DEEPSPEED_VENV))/bin/python
test-all: $(VENV)/.test $(DEEPSPEED_VENV)/.made
	$(call pytest,--timeout 600 $(PYTEST_FLAGS))

# The types of tools/notebooks.py and of docs/conf.py need what the documentation needs.
lint: $(VENV)/.test $(VENV)/.docs $(VENV)/.lint
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyrefly check
	$(BIN)/python -m tools.pages programs build/programs
	$(BIN)/mypy examples build/programs
	$(BIN)/pyright --pythonpath $(BIN)/python examples build/programs

format: $(VENV)/.lint
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

figures:
	$(PYTHON) -m tools.figures

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -b html -d docs/_build/doctrees docs \
		"docs/_build/html/v$$($(BIN)/python -c 'import zfun; print(zfun.__version__.rpartition(".")[0])')"

bench: $(VENV)/.base
	$(BIN)/python benchmarks/step.py $(BENCH_FLAGS)

# ninja, which compiles DeepSpeed's parts, is found beside python.
bench-deepspeed: $(DEEPSPEED_VENV)/.made
	PATH="$(abspath $(DEEPSPEED_VENV))/bin:$$PATH" $(DEEPSPEED_VENV)/bin/python benchmarks/step.py \
		--only ddp fsdp2 zfun-1 zfun-2 zfun-3 deepspeed-1 deepspeed-2 deepspeed-3 $(BENCH_FLAGS)

bench-facade: $(DEEPSPEED_VENV)/.made
	PATH="$(abspath $(DEEPSPEED_VENV))/bin:$$PATH" $(DEEPSPEED_VENV)/bin/python benchmarks/deepspeed_facade.py $(BENCH_FLAGS)

# An environment that has all of this is used as it is; a box without network can have no other.
has_gpu_packages = command -v $(1) >/dev/null && $(1) -c 'import hypothesis, numba, optree, pytest, torch, xxhash' 2>/dev/null

gpu:
	@if $(call has_gpu_packages,$(BIN)/python); then python=$(BIN)/python; \
	elif $(call has_gpu_packages,$(PYTHON)); then python=$(PYTHON); \
	else $(MAKE) --no-print-directory $(GPU_VENV)/.gpu && python=$(GPU_VENV)/bin/python; fi && \
	$$python benchmarks/gpu/report.py $(GPU_FLAGS)

# pip's default torch on Linux has the CUDA libraries and Triton.
$(GPU_VENV)/.gpu: pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_PIP) install --quiet --upgrade "pip>=25.1"
	$(GPU_PIP) install $(TORCH_FLAGS) "$(TORCH)"
	$(GPU_PIP) install --quiet --editable . --group gpu
	@touch $@

# The tag waits for packages that are right, a dated changelog, and a checkout without changes.
release: $(VENV)/.release
	test -z "$$(git status --porcelain)"
	grep -q "^## \[$$($(BIN)/python -c 'import zfun; print(zfun.__version__)')\] - 2" CHANGELOG.md
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	git tag "v$$($(BIN)/python -c 'import zfun; print(zfun.__version__)')"

clean:
	rm -rf $(VENV) $(VENV)-* build dist docs/_build docs/jupyter_execute docs/notebooks docs/pictures hf-trainer zfun-demo zfun-io

# torch comes first and alone, so that what else is installed takes the build chosen here.
$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zfun needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(PIP) install $(TORCH_FLAGS) "$(TORCH)"
	$(PIP) install --editable ".[demo]"
	@touch $@

$(VENV)/.test $(VENV)/.docs $(VENV)/.lint $(VENV)/.release: $(VENV)/.%: $(VENV)/.base
	$(PIP) install --group $*
	@touch $@

# DeepSpeed's setup.py imports the torch that it is built for.
$(DEEPSPEED_VENV)/.made: pyproject.toml
	$(PYTHON) -m venv $(DEEPSPEED_VENV)
	$(DEEPSPEED_PIP) install $(TORCH_FLAGS) "$(TORCH)"
	$(DEEPSPEED_PIP) install --quiet ninja setuptools wheel
	$(DEEPSPEED_PIP) install --quiet --no-build-isolation "$(DEEPSPEED)"
	$(DEEPSPEED_PIP) install --quiet --editable .
	@touch $@
