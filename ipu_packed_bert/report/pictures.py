"""Pictures of the report's tables, and the report as one HTML page."""

from __future__ import annotations

import re
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple

from pack_data.display.page import Figure, Page, Part, Section
from pack_data.display.picture import Axis, Bars, Picture, Series
from pack_data.display.table import Table

_Rows = Sequence[Mapping[str, Any]]

# The names of the bars: these columns of a row.
_NAMES = {"table1": ("algorithm", "depth"), "table2": ("model", "length")}


def pictures(table: Table) -> List[Picture]:
    """Return the pictures of a table, none for most tables."""
    kind = table.name.split()[0]
    if not table.rows:
        return []
    if kind in _NAMES:
        return list(_speed_ups(table, _NAMES[kind]))
    if kind == "measured_beside":
        return [_measured(table)]
    return []


def _speed_ups(table: Table, name_keys: Sequence[str]) -> Iterator[Bars]:
    """Draw this engine's graph alone, and the paper's graph beside the paper's measurements."""
    limit = None
    if table.name == "table1":
        most = max(row["packing_factor"] for row in table.rows)
        limit = (f"{most:.3f}: no padding at all", most)

    for key, graph in (
        ("realised", "this engine's graph, modelled"),
        ("papers_realised", "the paper's graph, modelled and measured"),
    ):
        rows = [row for row in table.rows if isinstance(row.get(key), float)]
        names = [" ".join(str(row[name]) for name in name_keys) for row in rows]
        series = [_modelled(rows, key, f"{key}_lower", f"{key}_upper")]
        if key == "papers_realised":
            series.append(Series("paper, measured", _numbers(rows, "paper_realised")))
        yield Bars(
            f"{table.title.split(':')[0]}, {graph}",
            tuple(names),
            Axis("realised speed-up"),
            tuple(series),
            across=True,
            limit=limit,
        )


def _measured(table: Table) -> Bars:
    """Draw measured beside modelled cycles of the update and of each IPU."""
    rows = table.rows
    source = "".join(f", source {number}" for number in table.name.split()[1:])
    million_cycles = 1e6
    return Bars(
        f"Measured beside predicted{source}",
        tuple(row["what"] for row in rows),
        Axis("million cycles of an update"),
        (
            _modelled(rows, "model", "lower", "upper", million_cycles),
            Series("measured", _numbers(rows, "measured", million_cycles)),
        ),
        across=True,
    )


def _modelled(rows: _Rows, key: str, lower: str, upper: str, unit: float = 1.0) -> Series:
    values = _numbers(rows, key, unit)
    return Series(
        "model, with its interval", values, _numbers(rows, lower, unit), _numbers(rows, upper, unit)
    )


def _numbers(rows: _Rows, key: str, unit: float = 1.0) -> Tuple[Optional[float], ...]:
    """Return a column in multiples of ``unit``, None where it holds no number."""
    numbers: List[Optional[float]] = []
    for row in rows:
        value: Any = row.get(key)
        is_number = value is not None and not isinstance(value, str)
        numbers.append(float(value) / unit if is_number else None)
    return tuple(numbers)


# ---- the page --------------------------------------------------------------------------------------------------------


def page_of(name: str, lead: str, tables: Sequence[Table], words: Sequence[str]) -> Page:
    """Return the report as a page: what packing gains, if that is known, and each table below its pictures.

    name: subject of the page. lead: the answer if there is no headline. words: about the model.
    """
    sections: List[Section] = []
    first: List[Picture] = []
    figures: Tuple[Figure, ...] = ()
    for number, table in enumerate(tables, start=1):
        if table.name == "headline":
            lead, figures = _headline(table)
        drawn = pictures(table)
        if not first:
            first, drawn = drawn[:1], drawn[1:]
        parts: List[Part] = [
            picture._replace(title=_without(name, picture.title)) for picture in drawn
        ]
        for part in table.printed():
            title = _without(name, table.title)
            if table.parts:
                title = f"{table.title.split(':')[0]}. {part.title}"
            parts.append(part._replace(name=f"{part.name}-{number}", title=title))
        heading = drawn[0].title if len(drawn) == 1 and not table.parts else table.title
        sections.append(Section(_without(name, heading), tuple(parts)))
    if words:
        sections.append(Section("About the model", tuple(words)))
    return Page(
        f"Cycles, overhead and speed-up: {name}", lead, tuple(sections), figures, tuple(first)
    )


def _headline(table: Table) -> Tuple[str, Tuple[Figure, ...]]:
    """Return the answer of the headline and its figures."""
    speed_ups = [row for row in table.rows if row["ratio"] is not None]
    whole_run = speed_ups[-1]
    interval = (
        f"{whole_run['lower']:.3f} to {whole_run['upper']:.3f}, range of the fits; the cycle model"
    )
    speed_up = Figure(f"{whole_run['ratio']:.3f} times", "as fast as unpacked", interval)
    if len(speed_ups) == 1:  # it does not fit into memory
        return table.notes[0], (speed_up,)

    days = table.rows[-1]
    rate = Figure(
        whole_run["packed"], "sequences/s", f"{whole_run['unpacked']} unpacked; all replicas"
    )
    duration = Figure(
        f"{days['packed']:.2f}", "days", f"{days['unpacked']:.2f} unpacked; {days['what']}"
    )
    answer = (
        f"Packing makes a whole run {whole_run['ratio']:.2f} times as fast; "
        f"its kernel alone would be {speed_ups[0]['ratio']:.2f} times as fast."
    )
    return answer, (speed_up, rate, duration)


def _without(name: str, title: str) -> str:
    """Return a title without the subject of the page."""
    short = re.sub(f"^{re.escape(name)}: |[:,] {re.escape(name)}$", "", title)
    return title if short == title else short[0].upper() + short[1:]
