"""`multiple_of` in builds, rows, streams and collators: sequences begin at multiples, and nothing else changes."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import PackDataset, PackStream, pack, pack_dataset
from pack_data.batching.collators import padded_batch, padding_free_batch
from pack_data.building import assignment_on_disk
from pack_data.building.command import BuildOptions, build
from pack_data.building.command import main as build_main
from pack_data.building.verify import verify
from pack_data.cli.command import run_main
from pack_data.packing.packing import Packing, prove
from pack_data.store.data_set import CHECKSUM, StoreWriter, _checksum, read_manifest
from pack_data.store.packs import PackSchema, assemble, decode, disassemble
from pack_data.store.sequences import Sequences, rounded_up
from pack_data.stream.rows import PackRows, packed_rows
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refused
from tests.token_sequences import random_sequences

pytestmark = pytest.mark.usefixtures("small_parts")

S, M = 24, 4
GIVEN = random_sequences(80, longest=S)
EXAMPLES = [{"input_ids": each} for each in GIVEN]


def found_in(mask, positions, ids):
    """The sequences of a row, by its mask and positions; each begins at a multiple, padding has zeros."""
    assert len(ids) % M == 0 and not positions[mask == 0].any() and not ids[mask == 0].any()
    found = []
    for number in range(1, int(mask.max()) + 1):
        slots = np.flatnonzero(mask == number)
        assert slots[0] % M == 0 and np.array_equal(slots, slots[0] + np.arange(len(slots)))
        assert np.array_equal(positions[slots], np.arange(len(slots)))
        found.append(ids[slots].tolist())
    return found


def verify_packs(folder, schema, records):
    writer = StoreWriter(folder, schema)
    writer.add(records)
    writer.finish(algorithm="by hand").close()
    verify(folder)


@settings(max_examples=40)
@given(data=st.data(), multiple_of=st.sampled_from([1, 2, 3, 6]))
def test_packs_hold_the_same_sequences_at_multiples(tmp_path_factory, data, multiple_of):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=30))
    packed = pack(lengths, max_sequence_length=12, multiple_of=multiple_of)
    depth, total = packed.packing.largest_depth, sum(lengths)
    schema = PackSchema.bert(12, depth, total + 1, vocabulary_size=300)
    schema = PackSchema.from_json({**schema.to_json(), **({"multiple_of": multiple_of} if multiple_of > 1 else {})})
    rng = np.random.default_rng(0)
    sequences = Sequences(
        np.array(lengths),
        {"input_ids": rng.integers(1, 300, total)},
        np.ones(len(lengths), int),
        {"masked_lm_positions": rng.integers(0, lengths), "masked_lm_ids": rng.integers(1, 300, len(lengths))},
        {
            "first_segment_lengths": rng.integers(1, np.array(lengths) + 1),
            "next_sentence_labels": np.zeros_like(lengths),
        },
    )
    records = assemble(schema, sequences, packed.pack, packed.slot, packed.packing.packs)
    verify_packs(tmp_path_factory.mktemp("packs"), schema, records)
    order = np.lexsort((packed.slot, packed.pack))
    assert disassemble(schema, records).to_examples() == sequences.take(order).to_examples()
    plain = PackSchema.from_json({name: value for name, value in schema.to_json().items() if name != "multiple_of"})
    batch = decode(schema, records)
    alone = decode(plain, assemble(plain, sequences, np.arange(len(lengths)), np.zeros_like(lengths), len(lengths)))
    for number, (row, place) in enumerate(zip(packed.pack, packed.slot)):
        slots = batch["input_mask"][row] == place + 1
        start = batch["next_sentence_positions"][row, place]
        assert start % multiple_of == 0 and np.flatnonzero(slots)[0] == start
        for name in ("input_ids", "positions", "segment_ids"):
            assert np.array_equal(batch[name][row, slots], alone[name][number, : lengths[number]])
        masked = batch["masked_lm_weights"][row] == place + 1
        assert batch["masked_lm_positions"][row, masked] - start == alone["masked_lm_positions"][number, 0]
    for name in ("input_ids", "positions", "segment_ids"):
        assert not batch[name][batch["input_mask"] == 0].any()


def test_a_value_between_two_sequences_is_found(tmp_path):
    schema = PackSchema(8, 2, 0, "tokens", PackSchema.from_json(_tokens_schema()).columns, 4)
    sequences = Sequences(np.array([3, 2]), {"input_ids": np.arange(1, 6)}, np.zeros(2, int), {}, {})
    records = assemble(schema, sequences, np.zeros(2, int), np.arange(2), 1)
    assert records["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    verify_packs(tmp_path, schema, records)
    records["input_ids"][0, 3] = 7
    with refused("pack 0", "input_ids"):
        verify_packs(tmp_path, schema, records)


def _tokens_schema():
    column = {"name": "input_ids", "axis": "slot", "dtype": "<u2", "slot_index": False}
    widths = {"max_sequence_length": 8, "max_sequences_per_pack": 2, "max_predictions_per_pack": 0}
    return {"kind": "tokens", **widths, "columns": [column]}


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_build_rounds_up_and_accounts_for_it(tmp_path, monkeypatch, on_disk):
    if on_disk:
        monkeypatch.setattr(assignment_on_disk, "IN_MEMORY", 50)
        monkeypatch.setattr(assignment_on_disk, "NUMBERS", 60)
    corpus = write_corpus(tmp_path / "corpus")
    plain = build_small(corpus, tmp_path / "plain", packer="optimal").manifest
    S = plain.schema.max_sequence_length
    assert S % 8 == 0
    with build_small(corpus, tmp_path / "data", packer="optimal", multiple_of=8) as store:
        manifest = store.manifest
        batch = store.batch(np.arange(len(store)))
    starts = batch["next_sentence_positions"][batch["next_sentence_weights"] > 0]
    assert starts.any() and not (starts % 8).any()
    # The sequences are the same; the bound is that of the rounded lengths, proven.
    assert (manifest.digest, manifest.histogram, manifest.tokens) == (plain.digest, plain.histogram, plain.tokens)
    packing, lengths = Packing.load(tmp_path / "data/recipe.json"), np.repeat(np.arange(S + 1), plain.histogram)
    assert packing.placed().tolist() == np.bincount(rounded_up(lengths, 8), minlength=S + 1).tolist()
    assert prove(packing).lower_bound == manifest.lower_bound <= manifest.packs
    assert manifest.rounding == packing.tokens - manifest.tokens > 0
    verify(tmp_path / "data")
    path = tmp_path / "data/manifest.json"
    told = json.loads(path.read_text())
    assert told["rounding"] == manifest.rounding and told["made_with"]["options"]["multiple_of"] == 8
    told["rounding"] += 1
    path.write_text(json.dumps({**told, CHECKSUM: _checksum(told)}))
    with pytest.raises(ValueError, match="rounding"):
        read_manifest(tmp_path / "data")


def test_the_command_says_what_rounding_adds(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in EXAMPLES))
    arguments = ["--from", str(path), "--out", str(tmp_path / "data"), "--max-sequence-length", str(S)]
    assert run_main(build_main, [*arguments, "--multiple-of", str(M)]) == 0
    added = sum(-len(each) % M for each in GIVEN)
    assert f"rounded up to multiples of {M}: {added} slots of the tokens above are rounding" in capsys.readouterr().out
    assert run_main(build_main, [*arguments, "--multiple-of", "5", "--overwrite"]) == 2
    assert "max_sequence_length = 24 is not a multiple of multiple_of = 5" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["examples", "built"])
def test_rows_of_a_data_set(tmp_path, way):
    if way == "built":
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in EXAMPLES))
        options = dict(max_sequence_length=S, max_sequences_per_pack=None, multiple_of=M)
        rows = PackDataset(build(BuildOptions(tmp_path / "data", source=path, **options)))
    else:
        rows = pack_dataset(EXAMPLES, max_sequence_length=S, multiple_of=M)
    every = [rows[number] for number in range(len(rows))]
    found = [found_in(row["input_mask"], row["positions"], row["input_ids"]) for row in every]
    assert sorted(sum(found, [])) == sorted(GIVEN)
    assert len(rows) == pack([len(each) for each in GIVEN], max_sequence_length=S, multiple_of=M).packing.packs
    assert rows.lengths.sum() == sum(map(len, GIVEN))
    batch = rows.collate(every[:2])
    assert sequences_of_batch(batch) == sum(found[:2], [])


def sequences_of_batch(batch):
    """Return the predicted tokens of a padding-free batch whose examples begin at multiples."""
    ends = batch["cumulative_lengths"].tolist()
    ids, labels, positions = (batch[name][0] for name in ("input_ids", "labels", "position_ids"))
    assert len(ids) % M == 0 and int(batch["max_length"]) == max(np.diff(ends))
    found = []
    for start, end in zip(ends, ends[1:]):
        assert positions[start:end].tolist() == list(range(end - start)) and labels[start] == -100
        if ids[start]:
            assert start % M == 0 and labels[start + 1 : end].tolist() == ids[start + 1 : end].tolist()
            found.append(ids[start:end].tolist())
        else:
            assert end - start < M and (labels[start:end] == -100).all() and not ids[start:end].any()
    return found


def test_collators_pad_each_example():
    assert sequences_of_batch(padding_free_batch(EXAMPLES, multiple_of=M)) == GIVEN
    batch = padding_free_batch(EXAMPLES[:2], multiple_of=M, slots=64)
    assert batch["input_ids"].shape == (1, 64)
    with refused("slots", 30, 4):
        padding_free_batch(EXAMPLES[:2], multiple_of=M, slots=30)
    for count in (0, 1, 5):
        assert padding_free_batch(EXAMPLES[:count], multiple_of=M)["input_ids"].shape[1] % M == 0
        padded, plain = (padded_batch(EXAMPLES[:count], multiple_of=number) for number in (M, 1))
        width = plain["input_ids"].shape[1]
        assert padded["input_ids"].shape[1] == -(-width // M) * M
        for name, rest in (("input_ids", 0), ("labels", -100), ("attention_mask", 0), ("position_ids", 0)):
            assert np.array_equal(padded[name][:, :width], plain[name]) and (padded[name][:, width:] == rest).all()


@pytest.mark.parametrize("way", ["map", "stream"])
def test_rows_for_datasets(way):
    if way == "map":
        made = PackRows(S, multiple_of=M)({"input_ids": GIVEN})
        rows = [dict(zip(made, values)) for values in zip(*made.values())]
        assert len(rows) == pack([len(each) for each in GIVEN], max_sequence_length=S, multiple_of=M).packing.packs
    else:
        rows = list(packed_rows(EXAMPLES, S, multiple_of=M, buffer_sequences=20))
    found = []
    for row in rows:
        ends = np.cumsum([0, *row["seq_lengths"]]).tolist()
        assert ends[-1] == len(row["input_ids"]) <= S and ends[-1] % M == 0
        for start, end in zip(ends, ends[1:]):
            assert row["position_ids"][start:end] == list(range(end - start))
            if row["input_ids"][start]:
                assert start % M == 0 and row["labels"][start:end] == row["input_ids"][start:end]
                found.append(row["input_ids"][start:end])
            else:
                assert set(row["labels"][start:end]) == {-100} and end - start < M
    assert sorted(found) == sorted(GIVEN)


def test_a_stream_rounds_up_and_goes_on_from_its_state():
    def stream():
        return PackStream(S, multiple_of=M, buffer_sequences=16)

    whole, lengths = stream(), [len(each) for each in GIVEN]
    packs = list(whole.packs(enumerate(lengths)))
    assert whole.rounding == sum(-length % M for length in lengths)
    assert whole.waits.tokens == sum(lengths) + whole.rounding
    for one in packs:
        assert sum(one.lengths) <= S and not any(length % M for length in one.lengths)
        assert sorted(one.lengths) == sorted(-(-lengths[number] // M) * M for number in one.examples)
    first, second = stream(), stream()
    begun = [first.put(number, length) for number, length in enumerate(lengths[:40])]
    assert any(begun)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert list(second.packs(enumerate(lengths[40:], 40))) == packs and second.rounding == whole.rounding
    with refused("multiple_of", 4, 1):
        PackStream(S, buffer_sequences=16).load_state_dict(first.state_dict())
    with refused(24, 7):
        PackStream(S, multiple_of=7)
