"""Examples longer than a row: what each rule keeps, and what it counts; in `pack` too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import pack
from pack_data.lengths.overlong import RULES, Longer, fit
from tests.refusals import refused

RULES_THAT_GO_ON = [rule for rule in RULES if rule != "raise"]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30), row=st.integers(1, 20), rule=st.sampled_from(RULES_THAT_GO_ON)
)
def test_the_pieces_are_those_of_each_example_alone(lengths, row, rule):
    """The law of each rule on every example; the counts; and the same from all at once as one by one."""
    fitted, one_by_one = fit(lengths, row, rule), Longer(rule, row)
    expected = []
    for number, length in enumerate(lengths):
        spans = one_by_one.spans(length, f"sequence {number}")
        expected += [(number, *span) for span in spans]
        kept = [token for span in spans for token in range(*span)]
        if length <= row or rule == "split":
            assert kept == list(range(length)) and len(spans) == -(-length // row)
        else:
            assert kept == (list(range(row)) if rule == "truncate" else [])
        assert all(0 < stop - start <= row for start, stop in spans)
    found = zip(fitted.example.tolist(), fitted.start.tolist(), fitted.stop.tolist())
    assert list(found) == expected and fitted.longer == one_by_one
    assert fitted.longer.longer == sum(length > row for length in lengths)
    assert fitted.longer.tokens - fitted.longer.lost_tokens == fitted.lengths.sum()


def test_what_is_said():
    assert str(fit([9, 2], 9).longer) == "0 of 2 examples are longer than 9 tokens"
    said = {rule: str(fit([9, 2, 13], 4, rule).longer) for rule in RULES_THAT_GO_ON}
    assert said["truncate"].endswith(": truncated, which cuts off 14 of 24 tokens")
    assert said["split"].endswith("2 of 3 examples are longer than 4 tokens: split into 7 pieces")
    assert said["drop"].endswith(": dropped, with 22 of 24 tokens")


@pytest.mark.parametrize(
    "lengths, rule, names",
    [
        ([3, 9], "raise", ["sequence 1", "length 9", *RULES_THAT_GO_ON]),
        ([3, 0], "split", ["sequence 1", "length 0"]),
        ([3], "cut", ["longer = 'cut'", *RULES]),
        ([1.5], "drop", ["lengths", "float64"]),
    ],
)
def test_what_cannot_be_is_refused(lengths, rule, names):
    with refused(*names):
        fit(lengths, 8, rule)


@pytest.mark.parametrize("rule", RULES_THAT_GO_ON)
def test_pack_packs_the_pieces(rule):
    lengths = np.random.default_rng(3).integers(1, 50, 200)
    packed, fitted = pack(lengths, max_sequence_length=32, longer=rule), fit(lengths, 32, rule)
    assert sorted(index for members in packed.bins for index in members) == list(range(len(fitted.lengths)))
    assert all(fitted.lengths[members].sum() <= 32 for members in packed.bins)
    assert packed.fitted.longer == fitted.longer and fitted.longer.longer > 20
    assert packed.packing.tokens == fitted.lengths.sum()
    assert np.array_equal(packed.fitted.example, fitted.example)
