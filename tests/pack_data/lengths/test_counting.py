"""Lengths from files: every kind of source gives the same histogram, in bounded memory."""

import bz2
import gzip
import lzma
import tracemalloc

import numpy as np
import pytest

from pack_data.inspection.lengths import lengths_facts, summary
from pack_data.lengths.counting import count, lengths_in, picture
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.store.data_set import StoreWriter
from pack_data.store.packs import SLOT, PackSchema, StoredColumn, assemble
from pack_data.store.sequences import LONGEST, Sequences
from tests.refusals import refused

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
EXPECTED = LengthHistogram.from_lengths(LENGTHS, 10)


def most_memory(function):
    """Return the bytes that a call holds at most."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_length_costs_its_own_counts_and_no_copies_of_them(tmp_path):
    (tmp_path / "a.csv").write_text(f"length,count\n{LONGEST},1\n")

    def count_longest():
        histogram = count([str(tmp_path / "a.csv")])
        assert (histogram.tokens, histogram.median_length, histogram.longest) == (LONGEST,) * 3

    assert most_memory(count_longest) < 3 * 8 * LONGEST  # the file's, the histogram's, and a truth for each


def write_all(folder):
    """Write the same lengths as every kind of file; return the paths."""
    text = "".join(f"{length}\n" for length in LENGTHS)
    (folder / "a.txt").write_text("\ufeffLength\n" + text + "\n")
    (folder / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "c.lengths.xz").write_bytes(lzma.compress(text.encode()))
    np.save(folder / "d.npy", np.array(LENGTHS, np.int16).reshape(12, 1))
    EXPECTED.to_csv(folder / "e.csv")
    schema = PackSchema.of_tokens(10, 1, [StoredColumn("ids", SLOT, "|u1")])
    sequences = Sequences.of_tokens(np.array(LENGTHS), {"ids": np.ones(sum(LENGTHS), np.int64)})
    packs = np.arange(len(LENGTHS))
    writer = StoreWriter(folder / "f", schema)
    writer.add(assemble(schema, sequences, packs, np.zeros_like(packs), len(packs)))
    writer.finish(algorithm="none").close()
    (folder / "g").mkdir()
    np.save(folder / "g" / "0.npy", np.array(LENGTHS[:5]))
    np.save(folder / "g" / "1.npy", np.array(LENGTHS[5:]))
    rows = [f"{[7] * length}\n" for length in LENGTHS]
    (folder / "h.jsonl").write_text("".join(rows))
    return [str(folder / name) for name in ("a.txt", "b.txt.gz", "c.lengths.xz", "d.npy", "e.csv", "f", "g", "h.jsonl")]


def test_every_kind_of_source_alone_and_in_parallel(tmp_path):
    paths = write_all(tmp_path)
    for path in paths:
        assert count([path], 10) == EXPECTED, path
    for path in (path for path in paths if path[-1] in "tzyg"):
        assert lengths_in([path]).tolist() == LENGTHS
    alone = count(paths, 10, workers=1)
    assert alone == count(paths, 10, workers=2)
    assert alone.counts.tolist() == (EXPECTED.counts * len(paths)).tolist()


def test_without_a_maximum_the_longest_sequence_decides(tmp_path):
    np.save(tmp_path / "0.npy", np.array(LENGTHS))
    (tmp_path / "ones.txt").write_text("1\n1\n")
    assert count([str(tmp_path / "0.npy")]).max_sequence_length == 9
    assert count([str(tmp_path / "ones.txt")]) == LengthHistogram.from_lengths([1, 1], 1)
    assert count(["squad_1_1_384", str(tmp_path / "0.npy")]).max_sequence_length == 384
    assert count(["squad_1_1_384"]) == LengthHistogram.published("squad_1_1_384")
    assert count(["squad_1_1_384"], 512).max_sequence_length == 512


@pytest.mark.parametrize(
    "name, content",
    [
        ("x.txt", b"\xef\xbb\xbf3\n4\n4\n"),
        ("x.txt", b"3.0\n4.\n4.00\n"),
        ("x.tsv", b"Length\n3\n4\n4\n"),
        ("x.CSV", b"Length,Count\n3,1\n4,2\n"),
        ("x.csv", b"\xef\xbb\xbfcount,length\n1,3\n2,4\n"),
        ("x.tsv", b"length\tcount\n3\t1\n4.0\t2.0\n"),
        ("x.csv.gz", gzip.compress(b"length, count\n3,1\n4,2\n", mtime=0)),
        ("x.csv", b'"Length","Count"\r\n"3","1"\r\n"4","2"\r\n'),
        ("x.data", b"COUNT,LENGTH\n2,4\n1,3\n"),
    ],
)
def test_lengths_as_spreadsheets_and_pandas_write_them(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert count([str(tmp_path / name)], 10) == LengthHistogram.from_lengths([3, 4, 4], 10)


def test_the_table_of_lengths_has_the_values_of_the_histogram():
    histogram = LengthHistogram.published("wikipedia_512")
    for key, fact in lengths_facts(histogram).rows.items():
        assert fact.value == getattr(histogram, key)
    assert "23.43%" in summary(histogram)  # of all sequences fill the row: they were cut
    for lengths in ([], [1]):
        special = LengthHistogram.from_lengths(lengths, 3)
        assert "sequences" in summary(special)


@pytest.mark.parametrize("histogram", [LengthHistogram.from_lengths([], 4), LengthHistogram.published("wikipedia_512")])
def test_the_picture_holds_every_sequence(histogram):
    bars = picture(histogram)
    assert sum(bars.series[0].values) == histogram.sequences
    assert len(bars.edges) == len(bars.categories) + 1
    assert [value for _, value in bars.levels] == [histogram.mean_length, histogram.median_length]
    # 23.4 % were cut to 512: that bar ends beyond the picture, and a note names its share.
    assert (bars.values.most is None) == (not histogram.sequences) == (not bars.notes)


@pytest.mark.parametrize("suffix, compress", [("txt", bytes), ("txt.xz", lzma.compress), ("txt.bz2", bz2.compress)])
def test_a_line_without_end_takes_no_memory(tmp_path, suffix, compress):
    """20 MB of blanks in one line of a small file: one line is printed, and little of the file is ever held."""
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(compress(b" " * 20_000_000 + b"\n5\n"))

    def count_it():
        with refused(path.name, "line 1", 1000):
            count([str(path)])

    assert most_memory(count_it) < 12_000_000


# ---- synthetic lengths -----------------------------------------------------------------------------------------------


def test_synthetic_lengths_follow_the_specification():
    histogram = synthetic_histogram("lognormal:mean=400,max=4096,n=100000,seed=3")
    assert (histogram.sequences, histogram.max_sequence_length) == (100_000, 4096)
    assert histogram.mean_length == pytest.approx(400, rel=0.03)  # a little less, for the longest are cut
    mode = synthetic_histogram("lognormal:mode=100,sigma=0.5,max=2048,n=100000")
    assert 85 <= int(np.argmax(np.convolve(mode.counts, np.ones(9), "same"))) <= 115
    assert synthetic_histogram("lognormal:median=50,max=2048,n=100001").median_length == pytest.approx(50, abs=2)
    uniform = synthetic_histogram("uniform:min=3,max=6,n=4000")
    assert uniform.lengths.tolist() == [3, 4, 5, 6]
    assert uniform.counts[3:].min() > 900


def test_a_sample_takes_each_sequence_once_at_most():
    whole = LengthHistogram.published("squad_1_1_384")
    assert synthetic_histogram(f"sample:squad_1_1_384,n={whole.sequences}") == whole
    part = synthetic_histogram("sample:squad_1_1_384,n=5000,seed=1")
    assert part.sequences == 5000
    assert (part.counts <= whole.counts).all()
    assert part == synthetic_histogram("sample:squad_1_1_384,seed=1,n=5000")
    assert part != synthetic_histogram("sample:squad_1_1_384,n=5000,seed=2")
