"""`packed-bert build --from`: files made elsewhere become a data set that verifies, with nothing lost or changed."""

import numpy as np
import pytest

from tests.refusals import refusal_of

pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")

import pyarrow.parquet as pq

from pack_data import BuildOptions, build
from pack_data.building import inputs
from pack_data.building.command import main as build_main
from pack_data.building.verify import verify
from pack_data.cli.command import run_main
from pack_data.formats.records import Record, RowWidths
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import Origin
from pack_data.store.data_set import PackStore
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


def made(source, out, **options):
    store = build(
        BuildOptions(
            **{**dict(source=str(source), out=str(out), max_sequence_length=S, packer="spfhp", workers=1), **options}
        )
    )
    store.close()
    verify(out)
    return store


@pytest.fixture
def examples():
    return random_examples(np.random.default_rng(2), 60, S, 4)


def test_examples_in_are_examples_out(tmp_path, examples):
    source = tmp_path / "a.tfrecord"
    write_mlperf(str(source), records(examples), RowWidths(S, P))
    store = made(source, tmp_path / "out")
    assert sorted(record.value for record in open_source(tmp_path / "out").examples()) == sorted(examples)
    assert store.manifest.packing_factor > 1.2
    assert store.manifest.vocabulary_size == 1 + max(max(each.input_ids + each.masked_lm_ids) for each in examples)
    assert {column.name: column.dtype for column in store.schema.columns}["input_ids"] == "<u2"


def test_packs_are_packed_anew(tmp_path, examples):
    packs = [pack_from_examples([each], RowWidths(S, P + 3, 3)) for each in examples]
    write_packed(str(tmp_path / "a.tfrecord.gz"), records(packs), RowWidths())
    store = made(tmp_path / "a.tfrecord.gz", tmp_path / "out")
    assert len(store) < len(packs)
    assert sorted(record.value for record in open_source(tmp_path / "out").examples()) == sorted(examples)


def test_a_pack_of_more_sequences_than_sixteen_bits_count(tmp_path):
    count = (1 << 16) + 5
    offsets = pa.array(np.arange(count + 1), pa.int32())
    column = pa.ListArray.from_arrays(offsets, pa.array(np.arange(count), pa.int32()))
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
    made(
        tmp_path / "a.parquet",
        tmp_path / "out",
        max_sequence_length=count + 3,
        max_sequences_per_pack=None,
        packer="first_fit",
    )
    with PackStore.open(tmp_path / "out") as store:
        batch = store.batch(np.arange(len(store)))
    assert len(store) == 1 and np.array_equal(np.sort(batch["input_ids"][0])[3:], np.arange(count))
    assert (
        np.array_equal(batch["input_mask"][0], np.append(np.arange(1, count + 1), np.zeros(3, int)))
        and not batch["positions"].any()
    )


def test_token_columns_are_packed_with_positions_and_sequence_numbers(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, S + 1, 50).tolist()
    rows = [
        {
            "input_ids": rng.integers(0, 100_000, n).tolist(),
            "labels": [-100] + rng.integers(0, 99, n - 1).tolist(),
            "row": row,
            "text": "x",
        }
        for row, n in enumerate(lengths)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    store = made(tmp_path / "a.parquet", tmp_path / "out", max_sequences_per_pack=4)
    assert store.manifest.kind == "tokens" and store.manifest.sequences == 50
    assert store.manifest.made_with["left_out"] == ["text"]
    assert {column.name: column.dtype for column in store.schema.columns} == {
        "input_ids": "<u4",
        "labels": "|i1",
        "row": "|u1",
    }
    batch = PackStore.open(tmp_path / "out").batch(np.arange(len(store)))
    assert set(batch) == {"input_ids", "labels", "row", "input_mask", "positions"}
    found = {}
    for pack in range(len(store)):
        for number in range(1, int(batch["input_mask"][pack].max()) + 1):
            own = batch["input_mask"][pack] == number
            assert batch["positions"][pack][own].tolist() == list(range(int(own.sum())))
            found[int(batch["row"][pack][number - 1])] = (
                batch["input_ids"][pack][own].tolist(),
                batch["labels"][pack][own].tolist(),
            )
    assert found == {row["row"]: (row["input_ids"], row["labels"]) for row in rows}


def test_a_foreign_number_of_each_example_is_kept(tmp_path, examples):
    source = tmp_path / "a.tfrecord"
    write_mlperf(
        str(source),
        [Record(Origin("", 0), each, {"line": np.array([-number])}) for number, each in enumerate(examples)],
        RowWidths(S, P),
    )
    made(source, tmp_path / "out")
    lines = [
        int(value)
        for record in open_source(tmp_path / "out").read()
        for value in record.foreign["line"][record.value["next_sentence_weights"] == 1]
    ]
    by_line = dict(zip(lines, [record.value for record in open_source(tmp_path / "out").examples()]))
    assert [by_line[-number] for number in range(len(examples))] == examples


def test_parts_are_joined_in_order(tmp_path, examples, monkeypatch):
    source = tmp_path / "a.tfrecord"
    write_mlperf(str(source), records(examples), RowWidths(S, P))
    one = made(source, tmp_path / "one")
    monkeypatch.setattr(inputs, "SOURCE_PART", 7)
    many = made(source, tmp_path / "many")
    assert many.manifest.shards == one.manifest.shards
    assert many.manifest.made_with["parts"] == 9


def command(*arguments):
    return run_main(build_main, [str(argument) for argument in arguments])


def options(tmp_path, *more):
    files = ("--from", tmp_path / "a.tfrecord", "--out", tmp_path / "out")
    return (*files, "--packer", "spfhp", "--workers", 1, *more)


def test_the_command_says_what_it_skipped(tmp_path, capsys):
    good = frame(tf_example(mlperf_row(example(), 8, 2)))
    (tmp_path / "a.tfrecord").write_bytes(good + frame(b"junk") + good)
    common = options(tmp_path, "--max-sequence-length", 16)
    assert command(*common) == 2
    assert "record 1" in capsys.readouterr().err
    assert command(*common, "--skip-bad", 1) == 0
    out, err = capsys.readouterr()
    assert "skipped" in err and "record 1" in err
    assert verify(tmp_path / "out").manifest.sequences == 2


def test_ids_outside_the_vocabulary_are_refused(tmp_path, capsys):
    (tmp_path / "a.tfrecord").write_bytes(frame(tf_example(mlperf_row(example(), 8, 2))))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    given = options(tmp_path, "--vocabulary", tmp_path / "vocab.txt")
    assert "is not in the vocabulary of 6" in refusal_of(build_main, given, capsys)


def test_a_column_with_a_name_of_the_build_is_refused(tmp_path, capsys):
    pq.write_table(pa.table({"input_ids": [[1, 2]], "slot": [3]}), tmp_path / "a.parquet")
    assert command("--from", tmp_path / "a.parquet", "--out", tmp_path / "out", "--workers", 1) == 2
    assert "may not be called slot" in capsys.readouterr().err
