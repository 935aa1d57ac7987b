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
FLOATS = ("masked_lm_weights", "next_sentence_weights")
SEEDS = st.integers(0, 2**32)
SUFFIXES = st.sampled_from(["tfrecord", "tfrecord.gz"])


def compressed(stored, suffix):
    return gzip.compress(stored) if suffix.endswith(".gz") else stored


def write(path, *messages):
    path.write_bytes(b"".join(map(frame, messages)))
    return str(path)


# ---- frames ------------------------------------------------------------------------------------------------------


def test_the_checksum_is_the_published_one(tmp_path):
    """CRC32C of "123456789" is e3069283 (RFC 3720 gives the polynomial; the value is its usual check); masked by hand:
    rotated right by 15 it is 2507c60d, plus a282ead8 is c78ab0e5."""
    assert tfrecord._masked_crc(b"123456789") == 0xC78AB0E5


@given(st.lists(st.binary(max_size=40), max_size=6), SUFFIXES)
def test_frames_round_trip_with_the_same_bytes(tmp_path_factory, messages, suffix):
    """Written files have the frames and the messages of an encoder that shares no code with ours."""
    folder = tmp_path_factory.mktemp("frames")
    given_records = [Record(Origin("", 0), {"note": [message]}) for message in messages]
    written = []
    for name in "ab":
        path = str(folder / f"{name}.{suffix}")
        assert tfrecord.write_records(path, given_records, dict) == len(messages)
        written.append(Path(path).read_bytes())
    framed = [tf_example({"note": [message]}) for message in messages]
    frames = tfrecord.read_frames(path, BadRecords())
    assert [message for _, message in frames] == framed
    assert written[0] == written[1]
    plain = b"".join(map(frame, framed))
    stored = gzip.decompress(written[0]) if suffix.endswith("gz") else written[0]
    assert stored == plain


# ---- damage ------------------------------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from(["cut", "flip", "gzip cut", "gzip flip"]))
def test_damage_anywhere_loses_no_record_before_it(tmp_path_factory, seed, damage):
    """Every record before a cut or a flipped bit comes out of a plain file, and nothing false does."""
    rng = np.random.default_rng(seed)
    examples = random_examples(rng, 6, S, P)
    rows = [mlperf_row(row, S, P) for row in examples]
    frames = [frame(tf_example(row)) for row in rows]
    stored = bytearray(b"".join(frames))
    place = int(rng.integers(len(stored)))
    if damage.startswith("gzip"):
        stored = bytearray(gzip.compress(stored))
        place = int(rng.integers(10, len(stored)))  # behind the gzip header
    if damage.endswith("cut"):
        del stored[place:]
    else:
        stored[place] ^= 1 << int(rng.integers(8))
    path = tmp_path_factory.mktemp("damage") / "a.tfrecord"
    path.write_bytes(stored)
    intact = []
    try:
        for record in open_source(path, format="mlperf_tfrecord", skip_bad=1).read():
            intact.append((record.origin.record, record.value))
    except ValueError as error:
        assert "\n" not in str(error)
        assert "a.tfrecord" in str(error)
    assert all(value == examples[number] for number, value in intact)
    if not damage.startswith("gzip"):
        ends = np.cumsum(list(map(len, frames)))
        whole = int(np.searchsorted(ends, place, side="right"))
        numbers = [number for number, _ in intact]
        assert numbers[:whole] == list(range(whole))


@pytest.mark.parametrize("suffix", ["tfrecord", "tfrecord.gz"])
def test_a_record_beyond_the_limit_is_a_bad_one_and_never_held(tmp_path, suffix):
    """8 MB in one record, some 8 kB compressed: it is passed over, and the records around it are read."""
    path = str(tmp_path / f"a.{suffix}")
    messages = (b"one", bytes(8 << 20), b"three")
    stored = b"".join(map(frame, messages))
    Path(path).write_bytes(compressed(stored, suffix))
    with refused("record 1", "4,194,304", "--max-record-bytes"):
        list(tfrecord.read_frames(path, BadRecords(0, 4 << 20)))
    tracemalloc.start()
    bad = BadRecords(1, 4 << 20)
    frames = list(tfrecord.read_frames(path, bad))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [message for _, message in frames] == [b"one", b"three"]
    assert frames[1][0].record == 2
    assert bad.count == 1
    assert most < 4 << 20
    assert len(list(tfrecord.read_frames(path, BadRecords()))) == 3


def test_a_length_far_beyond_the_file_allocates_nothing(tmp_path):
    for length in (100, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 64) - 1):
        header = length.to_bytes(8, "little")
        stored = header + tfrecord._CHECKSUM.pack(tfrecord._masked_crc(header)) + b"short"
        for name, content in (
            ("a.tfrecord", stored),
            ("a.tfrecord.gz", gzip.compress(stored)),
        ):
            (tmp_path / name).write_bytes(content)
            tracemalloc.start()
            with refused("record 0"):
                list(tfrecord.read_frames(str(tmp_path / name), BadRecords()))
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert most < 2 << 20


# ---- examples ----------------------------------------------------------------------------------------------------


def test_an_unpacked_record_made_by_hand(tmp_path):
    """[CLS] 11 [MASK] [SEP] 12 [SEP] in 8 slots, the third token masked."""
    row = {
        "input_ids": [101, 11, 103, 102, 12, 102, 0, 0],
        "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
        "segment_ids": [0, 0, 0, 0, 1, 1, 0, 0],
        "masked_lm_positions": [2, 0],
        "masked_lm_ids": [77, 0],
        "masked_lm_weights": [1.0, 0.0],
        "next_sentence_labels": [1],
    }
    path = write(tmp_path / "a.tfrecord", tf_example(row), b"junk", tf_example(row))
    source = open_source(path, skip_bad=1)
    assert source.format == "mlperf_tfrecord"
    assert source.shape() == RowWidths(8, 2, None)
    given_example = ([101, 11, 103, 102, 12, 102], 4, [2], [77], 1)
    assert [(record.origin.record, record.value) for record in source.read()] == [
        (0, given_example),
        (2, given_example),
    ]


@given(SEEDS, SUFFIXES)
def test_examples_round_trip(tmp_path_factory, seed, suffix):
    examples = random_examples(np.random.default_rng(seed), 5, S, P)
    path = str(tmp_path_factory.mktemp("mlperf") / f"a.{suffix}")
    write_mlperf(path, records(examples), RowWidths(S, P))
    assert values(path) == examples


def test_written_features_have_the_exact_names_types_and_values(tmp_path):
    """Foreign features come along with their types."""
    foreign = {"document": [b"Anarchism", b"x"], "score": [0.5], "line": [3, 4]}
    row = {**mlperf_row(example(), S, P), **foreign}
    (record,) = open_source(write(tmp_path / "a.tfrecord", tf_example(row))).read()
    (pack,) = open_source(write(tmp_path / "b.tfrecord", tf_example({**PACKED, **foreign}))).read()
    write_mlperf(str(tmp_path / "c.tfrecord"), [record], RowWidths(S, P))
    write_packed(str(tmp_path / "d.tfrecord"), [pack], RowWidths())
    for name, expected in (("c", row), ("d", {**PACKED, **foreign})):
        (message,) = unframe((tmp_path / f"{name}.tfrecord").read_bytes())
        kinds = {feature: 2 if feature in (*FLOATS, "score") else 3 for feature in expected}
        assert feature_kinds(message) == {**kinds, "document": 1}
        features = tfrecord.parse(message)
        assert {feature: list(written) for feature, written in features.items()} == expected


# ---- packs -------------------------------------------------------------------------------------------------------


def test_a_pack_made_by_hand(tmp_path):
    source = open_source(write(tmp_path / "a.tfrecord", tf_example(PACKED)))
    assert source.format == "packed_tfrecord"
    assert source.shape() == RowWidths(10, 5, 3)
    (record,) = source.read()
    assert {field: array.tolist() for field, array in record.value.items()} == PACKED
    assert [record.value for record in source.examples()] == UNPACKED


@given(SEEDS)
def test_packs_round_trip_and_fall_apart_into_their_examples(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    depths = rng.integers(1, D + 1, 4).tolist()
    packs = [random_examples(rng, depth, S // D, P) for depth in depths]
    path = str(tmp_path_factory.mktemp("packed") / "a.tfrecord")
    rows = [pack_from_examples(pack, RowWidths(S, P * D, D)) for pack in packs]
    write_packed(path, records(rows), RowWidths())
    source = open_source(path)
    for record, row in zip(source.read(), rows):
        assert all(np.array_equal(record.value[name], row[name]) for name in FIELDS)
    assert [record.value for record in source.examples()] == sum(packs, [])


def test_a_packed_file_whose_first_record_lacks_a_feature_is_still_packed(tmp_path):
    rows = []
    for seed in range(3):
        pack = pack_from_examples([example(seed=seed)], RowWidths(S, P, D))
        row = {name: values.tolist() for name, values in pack.items()}
        for name in FLOATS:
            row[name] = list(map(float, row[name]))
        rows.append(row)
    for name in set(FIELDS) - set(mlperf_row(example(), S, P)):
        first = {field: rows[0][field] for field in FIELDS if field != name}
        messages = map(tf_example, [first, *rows[1:]])
        source = open_source(write(tmp_path / "a.tfrecord", *messages), skip_bad=1)
        assert source.format == "packed_tfrecord"
        assert [record.origin.record for record in source.read()] == [1, 2]
        assert name in source.report()
