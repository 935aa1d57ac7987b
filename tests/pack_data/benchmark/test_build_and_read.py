"""The whole way of a small data set: every stage has its row."""

from pack_data.benchmark.__main__ import main


def test_the_rows(capsys):
    assert main(["--sequences", "2000", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    labels = ("assignment", "drawing", "assign and write", "processors", "memory", "reading, random", "checksums")
    assert all(label in printed for label in labels)
    assert "2,000 sequences drawn" in printed and "of 2,000 lengths to packs" in printed
