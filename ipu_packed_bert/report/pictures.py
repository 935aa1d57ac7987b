"""Pictures of the report's tables, and the report as one HTML page."""

from __future__ import annotations

import re
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from pack_data.display.page import Figure, Page, Part, Section
from pack_data.display.picture import Axis, Bars, Picture, Series
from pack_data.display.table import Table

_Rows = Sequence[Mapping[str, Any]]

# Columns of a row that name its bar, by table.
_NAMES = {"table1": ("algorithm", "depth"), "table2": ("model", "length")}


def pictures(table: Table) -> List[Picture]:
    """Return the pictures of a table, none for most tables."""
    kind = table.name.split()[0]
    if not table.rows:
        return []
    if kind in _NAMES:
        return [
            _speed_ups(table, "realised", "this engine's graph, modelled"),
            _speed_ups(table, "papers_realised", "the paper's graph, modelled and measured"),
        ]
    if kind == "measured_beside":
        return [_measured(table)]
    return []


def _speed_ups(table: Table, key: str, graph: str) -> Bars:
    """Draw the modelled speed-ups of one graph, with the paper's measurements of the paper's graph."""
    rows = [row for row in table.rows if isinstance(row.get(key), float)]
    names = []
    for row in rows:
        words = [str(row[name]) for name in _NAMES[table.name]]
        names.append(" ".join(words))
    series = [_modelled(rows, key, f"{key}_lower", f"{key}_upper")]
    if key == "papers_realised":
        series.append(Series("paper, measured", _numbers(rows, "paper_realised")))

    limit = None
    if table.name == "table1":
        most = max(row["packing_factor"] for row in table.rows)
        limit = (f"{most:.3f}: no padding at all", most)
    number = table.title.split(":")[0]
    return Bars(
        f"{number}, {graph}",
        tuple(names),
        Axis("realised speed-up"),
        tuple(series),
        across=True,
        limit=limit,
    )


def _measured(table: Table) -> Bars:
    """Draw the measured and the modelled cycles of an update and of each IPU."""
    rows = table.rows
    title = "Measured and predicted"
    if " " in table.name:  # one of several sources
        number = table.name.split()[1]
        title = f"{title}, source {number}"
    million = 1e6
    return Bars(
        title,
        tuple(row["what"] for row in rows),
        Axis("million cycles of an update"),
        (
            _modelled(rows, "model", "lower", "upper", million),
            Series("measured", _numbers(rows, "measured", million)),
        ),
        across=True,
    )


def _modelled(rows: _Rows, key: str, lower: str, upper: str, unit: float = 1.0) -> Series:
    """Return the series of a modelled column with its interval."""
    values, least, most = (_numbers(rows, column, unit) for column in (key, lower, upper))
    return Series("model, with its interval", values, least, most)


def _numbers(rows: _Rows, key: str, unit: float = 1.0) -> Tuple[Optional[float], ...]:
    """Return a column in multiples of ``unit``, with None in place of texts and missing values."""
    numbers: List[Optional[float]] = []
    for row in rows:
        value: Any = row.get(key)
        is_number = value is not None and not isinstance(value, str)
        numbers.append(float(value) / unit if is_number else None)
    return tuple(numbers)


# ---- the page --------------------------------------------------------------------------------------------------------


def page_of(name: str, lead: str, tables: Sequence[Table], words: Sequence[str]) -> Page:
    """Return the report as a page, with each table below its pictures.

    Args:
        name: the subject of the page.
        lead: the first paragraph if the tables have no headline.
        tables: the tables, in order.
        words: paragraphs about the model.
    """
    sections: List[Section] = []
    first: List[Picture] = []
    figures: Tuple[Figure, ...] = ()
    for number, table in enumerate(tables, start=1):
        if table.name == "headline":
            lead, figures = _headline(table)
        drawn = pictures(table)
        if not first:
            first = drawn[:1]
            drawn = drawn[1:]

        parts: List[Part] = []
        for picture in drawn:
            parts.append(picture._replace(title=_without(name, picture.title)))
        for part in table.printed():
            title = _without(name, table.title)
            if table.parts:
                short_title = table.title.split(":")[0]
                title = f"{short_title}. {part.title}"
            parts.append(part._replace(name=f"{part.name}-{number}", title=title))
        heading = drawn[0].title if len(drawn) == 1 and not table.parts else table.title
        sections.append(Section(_without(name, heading), tuple(parts)))
    if words:
        sections.append(Section("About the model", tuple(words)))
    title = f"Cycles, overhead and speed-up: {name}"
    return Page(title, lead, tuple(sections), figures, tuple(first))


def _headline(table: Table) -> Tuple[str, Tuple[Figure, ...]]:
    """Return the first paragraph of a page and its figures from the headline."""
    speed_ups = [row for row in table.rows if row["ratio"] is not None]
    kernel = speed_ups[0]
    run = speed_ups[-1]
    interval = f"{run['lower']:.3f} to {run['upper']:.3f}, range of the fits; the cycle model"
    speed_up = Figure(f"{run['ratio']:.3f} times", "as fast as unpacked", interval)
    if kernel is run:  # the configuration does not fit into memory
        return table.notes[0], (speed_up,)

    days = table.rows[-1]
    unpacked_rate = f"{run['unpacked']} unpacked; all replicas"
    unpacked_days = f"{days['unpacked']:.2f} unpacked; {days['what']}"
    answer = (
        f"Packing makes a whole run {run['ratio']:.2f} times as fast; its kernel alone would be "
        f"{kernel['ratio']:.2f} times as fast."
    )
    figures = (
        speed_up,
        Figure(run["packed"], "sequences/s", unpacked_rate),
        Figure(f"{days['packed']:.2f}", "days", unpacked_days),
    )
    return answer, figures


def _without(name: str, title: str) -> str:
    """Return a title without the subject of the page."""
    short = re.sub(f"^{re.escape(name)}: |[:,] {re.escape(name)}$", "", title)
    return title if short == title else short[0].upper() + short[1:]
