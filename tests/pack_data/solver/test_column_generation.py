"""The linear programme: its bounds, its tables of best packs, rows that lengths share."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.certificate import best_pack_value
from pack_data.solver.column_generation import _PackTables, relax


def test_a_programme_stopped_early_bounds_the_full_one():
    histogram = synthetic_histogram("lognormal:mean=45,max=256,n=4000,seed=3")
    lengths = histogram.lengths
    counts = histogram.counts[histogram.lengths]
    coarse = relax(lengths, counts, 256, 12)
    full = relax(lengths, counts, 256, 12, exact=True)
    assert not coarse.exact and full.exact
    assert coarse.bound <= full.value * (1 + 1e-9) and full.bound <= full.value * (1 + 1e-9)
    assert coarse.bound == pytest.approx(full.value, rel=1e-3)
    for relaxation in (coarse, full):  # the prices, held against the independent dynamic programme
        prices = np.floor(relaxation.prices * 2**40).astype(int).tolist()
        assert best_pack_value(lengths.tolist(), prices, 256, 12) <= 2**40 * (1 + 1e-9)
        assert counts @ relaxation.prices == pytest.approx(relaxation.bound)


@pytest.mark.parametrize("one_at_a_time", [True, False])
@given(
    priced=st.lists(
        st.tuples(st.integers(1, 15), st.integers(0, 50)), min_size=1, max_size=5, unique_by=lambda p: p[0]
    ),
    sequences=st.integers(1, 5),
)
def test_pack_tables_find_the_best_packs(one_at_a_time, priced, sequences):
    priced = sorted(priced)
    lengths = np.array([length for length, _ in priced])
    prices = np.maximum.accumulate(np.array([price for _, price in priced], float))
    S = 20
    capacities = np.arange(S + 1)
    tables = _PackTables(lengths, prices, S, sequences)
    tables._single = one_at_a_time  # otherwise a matter of cost, and at this size always the same
    values = tables.value(sequences, capacities)
    packs = tables.packs(sequences, capacities)
    price_of = dict(zip([0, *lengths.tolist()], [0.0, *prices.tolist()]))
    for capacity in (0, 7, 13, 20):
        held = packs[capacity].tolist()
        assert sum(held) <= capacity
        assert sum(price_of[length] for length in held) == values[capacity]
        assert values[capacity] == max(
            sum(price_of[length] for length in chosen)
            for chosen in product(price_of, repeat=sequences)
            if sum(chosen) <= capacity
        )
