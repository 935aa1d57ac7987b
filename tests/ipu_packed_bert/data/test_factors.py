"""The packing factor before the data set is built."""

import argparse

import numpy as np
import pytest

from ipu_packed_bert.data import factors
from ipu_packed_bert.data.factors import PAPER_FACTORS, parse_factor, planned_factor, published_for
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram


def test_a_number_given_comes_first_then_a_histogram_then_the_paper():
    own = LengthHistogram.from_lengths(np.array([20] * 6), 100, "own")
    assert planned_factor(100, "spfhp", 3, given=1.5, histogram=own) == (1.5, "--packing-factor")
    assert planned_factor(100, "optimal", 3, histogram=own) == (3.0, "the histogram own, packed by optimal")
    assert (
        planned_factor(128, "spfhp", 3, histogram=own).value
        == planned_factor(128, "spfhp", 3).value
        == PAPER_FACTORS[128]
    )
    assert planned_factor(100, "spfhp", 3) is None


def test_the_published_histogram_of_that_length_is_packed_as_asked():
    whole = published_for(384)
    assert whole.name == "squad_1_1_384" and published_for(128) is None
    packed = get_packer("spfhp")(whole, max_sequences_per_pack=2).packing_factor
    assert planned_factor(384, "spfhp", 2).value == packed


@pytest.mark.parametrize(
    "packer, depth, asked",
    [("nnlshp", 3, "nnlshp"), ("nnlshp", 4, "optimal"), ("none", 3, "optimal"), ("spfhp", None, "spfhp")],
)
def test_a_packer_that_cannot_is_replaced(packer, depth, asked, monkeypatch):
    jobs = []
    monkeypatch.setattr(factors, "_packed_factor", lambda *job: jobs.append(job) or 2.0)
    planned_factor(512, packer, depth)
    assert [(job[1], job[2]) for job in jobs] == [(asked, depth)]


def test_no_factor_is_above_the_depth():
    assert planned_factor(512, "spfhp", 3, given=3.0).value == 3.0
    assert planned_factor(512, "spfhp", None, given=50.0).value == 50.0
    with pytest.raises(ValueError, match="at most 3 sequences"):
        planned_factor(512, "spfhp", 3, given=3.1)


@pytest.mark.parametrize("value", [0.0, 0.99, float("inf"), float("nan"), -3.0])
def test_what_cannot_be_a_factor(value):
    with pytest.raises(ValueError, match="at least one sequence"):
        planned_factor(512, "spfhp", 3, given=value)
    with pytest.raises(argparse.ArgumentTypeError, match="at least one sequence"):
        parse_factor(str(value))
    assert parse_factor("1.9") == 1.9 and parse_factor("1") == planned_factor(512, "spfhp", 3, given=1.0).value == 1.0
