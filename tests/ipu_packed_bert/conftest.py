"""Fixtures of the training package: a modelled machine, and runs without a picture.

Plans and traces of the machine are made once and shared through a folder of this test run.
"""

import pytest

from tests.imports import CONFIGS


@pytest.fixture(scope="session")
def cycle_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cycle_cache")


@pytest.fixture(scope="session")
def machine(cycle_cache):
    from ipu_profiling.cycles.target import MK2
    from ipu_profiling.cycles.workload import Machine

    return Machine(MK2, cycle_cache)


@pytest.fixture(scope="session")
def load():
    """load("packed_phase2_pod16.yml", "model.num_layers=4", ...) -> Config for IPUs."""
    from ipu_packed_bert.settings.loading import load_config

    return lambda name, *overrides: load_config(CONFIGS / name, ("without_ipus=null",) + overrides)


@pytest.fixture(scope="session", autouse=True)
def picture_of_a_run():
    """No run draws its picture, but for those of a test that asks for the fixture `pictures`; gives what draws it."""
    try:
        from ipu_packed_bert.training import summary as run_summary
    except ImportError:  # no torch, so no runs
        yield None
        return
    from tests.tiny_runs import not_drawn

    draw, run_summary.draw_curves = run_summary.draw_curves, not_drawn
    yield draw
    run_summary.draw_curves = draw


@pytest.fixture
def pictures(picture_of_a_run, monkeypatch):
    """Runs draw their picture, as they do for users."""
    from ipu_packed_bert.training import summary as run_summary

    monkeypatch.setattr(run_summary, "draw_curves", picture_of_a_run)
