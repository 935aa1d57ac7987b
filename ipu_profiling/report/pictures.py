"""Pictures of the report's tables, and the report as one HTML page."""

from __future__ import annotations

from typing import Any, List, Mapping, Sequence, Tuple

from ipu_profiling.report.figures import lengths_of_figure1
from pack_data.display.facts import Facts, as_json, number
from pack_data.display.page import Figure, Page, Section
from pack_data.display.picture import Axis, Bars, HeatMap, Line, Lines, Picture, Series
from pack_data.lengths.counting import picture as lengths


def pictures(facts: Facts) -> List[Picture]:
    """Return the pictures of a table; only figures of the paper have one."""
    if facts.name not in _DRAWN:
        return []
    return _DRAWN[facts.name](facts)


def _figure1(facts: Facts) -> List[Picture]:
    """Draw the lengths of each data set."""
    drawn: List[Picture] = []
    for histogram in lengths_of_figure1():
        picture = lengths(histogram)
        title = f"Lengths, {histogram.name}"
        drawn.append(picture._replace(title=title))
    return drawn


def _figure2(facts: Facts) -> List[Picture]:
    """Draw the zero-one mask."""
    names = []
    values = []
    for row in facts.subjects:
        sequence, *seen = (fact.value for fact in row.values())
        names.append(sequence)
        values.append(tuple(map(float, seen)))
    slots = tuple(names)
    heat_map = HeatMap(
        title=facts.title,
        columns=slots,
        rows=slots,
        values=tuple(values),
        form=".0f",
        along="sequence of the slot that is seen",
        down="sequence of the slot",
    )
    return [heat_map]


def _figure5(facts: Facts) -> List[Picture]:
    """Draw the speed-ups by the number of accelerators."""
    values = as_json(facts)
    numbers = tuple(float(row["accelerators"]) for row in values)
    lines = []
    for key, fact in facts.subjects[0].items():
        if key != "accelerators":
            lines.append(Line(fact.name, numbers, tuple(row[key] for row in values)))
    across = Axis("accelerators", log=2)
    up = Axis("speed-up over padding")
    picture = Lines(facts.title, across, up, tuple(lines))
    return [picture]


_DRAWN = {
    "figure1": _figure1,
    "figure2": _figure2,
    "figure5": _figure5,
}


# ---- the page --------------------------------------------------------------------------------------------------------


def page_of(
    name: str, lead: str, answer: Sequence[Facts], tables: Sequence[Facts], words: Sequence[str]
) -> Page:
    """Return the report as a page, with each table below its pictures.

    Args:
        name: the subject of the page.
        lead: the first paragraph if there is no answer.
        answer: the answer of the report, see `headline`; it may be empty.
        tables: the other tables, in order.
        words: paragraphs about the model.
    """
    figures: Tuple[Figure, ...] = ()
    first: Tuple[Picture, ...] = ()
    if answer:
        lead, figures = _headline(answer)
        first = (_speed_up_picture(as_json(answer[0])),)

    sections: List[Section] = []
    for place, facts in enumerate((*answer, *tables), start=1):
        named = facts._replace(name=f"{facts.name}-{place}")
        sections.append(Section(facts.title, (*pictures(facts), named)))
    if words:
        sections.append(Section("About the model", tuple(words)))
    return Page(f"Cycles, overhead and speed-up: {name}", lead, tuple(sections), figures, first)


_Rows = Sequence[Mapping[str, Any]]


def _speed_up_picture(answer: _Rows) -> Bars:
    """Draw the speed-ups; a run that does not fit has none."""
    _, *rows = answer
    speed_ups = tuple(row["ours"] for row in rows)
    return Bars(
        "Predicted speed-up of packing",
        tuple(row["what"] for row in rows),
        Axis("times as fast as unpacked"),
        (Series("cycle model", speed_ups),),
        across=True,
        levels=(("paper, speed-up of the graph", float(rows[0]["paper"])),),
    )


def _headline(answer: Sequence[Facts]) -> Tuple[str, Tuple[Figure, ...]]:
    """Return the first paragraph of a page and its figures from the answer of the report."""
    overhead, graph, whole = as_json(answer[0])
    if len(answer) == 1:  # the configuration does not fit into memory
        return answer[0].notes[0], (_speed_up(graph),)
    rates, _, days = as_json(answer[1])[1:]
    speed_up = number(whole["ours"], "times")
    longer = number(overhead["ours"], "percent")
    words = (
        f"Packing makes a whole run {speed_up} times as fast; a packed row takes {longer} % longer."
    )
    rate = Figure(rates["packed"], "sequences/s", f"{rates['unpacked']} unpacked; all replicas")
    unpacked_days = f"{number(days['unpacked'], 'days')} unpacked; {days['what']}"
    duration = Figure(number(days["packed"], "days"), "days", unpacked_days)
    return words, (_speed_up(whole), rate, duration)


def _speed_up(row: Mapping[str, Any]) -> Figure:
    speed_up = number(row["ours"], "times")
    return Figure(f"{speed_up} times", "as fast as unpacked", "the cycle model")
