"""A modelled machine, whose plans and traces are made once, and runs without a picture."""

import pytest

from ipu_packed_bert.settings.loading import load_config
from ipu_profiling.cycles.target import MK2
from ipu_profiling.cycles.workload import Machine
from tests.imports import CONFIGS
from tests.ipu_packed_bert.conftest import picture_of_a_run  # noqa: F401


@pytest.fixture(scope="session")
def cycle_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cycle_cache")


@pytest.fixture(scope="session")
def machine(cycle_cache):
    return Machine(MK2, cycle_cache)


@pytest.fixture(scope="session")
def load():
    """load("packed_phase2_pod16.yml", "model.num_layers=4", ...) -> Config for IPUs."""
    return lambda name, *overrides: load_config(CONFIGS / name, ("without_ipus=null",) + overrides)
