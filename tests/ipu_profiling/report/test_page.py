"""The report's page holds the numbers of its tables."""

import json

from ipu_profiling.report import command
from ipu_profiling.report.pictures import page_of
from pack_data.cli.command import run_main
from pack_data.display.table import MODEL, Column, Part, Table
from tests.pages import check_page

SMALL = (
    "model.hidden_size=64 model.num_heads=4 model.intermediate_size=128 model.vocabulary_size=512 model.num_layers=4 "
    "data.vocabulary_size=512 placement.layers_per_ipu=[1,1,1,1]"
).split()


def test_the_page_holds_the_tables_as_json_has_them(cycle_cache, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    options = [part for setting in SMALL for part in ("--set", setting)]
    options += [word for name in ("breakdown", "points") for word in ("--table", name)]
    options += ["--packing-factor", "1.996", "--json"]
    assert run_main(command.main, [*options, "--html", str(tmp_path / "page.html")]) == 0
    printed = json.loads(capsys.readouterr().out)["tables"]
    page = check_page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(printed) == 2 and len(page.tables) == 4  # breakdown has three parts
    drawn = [row for rows in page.tables.values() for row in rows]
    whole = [row for table in printed for row in table["rows"]]
    assert len(drawn) == len(whole) > 30
    for row, other in zip(drawn, whole):
        assert row.items() <= other.items() and len(row) >= 2


def test_parts_of_a_table_are_tables_of_the_page():
    columns = tuple(Column(key, key, MODEL, ".1f") for key in "abc")
    parts = (Part("first", ("a", "b")), Part("second", ("a", "c")))
    table = Table("t", "T: 1", columns, [dict(a=1.0, b=2.0, c=3.0)], ("note",), parts)
    page = check_page(page_of("page", "lead", [table, table._replace(name="u", title="U: 2")], ["words"]).html())
    assert page.tables["t_1-1"] == [dict(a=1.0, b=2.0)] and page.tables["t_2-1"] == [dict(a=1.0, c=3.0)]
    assert len(page.tables) == 4 and page.shown["t_1-1"] == [dict(a="1.0", b="2.0")]
