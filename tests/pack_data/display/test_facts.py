"""One list of facts: printed and as JSON it has the same values, and a unit decides how one is shown."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.display.facts import (
    COMPUTED,
    PAPER,
    Fact,
    Facts,
    _shown,
    _unit_of,
    as_json,
    columns_of,
    notes_of,
    number,
    printed,
    quantity,
    with_unit,
)
from pack_data.display.lines import WIDTH, ShownColumn, plain, table_lines
from pack_data.store.quantities import QUANTITIES
from tests.imports import ROOT

UNITS = ["", "slots", "of the slots", "times", "s", "bytes", "rows of a very long unit"]
NAMES = st.text("abc", min_size=1, max_size=9)
WORDS = st.text("xyz ", max_size=90).map(" ".join("ab").join)
NUMBERS = st.integers(-(10**9), 10**9) | st.floats()
VALUES = NUMBERS | st.booleans() | st.none() | WORDS | st.lists(st.integers(1, 9), max_size=3)


@st.composite
def rows_of_facts(draw):
    """Return rows whose facts of one key share name, unit and source; some lack a fact."""
    columns = draw(
        st.dictionaries(
            NAMES,
            st.tuples(NAMES, st.sampled_from(UNITS), st.sampled_from(["", "measured", "quoted"])),
            min_size=1,
            max_size=5,
        )
    )
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = {}
        for key, (name, unit, source) in columns.items():
            value = draw(VALUES)
            is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            interval = draw(st.none() | st.tuples(NUMBERS, NUMBERS)) if is_plain else None
            row[key] = Fact(name, value, unit, source, draw(st.sampled_from(["", "a note"])), interval)
        rows.append(row)
    return rows


@given(rows_of_facts(), st.booleans())
def test_every_form_has_the_same_values(rows, is_account):
    """And no printed line is too wide unless one cell is."""
    facts = Facts("Title", rows[0] if is_account else rows, ["A note."])
    stored = [as_json(facts)] if is_account else as_json(facts)
    text = printed(facts)
    for row, values in zip(rows, stored):
        for key, fact in row.items():
            assert values[key] == plain(fact.value)
            assert (f"{key}_lower" in values) == (fact.interval is not None)
            unit = _unit_of(fact) if isinstance(fact.value, float) else ""
            words = " ".join([_shown(fact), fact.name, fact.note, fact.source, unit]).split()
            assert all(word in text for word in words)
    cells = [cell for column in columns_of(facts) for cell in (column.heading, *column.cells)]
    widest = 2 * max(map(len, cells)) + 30
    assert max(map(len, text.splitlines())) <= max(WIDTH, widest)


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (12345, "", "12,345"),
        (0.12345, "", "0.1235"),
        (12345.678, "", "12,346"),
        (math.nan, "s", "not finite"),
        (0.98765, "of the slots", "98.765%"),
        (1, "of the slots", "100.000%"),
        (2, "times", "2"),
        (2.0005, "times", "2.001"),
        (3 * 2**20, "bytes", "3.0"),
        (4096, "bytes", "0.004"),
        (0, "bytes", "0"),
        (1.5e6, "million cycles", "1.500"),
        (1.25, "percent more", "+1.2"),
        (4e-8, "relative", "4e-08"),
    ],
)
def test_a_unit_decides_how_a_number_is_shown(value, unit, text):
    assert number(value, unit) == text == _shown(Fact("name", value, unit))
    assert with_unit(value, unit).split()[0] == text.split()[0]


def test_an_interval_stands_beside_its_value_and_low_comes_first():
    assert _shown(Fact("a", 1.14, "times", interval=(2.8, 0.97))) == "1.140, 0.970 to 2.800"
    assert _shown(Fact("a", 2, interval=(2, 2))) == "2 exact"


def test_an_account_has_a_line_for_each_fact():
    packs = quantity("packs", 12)
    gap = quantity("gap", 0, "optimal")
    row = {"packs": packs, "gap": gap}
    lines = ["Packs", "-----", "  packs  12", "  gap     0  packs, optimal"]
    assert printed(Facts("Packs", row)).splitlines() == lines


def test_an_account_of_nothing_and_of_empty_words():
    assert printed(Facts("", {})) == ""
    account = {"a": Fact("name", "")}
    assert printed(Facts("", account)) == "  name"


def test_words_beside_numbers_stand_with_the_notes():
    row = {"data": Fact("data", "37 packs"), "step": Fact("step", 4096, "bytes", note="at most")}
    assert printed(Facts("", row)).splitlines() == ["  data         37 packs", "  step  0.004  MiB, at most"]


def test_quoted_numbers_keep_the_decimals_of_their_source():
    rows = [{"p": Fact("p", value, "percent", PAPER)} for value in (2.0, 1.61, "~1.6")]
    (column,) = columns_of(Facts("", rows))
    assert (column.heading, column.cells) == ("p, %", ["2.00", "1.61", "~1.6"])


def test_a_source_or_unit_of_all_columns_stands_alone_and_labels_have_none():
    costs = {name: Fact(name, 2e6, "million cycles", COMPUTED) for name in "abc"}
    row = {"layers": Fact("layers", 3), **costs}
    assert notes_of(Facts("", [row])) == [f"Source: {COMPUTED}.", "Units: a, b, c: million cycles."]
    assert notes_of(Facts("", [costs])) == [f"Source: {COMPUTED}.", "Units: million cycles."]
    row["paper"] = Fact("paper", "above 2", source=PAPER)
    assert notes_of(Facts("", [row]))[0] == f"Source: a, b, c: {COMPUTED}; paper: quoted."


def test_a_short_unit_of_many_columns_stands_below():
    row = {name: Fact(name, 1.5, "percent") for name in "ab"}
    assert [column.heading for column in columns_of(Facts("", [row]))] == ["a, %", "b, %"]
    facts = Facts("", [{**row, "c": Fact("c", 1.5, "percent")}])
    assert [column.heading for column in columns_of(facts)] == ["a", "b", "c"]
    assert notes_of(facts) == ["Units: %."]


CELLS = st.lists(st.text("ab1", min_size=1, max_size=9), min_size=3, max_size=3)


@given(st.lists(st.tuples(CELLS, st.booleans()), min_size=1, max_size=20), st.integers(0, 2))
def test_a_table_of_any_width_keeps_its_cells_and_no_line_is_too_wide(contents, labels):
    """A column has one width; numbers stand flush right; labels are repeated if columns stand below."""
    columns = []
    for place, (cells, is_number) in enumerate(contents):
        is_label = place < labels
        columns.append(ShownColumn("k", f"k{place}", cells, is_number=is_number and not is_label, is_label=is_label))
    lines = table_lines(columns)
    assert max(map(len, lines)) <= WIDTH
    blocks = [block.splitlines() for block in "\n".join(lines).split("\n\n")]
    shown = [[column for column in columns if column.heading in block[0].split()] for block in blocks]
    repeated = columns[: min(labels, len(columns))]
    if len(repeated) == len(columns):
        repeated = repeated[:1]
    assert [column for block in shown for column in block[len(repeated) :]] == columns[len(repeated) :]
    for block, block_columns in zip(blocks, shown):
        assert block_columns[: len(repeated)] == repeated
        padded_columns = []
        for column in block_columns:
            texts = [column.heading, *column.cells]
            width = max(map(len, texts))
            pad = str.rjust if column.is_number else str.ljust
            padded_columns.append([pad(text, width) for text in texts])
        assert block == ["  ".join(cells).rstrip() for cells in zip(*padded_columns)]


def test_a_column_has_one_name_and_one_unit():
    seconds = Fact("time", 1, "s")
    milliseconds = Fact("time", 1, "ms")
    rows = [{"time": seconds}, {"time": milliseconds}]
    with pytest.raises(ValueError, match="Times: time"):
        printed(Facts("Times", rows))


def test_a_quantity_brings_its_name_and_unit():
    for key, named in QUANTITIES.items():
        fact = quantity(key, 1)
        assert (fact.name, fact.unit) == (named.name, named.unit)


RESULTS = (
    *("pack_data/inspection", "pack_data/stream", "ipu_packed_bert/training", "ipu_packed_bert/benchmarks"),
    *("ipu_packed_bert/commands", "ipu_packed_bert/tasks"),
    *("ipu_profiling/planning", "ipu_profiling/report", "ipu_profiling/measured", "ipu_profiling/ipu_check"),
)
# The range that the paper's rounded numbers allow is a text in JSON, too. tqdm formats its `percentage`.
OF_THE_PAPER = "ipu_profiling/report/paper.py"


def test_nothing_else_formats_the_numbers_of_results():
    """A table, a page and a line of one result had different digits, each chosen where it was printed."""
    files = [file for folder in RESULTS for file in sorted((ROOT / folder).glob("*.py"))]
    faults = []
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        for line, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if re.search(r"(?<!percentage):[+,<>\d]*\.\d[fg%e]", text) and name != OF_THE_PAPER:
                faults.append(f"{name}:{line}: {text.strip()}; use display.facts.number or with_unit")
    assert not faults
    assert len(files) > 70
