"""Balancing the attention work of packs: a case by hand, every law, and that it does something."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import optimal
from pack_data.balance import AttentionWork, balance_attention
from pack_data.histogram import LengthHistogram
from pack_data.packing import Packing
from tests.pack_data_strategies import histograms


def test_balance_by_hand():
    # 8 + 2 costs 68, 5 + 5 costs 50: nothing to exchange.  6 + 3 + 1 costs 46 and 4 + 4 + 2 costs 36; giving 6 + 1 for
    # 4 + 2 makes 4 + 3 + 2 (29) and 6 + 4 + 1 (53), worse; 3 + 1 for 4 makes 6 + 4 (52): worse; 6 for 4 + 2 does too.
    even = Packing("x", 10, 3, ((6, 3, 1), (4, 4, 2)), (1, 1))
    assert balance_attention(even) == even
    # 10 + 10 costs 200 and 4 + 4 + 4 costs 48; a 10 for a 4 makes 116 and 132 (for 4 + 4 the same the other way round).
    uneven = Packing("x", 24, 3, ((10, 10), (4, 4, 4)), (1, 1))
    balanced = balance_attention(uneven)
    assert balanced.strategies == ((10, 4, 4), (10, 4)) and AttentionWork.of(balanced).largest == 132


@given(histograms(max_count=40), st.sampled_from([2, 3, 5, None]))
def test_balance_keeps_every_law_and_never_raises_the_largest(histogram, depth):
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    balanced = optimal.pack(histogram, max_sequences_per_pack=depth, balance="attention")
    balanced.check(histogram)
    assert balanced.packs == packing.packs and balanced.certificate == packing.certificate
    before, after = AttentionWork.of(packing), AttentionWork.of(balanced)
    assert max(after.least_imbalance * (1 - 1e-12), 1.0) <= after.imbalance and after.largest <= before.largest
    assert after.deviation <= before.deviation * (1 + 1e-12)
    assert after.mean == pytest.approx(before.mean)


def test_balance_does_something():
    packing = optimal.pack(LengthHistogram.published("squad_1_1_384"), max_sequences_per_pack=3)
    assert AttentionWork.of(balance_attention(packing, exchanges=50)).deviation < AttentionWork.of(packing).deviation


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="attention"):
        optimal.pack(LengthHistogram.from_lengths([1], 2), max_sequences_per_pack=2, balance="tokens")
