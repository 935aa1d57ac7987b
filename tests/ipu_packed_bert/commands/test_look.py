"""`packed-bert look`: one page of what is named, the same as JSON, and one line for every mistake."""

import json

import pytest

from ipu_packed_bert import __main__ as packed_bert
from pack_data import LengthHistogram, PackStore
from pack_data.cli.command import run_main
from tests.pages import check_page
from tests.tiny_runs import tiny_data


def look(*arguments):
    return run_main(packed_bert.main, ["look", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    records = [dict(step=n, loss=9 / n, packs=2, sequences=3, tokens=90, seconds=0.5) for n in (1, 2, 3)]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_of_data_sets_and_runs(tmp_path, capsys, run):
    data = tiny_data(tmp_path / "data")
    for what, pictures in ((data, 9), (run, 2)):
        page = tmp_path / "page.html"
        assert look(what, "--html", page, "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        read = check_page(page.read_text(encoding="utf-8"))
        assert len(read.pictures) >= pictures
        assert read.pictures == printed["pictures"]
        assert read.tables == printed["tables"]
        assert printed["answer"]
        assert len(printed["figures"]) == 3


def test_the_lengths_of_a_data_set_can_be_written(tmp_path, capsys):
    data = tiny_data(tmp_path / "data")
    table = tmp_path / "lengths.csv"
    assert look(data, "--out", table) == 0
    with PackStore.open(data) as store:
        assert LengthHistogram.from_csv(table, 512).sequences == store.manifest.sequences
    assert f"{store.manifest.sequences:,}" in capsys.readouterr().out
