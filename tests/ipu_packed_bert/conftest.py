"""Runs without a picture, which takes as long as a tiny run; and one run that many tests read or resume."""

import sys
from pathlib import Path

import pytest

from pack_data.store.data_set import PackStore
from tests.tiny_runs import not_drawn, tiny_config, tiny_data


@pytest.fixture(scope="session", autouse=True)
def picture_of_a_run():
    """No run draws its picture, but for those of a test that asks for the fixture `pictures`."""
    # A test process without torch makes no run, and the module leads to most of the package.
    if "torch" not in sys.modules:
        yield
        return
    from ipu_packed_bert.training import summary

    draw = summary.draw_curves
    summary.draw_curves = not_drawn
    yield
    summary.draw_curves = draw


@pytest.fixture
def pictures(picture_of_a_run, monkeypatch):
    """Runs draw their picture, as they do for users."""
    # From its own module: tests of another directory, which has this fixture too, may have replaced it in the summary.
    draw = sys.modules["ipu_packed_bert.training.picture"].draw_curves
    monkeypatch.setattr(sys.modules["ipu_packed_bert.training.summary"], "draw_curves", draw)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The configuration file of a run of 12 updates; its data set is beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    return str(tiny_config(folder / "tiny.yml", tiny_data(folder / "data")))


@pytest.fixture(scope="session")
def store(tiny):
    """The data set of that run, open."""
    with PackStore.open(Path(tiny).parent / "data") as opened:
        yield opened


@pytest.fixture(scope="session")
def undisturbed(tiny, tmp_path_factory):
    """The directory of that run, made once; no test changes it."""
    from ipu_packed_bert.commands import pretrain

    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert pretrain.main(["--config", tiny, "--out", str(folder)]) == 0
    return folder
