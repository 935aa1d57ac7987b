"""A modelled machine for the tests; plans and traces are made once and shared through a folder of this test run."""

from pathlib import Path

import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="session")
def cycle_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cycle_cache")


@pytest.fixture(scope="session")
def machine(cycle_cache):
    from ipu_packed_bert.cycles.target import MK2
    from ipu_packed_bert.cycles.workload import Machine

    return Machine(MK2, cycle_cache)


@pytest.fixture(scope="session")
def load():
    """load("packed_phase2_pod16.yml", "model.num_layers=4", ...) -> Config for IPUs."""
    from ipu_packed_bert.config import load_config

    return lambda name, *overrides: load_config(CONFIGS / name, ("without_ipus=null",) + overrides)
