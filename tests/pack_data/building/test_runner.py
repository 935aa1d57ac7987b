"""The same build on a cluster: the same bytes, also when a worker dies while it runs."""

import os
import signal
from importlib.util import find_spec

import pytest

from pack_data.building import inputs, runner, stages
from pack_data.building.runner import _DaskRunner
from pack_data.building.verify import verify
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refused

# Collection need not load Dask.
pytestmark = pytest.mark.skipif(find_spec("distributed") is None, reason="needs the extra 'dask'")


class DeadlyRunner(_DaskRunner):
    """Kills one of the workers after the first result of every stage."""

    killed = 0

    def map(self, function, tasks):
        for number, result in enumerate(super().map(function, tasks)):
            if number == 0:
                workers = sorted(self.client.run(os.getpid).values())
                os.kill(workers[0], signal.SIGKILL)
                DeadlyRunner.killed += 1
            yield result


@pytest.mark.parametrize("workers", ["0", "many"])
def test_a_number_of_workers_is_whole_and_positive(tmp_path, workers):
    with refused("--on", "dask:local:N"):
        build_small(tmp_path, tmp_path / "data", on=f"dask:local:{workers}")


@pytest.mark.slow
def test_a_worker_dies_in_every_stage_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "PART_CHARACTERS", 3000)
    monkeypatch.setattr(stages, "SLOTS_PER_SHARD", 64 * 50)
    corpus = write_corpus(tmp_path / "corpus", 60)
    build_small(corpus, tmp_path / "calm").close()
    monkeypatch.setattr(runner, "_DaskRunner", DeadlyRunner)
    build_small(corpus, tmp_path / "data", on="dask:local:2").close()
    assert DeadlyRunner.killed == 3
    verify(tmp_path / "data")
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "calm").iterdir()
    }
