"""`packed-bert build --from`: files made elsewhere become a data set that verifies, with nothing lost or changed."""

import numpy as np
import pytest

from tests.refusals import refusal_of

pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")

import pyarrow.parquet as pq

from pack_data import BuildOptions, build
from pack_data.building import convert, inputs
from pack_data.building.command import main as build_main
from pack_data.building.verify import verify
from pack_data.cli.command import run_main
from pack_data.formats.records import Record, RowWidths
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import Origin
from pack_data.store.data_set import PackStore, read_manifest
from tests.format_samples import (
    example,
    frame,
    mlperf_row,
    pack_from_examples,
    random_examples,
    records,
    tf_example,
    write_mlperf,
    write_packed,
)

S, P = 32, 6
EXAMPLES = random_examples(np.random.default_rng(2), 60, S, 4)


def build_from(source, out, **options):
    small = dict(source=str(source), out=str(out), max_sequence_length=S, packer="spfhp", workers=1)
    store = build(BuildOptions(**{**small, **options}))
    store.close()
    verify(out)
    return store


def sequences_of(out):
    return [record.value for record in open_source(out).examples()]


def test_examples_in_are_examples_out_with_their_numbers(tmp_path, monkeypatch):
    source = tmp_path / "a.tfrecord"
    rows = [Record(Origin("", 0), one, {"line": np.array([-number])}) for number, one in enumerate(EXAMPLES)]
    write_mlperf(str(source), rows, RowWidths(S, P))
    store = build_from(source, tmp_path / "out")
    assert store.manifest.packing_factor > 1.2
    assert store.manifest.vocabulary_size == 1 + max(max(one.input_ids + one.masked_lm_ids) for one in EXAMPLES)
    assert {column.name: column.dtype for column in store.schema.columns}["input_ids"] == "<u2"
    lines = []
    for record in open_source(tmp_path / "out").read():
        is_used = record.value["next_sentence_weights"] == 1
        lines += record.foreign["line"][is_used].tolist()
    by_line = dict(zip(lines, sequences_of(tmp_path / "out")))
    assert [by_line[-number] for number in range(len(EXAMPLES))] == EXAMPLES
    # Parts are joined in order.
    monkeypatch.setattr(inputs, "SOURCE_PART", 7)
    many = build_from(source, tmp_path / "many")
    assert many.manifest.shards == store.manifest.shards
    assert many.manifest.made_with["parts"] == 9


def test_packs_are_packed_anew(tmp_path):
    packs = [pack_from_examples([one], RowWidths(S, P + 3, 3)) for one in EXAMPLES]
    write_packed(str(tmp_path / "a.tfrecord.gz"), records(packs), RowWidths())
    store = build_from(tmp_path / "a.tfrecord.gz", tmp_path / "out")
    assert len(store) < len(packs)
    assert sorted(sequences_of(tmp_path / "out")) == sorted(EXAMPLES)


def test_a_pack_of_more_sequences_than_sixteen_bits_count(tmp_path):
    count = (1 << 16) + 5
    offsets = pa.array(np.arange(count + 1), pa.int32())
    column = pa.ListArray.from_arrays(offsets, pa.array(np.arange(count), pa.int32()))
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
    options = dict(max_sequence_length=count + 3, max_sequences_per_pack=None, packer="first_fit")
    build_from(tmp_path / "a.parquet", tmp_path / "out", **options)
    with PackStore.open(tmp_path / "out") as store:
        batch = store.batch(np.arange(len(store)))
    assert len(store) == 1
    assert np.array_equal(np.sort(batch["input_ids"][0])[3:], np.arange(count))
    numbers = np.append(np.arange(1, count + 1), np.zeros(3, int))
    assert np.array_equal(batch["input_mask"][0], numbers)
    assert not batch["positions"].any()


def test_token_columns_are_packed_with_positions_and_sequence_numbers(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for row, length in enumerate(rng.integers(1, S + 1, 50).tolist()):
        ids = rng.integers(0, 100_000, length).tolist()
        labels = [-100, *rng.integers(0, 99, length - 1).tolist()]
        rows.append({"input_ids": ids, "labels": labels, "row": row, "text": "x"})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    store = build_from(tmp_path / "a.parquet", tmp_path / "out", max_sequences_per_pack=4)
    assert store.manifest.kind == "tokens"
    assert store.manifest.sequences == 50
    assert store.manifest.made_with["left_out"] == ["text"]
    types = {"input_ids": "<u4", "labels": "|i1", "row": "|u1"}
    assert {column.name: column.dtype for column in store.schema.columns} == types
    batch = PackStore.open(tmp_path / "out").batch(np.arange(len(store)))
    assert set(batch) == {*types, "input_mask", "positions"}
    by_row = {}
    for pack, mask in enumerate(batch["input_mask"]):
        for number in range(1, int(mask.max()) + 1):
            own = mask == number
            assert batch["positions"][pack][own].tolist() == list(range(int(own.sum())))
            columns = [batch[name][pack][own].tolist() for name in ("input_ids", "labels")]
            by_row[int(batch["row"][pack][number - 1])] = columns
    assert by_row == {row["row"]: [row["input_ids"], row["labels"]] for row in rows}


def test_the_largest_id_comes_back_from_a_data_set(tmp_path):
    for largest, dtype in ((255, "<u2"), (256, "<u2"), (65_535, "<u2"), (65_536, "<u4")):
        one = example()._replace(input_ids=[1, 2, 3, 4, 5, 6, largest], masked_lm_ids=[1, largest])
        source = str(tmp_path / f"{largest}.tfrecord")
        write_packed(source, records([pack_from_examples([one], RowWidths(24, 6, 2))]), RowWidths())
        out = tmp_path / f"{largest}"
        assert convert.main([source, str(out), "--to-format", "store"]) == 0
        assert sequences_of(out) == [one]
        manifest = read_manifest(out)
        assert manifest.vocabulary_size == largest + 1
        assert {column.name: column.dtype for column in manifest.schema.columns}["input_ids"] == dtype


def test_the_command_names_what_it_skips_and_refuses(tmp_path, capsys):
    good = frame(tf_example(mlperf_row(example(), 8, 2)))
    (tmp_path / "a.tfrecord").write_bytes(good + frame(b"junk") + good)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    pq.write_table(pa.table({"input_ids": [[1, 2]], "slot": [3]}), tmp_path / "a.parquet")
    common = ["--max-sequence-length", 16, "--packer", "spfhp", "--workers", 1, "--out", tmp_path / "out", "--from"]
    skipping = [*common, tmp_path / "a.tfrecord", "--skip-bad", 1]
    refusal_of(build_main, skipping[:-2], capsys, "record 1")
    refusal_of(build_main, [*skipping, "--vocabulary", tmp_path / "vocab.txt"], capsys, "vocabulary of 6", after=".*")
    refusal_of(build_main, [*common, tmp_path / "a.parquet"], capsys, "slot", after=".*")
    assert run_main(build_main, list(map(str, skipping))) == 0
    assert "record 1" in capsys.readouterr().err
    assert verify(tmp_path / "out").manifest.sequences == 2
