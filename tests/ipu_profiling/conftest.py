"""A modelled machine, whose plans and traces are made once, and runs without a picture."""

import pytest

from ipu_packed_bert.settings.loading import load_config
from ipu_profiling.cycles import calibration
from tests.imports import CONFIGS
from tests.ipu_packed_bert.conftest import picture_of_a_run  # noqa: F401


@pytest.fixture(scope="session")
def machines(cycle_cache):
    """One machine for each target, by name."""
    return calibration.machines(cycle_cache / "ipu_packed_bert")


@pytest.fixture(scope="session")
def machine(machines):
    return machines["mk2"]


@pytest.fixture(scope="session")
def load():
    """load("packed_phase2_pod16.yml", "model.num_layers=4", ...) -> Config for IPUs."""
    return lambda name, *overrides: load_config(CONFIGS / name, ("without_ipus=null",) + overrides)
