"""Forty faults of padding-free training: what the probe sees of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ipu_packed_bert.padding_free.probe import check_no_leak
from ipu_packed_bert.padding_free.update import logits_of
from tests.padding_free_faults import FAULTS, LONGEST, right_ones

DRAWS = 3
# The probe sees two examples of 11 tokens, and no collator and no loss.
SEEN = {"groups_of_tokens_of_the_row", "rows_behind_the_last_whole_block_are_zero"}


def test_there_are_forty_and_three_of_each_class():
    assert len(FAULTS) == len({each.name for each in FAULTS}) == 40
    letters = Counter(each.letter for each in FAULTS)
    assert sorted(letters) == list("abcdefghijk") and min(letters.values()) >= 3


@pytest.mark.parametrize("name", right_ones(np.random.default_rng(0)))
def test_the_right_ones_pass(name):
    check_no_leak(right_ones(np.random.default_rng(1))[name].model, longest=LONGEST)


@pytest.mark.parametrize("each", FAULTS, ids=lambda each: each.name)
def test_a_fault_is_caught(each, request):
    if each.name not in SEEN:
        request.applymarker(pytest.mark.xfail(strict=True, reason="the probe's row has 22 tokens"))
    for seed in range(DRAWS):
        wrong = each.make(np.random.default_rng(seed))
        with pytest.raises(ValueError):
            check_no_leak(wrong.model, longest=LONGEST, forward=wrong.forward or logits_of)
