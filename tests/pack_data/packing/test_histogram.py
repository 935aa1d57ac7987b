"""Length histograms: totals, merging, and the way in from lengths, CSV and JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pack_data
from pack_data.packing.histogram import BUNDLED, PUBLISHED, LengthHistogram
from tests.pack_data_strategies import histograms, lengths_of


@given(lengths=st.lists(st.integers(1, 30), max_size=80))
def test_totals_are_those_of_the_lengths(lengths):
    histogram = LengthHistogram.from_lengths(lengths, 30)
    assert lengths_of(histogram).tolist() == sorted(lengths)
    assert histogram.max_sequence_length == 30
    assert histogram.sequences == len(lengths)
    assert histogram.tokens == sum(lengths)
    assert histogram.lengths.tolist() == sorted(set(lengths))
    assert histogram.longest == max(lengths, default=0)
    assert histogram.shortest == min(lengths, default=0)
    if lengths:
        assert histogram.mean_length == pytest.approx(np.mean(lengths))
        assert histogram.median_length == sorted(lengths)[(len(lengths) - 1) // 2]
        assert histogram.theoretical_speedup == pytest.approx(30 / np.mean(lengths))
        assert histogram.padding_share == pytest.approx(1 - np.mean(lengths) / 30)


# Figures of the paper and of the source of the histograms.
@pytest.mark.parametrize(
    "name, S, sequences, tokens, shortest, median, padding, speedup",
    [
        ("wikipedia_512", 512, 16_279_552, 4_164_796_173, 5, 204, 0.5003, 2.001),
        ("squad_1_1_384", 384, 88_641, 15_249_479, 36, 159, 0.552, 2.232),
    ],
)
def test_published(name, S, sequences, tokens, shortest, median, padding, speedup):
    histogram = LengthHistogram.published(name)
    assert (histogram.max_sequence_length, histogram.sequences, histogram.tokens) == (S, sequences, tokens)
    assert (histogram.shortest, histogram.median_length) == (shortest, median)
    assert histogram.padding_share == pytest.approx(padding, abs=1e-4)
    assert histogram.theoretical_speedup == pytest.approx(speedup, abs=5e-4)
    assert name in PUBLISHED


def test_every_bundled_file_is_a_name_and_holds_no_longer_sequence():
    files = (Path(pack_data.__file__).parent / "published").glob("*.csv")
    assert {path.stem for path in files} == set(BUNDLED)
    for name, slots in BUNDLED.items():
        assert LengthHistogram.published(name).longest <= slots


def test_counts_cannot_be_changed_from_outside():
    counts = np.array([0, 1, 2])
    histogram = LengthHistogram(counts)
    counts[1] = 7
    assert histogram.counts.tolist() == [0, 1, 2]
    with pytest.raises(ValueError):
        histogram.counts[1] = 7


@given(first=histograms(), second=histograms())
def test_merging_counts_both(first, second):
    S = max(first.max_sequence_length, second.max_sequence_length)
    first = first.with_max_sequence_length(S)
    second = second.with_max_sequence_length(S)
    both = first + second
    assert both == second + first
    assert both == LengthHistogram.from_lengths(np.concatenate([lengths_of(first), lengths_of(second)]), S)


@given(histogram=histograms())
def test_csv_and_json_round_trips(histogram, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "h.csv"
    histogram.to_csv(path)
    assert LengthHistogram.from_csv(path, histogram.max_sequence_length) == histogram
    assert LengthHistogram.from_json(json.loads(json.dumps(histogram.to_json()))) == histogram


def test_equality_is_about_counts():
    first = LengthHistogram.from_lengths([1, 2], 4, "a")
    assert first == LengthHistogram.from_lengths([2, 1], 4, "b")
    assert hash(first) == hash(LengthHistogram.from_lengths([2, 1], 4, "b"))
    assert first != LengthHistogram.from_lengths([1, 2], 5, "a")
    assert first != "a"


def test_numpys_integers_are_whole_numbers():
    for kind in (np.int8, np.uint16, np.int64, np.uint64):
        assert LengthHistogram.from_lengths(np.array([3, 3], kind), kind(4)) == LengthHistogram.from_lengths([3, 3], 4)
