"""Several parts and shards although the corpora of these tests are small."""

import pytest

from tests.pack_data.text_corpus import make_parts_small


@pytest.fixture
def small_parts(monkeypatch):
    make_parts_small(monkeypatch)
