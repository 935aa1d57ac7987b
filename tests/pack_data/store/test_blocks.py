"""Checksums of blocks of packs: a reader meets damage as an error that names file, pack and block, never as packs."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pack_data.building.verify import verify
from pack_data.store import data_set
from pack_data.store.data_set import PackStore, StoreWriter
from tests.pack_data.store.test_data_set import SCHEMA, records
from tests.refusals import refused

PACKS = 3  # in a block: shards of 7, 7, 6 packs have 3, 3, 2 blocks
BLOCKS = [(0, 2), (3, 5), (6, 6), (7, 9), (10, 12), (13, 13), (14, 16), (17, 19)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(data_set, "BLOCK_BYTES", PACKS * SCHEMA.record_dtype.itemsize)


def written(tmp_path):
    writer = StoreWriter(tmp_path / "data", SCHEMA, packs_per_shard=7)
    writer.add(records(20))
    writer.finish(algorithm="none", vocabulary_size=50).close()
    return tmp_path / "data"


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


def test_no_changed_byte_of_a_shard_is_read(folder):
    """A byte of a shard changed, every third in turn: its block is refused, whichever pack is asked for; others are
    read."""
    whole = records(20)
    shard = sorted(folder.glob("packs-00001-*.npy"))[0]
    content = shard.read_bytes()
    first = len(content) - 7 * SCHEMA.record_dtype.itemsize
    rng = np.random.default_rng(0)
    for place in range(0, len(content), 3):
        shard.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << int(rng.integers(8)))]) + content[place + 1 :]
        )
        if place < first:  # in the header: the file does not open, its blocks are not right, or it says the same
            try:
                with PackStore.open(folder) as store:
                    assert np.array_equal(store.records(np.arange(20)), whole)
            except ValueError as error:
                assert shard.name in str(error)
                assert "\n" not in str(error)
            continue
        begin, end = BLOCKS[3 + (place - first) // SCHEMA.record_dtype.itemsize // PACKS]
        block = BLOCKS.index((begin, end)) - 3
        with PackStore.open(folder) as store:
            others = np.setdiff1d(np.arange(20), np.arange(begin, end + 1))
            assert np.array_equal(store.records(others), whole[others])
            wanted = int(rng.integers(begin, end + 1))
            for _ in range(2):  # the second time as well
                with refused(shard, f"pack {wanted}", f"block {block} (packs {begin} to {end})"):
                    store.batch(np.append(others, wanted))
        if place % 7 == 0:
            with refused(shard.name, f"pack {begin}", f"block {block} "):
                verify(folder)


def test_no_changed_byte_of_the_lengths_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data_set, "BLOCK_BYTES", PACKS * SCHEMA.lengths_dtype.itemsize)
    folder = written(tmp_path)
    lengths = next(folder.glob("lengths-*.npy"))
    with PackStore.open(folder) as store:
        table = np.array(store.lengths())
        packs = store.manifest.lengths.blocks.packs
        assert packs == PACKS
        assert np.array_equal(store.lengths(np.array([19, 0, 0])), table[[19, 0, 0]])
    content = lengths.read_bytes()
    size = table.dtype.itemsize
    for place in range(len(content) - 20 * size, len(content)):
        lengths.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        block = (place - len(content) + 20 * size) // size // packs
        others = np.flatnonzero(np.arange(20) // packs != block)
        with PackStore.open(folder) as store:
            assert np.array_equal(store.lengths(others), table[others])
            for wanted in (np.arange(20)[::-1], None):
                with refused(lengths.name, f"block {block} "):
                    store.lengths(wanted)


def test_threads_read_together(folder):
    whole = records(20)
    with PackStore.open(folder) as store, ThreadPoolExecutor(4) as threads:
        orders = [np.random.default_rng(seed).permutation(20) for seed in range(40)]
        for order, read in zip(orders, threads.map(store.records, orders)):
            assert np.array_equal(read, whole[order])


def test_a_pack_larger_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(data_set, "BLOCK_BYTES", 1)
    writer = StoreWriter(tmp_path, SCHEMA)
    writer.add(records(4))
    with writer.finish(algorithm="none") as store:
        assert store.manifest.shards[0].blocks.packs == 1
        assert len(store.records(np.arange(4))) == 4
