"""`pack`: plain lengths in, bins of indices out."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pack_data import pack, pack_groups, pack_in_order, prove


def check_bins(packed, sizes, slots, depth=None):
    """Check that each sequence stands once, in a pack that is neither overfull nor too deep."""
    numbers = np.concatenate([np.zeros(0, np.int64), *packed.bins])
    assert sorted(numbers.tolist()) == list(range(len(sizes)))
    assert len(packed.bins) == packed.packing.packs
    for number, members in enumerate(packed.bins):
        assert sum(sizes[member] for member in members) <= slots
        assert 1 <= len(members) <= (depth or slots)
        assert set(packed.pack[members]) == {number}
        assert packed.slot[members].tolist() == list(range(len(members)))


@given(
    st.data(),
    st.sampled_from([12, 24, 36]),
    st.sampled_from([None, 1, 2, 3, 7]),
    st.sampled_from([1, 2, 4, 6]),
)
def test_each_index_stands_once_in_a_pack_that_is_not_overfull(data, slots, depth, multiple_of):
    lengths = data.draw(st.lists(st.integers(1, slots), max_size=60))
    options = {"max_sequences_per_pack": depth, "multiple_of": multiple_of}
    packed = pack(lengths, max_sequence_length=slots, seed=data.draw(st.integers(0, 3)), **options)
    rounded = [-(-length // multiple_of) * multiple_of for length in lengths]
    check_bins(packed, rounded, slots, depth)
    packing = packed.packing
    assert packing.packs >= prove(packing).lower_bound == packing.lower_bound
    assert packing.sequences == len(lengths)
    assert packing.max_sequences_per_pack == depth
    assert packing.tokens == sum(rounded)
    assert packed.rounding == sum(rounded) - sum(lengths)
    assert np.array_equal(packed.fitted.lengths, lengths)


def test_the_seed_decides_who_meets_whom_and_nothing_else():
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    plain = pack(lengths, max_sequence_length=64)
    again = pack(iter(lengths.tolist()), max_sequence_length=64, seed=0)
    other = pack(lengths.astype(np.uint8), max_sequence_length=64, seed=1)
    assert np.array_equal(plain.pack, again.pack)
    assert np.array_equal(plain.slot, again.slot)
    assert not np.array_equal(plain.pack, other.pack)
    assert plain.packing == other.packing


def fewest_in_order(lengths, slots, depth):
    """Packs of consecutive sequences, by trying every end of every pack."""
    fewest = [0]
    for end in range(1, len(lengths) + 1):
        counts = []
        for begin in range(end):
            if sum(lengths[begin:end]) <= slots and end - begin <= (depth or end):
                counts.append(1 + fewest[begin])
        fewest.append(min(counts))
    return fewest[-1]


@given(st.lists(st.integers(1, 12), max_size=25), st.sampled_from([None, 1, 2, 3]))
def test_packs_in_order_are_the_fewest_of_consecutive_sequences(lengths, depth):
    packed = pack_in_order(lengths, max_sequence_length=12, max_sequences_per_pack=depth)
    check_bins(packed, lengths, 12, depth)
    assert [index for members in packed.bins for index in members] == list(range(len(lengths)))
    fewest = fewest_in_order(lengths, 12, depth)
    assert packed.packing.packs == packed.packing.lower_bound == fewest
    assert packed.prove().lower_bound == fewest


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=30),
    st.sampled_from([1, 4]),
)
def test_a_group_shares_a_pack_or_is_dropped_whole(pairs, multiple_of):
    lengths = np.array([length for length, _ in pairs])
    groups = np.array([group for _, group in pairs])
    taken = Counter()
    for length, group in pairs:
        taken[group] += -(-length // multiple_of) * multiple_of
    kept = np.array([number for number, group in enumerate(groups) if taken[group] <= 24], int)
    options = {"max_sequence_length": 24, "multiple_of": multiple_of}
    packed = pack_groups(lengths, groups, longer="drop", **options)
    assert packed.fitted.example.tolist() == kept.tolist()
    counts = packed.fitted.longer
    assert counts.longer + counts.partners == len(lengths) - len(kept)
    assert counts.lost_tokens == lengths.sum() - lengths[kept].sum()

    groups_kept = groups[kept]
    check_bins(packed, -(-lengths[kept] // multiple_of) * multiple_of, 24)
    assert packed.packing.sequences == len(set(groups_kept))
    assert packed.prove().lower_bound <= len(packed.bins)
    for group in set(groups_kept):
        assert len(set(packed.pack[groups_kept == group])) == 1
    for members in packed.bins:  # a group's sequences stand side by side
        changes = np.count_nonzero(np.diff(groups_kept[members]))
        assert changes == len(set(groups_kept[members])) - 1
    alone = pack_groups(lengths[kept], groups_kept, **options)
    assert packed.pack.tolist() == alone.pack.tolist()
    assert packed.slot.tolist() == alone.slot.tolist()
