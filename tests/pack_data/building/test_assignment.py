import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.building.assignment import assign
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing


def packed(lengths, S, depth=3):
    return get_packer("spfhp")(
        LengthHistogram.from_lengths(np.array(lengths, int), S),
        max_sequences_per_pack=depth,
    )


def assert_each_has_a_place_of_the_recipe(lengths, pack, slot, packing):
    members = [[] for _ in range(packing.packs)]
    for place in np.argsort(slot, kind="stable"):
        row = members[pack[place]]
        assert slot[place] == len(row)
        row.append(int(lengths[place]))
    expected = []
    for strategy, repeat in zip(packing.strategies, packing.repeats):
        expected += [strategy] * repeat
    assert sorted(map(tuple, members)) == sorted(expected)


def assert_spread(pack, slot, packing):
    """Neighbours in the corpus get packs as far apart as two random packs: a third of all packs on average."""
    pack = pack.astype(np.int64)
    distance = np.abs(np.diff(pack)) / packing.packs
    assert abs(distance.mean() - 1 / 3) < 0.01
    assert (distance == 0).mean() < 1e-3
    # The partners of a pack come from everywhere in the corpus.
    order = np.lexsort((slot, pack))
    are_partners = np.diff(pack[order]) == 0
    apart = np.abs(np.diff(order))[are_partners] / len(pack)
    assert abs(apart.mean() - 1 / 3) < 0.01


def pairing_of(pack):
    """With three sequences of 2 tokens and three of 1: which meets which is one of 3! = 6 ways."""
    return tuple(int(np.flatnonzero(pack[3:] == p)[0]) for p in pack[:3])


@given(
    st.lists(st.integers(1, 30), max_size=80),
    st.sampled_from([1, 2, 3, None]),
    st.integers(0, 5),
)
def test_every_sequence_gets_its_own_place_in_a_pack_of_the_recipe(lengths, depth, seed):
    packing = packed(lengths, 30, depth)
    assert_each_has_a_place_of_the_recipe(lengths, *assign(np.array(lengths, int), packing, seed), packing)


def test_by_seed_and_in_several_blocks_alike():
    lengths = np.random.default_rng(0).integers(1, 100, 200_000)
    packing = packed(lengths, 128)
    places = assign(lengths, packing, 1)
    again = assign(lengths, packing, 1)
    other = assign(lengths, packing, (1, 1))
    assert np.array_equal(places.pack, again.pack)
    assert np.array_equal(places.slot, again.slot)
    assert (places.pack != other.pack).mean() > 0.99
    assert np.bincount(places.pack, weights=lengths).max() <= 128


def test_neighbours_are_spread():
    lengths = np.random.default_rng(0).integers(1, 100, 50_000)
    packing = packed(lengths, 128)
    assert_spread(*assign(lengths, packing, 0), packing)


def test_within_a_length_every_order_is_equally_likely():
    packing = packed([2, 2, 2, 1, 1, 1], 3, 2)
    seen = {}
    for seed in range(600):
        pack = assign(np.array([2, 2, 2, 1, 1, 1]), packing, seed).pack
        seen[pairing_of(pack)] = seen.get(pairing_of(pack), 0) + 1
    assert len(seen) == 6
    assert min(seen.values()) > 60  # 100 expected, standard deviation 9


@pytest.mark.parametrize("count, size", [(256, 1), (257, 2), (1 << 16, 2), ((1 << 16) + 1, 4)])
def test_a_pack_of_very_many_sequences_gives_each_its_own_slot(count, size):
    lengths = np.ones(count, int)
    packing = Packing.of(
        "by hand",
        LengthHistogram.from_lengths(lengths, 1 << 17),
        None,
        [((1,) * count, 1)],
    )
    pack, slot = assign(lengths, packing, 0)
    assert not pack.any()
    assert np.array_equal(np.sort(slot), np.arange(count))
    assert slot.dtype.itemsize == size
