"""GREEDY packs in the order of arrival; SORT makes batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import greedy, sort
from pack_data.packing.histogram import LengthHistogram
from tests.pack_data_strategies import depths, histograms, lengths_of


def next_fit(lengths, S, depth):
    packs = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > S or len(packs[-1]) == depth:
            packs.append([])
        packs[-1].append(length)
    return [tuple(sorted(pack, reverse=True)) for pack in packs if pack]


@given(lengths=st.lists(st.integers(1, 12), max_size=60), depth=depths(), chunk=st.sampled_from([1, 5, 1 << 20]))
def test_greedy_packs_in_the_order_of_arrival(lengths, depth, chunk):
    histogram = LengthHistogram.from_lengths(lengths, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy, "_CHUNK", chunk)  # packs reach from one chunk into the next
        packing = greedy.pack(histogram, max_sequences_per_pack=depth, order=lengths)
    expected = next_fit(lengths, 12, depth)
    assert sorted(strategy for strategy, n in zip(packing.strategies, packing.repeats) for _ in range(n)) == sorted(
        expected
    )


def test_greedy_on_wikipedia_is_what_the_paper_saw():
    """Table 1: depth about 10, efficiency about 78 %, packing factor about 1.6; here on 1 of 80 sequences."""
    whole = LengthHistogram.published("wikipedia_512")
    histogram = LengthHistogram(whole.counts // 80)
    packing = greedy.pack(histogram, max_sequences_per_pack=None, seed=0)
    packing.check(histogram)
    assert 0.775 <= packing.efficiency <= 0.79
    assert 1.55 <= packing.packing_factor <= 1.6
    assert 8 <= packing.largest_depth <= 12


@given(histogram=histograms(), batch_size=st.integers(1, 50), seed=st.integers(0, 3))
def test_sort_equals_sorting(histogram, batch_size, seed):
    batching = sort.batch(histogram, batch_size=batch_size, seed=seed)
    descending = lengths_of(histogram)[::-1]
    batches = [descending[at : at + batch_size] for at in range(0, len(descending), batch_size)]
    assert sorted(batching.lengths) == sorted(int(batch[0]) for batch in batches)
    assert batching.slots == sum(int(batch[0]) * len(batch) for batch in batches)
    assert batching.batches == len(batches)
    assert batching.padding_tokens == batching.slots - histogram.tokens
    assert batching == sort.batch(histogram, batch_size=batch_size, seed=seed)


def test_a_seed_decides_the_order_of_sequences_and_batches():
    histogram = LengthHistogram.from_lengths(list(range(1, 101)), 100)
    packings = [greedy.pack(histogram, max_sequences_per_pack=None, seed=seed) for seed in (1, 1, 2)]
    assert packings[0] == packings[1] != packings[2]
    batchings = [sort.batch(histogram, batch_size=2, seed=seed) for seed in (0, 1)]
    assert batchings[0].lengths != batchings[1].lengths
    for batching in batchings:
        assert sorted(batching.lengths) == list(range(2, 101, 2))
        assert list(batching.lengths) != sorted(batching.lengths, reverse=True)
