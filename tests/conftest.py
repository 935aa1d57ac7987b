"""What every test shares: seeds, threads, hypothesis profiles, the folder of larger data, IPU devices."""

import os
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# Two torch threads on a busy two-core machine take more than twice as long as one; the test run is parallel over
# processes.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

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


@pytest.fixture(scope="session")
def data_dir(request) -> Path:
    """The folder given with --data-dir; a test that asks for it is skipped, and counted, without one."""
    folder = request.config.getoption("--data-dir")
    if folder is None:
        pytest.skip("needs larger data: --data-dir FOLDER")
    return folder


@pytest.fixture(autouse=True)
def seeded():
    """Each test starts from the same seeds, whatever ran before it in the process."""
    random.seed(0)
    np.random.seed(0)
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
