"""Token sequences read in blocks: what reading one record after another gives, in both good and damaged files."""

import numpy as np
import pytest

from pack_data.formats import megatron
from pack_data.formats.source import Source, open_source
from pack_data.store.sequences import Sequences
from tests.refusals import refused
from tests.token_sequences import random_sequences, write_megatron

ROWS = 2500


def parquet_file(path, sequences, masked=(), **columns):
    """Rows of `sequences` with an attention_mask; those of the numbers `masked` have padding behind their tokens."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    padded = [each and each + [0] * (2 * (number in masked)) for number, each in enumerate(sequences)]
    masks = [
        each and [1] * (len(each) - 2 * (number in masked)) + [0] * (2 * (number in masked))
        for number, each in enumerate(padded)
    ]
    parquet.write_table(pyarrow.table({"input_ids": padded, "attention_mask": masks, **columns}), str(path))
    return path


def read_both_ways(source, monkeypatch, **options):
    """Blocks as they are read, and from one record after another; how many pieces were checked by record."""
    checked, real = [], Source._block
    monkeypatch.setattr(Source, "_block", lambda self, block, *rest: checked.append(block) or real(self, block, *rest))
    found = Sequences.concatenate(list(source.blocks(700, **options)))
    by_record, lost = len(checked), source.foreign_lost
    bad = [str(each) for each in source.bad.found]
    records = source.examples()
    expected = Sequences.concatenate(list(source._checked(records, next(source.examples()), sorted(found.scalars), 99)))
    assert (source.foreign_lost, [str(each) for each in source.bad.found]) == (lost, bad)
    for name in ("lengths", "prediction_counts"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    for name in ("tokens", "scalars"):
        first, second = getattr(found, name), getattr(expected, name)
        assert list(first) == list(second) and all(np.array_equal(first[each], second[each]) for each in first)
    return found, by_record


def test_megatron(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "_BYTES", 6000)
    given = random_sequences(ROWS)
    source = open_source(write_megatron(tmp_path / "good", given, 4, "<i4"))
    found, by_record = read_both_ways(source, monkeypatch)
    assert len(found) == ROWS and not by_record
    given[1700] = [5, -1]
    source = open_source(write_megatron(tmp_path / "bad", given, 4, "<i4"), skip_bad=1)
    found, by_record = read_both_ways(source, monkeypatch)
    assert len(found) == ROWS - 1 and 0 < by_record < 5 and "record 1700" in str(source.bad.found[0])


def test_parquet(tmp_path, monkeypatch):
    given = random_sequences(ROWS)
    more = {"number": list(range(ROWS)), "text": ["a"] * ROWS, "share": [0.5] * ROWS}
    source = open_source(parquet_file(tmp_path / "good.parquet", given, **more))
    found, by_record = read_both_ways(source, monkeypatch)
    assert len(found) == ROWS and not by_record and source.foreign_lost == ("share", "text")
    assert found.scalars["number"].tolist() == list(range(ROWS))
    path = parquet_file(
        tmp_path / "padded.parquet", given, masked=[1200], number=[2**40 * (at > 2100) for at in range(ROWS)]
    )
    with refused("record 2101", "number"):
        read_both_ways(open_source(path), monkeypatch)
    given[1800] = None
    source = open_source(parquet_file(tmp_path / "bad.parquet", given, masked=[1200]), skip_bad=1)
    found, by_record = read_both_ways(source, monkeypatch)
    assert len(found) == ROWS - 1 and 0 < by_record < 5 and "record 1800" in str(source.bad.found[0])


def test_a_longer_sequence_and_other_columns_are_named(tmp_path):
    given = random_sequences(ROWS)
    given[2000] = [7] * 40
    with refused("record 2000", 40, 30, "--max-sequence-length"):
        list(open_source(write_megatron(tmp_path / "a", given)).blocks(longest=30))
    (tmp_path / "b").mkdir()
    parquet_file(tmp_path / "b" / "1.parquet", given, labels=given)
    parquet_file(tmp_path / "b" / "2.parquet", given)
    with refused("2.parquet: record 0", "input_ids, labels", "--columns"):
        list(open_source(tmp_path / "b").blocks())
