"""The whole way of a small data set: every stage has its row."""

from pack_data.benchmark.__main__ import main, scaled
from pack_data.histogram import LengthHistogram


def test_the_rows(capsys):
    assert main(["--sequences", "2000", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    labels = ("assignment", "drawing", "assign and write", "processors", "memory", "reading, random", "checksums")
    assert all(label in printed for label in labels) and "2,000 sequences" in printed


def test_as_many_sequences_in_the_same_proportions():
    found = scaled(LengthHistogram.from_lengths([1, 1, 1, 2, 2, 5], 5), 60)
    assert found.sequences == 60 and found.counts.tolist() == [0, 30, 20, 0, 0, 10]
