"""Weights, capacities and prices that packing with two capacities refuses, and a programme without a solution."""

from dataclasses import replace

import numpy as np
from scipy.optimize import OptimizeResult

from pack_data import pack_with_capacity
from pack_data.packing.certificate import Certificate
from pack_data.solver import column_generation
from pack_data.solver.column_generation import relax  # noqa: F401  a name of the table
from pack_data.solver.two_capacities import TwoPrices, _Mix, pack_two
from tests.refusals import faults_of_refusals, rows_of

LENGTHS = np.array([3, 2, 2, 5, 7])
WEIGHTS = np.array([1, 2, 0, 3, 4])
PRICES = TwoPrices(4096, 10, _Mix(1, 0, 1), 10, _Mix(0, 1, 1), Certificate(10, None, (), (), 1))


def packed(weights, capacity=4, **options):
    limits = {"max_sequence_length": 8, **options}
    return pack_with_capacity([3, 2, 2], weights, capacity=capacity, **limits)


def priced(factor):
    """Prove packs with dearer prices."""
    limits = {"max_sequence_length": 8, "capacity": 5, "max_sequences_per_pack": None}
    prices = pack_two(LENGTHS, WEIGHTS, **limits).prices
    certificate = prices.certificate
    dearer = tuple(int(factor * price) + 1 for price in certificate.prices)
    forged = replace(prices, certificate=replace(certificate, prices=dearer))
    return forged.prove(LENGTHS, WEIGHTS)


REFUSED = rows_of(
    """
packed([1, 5, 0]) => sequence 1 | weight 5 | capacity = 4
packed([1, -1, 0]) => sequence 1 | weight -1
packed([1, 2]) => 2 weights | 3 lengths
packed([1, 2, 0.5]) => weights | float64
packed([[1], [2, 3]]) => weights | each sequence
packed([1, 2, 0], capacity=0) => capacity | 0
packed([5, 1, 9], longer='drop', max_sequence_length=2) => sequence 2 | weight 9
packed([1, 1, 1], longer='split', max_sequence_length=2) => weight | piece
priced(1.01) => certificate | more than 1
priced(2) => certificate | more than 1
replace(PRICES, k=4096) => k = 4096 | half a pack
replace(PRICES, k=-1) => k = -1
replace(PRICES, capacity=7) => max_sequence_length | 7
replace(PRICES, second=_Mix(2, 3, 1)) => max_sequence_length
replace(PRICES, first=_Mix(1, 0, 0)) => parts
replace(PRICES, first=_Mix(1 << 60, 0, 1)) => first | 64-bit
relax(LENGTHS[3:], WEIGHTS[3:], 16, 4) => HiGHS | no pivot => RuntimeError
"""
)


def test_what_two_capacities_and_the_solver_refuse(monkeypatch):
    failed = OptimizeResult(status=4, x=None, message="no pivot")
    monkeypatch.setattr(column_generation, "linprog", lambda *args, **options: failed)
    faults = faults_of_refusals(REFUSED, globals())
    assert not faults, "\n".join(faults)
