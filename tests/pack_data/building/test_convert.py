"""Formats told from the content, folders of files, and conversions from end to end."""

import subprocess
import sys

import numpy as np
import pytest

from tests.refusals import refusal_of

pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")


from pack_data.building import convert
from pack_data.cli.command import run_main
from pack_data.formats.records import Record, RowWidths
from pack_data.formats.source import open_source
from pack_data.reading import durable, files
from pack_data.reading.bad_records import Origin
from pack_data.reading.files import only_writer
from pack_data.store.data_set import StoreWriter
from pack_data.store.packs import SEQUENCE, SLOT, PackSchema, StoredColumn, assemble
from pack_data.store.sequences import Sequences
from tests.format_samples import (
    example,
    frame,
    pack_from_examples,
    random_examples,
    records,
    write_mlperf,
    write_packed,
    write_store,
)
from tests.imports import ROOT
from tests.pack_data.text_corpus import build_small, write_corpus

S = 24
P = 4
D = 3


def command(*arguments):
    return run_main(convert.main, [str(argument) for argument in arguments])


def in_packs(examples):
    """Every D examples of at most S / D tokens make a pack."""
    return [pack_from_examples(examples[at : at + D], RowWidths(S, P * D, D)) for at in range(0, len(examples), D)]


@pytest.fixture
def examples():
    return random_examples(np.random.default_rng(5), 10, S // D, P)


@pytest.fixture
def mlperf(tmp_path, examples):
    path = tmp_path / "examples.tfrecord"
    write_mlperf(str(path), records(examples), RowWidths(S, P))
    return path


@pytest.fixture
def packed(tmp_path, examples):
    path = tmp_path / "packs.tfrecord"
    write_packed(str(path), records(in_packs(examples)), RowWidths())
    return path


def test_unpacked_to_packed_and_back_is_the_same_file(tmp_path, mlperf, examples, capsys):
    """MLPerf TFRecord -> examples -> packed TFRecord and store -> packed TFRecord -> MLPerf TFRecord."""
    read = [record.value for record in open_source(mlperf).read()]
    write_packed(str(tmp_path / "1.tfrecord"), records(in_packs(read)), RowWidths())
    packs = [read[at : at + D] for at in range(0, len(read), D)]
    write_store(tmp_path / "store", packs, RowWidths(S, P * D, D))
    inside = [tmp_path / "store", tmp_path / "store" / "manifest.json", "--to-format", "packed_tfrecord"]
    assert "lies among them" in refusal_of(convert.main, inside, capsys)
    assert command(tmp_path / "store", tmp_path / "2.tfrecord") == 0
    assert (tmp_path / "1.tfrecord").read_bytes() == (tmp_path / "2.tfrecord").read_bytes()
    assert (
        command(tmp_path / "2.tfrecord", tmp_path / "3.tfrecord", "--unpack", "--max-predictions-per-sequence", P) == 0
    )
    assert (tmp_path / "3.tfrecord").read_bytes() == mlperf.read_bytes()


def test_unpacked_width_is_that_of_one_sequence(tmp_path):
    """A pack of depth 2 with P = 4 + 2 comes from sequences of at most 4 predictions."""
    pack = pack_from_examples([example(), example(seed=1)], RowWidths(S, 6, 2))
    write_packed(str(tmp_path / "a.tfrecord"), records([pack]), RowWidths())
    assert command(tmp_path / "a.tfrecord", tmp_path / "b.tfrecord", "--to-format", "mlperf_tfrecord") == 0
    assert open_source(tmp_path / "b.tfrecord").shape() == RowWidths(S, 4, None)
    assert [record.value for record in open_source(tmp_path / "b.tfrecord").read()] == [example(), example(seed=1)]


# Files that cannot be read.
UNREADABLE = {
    "none.tfrecord": b"",
    "none.bin": b"",
    "text.bin": b"something else",
    "lengths.npy": b"\x93NUMPY and so on",
    "text.tfrecord": b"something else",
    "cut.gz": b"\x1f\x8bxxxxxxxxxxxxxxxx",
    "cut.parquet": b"PAR1",
    "cut.arrow": b"\xff\xff\xff\xff",
    "cut.hdf5": b"\x89HDF\r\n\x1a\n",
    "tokens.jsonl": b'{"input_ids": [1]}\n',
}
# Arguments, and what the message names.
MISTAKES = [
    ("none.tfrecord b.tfrecord", ["none.tfrecord", "no record"]),
    ("none.bin b.tfrecord", ["none.bin", "empty"]),
    ("text.bin b.tfrecord", ["text.bin", "mlperf_tfrecord, packed_tfrecord"]),
    ("lengths.npy b.tfrecord", ["lengths.npy", "NumPy", "lengths"]),
    ("text.tfrecord b.tfrecord", ["text.tfrecord", "record 0", "checksum"]),
    ("cut.gz b.tfrecord", ["cut.gz", "compressed"]),
    ("cut.parquet b.tfrecord", ["cut.parquet", "Arrow"]),
    ("cut.arrow b.tfrecord", ["cut.arrow", "Arrow"]),
    ("cut.hdf5 b.tfrecord", ["cut.hdf5", "HDF5"]),
    ("missing.tfrecord b.parquet", ["missing.tfrecord", "no such file"]),
    ("examples.tfrecord b.parquet", ["b.parquet", "BERT examples"]),
    ("packs.tfrecord b --to-format arrow", ["b", "TFRecord"]),
    ("examples.tfrecord b.xyz", ["b.xyz", "--to-format"]),
    ("examples.tfrecord b.hdf5", ["b.hdf5", "HDF5"]),
    ("examples.tfrecord examples.tfrecord", ["examples.tfrecord", "one of the files to read"]),
    ("examples.tfrecord b.tfrecord --to-format packed_tfrecord", ["packed_tfrecord", "packed-bert build --from"]),
    ("examples.tfrecord b.tfrecord --from-format packed_tfrecord", ["examples.tfrecord", "positions"]),
    ("examples.tfrecord b.parquet --columns input_ids", ["columns", "Parquet"]),
    ("examples.tfrecord b.parquet --skip-bad -1", ["--skip-bad", "-1", "0"]),
    ("empty b.parquet", ["empty", "part-NNNNN"]),
    ("tokens.jsonl b.tfrecord", ["b.tfrecord", ".parquet"]),
]


def test_mistakes_are_one_line(tmp_path, mlperf, packed, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, content in UNREADABLE.items():
        (tmp_path / name).write_bytes(content)
    for arguments, names in MISTAKES:
        refusal_of(convert.main, arguments.split(), capsys, *names, unchanged=tmp_path)


def test_a_foreign_column_of_packs_stays_with_packs_and_is_named_when_they_are_taken_apart(tmp_path, examples, capsys):
    rows = [
        Record(Origin("given", 0), pack, {"shard": np.array([number])})
        for number, pack in enumerate(in_packs(examples))
    ]
    write_packed(str(tmp_path / "a.tfrecord"), rows, RowWidths())
    assert command(tmp_path / "a.tfrecord", tmp_path / "b.tfrecord.gz") == 0
    shards = [record.foreign["shard"].tolist() for record in open_source(tmp_path / "b.tfrecord.gz").read()]
    assert shards == [[number] for number in range(len(rows))]
    assert command(tmp_path / "a.tfrecord", tmp_path / "c.tfrecord", "--unpack") == 0
    assert "left out: shard" in capsys.readouterr().err
    assert [record.value for record in open_source(tmp_path / "c.tfrecord").read()] == examples


def test_token_sequences_come_out_of_their_store(tmp_path, capsys):
    columns = (("input_ids", SLOT, "<u2"), ("labels", SLOT, "<i4"), ("row", SEQUENCE, "<u4"))
    schema = PackSchema.of_tokens(8, 3, [StoredColumn(*column) for column in columns])
    sequences = Sequences.of_tokens(
        [3, 2, 4], {"input_ids": np.arange(9), "labels": np.arange(9) - 4}, {"row": np.array([5, 6, 7])}
    )
    writer = StoreWriter(tmp_path / "store", schema)
    writer.add(assemble(schema, sequences, np.array([0, 0, 1]), np.array([0, 1, 0]), 2))
    writer.finish(algorithm="by hand").close()
    assert command(tmp_path / "store", tmp_path / "a.parquet", "--unpack") == 0
    assert pq.read_table(tmp_path / "a.parquet").to_pydict() == {
        "input_ids": [[0, 1, 2], [3, 4], [5, 6, 7, 8]],
        "labels": [[-4, -3, -2], [-1, 0], [1, 2, 3, 4]],
        "row": [5, 6, 7],
    }
    capsys.readouterr()
    store = tmp_path / "store"
    parquet = tmp_path / "b.parquet"
    refusal_of(convert.main, [store, parquet], capsys, "token_packs", "packed_parquet", "--unpack")
    refusal_of(
        convert.main, [store, parquet, "--to-format", "packed_parquet"], capsys, "input_ids, labels", "loss_mask"
    )
    assert not parquet.exists()


def test_nothing_is_not_converted(tmp_path, capsys):
    (tmp_path / "a.tfrecord").write_bytes(frame(b"junk"))
    options = "--from-format mlperf_tfrecord --to-format mlperf_tfrecord --skip-bad 1".split()
    assert command(tmp_path / "a.tfrecord", tmp_path / "b", *options) == 2
    assert "a.tfrecord: has no record to convert" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.tfrecord"]


KILLED = """
import os, signal, sys
from pack_data.building import convert
from pack_data.formats.source import Source
read = Source.read
def killed(self):
    for number, record in enumerate(read(self)):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield record
Source.read = killed
convert.main(sys.argv[1:])
"""


def test_what_a_killed_conversion_leaves_the_next_one_removes(tmp_path, packed):
    place = tmp_path / "out"
    place.mkdir()
    name = "a.tfrecord.gz"
    others = {f"{name}.1.77.tmp", f"{name}.tmp", f"other.{durable._MACHINE}.77.tmp"}  # another machine's, other names
    for other in others:
        (place / other).write_text("")
    arguments = [str(packed), str(place / name)]
    program = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert program.returncode == -9, program.stderr
    left = {path.name for path in place.iterdir()} - others
    assert any(file.endswith(".tmp") for file in left), "the kill came too early to leave anything"
    assert command(packed, place / name) == 0
    assert {path.name for path in place.iterdir()} == {name} | others


def test_a_conversion_that_is_alive_loses_nothing(tmp_path, packed, monkeypatch, capsys):
    """Another one to the same place, in another process, is refused at once and touches nothing."""
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0)
    target = tmp_path / "a.tfrecord.gz"
    with only_writer(target):
        unfinished = durable.temporary_name(target)
        unfinished.write_text("")
        assert command(packed, target) == 2
        assert "is writing" in capsys.readouterr().err
        assert unfinished.exists()
        assert not target.exists()


def test_a_data_set_unpacked_has_the_predictions_that_it_was_built_with(tmp_path):
    with build_small(write_corpus(tmp_path / "corpus", documents=12), tmp_path / "data") as store:
        predictions = store.manifest.max_predictions_per_sequence
        sequences = store.manifest.sequences
    assert command(tmp_path / "data", tmp_path / "out.tfrecord", "--unpack") == 0
    source = open_source(tmp_path / "out.tfrecord")
    assert (source.format, source.shape()) == ("mlperf_tfrecord", RowWidths(64, predictions, None))
    assert sum(1 for _ in source.read()) == sequences
