"""Several parts and shards although the corpora of these tests are small."""

import pytest

from pack_data.building import inputs, stages


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(inputs, "PART_CHARACTERS", 6000)
    monkeypatch.setattr(stages, "SLOTS_PER_SHARD", 64 * 50)
