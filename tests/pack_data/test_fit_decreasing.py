"""First-fit and best-fit decreasing: the runs of equal packs are the packs that single samples would have made."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given

from pack_data import best_fit, first_fit, lpfhp
from pack_data.packing.histogram import LengthHistogram
from tests.pack_data_strategies import depths, histograms, lengths_of


def sample_by_sample(lengths, S, depth, best):
    """The textbook rule on single samples; of equally full packs, best fit takes the one that was changed last."""
    packs = []  # in the order of visits: first fit keeps the order of opening, best fit puts the last changed first
    for length in sorted(lengths, reverse=True):
        able = [pack for pack in packs if S - sum(pack) >= length and (depth is None or len(pack) < depth)]
        pack = (max(able, key=sum) if best else able[0]) if able else []
        if best and able:
            packs = [other for other in packs if other is not pack]
        if best:
            packs.insert(0, pack)
        elif not able:
            packs.append(pack)
        pack.append(length)
    return Counter(map(tuple, packs))


@pytest.mark.parametrize("packer", [first_fit, best_fit])
@given(histogram=histograms(max_sequence_length=24, max_count=12, max_lengths=8), depth=depths())
def test_equals_the_rule_on_single_samples(packer, histogram, depth):
    packing = packer.pack(histogram, max_sequences_per_pack=depth)
    expected = sample_by_sample(
        lengths_of(histogram).tolist(), histogram.max_sequence_length, depth, best=packer is best_fit
    )
    assert dict(zip(packing.strategies, packing.repeats)) == expected
    if packer is best_fit:
        longest_first = lpfhp.pack(histogram, max_sequences_per_pack=depth)
        assert (longest_first.strategies, longest_first.repeats) == (packing.strategies, packing.repeats)


@pytest.mark.parametrize("packer", [first_fit, best_fit])
def test_runs_do_not_grow_with_the_sequences(packer):
    histogram = LengthHistogram(np.array([0, 0, 0, 7, 5, 11, 0, 2, 0, 0]) * 10**9)
    packing = packer.pack(histogram, max_sequences_per_pack=None)
    packing.check(histogram)
    assert len(packing.strategies) <= 4 * 4  # four lengths occur, each makes four runs at most
