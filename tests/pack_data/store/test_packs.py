import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.store.packs import (
    FIELDS,
    PREDICTION,
    PackSchema,
    StoredColumn,
    assemble,
    decode,
    default_predictions,
    disassemble,
    predictions_per_pack,
)
from pack_data.store.sequences import Example, Sequences, digest, mix_bits, smallest_type

VOCABULARY = 300


@st.composite
def examples(draw, longest):
    length = draw(st.integers(1, longest))
    ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length))
    positions = sorted(draw(st.sets(st.integers(0, length - 1), max_size=5)))
    labels = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=len(positions), max_size=len(positions)))
    return Example(ids, draw(st.integers(1, length)), positions, labels, draw(st.integers(0, 1)))


@st.composite
def packed(draw):
    """Sequences with a place each, and the schema they fit."""
    S = draw(st.integers(4, 40))
    D = draw(st.integers(1, 5))
    chosen = []
    pack = []
    slot = []
    packs = draw(st.integers(0, 5))
    for number in range(packs):
        room = S
        for place in range(draw(st.integers(0, D))):
            if not room:
                break
            chosen.append(draw(examples(room)))
            room -= len(chosen[-1].input_ids)
            pack.append(number)
            slot.append(place)
    order = draw(st.permutations(range(len(chosen))))
    masked = [sum(len(e.masked_lm_ids) for e, p in zip(chosen, pack) if p == number) for number in range(packs)]
    spare = draw(st.integers(0, 1)) or not any(masked)
    schema = PackSchema.bert(S, D, max(masked, default=0) + spare, vocabulary_size=VOCABULARY)
    return (
        schema,
        [chosen[i] for i in order],
        np.array([pack[i] for i in order], int),
        np.array([slot[i] for i in order], int),
        packs,
    )


def plain_fields(schema, chosen, pack, slot, packs):
    """The fields of the definition, written out one value at a time."""
    S = schema.max_sequence_length
    D = schema.max_sequences_per_pack
    P = schema.max_predictions_per_pack
    width = dict(zip(FIELDS, (S, S, S, S, P, P, P, D, D, D)))
    batch = {name: np.zeros((packs, width[name]), np.int32) for name in FIELDS}
    for row in range(packs):
        start = masked = 0
        members = sorted((s, e) for e, p, s in zip(chosen, pack, slot) if p == row)
        for place, example in members:
            for offset, token in enumerate(example.input_ids):
                batch["input_ids"][row, start + offset] = token
                batch["input_mask"][row, start + offset] = place + 1
                batch["positions"][row, start + offset] = offset
                batch["segment_ids"][row, start + offset] = offset >= example.first_segment_length
            for position, label in zip(example.masked_lm_positions, example.masked_lm_ids):
                batch["masked_lm_positions"][row, masked] = start + position
                batch["masked_lm_ids"][row, masked] = label
                batch["masked_lm_weights"][row, masked] = place + 1
                masked += 1
            batch["next_sentence_positions"][row, place] = start
            batch["next_sentence_labels"][row, place] = example.next_sentence_label
            batch["next_sentence_weights"][row, place] = 1
            start += len(example.input_ids)
    return batch


@given(packed())
def test_a_batch_is_what_the_definition_says(case):
    schema, chosen, pack, slot, packs = case
    batch = decode(schema, assemble(schema, Sequences.from_examples(chosen), pack, slot, packs))
    assert tuple(batch) == FIELDS == schema.fields
    for name, expected in plain_fields(*case).items():
        assert batch[name].dtype == np.int32 and np.array_equal(batch[name], expected), name


@given(packed())
def test_packs_fall_apart_into_the_same_sequences(case):
    schema, chosen, pack, slot, packs = case
    sequences = Sequences.from_examples(chosen)
    back = disassemble(schema, assemble(schema, sequences, pack, slot, packs))
    order = np.lexsort((slot, pack))
    assert back.to_examples() == [chosen[i] for i in order]
    assert digest(back) == digest(sequences)


@given(st.lists(examples(12), min_size=1, max_size=6), st.data())
def test_the_digest_sees_every_loss_repetition_and_change(chosen, data):
    whole = digest(Sequences.from_examples(chosen))
    victim = data.draw(st.integers(0, len(chosen) - 1))
    example = chosen[victim]
    ids = list(example.input_ids)
    place = data.draw(st.integers(0, len(ids) - 1))
    ids[place] += 1
    others = [
        chosen[:victim] + chosen[victim + 1 :],
        chosen + [example],
        chosen[:victim] + [example._replace(input_ids=ids)] + chosen[victim + 1 :],
        chosen[:victim]
        + [example._replace(next_sentence_label=1 - example.next_sentence_label)]
        + chosen[victim + 1 :],
    ]
    assert all(digest(Sequences.from_examples(other)) != whole for other in others)
    assert digest(Sequences.from_examples(data.draw(st.permutations(chosen)))) == whole
    parts = digest(Sequences.from_examples(chosen[:victim])) + digest(Sequences.from_examples(chosen[victim:]))
    assert parts % 2**64 == whole


def test_a_pack_by_hand():
    # Two sequences of 3 and 2 tokens in 6 slots, depth 3, 4 places for masked tokens.
    a = Example([7, 8, 9], 2, [1], [5], 1)
    b = Example([4, 6], 1, [0, 1], [2, 3], 0)
    schema = PackSchema.bert(6, 3, 4, vocabulary_size=10)
    batch = decode(
        schema,
        assemble(schema, Sequences.from_examples([b, a]), np.array([0, 0]), np.array([1, 0]), 1),
    )
    assert {name: values[0].tolist() for name, values in batch.items()} == {
        "input_ids": [7, 8, 9, 4, 6, 0],
        "input_mask": [1, 1, 1, 2, 2, 0],
        "segment_ids": [0, 0, 1, 0, 1, 0],
        "positions": [0, 1, 2, 0, 1, 0],
        "masked_lm_positions": [1, 3, 4, 0],
        "masked_lm_ids": [5, 2, 3, 0],
        "masked_lm_weights": [1, 2, 2, 0],
        "next_sentence_positions": [0, 3, 0],
        "next_sentence_labels": [1, 0, 0],
        "next_sentence_weights": [1, 1, 0],
    }


def test_a_pack_at_512_takes_1358_bytes():
    assert PackSchema.bert(512, 3, 79, vocabulary_size=30522).record_dtype.itemsize == 1358
    # Larger vocabularies and longer packs take wider types, by themselves.
    wide = PackSchema.bert(100_000, 3, 79, vocabulary_size=100_000).record_dtype
    assert wide["input_ids"].base == np.dtype("<u4")
    assert wide["lengths"].base == np.dtype("<u4")


@pytest.mark.parametrize("S, M", [(128, 20), (384, 56), (512, 76)])
def test_the_published_width_suffices_for_every_pack_at_the_published_lengths(S, M):
    """Masked tokens of the worst pack of at most D sequences and S tokens, by dynamic programming over all packs."""
    masked = np.minimum(np.maximum(np.rint(np.arange(S + 1) * 0.15), 1), M).astype(int)
    worst = np.zeros(S + 1, int)
    for D in range(1, 9):
        deeper = worst.copy()
        for length in range(5, S + 1):
            deeper[length:] = np.maximum(deeper[length:], worst[: S + 1 - length] + masked[length])
        worst = deeper
        assert predictions_per_pack(M, D, int(worst.max())) == M + D


def test_types_at_their_limits():
    """Ids have two bytes from 256 on (one byte for so few ids is not worth another layout), four from 65,537 tokens
    on."""
    for tokens, kind in ((100, "<u2"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")):
        schema = PackSchema.bert(255, 3, 10, vocabulary_size=tokens)
        types = {column.name: column.dtype for column in schema.columns}
        assert types["input_ids"] == types["masked_lm_ids"] == kind
        assert types["first_segment_lengths"] == types["masked_lm_positions"] == "|u1"
    assert {column.dtype for column in PackSchema.bert(256, 3, 10, vocabulary_size=300).columns} == {"<u2", "|u1"}
    for largest, kind in (
        (255, "|u1"),
        (256, "<u2"),
        (65535, "<u2"),
        (65536, "<u4"),
        (2**31 - 1, "<u4"),
    ):
        assert smallest_type(largest) == kind
        assert np.array([largest]).astype(kind)[0] == largest
    for low, kind in ((-1, "|i1"), (-128, "|i1"), (-129, "<i2"), (-(2**15) - 1, "<i4")):
        assert smallest_type(1, low) == kind


def test_the_mixing_of_the_digest_is_splitmix64():
    """Its published finaliser; the first outputs of the generator from seed 0 are known (Steele, Lea and Flood,
    2014)."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(number * golden) % 2**64 for number in (1, 2, 3)], np.uint64)
    assert [f"{value:016x}" for value in mix_bits(states).tolist()] == [
        "e220a8397b1dcdaf",
        "6e789e6aa1b965f4",
        "06c45d188009454f",
    ]


def test_schema_survives_json():
    schema = PackSchema.bert(512, 3, 79, vocabulary_size=70000, extra=[StoredColumn("x", PREDICTION, "<u4")])
    assert PackSchema.from_json(schema.to_json()) == schema


def test_published_numbers_of_predictions():
    assert [default_predictions(S) for S in (128, 384, 512, 100, 101, 5)] == [
        20,
        56,
        76,
        15,
        16,
        1,
    ]
