"""Examples longer than a row: what each rule keeps, and what it counts; in `pack` too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import pack
from pack_data.lengths.overlong import RULES, Longer, fit

RULES_THAT_GO_ON = [rule for rule in RULES if rule != "raise"]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    row=st.integers(1, 20),
    rule=st.sampled_from(RULES_THAT_GO_ON),
)
def test_the_pieces_are_those_of_each_example_alone(lengths, row, rule):
    """The law of each rule on every example; the counts; and the same from all at once as one by one."""
    fitted = fit(lengths, row, rule)
    one_by_one = Longer(rule, row)
    expected = []
    for number, length in enumerate(lengths):
        spans = one_by_one.spans(length, f"sequence {number}")
        expected += [(number, *span) for span in spans]
        kept = [token for span in spans for token in range(*span)]
        if length <= row or rule == "split":
            assert kept == list(range(length))
            assert len(spans) == -(-length // row)
        else:
            assert kept == (list(range(row)) if rule == "truncate" else [])
        assert all(0 < stop - start <= row for start, stop in spans)
    assert len(fitted.lengths) == len(expected)
    for number, (example, start, stop) in enumerate(expected):
        assert fitted.beginning(number) == (example, start)
        assert fitted.example[number] == example
        assert fitted.start[number] == start
        assert fitted.stop[number] == stop
    assert fitted.longer == one_by_one
    assert fitted.longer.longer == sum(length > row for length in lengths)
    assert fitted.longer.tokens - fitted.longer.lost_tokens == fitted.lengths.sum()


def test_each_rule_names_its_counts():
    assert "0 of 2" in str(fit([9, 2], 9).longer)
    counts = {"truncate": "14 of 24", "split": "7 pieces", "drop": "22 of 24"}
    for rule, text in counts.items():
        assert text in str(fit([9, 2, 13], 4, rule).longer)


@pytest.mark.parametrize("rule", RULES_THAT_GO_ON)
def test_pack_packs_the_pieces(rule):
    lengths = np.random.default_rng(3).integers(1, 50, 200)
    packed = pack(lengths, max_sequence_length=32, longer=rule)
    fitted = fit(lengths, 32, rule)
    indices = np.sort(np.concatenate(packed.bins))
    assert indices.tolist() == list(range(len(fitted.lengths)))
    for members in packed.bins:
        assert fitted.lengths[members].sum() <= 32
    assert packed.fitted.longer == fitted.longer
    assert fitted.longer.longer > 20
    assert packed.packing.tokens == fitted.lengths.sum()
    assert np.array_equal(packed.fitted.example, fitted.example)
