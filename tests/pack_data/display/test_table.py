"""One table: no line too wide, nothing lost, an interval in one cell, the source of every number; columns of text."""

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.display.table import (
    COMPUTED,
    CONFIGURED,
    MODEL,
    PAPER,
    WIDTH,
    Cell,
    Column,
    Part,
    Table,
    _padded,
    text_table,
)

COLUMNS = (
    Column("name", "name", CONFIGURED),
    Column("p", "p", COMPUTED, ".2f"),
    Column("overhead", "OH %", MODEL, ".1f", ("overhead_lower", "overhead_upper")),
    Column("paper", "paper", PAPER, ".1f"),
    Column("cycles", "M cycles", MODEL, ".2f", scale=1e6),
)
ROWS = [
    dict(name="a", p=1.5, overhead=1.14, overhead_lower=0.97, overhead_upper=2.8, paper=4.3, cycles=12_345_678.0),
    dict(name="b", p=2.0, overhead=-1.0, overhead_lower=-0.9, overhead_upper=-1.1),
    dict(name="c", p=1.0, paper=">>100", overhead="508 engines"),
]
TABLE = Table("one", "A table", COLUMNS, ROWS, ("A note. " + "word " * 60,))


def test_an_interval_is_one_cell_and_low_comes_first():
    lines = TABLE.text().splitlines()
    assert lines[2].split("  ")[0] == "name"
    assert "OH %[b]" in lines[2]
    assert "paper[c]" in lines[2]
    assert lines[3].split() == ["a", "1.50", "1.1,", "1.0", "to", "2.8", "4.3", "12.35"]
    assert lines[4].split() == ["b", "2.00", "-1.0,", "-1.1", "to", "-0.9", "-", "-"]
    assert lines[5].split() == ["c", "1.00", "508", "engines", ">>100", "-"]
    assert lines[6] == "  Source: [a] computed; [b] predicted by the cycle model; [c] the paper."


def test_json_keeps_every_number():
    made = TABLE.to_json()
    keys = [column["key"] for column in made["columns"]]
    assert keys == [column.key for column in TABLE._every_column()]
    first = {key: value for key, value in made["rows"][0].items() if value is not None}
    assert first == ROWS[0]


def test_parts_stand_below_each_other_with_the_rows_that_they_have():
    parts = (Part("theirs", ("name", "p", "paper")), Part("ours", ("name", "overhead")))
    theirs, ours = TABLE._replace(parts=parts).printed()
    assert [row["name"] for row in theirs.rows] == ["a", "c"]
    assert [row["name"] for row in ours.rows] == ["a", "b", "c"]
    assert theirs.name != ours.name
    assert theirs.notes == ()
    assert ours.notes == TABLE.notes
    assert TABLE._replace(parts=parts).to_json() == TABLE.to_json()


@pytest.mark.parametrize("seed", range(4))
def test_no_line_is_too_wide_and_nothing_is_lost(seed):
    numbers = random.Random(seed)
    columns = [Column("name", "the name", CONFIGURED), Column("other", "other", CONFIGURED)]
    for n in range(12):
        title = "x" * numbers.randint(1, 20)
        columns.append(Column(f"k{n}", title, numbers.choice([MODEL, PAPER]), ",.3f"))
    columns.append(Column("use", "use", CONFIGURED))
    rows = []
    for place in range(4):
        words = ["w" * numbers.randint(1, 12) for _ in range(numbers.randint(1, 15))]
        name = " ".join([str(place), *words])
        row = {"name": name, "other": "o", "use": "used"}
        for n in range(12):
            row[f"k{n}"] = numbers.random() * 10 ** numbers.randint(0, 9)
        rows.append(row)
    text = Table("wide", "Wide", tuple(columns), rows).text()
    assert max(map(len, text.splitlines())) <= WIDTH
    for row in rows:
        for n in range(12):
            assert f"{row[f'k{n}']:,.3f}" in text
        assert all(word in text for word in row["name"].split())
    assert len(re.findall(r"\bused\b", text)) == 4  # no label is printed twice as a value


@pytest.mark.parametrize(
    "value, form, words, stored",
    [
        (None, ".1f", "-", None),
        (True, "", "yes", True),
        (12345, "", "12,345", 12345),
        (0.12345, "", "0.1235", 0.12345),
        (12345.678, "", "12,346", 12345.678),
        (math.nan, ".1f", "not finite", None),
        ([1, 2], "", "[1, 2]", [1, 2]),
        (Cell((1, 2), "1 + 2"), ".1f", "1 + 2", [1, 2]),
        (">>100", ".1f", ">>100", ">>100"),
    ],
)
def test_a_cell_of_any_value(value, form, words, stored):
    table = Table("t", "T", (Column("a", "a", form=form),), [{"a": value}])
    assert table.columns[0].shown(table.rows[0]) == words and table.to_json()["rows"] == [{"a": stored}]


CELL = st.text("ab1 ", max_size=6)


@given(st.data(), st.integers(1, 4), st.sets(st.integers(0, 3)))
def test_a_column_has_one_width_and_keeps_its_cells(data, columns, left):
    row = st.lists(CELL, min_size=columns, max_size=columns)
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    padded = _padded(rows, left=left)
    for number, cells in enumerate(zip(*rows)):
        width = max(map(len, cells))
        pad = str.ljust if number in left else str.rjust
        assert [row[number] for row in padded] == [pad(cell, width) for cell in cells]
    lines = [("> " + "  ".join(row)).rstrip() for row in padded]
    assert text_table(rows, left=left, indent="> ") == lines
