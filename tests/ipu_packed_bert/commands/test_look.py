"""`packed-bert look`: one page of what is named, the same as JSON, and one line for every mistake."""

import json

import numpy as np
import pytest

from ipu_packed_bert import __main__ as packed_bert
from pack_data import LengthHistogram, PackStore
from pack_data.cli.command import run_main
from tests.pages import check_page
from tests.tiny_runs import tiny_data


def look(*arguments):
    return run_main(packed_bert.main, ["look", *map(str, arguments)])


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(2, 17, 200))
    return path


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    records = [dict(step=n, loss=9 / n, packs=2, sequences=3, tokens=90, seconds=0.5) for n in (1, 2, 3)]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_of_lengths_data_sets_and_runs(tmp_path, capsys, lengths, run):
    data = tiny_data(tmp_path / "data")
    text = tmp_path / "lengths.txt"
    text.write_text("3\n5\n5\n")
    for what, pictures in ((lengths, 9), (text, 9), (data, 9), (run, 2)):
        page = tmp_path / "page.html"
        assert look(what, "--html", page, "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        read = check_page(page.read_text(encoding="utf-8"))
        assert len(read.pictures) >= pictures
        assert read.pictures == printed["pictures"] and read.tables == printed["tables"]
        assert printed["answer"] and len(printed["figures"]) == 3


def test_shipped_names_know_their_slots(capsys):
    assert look("squad_1_1_384", "--json", "--depth", "2", "--packer", "spfhp") == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert {row["what"]: row["value"] for row in tables["lengths"]}["max_sequence_length"] == 384


def test_the_answer_is_printed_too(tmp_path, capsys, lengths):
    assert look(lengths, "--html", tmp_path / "page.html") == 0
    answer, page = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "page.html") in page and "200 sequences fit into" in answer
    assert answer in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options, words",
    [
        ([], ["10 packs of 16 slots (OPTIMAL, any depth)", "instead of 75.0%", "4.000 of at most 4.000"]),
        (["--depth", "2", "--packer", "best_fit"], ["20 packs", "(BEST_FIT, depth 2)", "20 instead of at most 10"]),
    ],
)
def test_without_options_the_headline_is_printed(tmp_path, capsys, options, words):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("4\n" * 40)
    assert look(lengths, "--max-sequence-length", 16, *options) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


def test_lengths_alone_are_summarised_and_added_up(tmp_path, capsys, lengths):
    table = tmp_path / "both.csv"
    assert look(lengths, "squad_1_1_384", "--out", table, "--plot", tmp_path / "both.svg") == 0
    assert "88,841" in capsys.readouterr().out and (tmp_path / "both.svg").stat().st_size
    assert LengthHistogram.from_csv(table, 384).sequences == 88_841


def test_the_lengths_of_a_data_set_can_be_written(tmp_path, capsys):
    data = tiny_data(tmp_path / "data")
    table = tmp_path / "lengths.csv"
    assert look(data, "--out", table) == 0
    with PackStore.open(data) as store:
        assert LengthHistogram.from_csv(table, 512).sequences == store.manifest.sequences
    assert f"{store.manifest.sequences:,}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((), "WHAT"),
        (("{lengths}", "{data}", "--pack", "1"), "--pack"),
        (("{data}", "{lengths}", "--html", "{page}"), "shown alone"),
        (("{data}", "--out", "{data}/manifest.json"), "exists"),
        (("{broken}", "--plot", "{page}.png"), "--plot"),
        (("nowhere",), "no such file"),
        (("{folder}/none.npy", "--html", "{page}"), "none.npy"),
        (("{folder}", "--html", "{page}"), "{folder}"),
        (("{lengths}", "--html", "{folder}/none/page.html"), "no directory"),
        (("{lengths}", "--html", "{folder}"), "is a directory"),
        (("{lengths}", "--html", "{page}", "--packer", "best"), "best"),
        (("{lengths}", "--html", "{page}", "--packer", "nnlshp", "--depth", "8"), "--max-sequences-per-pack 3"),
        (("{lengths}", "--html", "{page}", "--max-sequence-length", "8"), "length"),
        (("{empty}", "--html", "{page}"), "empty.txt"),
        (("{empty}",), "empty.txt: contains no sequences"),
        (("{data}", "--html", "{page}", "--pack", "1000"), "--pack 1000"),
        (("{data}", "--html", "{page}", "--packer", "spfhp"), "packed already"),
        (("{data}", "--html", "{page}", "--max-sequence-length", "64"), "packed already"),
        (("{data}", "--html", "{page}", "--depth", "3"), "--depth: "),
        (("{broken}", "--html", "{page}", "--depth", "2"), "--depth: "),
        (("{lengths}", "--html", "{lengths}"), "reads this file"),
        (("squad_1_1_384", "--html", "{page}", "--pack", "0"), "--pack: squad_1_1_384 holds lengths, not packs"),
        (("{broken}", "--html", "{page}"), "log.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_no_file(tmp_path, capsys, lengths, arguments, named):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "empty.txt").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "log.jsonl").write_text("no JSON\n")
    page = tmp_path / "page.html"
    places = dict(lengths=lengths, folder=folder, page=page, empty=tmp_path / "empty.txt", broken=broken)
    if any("{data}" in argument for argument in arguments):
        places["data"] = tiny_data(tmp_path / "data")
    page.write_text("former")
    assert look(*(str(each).format(**places) for each in arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and named.format(**places) in said
    assert page.read_text() == "former"
