"""TFRecord: frames and checksums, the three formats kept in them, and what damage does."""

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")

from pack_data.formats import tfrecord
from pack_data.formats.records import Record, RowWidths
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.store.packs import FIELDS
from tests.format_samples import (
    CLS_LAST,
    PACKED,
    UNPACKED,
    example,
    feature_kinds,
    frame,
    mlperf_row,
    pack_from_examples,
    random_examples,
    records,
    tf_example,
    unframe,
    values,
    write_mlperf,
    write_packed,
)
from tests.refusals import refused

S, P, D = 24, 4, 3


def write(path, *messages):
    path.write_bytes(b"".join(frame(message) for message in messages))
    return str(path)


# ---- frames ------------------------------------------------------------------------------------------------------


def test_the_checksum_is_the_published_one(tmp_path):
    """CRC32C of "123456789" is e3069283 (RFC 3720 gives the polynomial; the value is its usual check); masked by hand:
    rotated right by 15 it is 2507c60d, plus a282ead8 is c78ab0e5."""
    assert tfrecord._masked_crc(b"123456789") == 0xC78AB0E5


@given(st.lists(st.binary(max_size=40), max_size=6), st.booleans())
def test_frames_round_trip(tmp_path_factory, messages, zipped):
    """Written files have the frames and the messages of an encoder that shares no code with ours."""
    path = str(tmp_path_factory.mktemp("frames") / ("a.tfrecord.gz" if zipped else "a.tfrecord"))
    records = [Record(Origin("", 0), {"note": [each]}) for each in messages]
    assert tfrecord.write_records(path, records, dict) == len(messages)
    framed = [tf_example({"note": [each]}) for each in messages]
    assert [data for _, data in tfrecord.read_frames(path, BadRecords())] == framed
    raw = Path(path).read_bytes()
    assert (gzip.decompress(raw) if zipped else raw) == b"".join(map(frame, framed))


def test_gzip_members_one_after_another_are_one_file(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(frame(b"one") + frame(b"two")[:5]) + gzip.compress(frame(b"two")[5:]) + b"\0" * 512)
    assert [data for _, data in tfrecord.read_frames(str(path), BadRecords())] == [b"one", b"two"]


def test_the_same_records_give_the_same_bytes(tmp_path):
    rows = [Record(Origin("", 0), example(), {"note": [b"x"], "a": np.arange(3)})]
    for name in ("a.tfrecord.gz", "b.tfrecord.gz"):
        write_mlperf(str(tmp_path / name), rows, RowWidths(S, P))
    assert (tmp_path / "a.tfrecord.gz").read_bytes() == (tmp_path / "b.tfrecord.gz").read_bytes()


def test_a_failed_write_leaves_the_former_file(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"former")

    def broken():
        yield Record(Origin("", 0), example())
        raise ValueError("stop")

    with refused("stop"):
        write_mlperf(str(path), broken(), RowWidths(S, P))
    assert path.read_bytes() == b"former"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tfrecord"]


# ---- damage ------------------------------------------------------------------------------------------------------


def test_more_bad_records_than_allowed_are_counted_in_the_message(tmp_path):
    path = write(tmp_path / "a.tfrecord", b"junk", b"junk", tf_example(mlperf_row(example(), S, P)))
    with refused("record 1", "2 bad records", "--skip-bad 1"):
        values(path, skip_bad=1)
    assert values(path, skip_bad=2) == [example()]


@given(st.integers(0, 2**32), st.sampled_from(["cut", "flip", "gzip cut", "gzip flip"]))
def test_damage_anywhere_loses_no_record_before_it(tmp_path_factory, seed, damage):
    """Whatever is cut or flipped: every record before it comes out of a plain file, nothing false does, and what is
    said is one line."""
    rng = np.random.default_rng(seed)
    examples = random_examples(rng, 6, S, P)
    frames = [frame(tf_example(mlperf_row(each, S, P))) for each in examples]
    raw = b"".join(frames)
    place = int(rng.integers(len(raw)))
    stored = raw
    if damage.startswith("gzip"):
        stored = gzip.compress(raw)
        place = int(rng.integers(10, len(stored)))  # behind the gzip header
    if damage.endswith("cut"):
        stored = stored[:place]
    else:
        stored = stored[:place] + bytes([stored[place] ^ 1 << int(rng.integers(8))]) + stored[place + 1 :]
    path = tmp_path_factory.mktemp("damage") / "a.tfrecord"
    path.write_bytes(stored)
    got = []
    try:
        for record in open_source(path, format="mlperf_tfrecord", skip_bad=1).read():
            got.append((record.origin.record, record.value))
    except ValueError as error:
        assert "\n" not in str(error) and "a.tfrecord" in str(error)
    assert all(value == examples[number] for number, value in got)
    if not damage.startswith("gzip"):
        whole = int(np.searchsorted(np.cumsum([len(each) for each in frames]), place, side="right"))
        assert [number for number, _ in got[:whole]] == list(range(whole))


def test_a_cut_gzip_stream_is_an_error_whatever_may_be_skipped(tmp_path):
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(frame(b"one") + frame(b"two"))[:-12])
    with refused("a.tfrecord.gz", "compressed"):
        list(tfrecord.read_frames(str(path), BadRecords(9, 99)))


def test_damage_behind_a_record_that_is_too_long_is_an_error_too(tmp_path):
    """It is not known how many records are lost there, so none may be skipped."""
    path = tmp_path / "a.tfrecord.gz"
    whole = gzip.compress(frame(b"one") + frame(bytes(1000)) + frame(b"two"), 0)
    path.write_bytes(whole)
    assert [data for _, data in tfrecord.read_frames(str(path), BadRecords(1, 99))] == [b"one", b"two"]
    damaged = gzip.compress(frame(b"one") + frame(bytes(1000))[:500], 0)[:-8] + b"\xff" * 99
    path.write_bytes(damaged)
    with refused("a.tfrecord.gz", "compressed"):
        list(tfrecord.read_frames(str(path), BadRecords(9, 99)))


# ---- MLPerf ------------------------------------------------------------------------------------------------------


def test_an_unpacked_record_made_by_hand(tmp_path):
    """[CLS] 11 [MASK] [SEP] 12 [SEP] in 8 slots, the third token masked."""
    path = write(
        tmp_path / "a.tfrecord",
        tf_example(
            {
                "input_ids": [101, 11, 103, 102, 12, 102, 0, 0],
                "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
                "segment_ids": [0, 0, 0, 0, 1, 1, 0, 0],
                "masked_lm_positions": [2, 0],
                "masked_lm_ids": [77, 0],
                "masked_lm_weights": [1.0, 0.0],
                "next_sentence_labels": [1],
            }
        ),
    )
    assert values(path) == [([101, 11, 103, 102, 12, 102], 4, [2], [77], 1)]
    assert open_source(path).format == "mlperf_tfrecord"
    assert open_source(path).shape() == RowWidths(8, 2, None)


def test_what_is_written_has_the_exact_names_types_and_values(tmp_path):
    path = tmp_path / "a.tfrecord"
    given_example = example()
    write_mlperf(str(path), records([given_example]), RowWidths(S, P))
    (data,) = unframe(path.read_bytes())
    row = mlperf_row(given_example, S, P)
    assert feature_kinds(data) == {name: 2 if name == "masked_lm_weights" else 3 for name in row}
    assert {name: array.tolist() for name, array in tfrecord.parse(data).items()} == row


@pytest.mark.parametrize(
    "change, names",
    [
        ({"input_ids": [1.0] * S}, ("input_ids", "float", "int64")),
        ({"masked_lm_weights": [1] * 2 + [0] * 2}, ("masked_lm_weights", "int64", "float")),
        ({"masked_lm_weights": [1.0] * 3}, ("masked_lm_weights has 3", "masked_lm_positions 4")),
        ({"masked_lm_weights": [0.5, 1.0, 0.0, 0.0]}, ("masked_lm_weights", "ones")),
        ({"masked_lm_ids": [7, 8, 9]}, ("masked_lm_positions has 4", "masked_lm_ids 3")),
        ({"input_ids": [-5] + [1] * 6 + [0] * 17}, ("input_ids", -5, "index 0")),
        ({"input_ids": [2**40] + [1] * 6 + [0] * 17}, ("input_ids", 2**40, "index 0")),
        ({"input_ids": [1] * 7}, ("segment_ids has 24", "input_ids 7")),
        ({"input_ids": [1] * 8 + [0] * 16}, ("not 0",)),
        ({"input_mask": [0] * S}, ("input_mask",)),
        ({"input_mask": [1] * 3 + [2] * 4 + [0] * 17}, ("input_mask", "packed")),
        ({"input_mask": [1] * 7}, ("input_mask has 7", "input_ids 24")),
        ({"segment_ids": [1] * 7 + [0] * 16 + [1]}, ("not 0",)),
        ({"segment_ids": [0, 1, 0, 1] + [1] * 3 + [0] * 17}, ("segment_ids", "zeros followed by ones")),
        ({"segment_ids": [1] * 7 + [0] * 17}, ("segment_ids", "first segment")),
        ({"segment_ids": [0, 0, 0, 0, 2, 2, 2] + [0] * 17}, ("segment_ids", 2, "index 4", "0 to 1")),
        ({"masked_lm_positions": [2, 7, 0, 0]}, ("masked_lm_positions", 7, "index 1", "7 tokens")),
        ({"masked_lm_positions": [2, 2, 0, 0]}, ("masked_lm_positions", "twice")),
        ({"masked_lm_ids": [5, 6, 7, 0]}, ("not 0",)),
        ({"next_sentence_labels": [2]}, ("next_sentence_labels", 2, "0 or 1")),
        ({"next_sentence_labels": [0, 0]}, ("next_sentence_labels", "2 values")),
        ({"next_sentence_labels": []}, ("next_sentence_labels", "bytes|0 values")),
    ],
)
def test_a_bad_record_is_named_with_its_reason(tmp_path, change, names):
    row = {**mlperf_row(example(), S, P), **change}
    path = write(tmp_path / "a.tfrecord", tf_example(mlperf_row(example(), S, P)), tf_example(row))
    with refused("a.tfrecord: record 1", *names):
        values(path)
    assert values(path, skip_bad=1) == [example()]


def test_a_missing_feature_is_named(tmp_path):
    row = mlperf_row(example(), S, P)
    del row["segment_ids"]
    path = write(tmp_path / "a.tfrecord", tf_example(row))
    with refused("record 0", "segment_ids"):
        values(path, format="mlperf_tfrecord")
    with refused("a.tfrecord", "masked_lm_weights", "--from-format"):
        open_source(path)


def packed_rows(count, without=()):
    """Packed records, the first ones without one feature each."""
    rows = [pack_from_examples([example(seed=seed)], RowWidths(S, P, D)) for seed in range(count)]
    for row, name in zip(rows, without):
        del row[name]
    floats = ("masked_lm_weights", "next_sentence_weights")
    return [tf_example({name: list(map(float if name in floats else int, row[name])) for name in row}) for row in rows]


@pytest.mark.parametrize("name", sorted(set(FIELDS) - set(mlperf_row(example(), S, P))))
def test_a_packed_file_whose_first_record_lacks_a_feature_is_still_packed(tmp_path, name):
    path = write(tmp_path / "a.tfrecord", *packed_rows(3, [name]))
    source = open_source(path, skip_bad=1)
    assert source.format == "packed_tfrecord"
    assert [record.origin.record for record in source.read()] == [1, 2] and name in source.report()


def test_a_file_of_which_no_record_tells_the_format_is_a_question(tmp_path):
    incomplete = packed_rows(2, ["positions", "next_sentence_weights"])
    unpacked = tf_example(mlperf_row(example(), S, P))
    with refused("a.tfrecord", "--format"):
        open_source(write(tmp_path / "a.tfrecord", *incomplete))
    with refused("b.tfrecord", "1 .*mlperf_tfrecord", "1 .*packed_tfrecord", "--format"):
        open_source(write(tmp_path / "b.tfrecord", unpacked, *packed_rows(1)))
    assert open_source(write(tmp_path / "c.tfrecord", *incomplete, unpacked)).format == "mlperf_tfrecord"


@given(st.integers(0, 2**32), st.booleans())
def test_examples_round_trip(tmp_path_factory, seed, zipped):
    examples = random_examples(np.random.default_rng(seed), 5, S, P)
    path = str(tmp_path_factory.mktemp("mlperf") / f"a.tfrecord{'.gz' if zipped else ''}")
    write_mlperf(path, records(examples), RowWidths(S, P))
    assert values(path) == examples


def test_foreign_features_come_along_with_their_types(tmp_path):
    foreign = {"document": [b"Anarchism", b"x"], "score": [0.5], "line": [3, 4]}
    path = write(tmp_path / "a.tfrecord", tf_example({**mlperf_row(example(), S, P), **foreign}))
    (record,) = open_source(path).read()
    again = str(tmp_path / "b.tfrecord")
    write_mlperf(again, [record], RowWidths(S, P))
    (second,) = open_source(again).read()
    for name, expected in foreign.items():
        assert list(second.foreign[name]) == expected
    assert feature_kinds(unframe(Path(again).read_bytes())[0])["score"] == 2


def test_a_row_too_short_for_an_example_says_what_to_do(tmp_path):
    records = [Record(Origin("src", 9), example())]
    with refused("src: record 9", 7, 6, "--max-sequence-length"):
        write_mlperf(str(tmp_path / "a.tfrecord"), records, RowWidths(6, 4))
    with refused("record 9", 2, 1, "--max-predictions-per-sequence"):
        write_mlperf(str(tmp_path / "a.tfrecord"), records, RowWidths(8, 1))
    with refused("--max-sequence-length", "--max-predictions-per-sequence"):
        write_mlperf(str(tmp_path / "a.tfrecord"), records, RowWidths(8))
    table = Record(Origin("src", 9), example(), {"table": np.zeros((2, 2))})
    with refused("src: record 9", "table"):
        write_mlperf(str(tmp_path / "a.tfrecord"), [table], RowWidths(S, P))
    assert not list(tmp_path.iterdir())


# ---- packed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, row", [("packed_tfrecord", PACKED), ("cls_last_tfrecord", CLS_LAST)])
def test_a_pack_made_by_hand(tmp_path, name, row):
    source = open_source(write(tmp_path / "a.tfrecord", tf_example(row)))
    assert (source.format, source.kind, source.shape()) == (name, "packs", RowWidths(10, 5, 3))
    (record,) = source.read()
    assert {name: array.tolist() for name, array in record.value.items()} == PACKED
    assert [record.value for record in source.examples()] == UNPACKED


def test_written_packs_have_the_exact_names_and_types(tmp_path):
    path = tmp_path / "a.tfrecord"
    (record,) = open_source(write(tmp_path / "in.tfrecord", tf_example({**PACKED, "shard": [7]}))).read()
    write_packed(str(path), [record], RowWidths())
    (data,) = unframe(path.read_bytes())
    kinds = {name: 2 if name in ("masked_lm_weights", "next_sentence_weights") else 3 for name in PACKED}
    assert feature_kinds(data) == {**kinds, "shard": 3}
    assert {name: tfrecord.parse(data)[name].tolist() for name in PACKED} == PACKED


@pytest.mark.parametrize(
    "change, names",
    [
        ({"positions": [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]}, ("positions", "sequence 2", "0 to 3")),
        ({"input_mask": [1, 1, 1, 1, 1, 3, 3, 3, 3, 0]}, ("masked_lm_weights", 2, "index 1", "input_mask", 3)),
        (
            {"input_mask": [1] * 5 + [4] * 4 + [0], "masked_lm_weights": [1.0, 4.0, 4.0, 0.0, 0.0]},
            ("input_mask", 4, "next_sentence_weights", 3),
        ),
        (
            {"next_sentence_weights": [1.0, 0.0, 0.0], "next_sentence_labels": [1, 0, 0]},
            ("input_mask", 2, "next_sentence_weights has 1"),
        ),
        (
            {"input_mask": [1] * 5 + [3] * 4 + [0], "masked_lm_weights": [1.0, 3.0, 3.0, 0.0, 0.0]},
            ("input_mask", 3, "next_sentence_weights has 2"),
        ),
        (
            {
                "input_mask": [1] * 5 + [3] * 4 + [0],
                "masked_lm_weights": [1.0, 3.0, 3.0, 0.0, 0.0],
                "next_sentence_weights": [1.0, 1.0, 1.0],
            },
            ("input_mask", "number 2"),
        ),
        ({"next_sentence_positions": [0, 6, 0]}, ("next_sentence_positions", "slot 5", "sequence 2")),
        ({"next_sentence_positions": [0, 10, 0]}, ("next_sentence_positions", "10 slots")),
        ({"next_sentence_weights": [1.0, 1.5, 0.0]}, ("next_sentence_weights", "whole")),
        ({"next_sentence_weights": [1.0, 2.0, 0.0]}, ("next_sentence_weights", 2, "0 to 1")),
        ({"next_sentence_labels": [1, 0, 1]}, ("next_sentence_labels", "next_sentence_weights")),
        ({"masked_lm_positions": [1, 6, 10, 0, 0]}, ("masked_lm_positions", 10, "index 2", "10 slots")),
        ({"masked_lm_positions": [1, 6, 4, 0, 0]}, ("masked_lm_weights", 2, "index 2", "input_mask", 1)),
        ({"masked_lm_ids": [11, 21, 22, 5, 0]}, ("masked_lm_ids", "masked_lm_weights")),
        ({"masked_lm_ids": [11, 21, 22, 0]}, ("masked_lm_ids has 4", "masked_lm_positions 5")),
        ({"segment_ids": [0, 0, 1, 0, 1, 0, 0, 0, 1, 0]}, ("segment_ids", "sequence 1", "zeros followed by ones")),
        ({"input_ids": [101, 103, 102, 12, 102, 101, 103, 103, 102, 9]}, ("input_ids", "input_mask")),
        ({name: [0.0 if "weights" in name else 0] * len(PACKED[name]) for name in PACKED}, ("at least one",)),
    ],
)
def test_a_bad_pack_is_named_with_its_reason(tmp_path, change, names):
    path = write(tmp_path / "a.tfrecord", tf_example(PACKED), tf_example({**PACKED, **change}))
    with refused("a.tfrecord: record 1", *names):
        values(path)
    assert len(values(path, skip_bad=1)) == 1


@given(st.integers(0, 2**32))
def test_packs_round_trip_and_fall_apart_into_their_examples(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    packs = [random_examples(rng, int(rng.integers(1, D + 1)), S // D, P) for _ in range(4)]
    path = str(tmp_path_factory.mktemp("packed") / "a.tfrecord")
    made = [pack_from_examples(pack, RowWidths(S, P * D, D)) for pack in packs]
    write_packed(path, records(made), RowWidths())
    source = open_source(path)
    for record, pack in zip(source.read(), made):
        assert all(np.array_equal(record.value[name], pack[name]) for name in FIELDS)
    assert [record.value for record in source.examples()] == [each for pack in packs for each in pack]


@pytest.mark.parametrize("suffix", ["tfrecord", "tfrecord.gz"])
def test_a_record_beyond_the_limit_is_a_bad_one_and_never_held(tmp_path, suffix):
    """8 MB in one record, some 8 kB compressed: it is passed over, and the records around it are read."""
    path = str(tmp_path / f"a.{suffix}")
    content = b"".join(map(frame, (b"one", bytes(8 << 20), b"three")))
    Path(path).write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with refused("record 1", "4,194,304", "--max-record-bytes"):
        list(tfrecord.read_frames(path, BadRecords(0, 4 << 20)))
    tracemalloc.start()
    bad = BadRecords(1, 4 << 20)
    found = [(origin.record, data) for origin, data in tfrecord.read_frames(path, bad)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(0, b"one"), (2, b"three")] and bad.count == 1 and most < 4 << 20
    assert len(list(tfrecord.read_frames(path, BadRecords()))) == 3


@pytest.mark.parametrize("length", [100, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 64) - 1])
@pytest.mark.parametrize("suffix", ["tfrecord", "tfrecord.gz"])
def test_a_length_far_beyond_the_file_allocates_nothing(tmp_path, length, suffix):
    header = length.to_bytes(8, "little")
    content = header + tfrecord._CHECKSUM.pack(tfrecord._masked_crc(header)) + b"short"
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    tracemalloc.start()
    with refused("record 0"):
        list(tfrecord.read_frames(str(path), BadRecords()))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 << 20
