"""`pack`: plain lengths in, bins of indices out."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pack_data import pack, pack_groups, pack_in_order, prove


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
