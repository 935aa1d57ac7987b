"""Fixtures of all tests: seeds, threads, hypothesis profiles, the directory of larger data, IPU devices."""

import gc
import os
import random
import re
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# Two torch threads on a busy two-core machine take more than twice as long as one; the test run is parallel over
# processes.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As in an activated environment, so that printed commands begin with `python`.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
# Tests are of the CPU, on a machine with GPUs too, and so are the processes that they start; a test marked `cuda` gets
# what was hidden here.
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

DESELECTED = pytest.StashKey[int]()
# A file with slow tests has this word, or its cases are drawn by tests/tiers.py.
NAMES_SLOW = re.compile(r"\bslow\b|\btests\.tiers\b")

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=1000,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption(
        "--data-dir",
        type=Path,
        default=None,
        help="folder with larger data sets (histograms/, wikipedia/, squad/, ...); tests that need it are skipped "
        "without it",
    )
    parser.addoption(
        "--packed-bert",
        type=Path,
        default=None,
        help="the console command of an installed wheel; tests/test_wheel.py then tests that one instead of building a "
        "wheel",
    )


def _names_slow(path):
    return bool(NAMES_SLOW.search(path.read_text(encoding="utf-8")))


def pytest_ignore_collect(collection_path, config):
    """Leave out, with `-m slow`, the files without slow tests: importing all files takes as long as many tests."""
    if config.option.markexpr == "slow" and collection_path.suffix == ".py" and not _names_slow(collection_path):
        return True
    return None


def pytest_collection_modifyitems(items):
    """Begin with the files at the top, whose tests take longest, so that no process ends long after another."""
    items.sort(key=lambda item: len(item.path.parts))
    with_slow = {item.path for item in items if item.get_closest_marker("slow")}
    unnamed = [str(path) for path in sorted(with_slow) if not _names_slow(path)]
    if unnamed:
        raise pytest.UsageError(f"`-m slow` would not find the slow tests of {', '.join(unnamed)}: see NAMES_SLOW")


def pytest_deselected(items):
    """Count what `-m` and `-k` leave out, in a worker of xdist for the controller."""
    config = items[0].config
    if hasattr(config, "workeroutput"):
        before = config.workeroutput.get("deselected", 0)
        config.workeroutput["deselected"] = before + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Keep the number of a worker; all workers collect the same tests."""
    number = getattr(node, "workeroutput", {}).get("deselected", 0)
    node.config.stash[DESELECTED] = max(number, node.config.stash.get(DESELECTED, 0))


def pytest_terminal_summary(terminalreporter, config):
    """Print the number of deselected tests, which xdist does not."""
    number = config.stash.get(DESELECTED, 0)
    if number:
        terminalreporter.write_line(f"{number:,} tests deselected; make test-slow runs those marked slow")


def pytest_collection_finish(session):
    """Exclude loaded modules from garbage collection, which some tests call often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir(request):
    """The folder given with --data-dir; a test that asks for it is skipped, and counted, without one."""
    folder = request.config.getoption("--data-dir")
    if folder is None:
        pytest.skip("needs larger data: --data-dir FOLDER")
    return folder


def _show_gpus(visible):
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _real_gpu():
    """(why there is none, or "", torch's own functions); torch looks for devices once in a process, so here."""
    try:
        import torch
    except ImportError:
        return "torch is not installed", {}
    names = ("is_available", "device_count")
    kept = {name: getattr(torch.cuda, name) for name in names}
    _show_gpus(VISIBLE)
    try:
        there = torch.cuda.is_available() and torch.cuda.device_count()
    finally:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0
    return "" if there else "no CUDA device", kept


@pytest.fixture(scope="session", autouse=True)
def gpu_hidden(request):
    """Hide the GPU from the first fixture of the session on; give (why there is none, what was hidden)."""
    if not any(item.get_closest_marker("cuda") for item in request.session.items):
        yield "no test needs a GPU", {}  # and torch need not be loaded
        return
    why, kept = _real_gpu()
    yield why, kept
    if kept:
        import torch

        for name, function in kept.items():
            setattr(torch.cuda, name, function)


@pytest.fixture(autouse=True)
def gpu_shown(request, gpu_hidden, monkeypatch):
    """For a test marked `cuda` the GPU is there; without one the test is skipped, and counted."""
    if request.node.get_closest_marker("cuda") is None:
        return
    why, kept = gpu_hidden
    if why:
        pytest.skip(why)
    import torch

    for name, function in kept.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if VISIBLE is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk():
    """No test takes the power away: files that are to be on the disk before a test goes on need not be there."""

    def checked(file):
        os.fstat(file if isinstance(file, int) else file.fileno())  # raises where it is not open

    fsync = os.fsync
    os.fsync = checked
    yield
    os.fsync = fsync


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """Separate the trusted tasks of the user, of tests and of their processes."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def cycle_cache(tmp_path_factory):
    """The directory of traces and plans of the cycle model, which all processes of a test run fill and read."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder / "cycles"


@pytest.fixture
def cached_cycles(cycle_cache, monkeypatch):
    """Let commands keep their traces and plans there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))


@pytest.fixture(autouse=True)
def seeded():
    """Each test starts from the same seeds, whatever ran before it in the process."""
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny encoder to fine-tune, as a Hugging Face folder."""
    from tests.fine_tuning_files import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("weights") / "bert")
