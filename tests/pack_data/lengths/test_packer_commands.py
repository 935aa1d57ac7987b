"""`python -m pack_data.<packer>`: what a user types and sees."""

import json
import shlex
import subprocess
import sys

import pytest

from pack_data.cli.command import run_main
from pack_data.lengths import packer_command, sort_command
from pack_data.packers import PACKERS
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.sort import batch


def run(name, *arguments):
    return run_main(lambda argv: packer_command.main(name, argv), list(arguments))


@pytest.fixture
def lengths_csv(tmp_path):
    path = tmp_path / "mine.csv"
    LengthHistogram.from_lengths([3, 12, 7, 7, 1, 11, 2] * 3, 12).to_csv(path)
    return ["--histogram", str(path), "--max-sequence-length", "12"]


@pytest.mark.parametrize("name", PACKERS)
def test_table_json_and_recipe(name, capsys, tmp_path, lengths_csv):
    recipe = tmp_path / "recipe.json"
    assert run(name, *lengths_csv, "--max-sequences-per-pack", "2", "--out", str(recipe)) == 0
    out = capsys.readouterr().out
    assert name.upper() in out and "mine" in out and "efficiency" in out and str(recipe) in out
    assert run(name, *lengths_csv, "--max-sequences-per-pack", "2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    packing = Packing.load(recipe)
    packing.check(LengthHistogram.from_csv(lengths_csv[1], 12))
    assert {**report, "solve_seconds": 0} == {**packing.to_json(), "solve_seconds": 0}


def test_bare_spfhp_packs_wikipedia_at_depth_3(capsys):
    assert run("spfhp") == 0
    out = capsys.readouterr().out
    assert "wikipedia_512" in out and "9,094,695" in out and "89.441%" in out


def test_options_of_their_own(capsys, lengths_csv):
    assert run("nnlshp", *lengths_csv, "--rounds", "20", "--json") == 0
    seeds = []
    for seed in ("0", "0", "1"):
        assert run("greedy", *lengths_csv, "--seed", seed, "--json") == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    seeds = [{**report, "solve_seconds": 0} for report in reports[1:]]
    assert seeds[0] == seeds[1]
    assert sort_command.main(batch, [*lengths_csv, "--batch-size", "4"]) == 0
    assert "different lengths" in capsys.readouterr().out
    options = "--histogram squad_1_1_384 --max-sequence-length 512 --max-sequences-per-pack unlimited"
    assert run("spfhp", *options.split()) == 0
    assert "pack of 512 slots" in capsys.readouterr().out
    assert run("spfhp", *lengths_csv, "--multiple-of", "4", "--json") == 0  # 3, 1, 2 -> 4; 7, 7 -> 8; 12, 11 -> 12
    assert json.loads(capsys.readouterr().out)["tokens"] == 3 * (3 * 4 + 2 * 8 + 2 * 12)
    assert run("spfhp", *lengths_csv, "--multiple-of", "4") == 0
    assert "27 slots of the tokens above are rounding" in capsys.readouterr().out
    assert run("spfhp", *lengths_csv, "--multiple-of", "5") == 2
    assert "multiple_of = 5" in capsys.readouterr().err
    assert run("spfhp", "--synthetic", "uniform:max=9,n=100") == 0
    assert "uniform:max=9,n=100" in capsys.readouterr().out


def test_run_as_modules_without_warnings(tmp_path):
    """Run as a user runs them, with warnings as errors: no module is imported twice, nothing is deprecated."""
    for arguments in (
        ["pack_data.spfhp", "--json"],
        ["pack_data.sort", "--histogram", "squad_1_1_384"],
        ["ipu_packed_bert", "look", "squad_1_1_384"],
        ["ipu_packed_bert", "compare", "--synthetic", "uniform:max=9,n=100", "--depths", "2", "--packers", "spfhp"],
    ):
        finished = subprocess.run([sys.executable, "-W", "error", "-m", *arguments], capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        assert finished.stderr == ""


def test_a_reader_that_leaves_early_is_no_error():
    finished = subprocess.run(
        f"{shlex.quote(sys.executable)} -m pack_data.spfhp | head -n 1", shell=True, capture_output=True, text=True
    )
    assert finished.stdout.startswith("SPFHP")
    assert finished.stderr == ""
