"""Lengths from files: every kind of source gives the same histogram, and a bad one says which record is wrong."""

import bz2
import gzip
import json
import lzma
import re
import tracemalloc

import numpy as np
import pytest

from pack_data.lengths.counting import count, picture, statistics, summary
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.store.data_set import StoreWriter
from pack_data.store.packs import SLOT, PackSchema, StoredColumn, assemble
from pack_data.store.sequences import LONGEST, Sequences


def test_a_length_costs_its_own_counts_and_no_copies_of_them(tmp_path):
    (tmp_path / "a.csv").write_text(f"length,count\n{LONGEST},1\n")
    tracemalloc.start()
    try:
        histogram = count([str(tmp_path / "a.csv")])
        assert (histogram.tokens, histogram.median_length, statistics(histogram)["longest"]) == (LONGEST,) * 3
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


def test_an_array_of_columns_is_no_array_of_lengths(tmp_path):
    for shape in ((6, 2), (1, 12), (2, 3, 2)):
        np.save(tmp_path / "x.npy", np.array(LENGTHS).reshape(shape))
        with pytest.raises(ValueError, match=re.escape(f"x.npy: an array of shape {shape}; give one column")):
            count([str(tmp_path / "x.npy")], 10)


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


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("x.txt", b"3\n4\nfive\n", "x.txt line 3: 'five' is not a length"),
        ("x.txt", b"3\n0\n", "sequence 1 has length 0; lengths go from 1 to max_sequence_length = 10"),
        ("x.txt", b"3\n11\n", "sequence 1 has length 11"),
        ("x.txt", b"3\n99999999999999999999\n", "line 2: '99999999999999999999' is not a length"),
        ("x.txt", b"\xff\xfe\x00", "cannot be read as text"),
        ("x.txt.xz", b"nonsense", "cannot be read as text"),
        ("x.txt.gz", b"nonsense", "cannot be read as text"),
        ("x.txt.gz", gzip.compress(b"3\n" * 1000, mtime=0)[:-9], "is cut or damaged"),
        ("x.txt.bz2", b"nonsense", "cannot be read as text"),
        ("x.npy", b"nonsense", "x.npy: not a readable .npy file"),
        ("x.csv.gz", gzip.compress(b"length,count\n3,1\n", mtime=0), "a CSV histogram is read plain"),
        ("x.csv", b"length,count\n3\n", "x.csv line 2"),
    ],
)
def test_bad_files_are_told_with_the_place(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        count([str(tmp_path / name)], 10)
    assert words in str(caught.value)


def test_other_bad_sources(tmp_path):
    with pytest.raises(ValueError, match="neither a file, nor a folder, nor a shipped histogram"):
        count(["nowhere"])
    np.save(tmp_path / "x.npy", np.array([1.5]))
    with pytest.raises(ValueError, match="lengths are whole numbers of tokens; got float64"):
        count([str(tmp_path / "x.npy")])
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="manifest.json: version is missing"):
        count([str(tmp_path)])


def test_summary_and_statistics():
    histogram = LengthHistogram.published("wikipedia_512")
    text = summary(histogram)
    for part in ("16,279,552", "204", "255.8", "23.4% fill all 512 slots", "50.0%", "2.001"):
        assert part in text
    values = statistics(histogram)
    assert json.loads(json.dumps(values)) == values
    assert LengthHistogram.from_json(values["histogram"]) == histogram
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
    "specification, words",
    [
        ("normal:mean=3", "no kind is called 'normal'; there are lognormal, uniform, sample"),
        ("uniform:max=5", "n is missing"),
        ("uniform:max=5,n=3,mean=4", "no key 'mean'"),
        ("uniform:max=5,n=x", "'n=x' is not KEY=NUMBER"),
        ("uniform:max=5.5,n=3", "max=5.5 is not a whole number of at least 1"),
        ("uniform:max=inf,n=3", "max=inf is not a whole number"),
        ("uniform:max=5,min=6,n=3", "min=6 is above max=5"),
        ("lognormal:max=5,n=3", "give one of mean, mode and median"),
        ("lognormal:max=5,n=3,mean=1,mode=1", "give one of mean, mode and median"),
        ("lognormal:max=5,n=3,mean=-1", "mean has to be positive"),
        ("sample:n=3", "histogram is missing"),
        ("sample:nothing,n=3", "no published histogram is called 'nothing'"),
        ("sample:squad_1_1_384,n=99999999", "has 88641 sequences"),
    ],
)
def test_bad_specifications(specification, words):
    with pytest.raises(ValueError) as caught:
        synthetic_histogram(specification)
    assert words in str(caught.value) and specification in str(caught.value)


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
            with pytest.raises(ValueError, match="line 1: more than 1000 characters"):
                count([str(path)])
            assert tracemalloc.get_traced_memory()[1] < 12_000_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("values", [["a"], [[1, 2], "b"], [None], [1 + 2j]])
def test_an_array_of_something_else(tmp_path, values):
    np.save(tmp_path / "a.npy", np.array(values, dtype=object if values[-1] in ("b", None) else None))
    with pytest.raises(ValueError, match="a.npy: not a readable .npy file"):
        count([str(tmp_path / "a.npy")])


def test_lengths_beyond_int64(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2**64 - 1], np.uint64))
    with pytest.raises(ValueError, match="sequence 1 has length 18446744073709551615"):
        count([str(tmp_path / "a.npy")])
