"""Faults of padding-free training: what the probe sees of them."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.isolation_trials import MIXTURES, families_of, refusal
from tests.padding_free_faults import FAULTS, probe, right_ones
from tests.tiers import slow

# Seeds of a model and its fault.
DRAWS = pytest.mark.parametrize("seeds", [range(1), slow(range(1, 4))], ids=["one", "more"])


def test_there_are_three_of_each_class_and_more():
    assert len(FAULTS) == len({each.name for each in FAULTS}) == 45
    letters = Counter(each.letter for each in FAULTS)
    assert sorted(letters) == list("abcdefghijk") and min(letters.values()) >= 3


@DRAWS
@pytest.mark.parametrize("name", right_ones(np.random.default_rng(0)))
def test_the_right_ones_pass(name, seeds):
    for seed in seeds:
        assert "320 tokens in 213 examples" in str(probe(right_ones(np.random.default_rng(seed))[name]))


@DRAWS
@pytest.mark.parametrize("each", FAULTS, ids=lambda each: each.name)
def test_a_fault_is_caught(each, seeds):
    missed = []
    for seed in seeds:
        try:
            probe(each.make(np.random.default_rng(seed)))
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            missed.append(seed)
    assert not missed


@pytest.mark.parametrize("number", [slow(0), 4])
def test_random_models_that_keep_examples_apart_are_not_refused(number):
    """A sample of `python -m tests.isolation_trials`: a dense model and a mixture of experts."""
    family = families_of(number + 1)[number]
    assert (family in MIXTURES) == (number == 4)
    assert [refusal(number, family, dtype) for dtype in (torch.float32, torch.bfloat16)] == ["", ""]
