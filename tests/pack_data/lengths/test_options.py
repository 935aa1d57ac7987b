"""The options that name a histogram."""

import gzip
import json

import numpy as np
import pytest

from pack_data.cli.command import ArgumentParser
from pack_data.lengths.counting import count
from pack_data.lengths.options import add_histogram_arguments, histogram_from, named_histogram
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packers import get_packer
from pack_data.packing.histogram import PUBLISHED, LengthHistogram
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refused

SPECIFICATION = "uniform:max=9,n=50"


def found(*arguments):
    parser = ArgumentParser()
    add_histogram_arguments(parser)
    return histogram_from(parser.parse_args(arguments))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("length,count\n3,2\n8,1\n")
    return str(path)


def test_a_shipped_name_a_file_or_a_specification(table):
    assert found() == LengthHistogram.published(PUBLISHED[0])
    assert found("--histogram", "squad_1_1_384") == LengthHistogram.published("squad_1_1_384")
    assert found("--histogram", table, "--max-sequence-length", "8") == LengthHistogram.from_lengths([3, 3, 8], 8)
    assert found("--synthetic", SPECIFICATION) == synthetic_histogram(SPECIFICATION)


def test_whatever_the_command_histogram_takes(tmp_path):
    """A histogram by its first line, whatever its name; sequences by their content."""
    for name, start in (("own.csv", "\ufefflength, count"), ("own", "length,count"), ("own.table.txt", "length,count")):
        (tmp_path / name).write_text(f"{start}\n3,2\n8,1\n", encoding="utf-8")
        for source in (named_histogram(str(tmp_path / name), 8), count([str(tmp_path / name)], 8)):
            assert source == LengthHistogram.from_lengths([3, 3, 8], 8)
    (tmp_path / "lengths.csv").write_text("3\n8\n3\n")
    (tmp_path / "part.jsonl").write_text("[1, 2, 3]\n[1, 2, 3, 4, 5, 6, 7, 8]\n[4, 5, 6]\n")
    for name in ("lengths.csv", "part.jsonl"):
        assert named_histogram(str(tmp_path / name), 8) == LengthHistogram.from_lengths([3, 3, 8], 8)


def test_columns_and_split_choose_among_published_sequences(tmp_path, capsys):
    """Both are refused where there is nothing to choose."""
    for split, longest in (("train", 5), ("test", 7)):
        rows = [{"chosen": [1] * longest, "rejected": [2]}] * 3
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ("--histogram", str(tmp_path), "--max-sequence-length", "8")
    for split, longest in (("train", 5), ("test", 7)):
        histogram = found(*options, "--split", split, "--columns", "chosen")
        assert histogram == LengthHistogram.from_lengths([longest] * 3, 8)
        assert f"{split}.jsonl, column chosen" in capsys.readouterr().err
    with refused(tmp_path, "--split", "test, train"):
        found(*options, "--columns", "chosen")
    with refused("--columns", "chosen", "rejected"):
        found(*options, "--split", "test")
    for option in (("--columns", "a"), ("--split", "train")):
        with refused(PUBLISHED[0], option[0]):
            found(*option)
        with refused("--synthetic", option[0]):
            found("--synthetic", SPECIFICATION, *option)


@pytest.mark.parametrize("name", ["own.npy", "own.txt", "own.lengths", "own.txt.gz"])
def test_a_file_with_a_length_for_each_sequence(tmp_path, name):
    lengths = [3, 8, 3]
    if name.endswith(".npy"):
        np.save(tmp_path / name, np.array(lengths, np.uint16))
    else:
        with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt") as file:
            file.write("".join(f"{length}\n" for length in lengths))
    for path in (tmp_path / name, tmp_path):  # a folder of such files as well
        assert found("--histogram", str(path), "--max-sequence-length", "9") == LengthHistogram.from_lengths(lengths, 9)
        with refused("--histogram", path, "--max-sequence-length"):
            found("--histogram", str(path))
    with refused(name, "sequence 1", "length 8", 7):
        found("--histogram", str(tmp_path / name), "--max-sequence-length", "7")


def test_a_data_set_knows_its_lengths_and_its_slots(tmp_path):
    with build_small(write_corpus(tmp_path / "corpus", 10), tmp_path / "data") as store:
        own = LengthHistogram(np.array(store.manifest.histogram))
    assert found("--histogram", str(tmp_path / "data")) == own
    assert found("--histogram", str(tmp_path / "data"), "--max-sequence-length", "70").max_sequence_length == 70
    # A packer gives the data set's own packing again.
    packing = get_packer("spfhp")(found("--histogram", str(tmp_path / "data")), max_sequences_per_pack=3)
    assert packing.packs == store.manifest.packs


@pytest.mark.parametrize(
    "name, content, names",
    [
        ("a.txt", b"", ["no sequences"]),
        ("a.csv", b"length,count\n", ["no sequences"]),
        ("a.csv", b"3,2\n8,1\n", ["line 1", "'3,2'", "length,count"]),
        ("a.bin", b"\0\1\xff", []),
        ("manifest.json", b"{}", ["version"]),
        ("nothing.csv", None, PUBLISHED),
    ],
)
def test_files_that_are_none_of_these(tmp_path, name, content, names):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    path = tmp_path if name == "manifest.json" else tmp_path / name
    with refused(name, *names, unchanged=tmp_path):
        found("--histogram", str(path), "--max-sequence-length", "8")


@pytest.mark.parametrize("arguments", [("--histogram", "squad_1_1_384"), ("--synthetic", SPECIFICATION)])
def test_the_slots_of_a_pack_can_be_more(arguments):
    own, wider = found(*arguments), found(*arguments, "--max-sequence-length", "500")
    assert wider.max_sequence_length == 500 and own.max_sequence_length < 500
    assert wider == own.with_max_sequence_length(500)
