"""`packed-bert build --from`: files made elsewhere become a data set that verifies, with nothing lost or changed."""

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")

import pyarrow.parquet as pq

from pack_data import BuildOptions, build
from pack_data.building import inputs
from pack_data.building.verify import verify
from pack_data.formats.records import RowWidths
from pack_data.formats.source import open_source
from pack_data.store.data_set import PackStore
from tests.format_samples import (
    example,
    pack_from_examples,
    random_examples,
    records,
    write_mlperf,
    write_packed,
)

S, P = 32, 6
EXAMPLES = random_examples(np.random.default_rng(2), 60, S, 4)


def build_from(source, out, **options):
    small = dict(
        source=str(source),
        out=str(out),
        max_sequence_length=S,
        packer="spfhp",
        workers=1,
    )
    store = build(BuildOptions(**{**small, **options}))
    store.close()
    verify(out)
    return store


def types_of(schema):
    return {column.name: column.dtype for column in schema.columns}


def sequences_of(out):
    source = open_source(out)
    return [record.value for record in source.examples()]


def test_examples_in_are_examples_out(tmp_path, monkeypatch):
    source = tmp_path / "a.tfrecord"
    write_mlperf(str(source), records(EXAMPLES), RowWidths(S, P))
    store = build_from(source, tmp_path / "out")
    assert store.manifest.packing_factor > 1.2
    largest = max(max(row.input_ids + row.masked_lm_ids) for row in EXAMPLES)
    assert store.manifest.vocabulary_size == 1 + largest
    assert types_of(store.schema)["input_ids"] == "<u2"
    assert sorted(sequences_of(tmp_path / "out")) == sorted(EXAMPLES)
    # Parts are joined in order.
    monkeypatch.setattr(inputs, "SOURCE_PART", 7)
    many = build_from(source, tmp_path / "many")
    assert many.manifest.shards == store.manifest.shards
    assert many.manifest.made_with["parts"] == 9


def test_packs_are_packed_anew(tmp_path):
    widths = RowWidths(S, P + 3, 3)
    packs = [pack_from_examples([row], widths) for row in EXAMPLES]
    source = str(tmp_path / "a.tfrecord.gz")
    write_packed(source, records(packs), RowWidths())
    store = build_from(source, tmp_path / "out")
    assert len(store) < len(packs)
    assert sorted(sequences_of(tmp_path / "out")) == sorted(EXAMPLES)


def test_a_pack_of_more_sequences_than_sixteen_bits_count(tmp_path):
    count = (1 << 16) + 5
    offsets = pa.array(np.arange(count + 1), pa.int32())
    ids = pa.array(np.arange(count), pa.int32())
    column = pa.ListArray.from_arrays(offsets, ids)
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
    options = dict(
        max_sequence_length=count + 3,
        max_sequences_per_pack=None,
        packer="first_fit",
    )
    build_from(tmp_path / "a.parquet", tmp_path / "out", **options)
    with PackStore.open(tmp_path / "out") as store:
        batch = store.batch(np.array([0]))
    assert len(store) == 1
    sorted_ids = np.sort(batch["input_ids"][0])
    assert np.array_equal(sorted_ids[3:], np.arange(count))
    numbers = np.arange(1, count + 4)
    numbers[count:] = 0
    assert np.array_equal(batch["input_mask"][0], numbers)
    assert not batch["positions"].any()


def test_token_columns_are_packed_with_positions_and_sequence_numbers(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    lengths = rng.integers(1, S + 1, 50)
    for row, length in enumerate(lengths.tolist()):
        ids = rng.integers(0, 100_000, length)
        labels = rng.integers(0, 99, length)
        labels[0] = -100
        rows.append(
            {
                "input_ids": ids.tolist(),
                "labels": labels.tolist(),
                "row": row,
                "text": "x",
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    store = build_from(tmp_path / "a.parquet", tmp_path / "out", max_sequences_per_pack=4)
    assert store.manifest.kind == "tokens"
    assert store.manifest.sequences == 50
    assert store.manifest.made_with["left_out"] == ["row", "text"]
    types = {"input_ids": "<u4", "labels": "|i1"}
    assert types_of(store.schema) == types
    with PackStore.open(tmp_path / "out") as packed:
        batch = packed.batch(np.arange(len(packed)))
    assert set(batch) == {*types, "input_mask", "positions"}
    packed_rows = []
    for pack, mask in enumerate(batch["input_mask"]):
        for number in range(1, int(mask.max()) + 1):
            is_own = mask == number
            positions = batch["positions"][pack][is_own]
            assert positions.tolist() == list(range(len(positions)))
            packed_rows.append([batch[name][pack][is_own].tolist() for name in types])
    assert sorted(packed_rows) == sorted([row["input_ids"], row["labels"]] for row in rows)


def test_the_largest_id_comes_back_from_a_data_set(tmp_path):
    for largest, dtype in ((256, "<u2"), (65_535, "<u2"), (65_536, "<u4")):
        row = example()._replace(input_ids=[1, 2, 3, 4, 5, 6, largest], masked_lm_ids=[1, largest])
        source = tmp_path / f"{largest}.tfrecord"
        write_mlperf(str(source), records([row]), RowWidths(24, 6))
        out = tmp_path / f"{largest}"
        manifest = build_from(source, out).manifest
        assert sequences_of(out) == [row]
        assert manifest.vocabulary_size == largest + 1
        assert types_of(manifest.schema)["input_ids"] == dtype
