"""Lengths from files: every kind of source gives the same histogram, and a bad one says which record is wrong."""

import bz2
import gzip
import io
import lzma
import re
import tracemalloc

import numpy as np
import pytest

from pack_data.lengths.counting import count, lengths_table, picture, summary
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import PUBLISHED, LengthHistogram
from pack_data.store.data_set import StoreWriter
from pack_data.store.packs import SLOT, PackSchema, StoredColumn, assemble
from pack_data.store.sequences import LONGEST, Sequences
from tests.refusals import refused


def test_a_length_costs_its_own_counts_and_no_copies_of_them(tmp_path):
    (tmp_path / "a.csv").write_text(f"length,count\n{LONGEST},1\n")
    tracemalloc.start()
    try:
        histogram = count([str(tmp_path / "a.csv")])
        assert (histogram.tokens, histogram.median_length, histogram.longest) == (LONGEST,) * 3
        assert tracemalloc.get_traced_memory()[1] < 3 * 8 * LONGEST  # the file's, the histogram's, and a truth each
    finally:
        tracemalloc.stop()


LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture
def expected():
    return LengthHistogram.from_lengths(LENGTHS, 10)


def write_all(folder):
    """The same lengths as every kind of file; returns the paths."""
    text = "".join(f"{length}\n" for length in LENGTHS)
    (folder / "a.txt").write_text("\ufeffLength\n" + text + "\n")
    with gzip.open(folder / "b.txt.gz", "wt") as file:
        file.write(text)
    with lzma.open(folder / "c.lengths.xz", "wt") as file:
        file.write(text)
    np.save(folder / "d.npy", np.array(LENGTHS, np.int16).reshape(12, 1))
    LengthHistogram.from_lengths(LENGTHS, 10).to_csv(folder / "e.csv")
    schema = PackSchema.of_tokens(10, 1, [StoredColumn("ids", SLOT, "|u1")])
    sequences = Sequences.of_tokens(np.array(LENGTHS), {"ids": np.ones(sum(LENGTHS), np.int64)})
    packs = np.arange(len(LENGTHS))
    writer = StoreWriter(folder / "f", schema)
    writer.add(assemble(schema, sequences, packs, np.zeros_like(packs), len(packs)))
    writer.finish(algorithm="none").close()
    return [str(folder / name) for name in ("a.txt", "b.txt.gz", "c.lengths.xz", "d.npy", "e.csv", "f")]


def test_every_kind_of_source(tmp_path, expected):
    for path in write_all(tmp_path):
        assert count([path], 10) == expected, path


def test_many_sources_at_once_in_parallel(tmp_path, expected):
    paths = write_all(tmp_path)
    alone = count(paths, 10, workers=1)
    assert alone == count(paths, 10, workers=2)
    assert alone.counts.tolist() == (expected.counts * len(paths)).tolist()


def test_a_folder_of_lengths(tmp_path, expected):
    np.save(tmp_path / "0.npy", np.array(LENGTHS[:5]))
    np.save(tmp_path / "1.npy", np.array(LENGTHS[5:]))
    assert count([str(tmp_path)], 10) == expected


def test_without_a_maximum_the_longest_sequence_decides(tmp_path):
    np.save(tmp_path / "0.npy", np.array(LENGTHS))
    assert count([str(tmp_path / "0.npy")]).max_sequence_length == 9
    assert count(["squad_1_1_384", str(tmp_path / "0.npy")]).max_sequence_length == 384
    assert count(["squad_1_1_384"]) == LengthHistogram.published("squad_1_1_384")
    assert count(["squad_1_1_384"], 512).max_sequence_length == 512


def test_a_file_of_sequences(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    parquet.write_table(arrow.table({"input_ids": [[7] * length for length in LENGTHS]}), tmp_path / "x.parquet")
    assert count([str(tmp_path / "x.parquet")], 10) == LengthHistogram.from_lengths(LENGTHS, 10)


def array_file(*values, **options):
    """The bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, np.array(*values, **options))
    return file.getvalue()


@pytest.mark.parametrize(
    "name, content, names",
    [
        ("x.txt", b"3\n4\nfive\n", ["line 3", "'five'"]),
        ("x.txt", b"3\n0\n", ["sequence 1", "length 0", "max_sequence_length = 10"]),
        ("x.txt", b"3\n11\n", ["sequence 1", "length 11"]),
        ("x.txt", b"3\n99999999999999999999\n", ["line 2", "'99999999999999999999'"]),
        ("x.txt", b"\xff\xfe\x00", ["UTF-16"]),
        ("x.txt", "3\n4\n".encode("utf-16"), ["UTF-16"]),
        ("x.txt", b"3\n4.5\n", ["line 2", "'4.5'"]),
        ("x.csv", b"count,length\n3,1\n1,11\n", ["line 3", "length 11"]),
        ("x.txt.xz", b"nonsense", ["text"]),
        ("x.txt.gz", b"nonsense", ["text"]),
        ("x.txt.gz", gzip.compress(b"3\n" * 1000, mtime=0)[:-9], []),
        ("x.txt.bz2", b"nonsense", ["text"]),
        ("x.csv", b"length,count\n3\n", ["line 2"]),
        ("x.npy", b"nonsense", [".npy"]),
        ("x.npy", array_file([1.5]), ["float64"]),
        ("x.npy", array_file([[1, 2]] * 3), [r"\(3, 2\)"]),
        ("x.npy", array_file([[1, 2, 3]]), [r"\(1, 3\)"]),
        ("x.npy", array_file([[[1, 2], [1, 2]]]), [r"\(1, 2, 2\)"]),
        ("x.npy", array_file(["a"]), [".npy"]),
        ("x.npy", array_file([[1, 2], "b"], dtype=object), [".npy"]),
        ("x.npy", array_file([None], dtype=object), [".npy"]),
        ("x.npy", array_file([1 + 2j]), [".npy"]),
        ("manifest.json", b"{}", ["version"]),
        ("manifest.json", None, [*PUBLISHED]),
    ],
)
def test_bad_files_are_told_with_the_place(tmp_path, name, content, names):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with refused(name, *names, unchanged=tmp_path):
        count([str(tmp_path if content == b"{}" else path)], 10)


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


def test_the_summary_and_the_table_of_lengths():
    histogram = LengthHistogram.published("wikipedia_512")
    text = summary(histogram)
    for part in ("16,279,552", "204", "255.8", "23.4% fill all 512 slots", "50.0%", "2.001"):
        assert part in text
    for row in lengths_table(histogram).rows:
        assert row["value"].value == getattr(histogram, row["what"].value)
    for special in (LengthHistogram.from_lengths([], 3), LengthHistogram.from_lengths([1], 1)):
        assert "sequences" in summary(special)


@pytest.mark.parametrize("name", ["wikipedia_512", "empty"])
def test_the_picture_holds_every_sequence(name):
    histogram = LengthHistogram.from_lengths([], 4) if name == "empty" else LengthHistogram.published(name)
    bars = picture(histogram)
    assert sum(bars.series[0].values) == histogram.sequences and len(bars.edges) == len(bars.categories) + 1
    assert dict(bars.levels).keys() == {f"mean {histogram.mean_length:.1f}", f"median {histogram.median_length}"}
    # 23.4 % were cut to 512: that bar ends beyond the picture, and a note says so.
    assert (bars.values.most is None) == (name == "empty") == (not bars.notes)


# ---- made-up lengths -------------------------------------------------------------------------------------------------


def test_synthetic_lengths_follow_the_specification():
    histogram = synthetic_histogram("lognormal:mean=400,max=4096,n=100000,seed=3")
    assert (histogram.sequences, histogram.max_sequence_length) == (100_000, 4096)
    assert histogram.mean_length == pytest.approx(400, rel=0.03)  # a little less, for the longest are cut
    mode = synthetic_histogram("lognormal:mode=100,sigma=0.5,max=2048,n=100000")
    assert 85 <= int(np.argmax(np.convolve(mode.counts, np.ones(9), "same"))) <= 115
    assert synthetic_histogram("lognormal:median=50,max=2048,n=100001").median_length == pytest.approx(50, abs=2)
    uniform = synthetic_histogram("uniform:min=3,max=6,n=4000")
    assert uniform.lengths.tolist() == [3, 4, 5, 6] and uniform.counts[3:].min() > 900


def test_a_sample_takes_each_sequence_once_at_most():
    whole = LengthHistogram.published("squad_1_1_384")
    assert synthetic_histogram(f"sample:squad_1_1_384,n={whole.sequences}") == whole
    part = synthetic_histogram("sample:squad_1_1_384,n=5000,seed=1")
    assert part.sequences == 5000 and (part.counts <= whole.counts).all()
    assert part == synthetic_histogram("sample:squad_1_1_384,seed=1,n=5000")
    assert part != synthetic_histogram("sample:squad_1_1_384,n=5000,seed=2")


@pytest.mark.parametrize(
    "specification, names",
    [
        ("normal:mean=3", ["'normal'", "lognormal", "uniform", "sample"]),
        ("uniform:max=5", ["n", "max"]),
        ("uniform:max=5,n=3,mean=4", ["'mean'"]),
        ("uniform:max=5,n=x", ["'n=x'"]),
        ("uniform:max=5.5,n=3", ["max=5.5", 1]),
        ("uniform:max=inf,n=3", ["max=inf", 1]),
        ("uniform:max=5,min=6,n=3", ["min=6", "max=5"]),
        ("lognormal:max=5,n=3", ["mean", "mode", "median"]),
        ("lognormal:max=5,n=3,mean=1,mode=1", ["mean", "mode", "median"]),
        ("lognormal:max=5,n=3,mean=-1", ["mean", "positive"]),
        ("sample:n=3", ["histogram"]),
        ("sample:nothing,n=3", ["'nothing'", *PUBLISHED]),
        ("sample:squad_1_1_384,n=99999999", [88641]),
    ],
)
def test_bad_specifications(specification, names):
    with refused(specification, *names):
        synthetic_histogram(specification)


@pytest.mark.parametrize("slots, rows", [(1, 1), (7, 7), (16, 16), (17, 16), (512, 16)])
def test_the_picture_of_a_summary_covers_every_length_once(slots, rows):
    lengths = np.random.default_rng(slots).integers(1, slots + 1, 300)
    lines = summary(LengthHistogram.from_lengths(lengths, slots)).splitlines()
    ranges = [found.groups() for found in (re.match(r" +(\d+) to +(\d+) +([\d.]+)%", line) for line in lines) if found]
    assert len(ranges) == rows and ranges[0][0] == "1" and ranges[-1][1] == str(slots)
    assert all(int(after[0]) == int(before[1]) + 1 for before, after in zip(ranges, ranges[1:]))
    for low, high, share in ranges:
        assert float(share) == pytest.approx(100 * ((lengths >= int(low)) & (lengths <= int(high))).mean(), abs=0.051)


def test_a_file_of_the_shortest_lengths_makes_the_smallest_histogram(tmp_path):
    (tmp_path / "ones.txt").write_text("1\n1\n")
    assert count([str(tmp_path / "ones.txt")]) == LengthHistogram.from_lengths([1, 1], 1)


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "txt.xz", "txt.bz2"])
def test_a_line_without_end_takes_no_memory(tmp_path, suffix):
    """20 MB of digits, or of blanks, in one line of a small file: one line is said, and little of it is ever held."""
    opener = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open}.get(suffix.rpartition(".")[2], open)
    for letter in (b"7", b" "):
        path = tmp_path / f"a.{suffix}"
        with opener(path, "wb") as file:
            file.write(letter * 20_000_000 + b"\n5\n")
        tracemalloc.start()
        try:
            with refused(path.name, "line 1", 1000):
                count([str(path)])
            assert tracemalloc.get_traced_memory()[1] < 12_000_000
        finally:
            tracemalloc.stop()
