"""`multiple_of` in builds, rows, streams and collators: sequences begin at multiples, and nothing else changes."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import PackStream, pack, pack_dataset
from pack_data.batching.collators import padding_free_batch
from pack_data.building import assignment_on_disk
from pack_data.building.verify import verify
from pack_data.packing.packing import Packing, prove
from pack_data.store.data_set import CHECKSUM, StoreWriter, _checksum, read_manifest
from pack_data.store.packs import PackSchema, assemble, decode, disassemble
from pack_data.store.quantities import rounded_up
from pack_data.store.sequences import Sequences
from pack_data.stream.rows import PackRows, packed_rows
from tests.pack_data.building.conftest import small_parts  # noqa: F401
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refused
from tests.token_sequences import random_sequences

pytestmark = pytest.mark.usefixtures("small_parts")

S = 24
M = 4
GIVEN = random_sequences(80, longest=S)
EXAMPLES = [{"input_ids": tokens} for tokens in GIVEN]
PACKS = pack(list(map(len, GIVEN)), max_sequence_length=S, multiple_of=M).packing.packs


def verify_packs(folder, schema, records):
    writer = StoreWriter(folder, schema)
    writer.add(records)
    writer.finish(algorithm="by hand").close()
    verify(folder)


def drawn_sequences(lengths):
    """Sequences of these lengths, with random tokens and one masked token each."""
    lengths = np.array(lengths)
    random = np.random.default_rng(0)
    masked = {
        "masked_lm_positions": random.integers(0, lengths),
        "masked_lm_ids": random.integers(1, 300, len(lengths)),
    }
    labels = {
        "first_segment_lengths": random.integers(1, lengths + 1),
        "next_sentence_labels": np.zeros_like(lengths),
    }
    tokens = {"input_ids": random.integers(1, 300, lengths.sum())}
    return Sequences(lengths, tokens, np.ones(len(lengths), int), masked, labels)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.sampled_from([1, 2, 3, 6]),
)
def test_packs_hold_the_same_sequences_at_multiples(tmp_path_factory, lengths, multiple_of):
    packed = pack(lengths, max_sequence_length=12, multiple_of=multiple_of)
    depth = packed.packing.largest_depth
    plain = PackSchema.bert(12, depth, sum(lengths) + 1, vocabulary_size=300)
    schema = plain
    if multiple_of > 1:
        schema = PackSchema.from_json({**plain.to_json(), "multiple_of": multiple_of})
    sequences = drawn_sequences(lengths)
    records = assemble(schema, sequences, packed.pack, packed.slot, packed.packing.packs)
    verify_packs(tmp_path_factory.mktemp("packs"), schema, records)
    order = np.lexsort((packed.slot, packed.pack))
    assert disassemble(schema, records).to_examples() == sequences.take(order).to_examples()

    batch = decode(schema, records)
    rows = np.arange(len(lengths))
    alone = decode(plain, assemble(plain, sequences, rows, np.zeros_like(rows), len(rows)))
    for number, (row, place) in enumerate(zip(packed.pack, packed.slot)):
        slots = batch["input_mask"][row] == place + 1
        start = batch["next_sentence_positions"][row, place]
        assert start % multiple_of == 0
        assert np.flatnonzero(slots)[0] == start
        for name in ("input_ids", "positions", "segment_ids"):
            assert np.array_equal(batch[name][row, slots], alone[name][number, : lengths[number]])
        masked = batch["masked_lm_positions"][row, batch["masked_lm_weights"][row] == place + 1]
        assert masked - start == alone["masked_lm_positions"][number, 0]
    for name in ("input_ids", "positions", "segment_ids"):
        assert not batch[name][batch["input_mask"] == 0].any()


def test_a_value_between_two_sequences_is_found(tmp_path):
    column = {
        "name": "input_ids",
        "axis": "slot",
        "dtype": "<u2",
        "slot_index": False,
    }
    widths = {
        "max_sequence_length": 8,
        "max_sequences_per_pack": 2,
        "max_predictions_per_pack": 0,
    }
    schema = PackSchema.from_json({"kind": "tokens", **widths, "columns": [column], "multiple_of": 4})
    tokens = {"input_ids": np.arange(1, 6)}
    sequences = Sequences(np.array([3, 2]), tokens, np.zeros(2, int), {}, {})
    records = assemble(schema, sequences, np.zeros(2, int), np.arange(2), 1)
    assert records["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    verify_packs(tmp_path, schema, records)
    records["input_ids"][0, 3] = 7
    with refused("pack 0", "input_ids"):
        verify_packs(tmp_path, schema, records)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_build_rounds_up_and_accounts_for_it(tmp_path, monkeypatch, on_disk):
    if on_disk:
        monkeypatch.setattr(assignment_on_disk, "IN_MEMORY", 50)
        monkeypatch.setattr(assignment_on_disk, "NUMBERS", 60)
    corpus = write_corpus(tmp_path / "corpus", 20)
    plain = build_small(corpus, tmp_path / "plain", packer="optimal").manifest
    folder = tmp_path / "data"
    with build_small(corpus, folder, packer="optimal", multiple_of=8) as store:
        manifest = store.manifest
        batch = store.batch(np.arange(len(store)))
    starts = batch["next_sentence_positions"][batch["next_sentence_weights"] > 0]
    assert starts.any()
    assert not (starts % 8).any()
    # The sequences are the same; the bound is that of the rounded lengths, proven.
    for name in ("digest", "histogram", "tokens"):
        assert getattr(manifest, name) == getattr(plain, name)
    packing = Packing.load(folder / "recipe.json")
    lengths = np.repeat(np.arange(len(plain.histogram)), plain.histogram)
    rounded = np.bincount(rounded_up(lengths, 8), minlength=len(plain.histogram))
    assert packing.placed().tolist() == rounded.tolist()
    assert prove(packing).lower_bound == manifest.lower_bound <= manifest.packs
    assert manifest.rounding == packing.tokens - manifest.tokens > 0
    verify(folder)

    path = folder / "manifest.json"
    stored = json.loads(path.read_text())
    assert stored["rounding"] == manifest.rounding
    assert stored["made_with"]["options"]["multiple_of"] == 8
    stored["rounding"] += 1
    path.write_text(json.dumps({**stored, CHECKSUM: _checksum(stored)}))
    with refused("manifest.json", "rounding"):
        read_manifest(folder)


def sequences_of_row(mask, positions, ids):
    """The sequences of a row by its mask and positions; each begins at a multiple, padding has zeros."""
    assert len(ids) % M == 0
    assert not positions[mask == 0].any() and not ids[mask == 0].any()
    sequences = []
    for number in range(1, int(mask.max()) + 1):
        slots = np.flatnonzero(mask == number)
        assert slots[0] % M == 0
        assert np.array_equal(slots, slots[0] + np.arange(len(slots)))
        assert np.array_equal(positions[slots], np.arange(len(slots)))
        sequences.append(ids[slots].tolist())
    return sequences


def sequences_between(ends, ids, labels, positions, *, predicts_next):
    """The examples of a padding-free row: at multiples, and behind each its padding as an example of its own."""
    assert len(ids) % M == 0
    sequences = []
    for start, end in zip(ends, ends[1:]):
        assert list(positions[start:end]) == list(range(end - start))
        if ids[start]:
            first = 1 if predicts_next else 0
            assert start % M == 0
            assert list(labels[start : start + first]) == [-100] * first
            assert list(labels[start + first : end]) == list(ids[start + first : end])
            sequences.append(list(ids[start:end]))
        else:
            assert end - start < M
            assert set(labels[start:end]) == {-100} and not any(ids[start:end])
    return sequences


def test_rows_of_a_data_set_and_of_a_collator():
    rows = pack_dataset(EXAMPLES, max_sequence_length=S, multiple_of=M)
    sequences = []
    for number in range(len(rows)):
        row = rows[number]
        sequences += sequences_of_row(row["input_mask"], row["positions"], row["input_ids"])
    assert sorted(sequences) == sorted(GIVEN)
    assert len(rows) == PACKS
    assert rows.lengths.sum() == sum(map(len, GIVEN))
    collated = padding_free_batch(EXAMPLES, multiple_of=M)
    ends = collated["cumulative_lengths"].tolist()
    columns = [collated[name][0].tolist() for name in ("input_ids", "labels", "position_ids")]
    assert sequences_between(ends, *columns, predicts_next=True) == GIVEN


def test_rows_for_datasets():
    columns = PackRows(S, multiple_of=M)({"input_ids": GIVEN})
    mapped = [dict(zip(columns, values)) for values in zip(*columns.values())]
    assert len(mapped) == PACKS
    for rows in (
        mapped,
        packed_rows(EXAMPLES, S, multiple_of=M, buffer_sequences=20),
    ):
        sequences = []
        for row in rows:
            ends = np.cumsum([0, *row["seq_lengths"]]).tolist()
            assert ends[-1] == len(row["input_ids"]) <= S
            values = [row[name] for name in ("input_ids", "labels", "position_ids")]
            sequences += sequences_between(ends, *values, predicts_next=False)
        assert sorted(sequences) == sorted(GIVEN)


def test_a_stream_rounds_up_and_goes_on_from_its_state():
    lengths = list(enumerate(map(len, GIVEN)))
    whole, first, second = (PackStream(S, multiple_of=M, buffer_sequences=16) for _ in range(3))
    packs = list(whole.packs(lengths))
    added = sum(-length % M for _, length in lengths)
    assert whole.rounding == added
    assert whole.waits.tokens == sum(map(len, GIVEN)) + added
    for pack_ in packs:
        assert sum(pack_.lengths) <= S
        rounded = [-(-len(GIVEN[number]) // M) * M for number in pack_.examples]
        assert sorted(pack_.lengths) == sorted(rounded)
    for number, length in lengths[:40]:
        first.put(number, length)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert list(second.packs(lengths[40:])) == packs
    assert second.rounding == whole.rounding
