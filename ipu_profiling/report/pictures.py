"""Pictures of the report's tables, and the report as one HTML page."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ipu_profiling.report.figures import lengths_of_figure1
from pack_data.display.page import Figure, Page, Part, Section
from pack_data.display.picture import Axis, Bars, HeatMap, Line, Lines, Picture, Series
from pack_data.display.table import Table
from pack_data.lengths.counting import picture as lengths


def pictures(table: Table) -> List[Picture]:
    """Return the pictures of a table; only figures of the paper have one."""
    if table.name not in _DRAWN:
        return []
    return _DRAWN[table.name](table)


def _figure1(table: Table) -> List[Picture]:
    """Draw the lengths of each data set."""
    drawn: List[Picture] = []
    for histogram in lengths_of_figure1():
        picture = lengths(histogram)
        title = f"Lengths, {histogram.name}"
        drawn.append(picture._replace(title=title))
    return drawn


def _figure2(table: Table) -> List[Picture]:
    """Draw the zero-one mask."""
    names = [row["sequence"] for row in table.rows]
    keys = [column.key for column in table.columns[1:]]
    values = []
    for row in table.rows:
        cells = tuple(float(row[key]) for key in keys)
        values.append(cells)
    slots = tuple(names)
    heat_map = HeatMap(
        title=table.title,
        columns=slots,
        rows=slots,
        values=tuple(values),
        form=".0f",
        along="sequence of the slot that is seen",
        down="sequence of the slot",
    )
    return [heat_map]


def _figure5(table: Table) -> List[Picture]:
    """Draw the speed-ups by the number of accelerators."""
    accelerators, *series = table.columns
    numbers = tuple(float(row[accelerators.key]) for row in table.rows)
    lines = []
    for column in series:
        speed_ups = tuple(row[column.key] for row in table.rows)
        line = Line(column.title, numbers, speed_ups)
        lines.append(line)
    across = Axis("accelerators", log=2)
    up = Axis("speed-up over padding")
    picture = Lines(table.title, across, up, tuple(lines))
    return [picture]


_DRAWN = {
    "figure1": _figure1,
    "figure2": _figure2,
    "figure5": _figure5,
}


# ---- the page --------------------------------------------------------------------------------------------------------


def page_of(name: str, lead: str, tables: Sequence[Table], words: Sequence[str]) -> Page:
    """Return the report as a page, with each table below its pictures.

    Args:
        name: the subject of the page.
        lead: the first paragraph if the tables have no headline.
        tables: the tables, in order.
        words: paragraphs about the model.
    """
    figures: Tuple[Figure, ...] = ()
    named = {table.name: table for table in tables}
    if "answer" in named:
        lead, figures = _headline(named["answer"], named.get("headline"))

    sections: List[Section] = []
    for number, table in enumerate(tables, start=1):
        parts: List[Part] = list(pictures(table))
        for part in table.printed():
            title = part.title
            if table.parts:  # several tables may have parts of the same title
                short_title = table.title.split(":")[0]
                title = f"{short_title}. {title}"
            name_of_part = f"{part.name}-{number}"
            parts.append(part._replace(name=name_of_part, title=title))
        sections.append(Section(table.title, tuple(parts)))
    if words:
        sections.append(Section("About the model", tuple(words)))
    first = (_speed_up_picture(named["answer"]),) if "answer" in named else ()
    return Page(f"Cycles, overhead and speed-up: {name}", lead, tuple(sections), figures, first)


def _speed_up_picture(answer: Table) -> Bars:
    """Draw the speed-ups; a run that does not fit has none."""
    rows = answer.rows[1:]
    speed_ups = tuple(row["ours"] for row in rows)
    return Bars(
        "Predicted speed-up of packing",
        tuple(row["what"] for row in rows),
        Axis("times as fast as unpacked"),
        (Series("cycle model", speed_ups),),
        across=True,
        levels=(("paper, speed-up of the graph", float(rows[0]["paper"])),),
    )


def _headline(answer: Table, run: Optional[Table]) -> Tuple[str, Tuple[Figure, ...]]:
    """Return the first paragraph of a page and its figures from the answer of the report."""
    overhead, graph, whole = answer.rows
    if run is None:  # the configuration does not fit into memory
        return answer.notes[0], (_speed_up(graph),)
    rates, _, days = run.rows[1:]
    speed_up = whole["ours"]
    longer = overhead["ours"]
    words = (
        f"Packing makes a whole run {speed_up:.2f} times as fast; "
        f"a packed row takes {longer:.2f} % longer."
    )
    rate = Figure(rates["packed"], "sequences/s", f"{rates['unpacked']} unpacked; all replicas")
    unpacked_days = f"{days['unpacked']:.2f} unpacked; {days['what']}"
    duration = Figure(f"{days['packed']:.2f}", "days", unpacked_days)
    return words, (_speed_up(whole), rate, duration)


def _speed_up(row: Mapping[str, Any]) -> Figure:
    return Figure(f"{row['ours']:.3f} times", "as fast as unpacked", "the cycle model")
