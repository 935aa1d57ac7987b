"""The printer of fixed-width tables."""

from hypothesis import given
from hypothesis import strategies as st

from pack_data.tables import account, padded, text_table

CELL = st.text("ab1 ", max_size=6)


@given(
    st.integers(1, 4).flatmap(
        lambda columns: st.lists(st.lists(CELL, min_size=columns, max_size=columns), min_size=1, max_size=5)
    ),
    st.sets(st.integers(0, 3)),
)
def test_a_column_has_one_width_and_keeps_its_cells(rows, left):
    made = padded(rows, left=left)
    for column in range(len(rows[0])):
        widths = {len(row[column]) for row in made}
        assert widths == {max(len(row[column]) for row in rows)}
        for cell, wide in zip((row[column] for row in rows), (row[column] for row in made)):
            assert wide == (cell.ljust(len(wide)) if column in left else cell.rjust(len(wide)))
    assert text_table(rows, left=left, between="|", indent="> ") == [("> " + "|".join(row)).rstrip() for row in made]


def test_least_widths_let_lines_be_printed_one_by_one():
    assert text_table([("a", "1")], widths=(3, 4)) + text_table([("long name", "2")], widths=(3, 4)) == [
        "a       1",
        "long name     2",
    ]
    assert text_table([]) == []


def test_the_first_column_stands_flush_left_unless_told_otherwise():
    assert text_table([("a", "b"), ("long", "name")]) == ["a        b", "long  name"]


def test_an_account():
    assert (
        account("Packs", [("made", "12", "of 3"), ("empty", "0", "")]) == "Packs\n-----\n  made   12  of 3\n  empty   0"
    )
