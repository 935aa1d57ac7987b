"""The options that name a histogram."""

import pytest

from pack_data.command import ArgumentParser
from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.lengths.options import add_histogram_arguments, histogram_from, named_histogram
from pack_data.lengths.synthetic import synthetic_histogram

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


@pytest.mark.parametrize("arguments", [("--histogram", "squad_1_1_384"), ("--synthetic", SPECIFICATION)])
def test_the_slots_of_a_pack_can_be_more(arguments):
    own, wider = found(*arguments), found(*arguments, "--max-sequence-length", "500")
    assert wider.max_sequence_length == 500 and own.max_sequence_length < 500
    assert wider == own.with_max_sequence_length(500)


def test_what_names_no_histogram(table, tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a shipped name"):
        named_histogram(str(tmp_path / "nothing.csv"), 8)
    with pytest.raises(ValueError, match="add --max-sequence-length"):
        named_histogram(table)
    (tmp_path / "empty.csv").write_text("length,count\n")
    with pytest.raises(ValueError, match="holds no sequence"):
        named_histogram(str(tmp_path / "empty.csv"), 8)
