"""The table of properties, computed from the batches, and the command that prints it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evidence.batching_report import Properties, _sorted, properties_of
from pack_data.batching.plans import BatchOptions, get_way
from tests.batching_ways import MSL, drawn, every_way
from tests.refusals import refused

# kernel, positions, isolated, unbroken, unsorted: by the definition of each way in sections 3 and 4.3 of the paper.
EXPECTED = {
    "RandomSampling+Padding": (False, True, True, True, True),
    "GroupByLength+Padding": (False, True, True, True, False),
    "MiniBatchPacking+PosID": (True, True, True, True, True),
    "FixedLengthPacking": (False, False, False, False, True),
    "FixedLengthPacking+PosID": (True, True, True, False, True),
    "Multipack+PosID": (True, True, True, True, True),
    "SortedPacking+PosID": (True, True, True, True, False),
    "RandomPacking+PosID": (True, True, True, True, True),
    "OptimalPacking+PosID": (True, True, True, True, True),
}


@every_way
@pytest.mark.parametrize("seed", [0, 1])
def test_computed_properties_are_those_of_the_table(way, seed):
    found = properties_of(way, drawn(900, seed), BatchOptions(4, MSL, 2, seed))
    assert found == Properties(*EXPECTED[way.name])


def test_which_numbers_of_falls_count_as_sorted():
    """About 12 of 24 changes are falls, with deviation sqrt(26 / 12) = 1.47: 6 falls are 4.1 of them off, 7 are 3.4."""
    for falls, expected in ((6, True), (7, False), (12, False), (17, False), (18, True)):
        means = np.cumsum([0] + [-1] * falls + [1] * (24 - falls))
        assert _sorted(means) == expected
    assert not _sorted(np.zeros(30))


def test_the_report_detects_leaks_and_missing_tokens():
    """A way whose batches are padded and mixed, and one that loses tokens: computed, not taken from a name."""

    lengths, options = drawn(300), BatchOptions(4, MSL)
    leaking = replace(get_way("RandomPacking+PosID"), padding_free=False)
    assert properties_of(leaking, lengths, options) == Properties(False, False, False, True, True)

    def losing(lengths, options, rng):
        return get_way("RandomSampling+Padding").group(lengths[:-1], options, rng)

    with refused("RandomSampling", "0 times"):
        properties_of(replace(get_way("RandomSampling+Padding"), group=losing), lengths, options)
