"""The packing factor before the data set is built."""

import numpy as np

from ipu_packed_bert.data import factors
from ipu_packed_bert.data.data_sets import known_packing_factor
from ipu_packed_bert.data.factors import (
    PAPER_FACTORS,
    parse_factor,
    planned_factor,
    published_for,
)
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import DataConfig
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.store.data_set import read_manifest
from tests.tiny_runs import tiny_data


def test_a_number_given_comes_first_then_a_histogram_then_the_paper():
    lengths_of_20 = LengthHistogram.from_lengths(np.array([20] * 6), 100, "own")
    assert planned_factor(100, "spfhp", 3, given=1.5, histogram=lengths_of_20) == (
        1.5,
        "--packing-factor",
    )
    assert planned_factor(100, "optimal", 3, histogram=lengths_of_20) == (
        3.0,
        "the histogram own, packed by optimal",
    )
    for histogram in (lengths_of_20, None):  # that of another length does not count
        assert planned_factor(128, "spfhp", 3, histogram=histogram).value == PAPER_FACTORS[128]
    assert planned_factor(100, "spfhp", 3) is None


def test_the_published_histogram_of_that_length_is_packed_as_asked():
    whole = published_for(384)
    assert whole.name == "squad_1_1_384"
    assert published_for(128) is None
    packed = get_packer("spfhp")(whole, max_sequences_per_pack=2).packing_factor
    assert planned_factor(384, "spfhp", 2).value == packed


def test_a_packer_that_cannot_is_replaced(monkeypatch):
    monkeypatch.setattr(factors, "_packed_factor", lambda histogram, packer, depth: 2.0)
    for packer, depth, used in (
        ("nnlshp", 3, "nnlshp"),
        ("nnlshp", 4, "optimal"),
        ("none", 3, "optimal"),
    ):
        assert planned_factor(512, packer, depth).source.endswith(used)


def test_a_factor_is_at_most_the_depth():
    for depth, value in ((3, 3.0), (None, 50.0), (3, 1.0)):
        assert planned_factor(512, "spfhp", depth, given=value).value == parse_factor(str(value)) == value


def test_without_packing_it_is_one():
    for data in (DataConfig(packer="none", max_sequences_per_pack=1), DataConfig(max_sequences_per_pack=1)):
        assert known_packing_factor(Config(data=data), None).value == 1.0
    assert known_packing_factor(Config(), None).value > 1.9


def test_a_stated_factor_replaces_that_of_the_data_set(tmp_path):
    manifest = read_manifest(tiny_data(tmp_path / "data"))
    assert known_packing_factor(Config(), manifest).value == manifest.packing_factor
    assert known_packing_factor(Config(), manifest, 1.25) == (1.25, "--packing-factor")
