"""Length histograms: totals, merging, and the way in from lengths, CSV and JSON."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import pack
from pack_data.packing.histogram import PUBLISHED, LengthHistogram
from tests.pack_data_strategies import histograms, lengths_of
from tests.refusals import refused


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
    first, second = first.with_max_sequence_length(S), second.with_max_sequence_length(S)
    both = first + second
    assert both == second + first
    assert both == LengthHistogram.from_lengths(np.concatenate([lengths_of(first), lengths_of(second)]), S)


def test_merging_keeps_names():
    assert (LengthHistogram.from_lengths([1], 4, "a") + LengthHistogram.from_lengths([2], 4, "b")).name == "a + b"


@given(histogram=histograms())
def test_csv_and_json_round_trips(histogram, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "h.csv"
    histogram.to_csv(path)
    assert LengthHistogram.from_csv(path, histogram.max_sequence_length) == histogram
    assert LengthHistogram.from_json(json.loads(json.dumps(histogram.to_json()))) == histogram


def test_csv_in_any_order_with_spaces_and_windows_ends(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbflength, count\r\n7, 2\r\n\r\n3,0\r\n 1 ,5\r\n")
    histogram = LengthHistogram.from_csv(path, 7)
    assert lengths_of(histogram).tolist() == [1] * 5 + [7] * 2
    assert histogram.name == "mine"


@pytest.mark.parametrize(
    "content, names",
    [
        (b"", ["''", "length,count"]),
        (b"1,2\n", ["'1,2'"]),
        (b"length,count\n1\n", ["line 2", "'1'"]),
        (b"length,count\n1,2,3\n", ["line 2", "'1,2,3'"]),
        (b"length,count\n1,x\n", ["line 2", "'1,x'"]),
        (b"length,count\n1,2\n11,1\n", ["line 3", 11, "max_sequence_length = 10"]),
        (b"length,count\n0,2\n", ["line 2", "length 0", 10]),
        (b"length,count\n4,2\n4,2\n", ["line 3", "length 4"]),
        (b"length,count\n4,-2\n", ["line 2", "count -2"]),
        (b"length,count\n4,99999999999999999999\n", ["line 2", "count 99999999999999999999"]),
        (b"length,count\n" + b"1" * 5000 + b",1\n", []),
        (b"length,count\n" + b"9" * 900 + b",1\n", ["line 2"]),
        (b"length,count\n1,-" + b"9" * 900, ["line 2"]),
        (b'length,count\n"' + b"\n" * 300_000, []),
        (b"x" * 5000, []),
        (b"length,count\n\xff,1\n", []),
        (b"length,count\n1\0,2\n", []),
        (b"length,count\n500,4000000000000000000\n", ["line 2", 500]),
        (f"length,count\n8,{2**61}\n9,{2**61}\n".encode(), ["bad: ", r"2\^62"]),
        (b"length,count\n9,999999999999999999\n", [r"2\^62"]),
    ],
    ids=range(20),
)
def test_a_bad_table_is_one_line_with_its_place(tmp_path, content, names):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with refused(path, *names, unchanged=tmp_path) as caught:
        LengthHistogram.from_csv(path, 10)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: LengthHistogram.from_lengths([3, 0], 5), ["sequence 1", "length 0"]),
        (
            lambda: LengthHistogram.from_lengths([3, 6], 5, "mine"),
            ["mine: ", "sequence 1", "length 6", "max_sequence_length = 5"],
        ),
        (lambda: LengthHistogram.from_lengths([3.5], 5), ["lengths", "float64"]),
        (lambda: LengthHistogram(np.array([1, 1])), ["length 0"]),
        (lambda: LengthHistogram(np.array([0, -1])), ["length 1", -1]),
        (lambda: LengthHistogram(np.array([0, 0, 2**62])), ["length 2", 2**62]),
        (lambda: LengthHistogram(np.array([0, 2**63], np.uint64), "mine"), ["mine: ", "length 1", 2**63]),
        (lambda: LengthHistogram(np.array([0.0, 1.0])), ["float64"]),
        (lambda: LengthHistogram(np.array([0])), [r"\(1,\)"]),
        (lambda: LengthHistogram.published("wikipedia_128"), ["'wikipedia_128'", *PUBLISHED]),
        (lambda: LengthHistogram.from_lengths([9], 9).with_max_sequence_length(8), [9, "max_sequence_length = 8"]),
        (lambda: LengthHistogram.from_lengths([9], 9).rounded_up(8), ["multiple_of", 8, 9]),
        (lambda: LengthHistogram.from_lengths([1], 4) + LengthHistogram.from_lengths([1], 5), [4, 5]),
        (lambda: LengthHistogram.from_json({"lengths": [1]}), ["histogram", "max_sequence_length"]),
        *(
            (lambda counts=counts: LengthHistogram(counts), [])
            for counts in ([[0, 1], [2]], [0, 2**64], ["0", "1"], 7, None, [0, None])
        ),
    ],
)
def test_what_is_refused(make, names):
    with refused(*names):
        make()


def test_other_types_are_not_added():
    with pytest.raises(TypeError):
        LengthHistogram.from_lengths([1], 4) + 1


def test_equality_is_about_counts():
    first = LengthHistogram.from_lengths([1, 2], 4, "a")
    assert first == LengthHistogram.from_lengths([2, 1], 4, "b")
    assert hash(first) == hash(LengthHistogram.from_lengths([2, 1], 4, "b"))
    assert first != LengthHistogram.from_lengths([1, 2], 5, "a")
    assert first != "a"


def test_a_table_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    histogram = LengthHistogram.from_lengths([3, 3, 5], 8)
    histogram.to_csv(tmp_path / "lengths.csv")
    before = (tmp_path / "lengths.csv").read_bytes()
    monkeypatch.setattr("os.replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LengthHistogram.from_lengths([1], 8).to_csv(tmp_path / "lengths.csv")
    assert (tmp_path / "lengths.csv").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("S", [8.0, np.float64(8), True, "8", None, [8], 0, -1, 10**30])
@pytest.mark.parametrize(
    "make",
    [
        lambda S: LengthHistogram.from_lengths([1], S),
        lambda S: LengthHistogram.from_lengths([1], 4).with_max_sequence_length(S),
        lambda S: pack([1], max_sequence_length=S),
    ],
    ids=["from_lengths", "with_max_sequence_length", "pack"],
)
def test_the_slots_of_a_pack_are_a_whole_number(make, S):
    """8.0 too is refused: it is the result of a division or of a file read without types; the next one is 8.5."""
    with refused("max_sequence_length = ", 16777216):
        make(S)


def test_numpys_integers_are_whole_numbers():
    for kind in (np.int8, np.uint16, np.int64, np.uint64):
        assert LengthHistogram.from_lengths(np.array([3, 3], kind), kind(4)) == LengthHistogram.from_lengths([3, 3], 4)


@pytest.mark.parametrize("lengths", [[[1, 2], [3]], ["1"], [None], {"a": 1}, [2**64], [True], 2.5, object()])
def test_lengths_that_are_no_whole_numbers_are_one_line(lengths):
    for make in (lambda: LengthHistogram.from_lengths(lengths, 4), lambda: pack(lengths, max_sequence_length=4)):
        with refused("lengths"):
            make()


@pytest.mark.parametrize("name", ["max_sequence_length", "lengths", "counts", "name"])
@pytest.mark.parametrize(
    "value", [None, -1, 2.5, "x\n", [1.5], [True, 1], [-1, 3], [3, 3], [9, 9, 9], {"a": 1}, 10**40, [[1], [2]]]
)
def test_from_json_names_the_field(name, value):
    given = {"name": "mine", "max_sequence_length": 8, "lengths": [2, 3], "counts": [1, 2]}
    if (name, value) == ("counts", [3, 3]):
        return  # counts may be equal
    with refused(f"^histogram: {name}"):
        LengthHistogram.from_json({**given, name: value})


def test_a_table_is_an_ordinary_file(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    for path in (tmp_path / "a.csv", "/dev/zero", tmp_path, tmp_path / "none"):
        with refused(path, "length,count"):
            LengthHistogram.from_csv(path, 10)
