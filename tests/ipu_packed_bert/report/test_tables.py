"""Tables in print: no line too wide, nothing lost, an interval in one cell, and the source of every number."""

import random
import re

import pytest

from ipu_packed_bert.report.tables import (
    COMPUTED,
    CONFIGURED,
    MODEL,
    PAPER,
    WIDTH,
    Part,
    ReportColumn,
    Table,
    as_csv,
    as_json,
    printed,
    text,
    wrapped,
)

COLUMNS = (
    ReportColumn("name", "name", CONFIGURED),
    ReportColumn("p", "p", COMPUTED, ".2f"),
    ReportColumn("overhead", "OH %", MODEL, ".1f", ("overhead_lower", "overhead_upper")),
    ReportColumn("paper", "paper", PAPER, ".1f"),
    ReportColumn("cycles", "M cycles", MODEL, ".2f", scale=1e6),
)
ROWS = [
    dict(name="a", p=1.5, overhead=1.14, overhead_lower=0.97, overhead_upper=2.8, paper=4.3, cycles=12_345_678.0),
    dict(name="b", p=2.0, overhead=-1.0, overhead_lower=-0.9, overhead_upper=-1.1),
    dict(name="c", p=1.0, paper=">>100", overhead="508 engines"),
]
TABLE = Table("one", "A table", COLUMNS, ROWS, ("A note. " + "word " * 60,))


def test_an_interval_is_one_cell_and_low_comes_first():
    lines = text(TABLE).splitlines()
    assert lines[2].split("  ")[0] == "name" and "OH %[b]" in lines[2] and "paper[c]" in lines[2]
    assert lines[3].split() == ["a", "1.50", "1.1,", "1.0", "to", "2.8", "4.3", "12.35"]
    assert lines[4].split() == ["b", "2.00", "-1.0,", "-1.1", "to", "-0.9", "-", "-"]
    assert lines[5].split() == ["c", "1.00", "508", "engines", ">>100", "-"]
    assert lines[6] == "  Source: [a] computed; [b] predicted by the cycle model; [c] the paper."


def test_json_and_csv_keep_every_number():
    plain = as_json(TABLE)
    assert [column["key"] for column in plain["columns"]] == as_csv([TABLE]).splitlines()[1].split(",")
    assert {key: value for key, value in plain["rows"][0].items() if value is not None} == ROWS[0]


def test_parts_stand_below_each_other_with_the_rows_that_they_have():
    parts = (Part("theirs", ("name", "p", "paper")), Part("ours", ("name", "overhead")))
    theirs, ours = printed(TABLE._replace(parts=parts))
    assert [row["name"] for row in theirs.rows] == ["a", "c"] and [row["name"] for row in ours.rows] == ["a", "b", "c"]
    assert theirs.name != ours.name and (theirs.notes, ours.notes) == ((), TABLE.notes)
    assert as_json(TABLE._replace(parts=parts)) == as_json(TABLE)


@pytest.mark.parametrize("seed", range(8))
def test_no_line_is_too_wide_and_nothing_is_lost(seed):
    numbers = random.Random(seed)
    columns = [ReportColumn("name", "the name", CONFIGURED), ReportColumn("other", "other", CONFIGURED)]
    columns += [
        ReportColumn(f"k{n}", "x" * numbers.randint(1, 20), numbers.choice([MODEL, PAPER]), ",.3f") for n in range(12)
    ]
    columns.append(ReportColumn("use", "use", CONFIGURED))
    rows = []
    for place in range(4):
        row = {f"k{n}": numbers.random() * 10 ** numbers.randint(0, 9) for n in range(12)}
        words = " ".join("w" * numbers.randint(1, 12) for _ in range(numbers.randint(1, 15)))
        rows.append({"name": f"{place} {words}", "other": "o", "use": "used", **row})
    found = text(Table("wide", "Wide", tuple(columns), rows))
    assert max(map(len, found.splitlines())) <= WIDTH
    for row in rows:
        for n in range(12):
            assert f"{row[f'k{n}']:,.3f}" in found
        assert all(word in found for word in row["name"].split())
    assert len(re.findall(r"\bused\b", found)) == 4  # no label is printed twice as a value


def test_a_note_that_is_set_in_stays_set_in_on_all_its_lines():
    lines = wrapped("    " + "word " * 60, "  ")
    assert len(lines) > 1 and all(line.startswith(" " * 6 + "word") for line in lines)


def test_a_note_is_said_once():
    said = set()
    first, second = text(TABLE, said), text(TABLE._replace(name="two"), said)
    assert "A note." in first and "A note." not in second and "Source:" in second
