"""Tables as lists of fields: a column and the function that computes its value from the item of a row."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, NamedTuple, Sequence, Tuple

from ipu_packed_bert.cycles.calibration import Interval
from pack_data.display.table import Column, Part, Table

# Printed below every table that has intervals.
INTERVALS = (
    "A number is at the fitted parameters. Its interval is the range over the fits that leave one of the published "
    "numbers out (docs/cycle_model.md); it includes no other error of the model.",
)


class Field(NamedTuple):
    """A column of a table and its value for an item: a number, a text, an `Interval` or None."""

    column: Column
    value: Callable[[Any], Any]

    def _cells(self, item: Any) -> Dict[str, Any]:
        """Return the value of an item by the key of the column, and the ends of an interval by their keys."""
        value = self.value(item)
        if not isinstance(value, Interval):
            return {self.column.key: value}
        lower, upper = self.column.interval
        return {lower: value.lower, self.column.key: value.value, upper: value.upper}


def rows_of(fields: Sequence[Field], items: Iterable[Any]) -> Tuple[Dict[str, Any], ...]:
    """Return one row for each item, with the values of all fields."""
    rows = []
    for item in items:
        row: Dict[str, Any] = {}
        for field in fields:
            row.update(field._cells(item))
        rows.append(row)
    return tuple(rows)


def table_of(
    name: str,
    title: str,
    fields: Sequence[Field],
    items: Iterable[Any],
    notes: Tuple[str, ...] = (),
    parts: Tuple[Part, ...] = (),
) -> Table:
    """Return a table with one row for each item."""
    columns = tuple(field.column for field in fields)
    return Table(name, title, columns, rows_of(fields, items), notes, parts)


def in_percent(fraction: Interval) -> Interval:
    """Return an interval of fractions in percent."""
    return Interval(*(100.0 * end for end in fraction))
