"""Commands that read lengths: what `--histogram` and `--synthetic` name, the default depth, and what a command does."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from pack_data.cli.command import ArgumentParser, run_main
from pack_data.lengths import packer_command, sort_command
from pack_data.lengths.counting import count
from pack_data.lengths.options import add_histogram_arguments, histogram_from, named_histogram
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packers import PACKERS, get_packer
from pack_data.packing.histogram import PUBLISHED, LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.sort import batch
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refused

SPECIFICATION = "uniform:max=9,n=50"
THREE = LengthHistogram.from_lengths([3, 3, 8], 8)


def histogram_of(*arguments):
    parser = ArgumentParser()
    add_histogram_arguments(parser)
    return histogram_from(parser.parse_args(arguments))


def report(capsys, name, *arguments):
    """Return what a packer's command prints as JSON, without its time."""
    assert run_main(lambda argv: packer_command.main(name, argv), [*arguments, "--json"]) == 0
    return {**json.loads(capsys.readouterr().out), "solve_seconds": 0}


# ---- histograms ------------------------------------------------------------------------------------------------------


def test_a_bundled_name_or_a_specification():
    assert histogram_of() == LengthHistogram.published(PUBLISHED[0])
    assert histogram_of("--synthetic", SPECIFICATION) == synthetic_histogram(SPECIFICATION)
    for arguments in (("--histogram", "squad_1_1_384"), ("--synthetic", SPECIFICATION)):
        histogram = histogram_of(*arguments)
        wider = histogram_of(*arguments, "--max-sequence-length", "500")
        assert histogram.max_sequence_length < wider.max_sequence_length == 500
        assert wider == histogram.with_max_sequence_length(500)


def test_a_histogram_by_its_first_line_and_sequences_by_their_content(tmp_path):
    table = "\n3,2\n8,1\n"
    files = {
        "own.csv": "\ufefflength, count" + table,
        "own": "length,count" + table,
        "own.table.txt": "length,count" + table,
        "lengths.csv": "3\n8\n3\n",
        "part.jsonl": "[1, 2, 3]\n[1, 2, 3, 4, 5, 6, 7, 8]\n[4, 5, 6]\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        assert named_histogram(str(path), 8) == count([str(path)], 8) == THREE


@pytest.mark.parametrize("name", ["own.npy", "own.txt", "own.lengths", "own.txt.gz"])
def test_a_file_with_a_length_for_each_sequence(tmp_path, name):
    path = tmp_path / name
    text = b"3\n8\n3\n"
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    if name.endswith(".npy"):
        np.save(path, np.array([3, 8, 3], np.uint16))
    for source in (path, tmp_path):  # a directory of such files as well
        assert histogram_of("--histogram", str(source), "--max-sequence-length", "8") == THREE


def test_columns_and_split_choose_among_published_sequences(tmp_path, capsys):
    for split, longest in (("train", 5), ("test", 7)):
        row = {"chosen": [1] * longest, "rejected": [2]}
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    options = ("--histogram", str(tmp_path), "--max-sequence-length", "8")
    for split, longest in (("train", 5), ("test", 7)):
        histogram = histogram_of(*options, "--split", split, "--columns", "chosen")
        assert histogram == LengthHistogram.from_lengths([longest] * 3, 8)
        assert f"{split}.jsonl, column chosen" in capsys.readouterr().err
    with refused(tmp_path, "--split", "test, train"):
        histogram_of(*options, "--columns", "chosen")


def test_a_data_set_states_its_lengths_and_its_slots(tmp_path):
    with build_small(write_corpus(tmp_path / "corpus", 10), tmp_path / "data") as store:
        stored = LengthHistogram(np.array(store.manifest.histogram))
    options = ("--histogram", str(tmp_path / "data"))
    assert histogram_of(*options) == stored
    assert histogram_of(*options, "--max-sequence-length", "70").max_sequence_length == 70
    # A packer gives the data set's own packing again.
    assert get_packer("spfhp")(stored, max_sequences_per_pack=3).packs == store.manifest.packs


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    LengthHistogram.from_lengths([3, 12, 7, 7, 1, 11, 2] * 3, 12).to_csv(tmp_path / "mine.csv")
    return ["--histogram", str(tmp_path / "mine.csv"), "--max-sequence-length", "12"]


@pytest.mark.parametrize("name", PACKERS)
def test_the_recipe_is_the_packing_that_is_printed(name, capsys, tmp_path, mine):
    recipe = tmp_path / "recipe.json"
    printed = report(capsys, name, *mine, "--max-sequences-per-pack", "2", "--out", str(recipe))
    packing = Packing.load(recipe)
    packing.check(LengthHistogram.from_csv(mine[1], 12))
    assert printed == {**packing.to_json(), "solve_seconds": 0}


def test_options_of_single_packers(capsys, mine):
    assert report(capsys, "nnlshp", *mine, "--rounds", "20")["packs"] >= 10
    drawn = [report(capsys, "greedy", *mine, "--seed", seed) for seed in "00"]
    assert drawn[0] == drawn[1]
    # 3, 1, 2 -> 4; 7, 7 -> 8; 12, 11 -> 12
    assert report(capsys, "spfhp", *mine, "--multiple-of", "4")["tokens"] == 3 * (3 * 4 + 2 * 8 + 2 * 12)
    assert sort_command.main(batch, [*mine, "--batch-size", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batches"] == 6  # 21 sequences
    # The paper's Table 1: SPFHP at depth 3.
    assert report(capsys, "spfhp")["packs"] == 9_094_695


@pytest.mark.parametrize("name, own, published", [("optimal", None, 3), ("nnlshp", 3, 3), ("none", 1, 1)])
def test_the_default_depth_depends_on_whose_lengths_they_are(tmp_path, capsys, name, own, published):
    """The user's own lengths are packed without a limit, a bundled histogram as in the paper."""
    (tmp_path / "lengths.txt").write_text("3\n" * 40)
    mine = ("--histogram", str(tmp_path / "lengths.txt"), "--max-sequence-length", "30")
    bundled = ("--synthetic", "sample:squad_1_1_384,n=400")
    assert report(capsys, name, *mine)["max_sequences_per_pack"] == own
    assert report(capsys, name, *bundled)["max_sequences_per_pack"] == published


@pytest.mark.parametrize("depth, packs", [("3", 14), ("9", 5), ("10", None), ("unlimited", None)])
def test_a_limit_on_depth_that_costs_packs_is_reported(tmp_path, capsys, depth, packs):
    """40 sequences of 3 tokens fill 4 rows of 30 slots."""
    (tmp_path / "lengths.txt").write_text("3\n" * 40)
    options = ["--histogram", str(tmp_path / "lengths.txt"), "--max-sequence-length", "30"]
    assert packer_command.main("best_fit", [*options, "--max-sequences-per-pack", depth]) == 0
    assert (f"costs packs: {packs} instead of at most 4" in capsys.readouterr().out) == (packs is not None)


def test_a_module_is_a_command_without_warnings():
    """No module is imported twice, and nothing is deprecated."""
    for module in ("spfhp", "sort"):
        command = [sys.executable, "-W", "error", "-m", f"pack_data.{module}", "--histogram", "squad_1_1_384"]
        finished = subprocess.run(command, capture_output=True, text=True)
        assert (finished.returncode, finished.stderr) == (0, "")


def test_a_reader_that_leaves_early_is_no_error():
    command = f"'{sys.executable}' -m pack_data.spfhp --histogram squad_1_1_384 | head -n 1"
    finished = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert finished.stdout.startswith("SPFHP")
    assert finished.stderr == ""
