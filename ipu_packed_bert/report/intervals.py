"""Tables of values that the cycle model computes with an interval."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Sequence, Tuple

from ipu_packed_bert.cycles.calibration import Interval
from pack_data.display.table import Column, Part, Table, spread

# Printed below every table that has intervals.
INTERVALS = (
    "A number is at the fitted parameters. Its interval is the range over the fits that leave one of the published "
    "numbers out (docs/cycle_model.md); it includes no other error of the model.",
)


def table_of(
    name: str,
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Mapping[str, Any]],
    notes: Tuple[str, ...] = (),
    parts: Tuple[Part, ...] = (),
) -> Table:
    """Return a table; the ends of an `Interval` in a row get the keys of `spread`."""
    spread_rows = []
    for row in rows:
        cells: Dict[str, Any] = {}
        for key, value in row.items():
            cells.update(spread(key, value) if isinstance(value, Interval) else {key: value})
        spread_rows.append(cells)
    return Table(name, title, tuple(columns), spread_rows, notes, parts)


def in_percent(fraction: Interval) -> Interval:
    """Return an interval of fractions in percent."""
    return Interval(*(100.0 * end for end in fraction))


def kernel_speed_up(packing_factor: float, overhead: Interval) -> Interval:
    """Return p / (1 + OH), the realised speed-up of the paper, for an overhead that is a fraction."""
    return Interval(*(packing_factor / (1 + end) for end in reversed(overhead)))
