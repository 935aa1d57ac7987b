"""`pack`: plain lengths in, bins of indices out."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ipu_packed_bert
import pack_data
from pack_data import optimal, pack, pack_groups, pack_in_order, pack_with_capacity, prove
from pack_data.cli.command import progress_bar
from tests.refusals import refused


@given(st.data(), st.integers(1, 40), st.sampled_from([None, 1, 2, 3, 7]), st.integers(0, 3))
def test_each_index_stands_once_in_a_pack_that_is_not_overfull(data, slots, depth, seed):
    lengths = data.draw(st.lists(st.integers(1, slots), max_size=60))
    packed = pack(lengths, max_sequence_length=slots, max_sequences_per_pack=depth, seed=seed)
    assert sorted(index for members in packed.bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= slots for members in packed.bins)
    assert all(1 <= len(members) <= (depth or slots) for members in packed.bins)
    for number, members in enumerate(packed.bins):
        assert packed.pack[members].tolist() == [number] * len(members) and packed.slot[members].tolist() == list(
            range(len(members))
        )
    assert len(packed.bins) == packed.packing.packs >= prove(packed.packing).lower_bound == packed.packing.lower_bound
    assert packed.packing.sequences == len(lengths) and packed.packing.max_sequences_per_pack == depth


def test_the_seed_decides_who_meets_whom_and_nothing_else():
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    one, again, other = (pack(lengths, max_sequence_length=64, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(one.pack, again.pack) and np.array_equal(one.slot, again.slot)
    assert not np.array_equal(one.pack, other.pack) and one.packing == other.packing
    assert np.array_equal(pack(lengths, max_sequence_length=64).pack, one.pack)


def test_the_example_of_the_documentation():
    packed = pack([5, 3, 2, 7], max_sequence_length=8)
    assert sorted(sorted(members.tolist()) for members in packed.bins) == [[0, 1], [2], [3]]
    assert packed.packing.lower_bound == 3 and packed.packing.efficiency == 17 / 24


@pytest.mark.parametrize(
    "lengths, options, said",
    [
        (
            [3, 9],
            {},
            "1 of 2 lengths is not from 1 to max_sequence_length = 8 (counted from 0, sequence 1 has length 9",
        ),
        ([0], {}, "sequence 0 has length 0"),
        ([1.5], {}, "whole numbers"),
        ([[1, 2]], {}, "2 dimensions"),
        ([1], {"max_sequences_per_pack": 0}, "at least 1"),
        ([1], {"max_sequence_length": 0}, "a whole number from 1"),
        ([1], {"seed": -1}, "a whole number of at least 0"),
    ],
)
def test_what_cannot_be_packed_is_named(lengths, options, said):
    with refused(said):
        pack(lengths, **{"max_sequence_length": 8, **options})


KINDS = [*(partial(np.array, dtype=kind) for kind in (np.uint8, np.int16, np.uint32, np.uint64)), iter]


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_of_any_integer_type(kind):
    found = pack(kind([5, 3, 2, 7]), max_sequence_length=8)
    assert np.array_equal(found.pack, pack([5, 3, 2, 7], max_sequence_length=8).pack)


def test_what_prints_is_short():
    packed = pack(np.arange(1, 500).repeat(100), max_sequence_length=512)
    packs = packed.packing.packs
    assert repr(packed) == f"PackedLengths(49,900 sequences in {packs:,} packs: .bins, .packing, .fitted)"
    assert repr(pack([2], max_sequence_length=2)) == "PackedLengths(1 sequence in 1 pack: .bins, .packing, .fitted)"


def test_a_call_that_is_no_way_in_says_the_way_in(tmp_path):
    with pytest.raises(TypeError, match=r"PackStore\.open\("):
        pack_data.PackStore(tmp_path)
    with pytest.raises(TypeError, match=r"build\(BuildOptions\("):
        pack_data.build("x")


def test_the_version_is_one_for_both_packages():
    assert pack_data.__version__ == ipu_packed_bert.__version__


@given(st.lists(st.integers(1, 24), max_size=40), st.sampled_from([None, 2, 3]), st.sampled_from([2, 4, 6]))
def test_each_sequence_is_rounded_up_before_packing(lengths, depth, multiple_of):
    packed = pack(lengths, max_sequence_length=24, max_sequences_per_pack=depth, multiple_of=multiple_of)
    rounded = [-(-length // multiple_of) * multiple_of for length in lengths]
    assert all(sum(rounded[index] for index in members) <= 24 for members in packed.bins)
    assert packed.rounding == sum(rounded) - sum(lengths) and packed.packing.tokens == sum(rounded)
    assert prove(packed.packing).lower_bound == packed.packing.lower_bound
    assert np.array_equal(packed.fitted.lengths, lengths)


def fewest_in_order(lengths, slots, depth):
    """Packs of consecutive sequences, by trying every end of every pack."""
    fewest = [0]
    for end in range(1, len(lengths) + 1):
        starts = [begin for begin in range(end) if sum(lengths[begin:end]) <= slots and end - begin <= (depth or end)]
        fewest.append(1 + min(fewest[begin] for begin in starts))
    return fewest[-1]


@given(st.lists(st.integers(1, 12), max_size=25), st.sampled_from([None, 1, 2, 3]))
def test_packs_in_order_are_the_fewest_of_consecutive_sequences(lengths, depth):
    packed = pack_in_order(lengths, max_sequence_length=12, max_sequences_per_pack=depth)
    assert [index for members in packed.bins for index in members] == list(range(len(lengths)))
    assert packed.packing.packs == packed.packing.lower_bound == fewest_in_order(lengths, 12, depth)
    assert packed.prove().lower_bound == packed.packing.packs


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=30).filter(
        lambda pairs: all(sum(length for length, own in pairs if own == group) <= 24 for group in range(10))
    )
)
def test_sequences_of_one_group_share_a_pack(pairs):
    lengths, groups = [length for length, _ in pairs], [group for _, group in pairs]
    packed = pack_groups(lengths, groups, max_sequence_length=24)
    assert sorted(index for members in packed.bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= 24 for members in packed.bins)
    for group in set(groups):
        assert len({int(packed.pack[index]) for index, own in enumerate(groups) if own == group}) == 1
    for members in packed.bins:  # a group's sequences stand side by side
        changes = sum(groups[a] != groups[b] for a, b in zip(members, members[1:]))
        assert changes == len({groups[index] for index in members}) - 1
    assert packed.packing.sequences == len(set(groups)) and packed.prove().lower_bound <= len(packed.bins)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=30),
    st.sampled_from([1, 4]),
)
def test_a_group_longer_than_a_row_is_dropped_whole_and_counted(pairs, multiple_of):
    lengths, groups = [length for length, _ in pairs], [group for _, group in pairs]
    taken = Counter()
    for length, group in pairs:
        taken[group] += -(-length // multiple_of) * multiple_of
    kept = [number for number, group in enumerate(groups) if taken[group] <= 8]
    packed = pack_groups(lengths, groups, max_sequence_length=8, longer="drop", multiple_of=multiple_of)
    assert packed.fitted.example.tolist() == kept
    assert packed.packing.sequences == len({groups[number] for number in kept})
    counts = packed.fitted.longer
    assert counts.longer + counts.partners == len(lengths) - len(kept)
    assert counts.lost_tokens == sum(lengths) - sum(lengths[number] for number in kept)
    alone = pack_groups([lengths[number] for number in kept], [groups[n] for n in kept], max_sequence_length=8)
    if multiple_of == 1:
        assert packed.pack.tolist() == alone.pack.tolist() and packed.slot.tolist() == alone.slot.tolist()


def test_the_partner_of_a_dropped_sequence_is_named_in_the_counts():
    packed = pack_groups([9, 3, 4], [0, 0, 1], max_sequence_length=8, longer="drop")
    assert packed.fitted.example.tolist() == [2] and packed.fitted.longer.partners == 1
    assert "1 of 3 examples" in str(packed.fitted.longer) and "12 of 16 tokens" in str(packed.fitted.longer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"multiple_of": 3}, "multiple_of = 3"),
        ({"multiple_of": 0}, "multiple_of"),
    ],
)
def test_options_that_pack_does_not_take_are_refused_in_one_line(options, message):
    with refused(message):
        pack([8, 5, 3], max_sequence_length=8, **options)


@pytest.mark.parametrize(
    "groups, message",
    [
        ([1, 1], "2 groups for 3 lengths"),
        ([1, np.nan, np.nan], "groups .* float64"),
        ([1, 1, 2], "group of sequence 0 has 13 tokens"),
    ],
)
def test_groups_that_cannot_be_packed_are_refused(groups, message):
    with refused(message):
        pack_groups([8, 5, 3], groups, max_sequence_length=8)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: pack_in_order([1], max_sequence_length=8, budget=1), "budget"),
        (lambda: pack_with_capacity([1], [1], capacity=1, max_sequence_length=8, budget=1), "budget"),
        (lambda: pack([1], max_sequence_length=8, bugdet=1), "bugdet"),
    ],
)
def test_an_option_that_does_not_combine_is_no_argument(call, name):
    with refused(name, kind=TypeError):
        call()


def test_packs_in_order_of_another_order_are_not_proved():
    packed = pack_in_order([5, 3, 2, 7], max_sequence_length=8)
    with refused("in order"):
        replace(packed, pack=np.array([0, 1, 1, 2])).prove()


def test_a_library_call_shows_no_progress_unless_asked(monkeypatch):
    hidden = []

    def packed(histogram, **options):
        with progress_bar(None, "packing") as bar:
            hidden.append(bar.disable)
        return optimal.pack(histogram, **options)

    monkeypatch.setattr("pack_data.pack_lengths.pack_optimally", packed)
    for progress in (False, True):
        pack([5, 3], max_sequence_length=8, progress=progress)
    assert hidden == [True, False]


def test_a_budget_is_handed_on():
    lengths = np.random.default_rng(0).lognormal(np.log(73), 0.6, 3000).astype(int).clip(1, 256)
    packed = pack(lengths, max_sequence_length=256, budget=1e-9)
    full = pack(lengths, max_sequence_length=256, budget=60)
    assert prove(packed.packing).lower_bound <= full.packing.packs < packed.packing.packs
