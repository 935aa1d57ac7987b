"""The packings of the searches without a linear programme are those of the last release: users pack again and resume.

A change that alters packings on purpose records them anew; it says so in the changelog.
"""

import zlib

import numpy as np
import pytest

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.exchange import exchange
from pack_data.solver.filling import fill_exactly, fill_seats
from pack_data.solver.free_slots import longest_first
from pack_data.solver.repair import mend
from pack_data.solver.two_capacities import pack_two

S = 256
LENGTHS = (np.arange(600) ** 3 * 7919) % 97 + 20
HISTOGRAM = LengthHistogram.from_lengths(LENGTHS, S)
COUNTS = HISTOGRAM.counts
LEAST = -(-HISTOGRAM.tokens // S)


def exchanged():
    histogram = LengthHistogram.from_lengths(LENGTHS[:300], S)
    return exchange(histogram.counts, 8, -(-histogram.tokens // S))


def two_capacities():
    weights = (np.arange(600) ** 2 * 104729) % 31
    limits = {"max_sequence_length": S, "capacity": 64, "max_sequences_per_pack": 6}
    return pack_two(LENGTHS, weights, **limits).pack.tolist()


SEARCHES = {
    "exchange": exchanged,
    "fill_exactly": lambda: fill_exactly(COUNTS, 5, LEAST),
    "fill_seats": lambda: fill_seats(COUNTS, 4, LEAST, 2 * LEAST),
    "mend": lambda: mend(longest_first(HISTOGRAM, 5), np.arange(S + 1) / S, 5, LEAST),
    "two_capacities": two_capacities,
}
# CRC-32 of the packs, the same with NumPy 1.24 and 2.4.
RECORDED = {
    "exchange": 2324371597,
    "fill_exactly": 2495070986,
    "fill_seats": 2598119962,
    "mend": 1126930780,
    "two_capacities": 896462106,
}


@pytest.mark.parametrize("name", SEARCHES)
def test_the_packing_is_the_recorded_one(name):
    packs = SEARCHES[name]()
    assert packs
    assert zlib.crc32(repr(packs).encode()) == RECORDED[name]
