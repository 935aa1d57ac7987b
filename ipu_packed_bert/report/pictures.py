"""The pictures of the report's tables, as values: the page draws them as SVG, `--plot` as files; and that page."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.uncertainty import INSIDE
from ipu_packed_bert.planning.plan import IPU_BYTES, RunPlan
from pack_data.display.page import Figure, Page, Part, Section
from pack_data.display.picture import Axis, Bars, Picture, Series
from pack_data.display.table import Table

# Nobody has measured this project's graphs: the paper's measurements belong beside the model of the paper's graph only.
THEIRS, OURS = "the paper's graph, modelled and measured", "this engine's graph, modelled"
_MILLION, _MIB = 1e6, 2.0**20


def pictures(table: Table) -> List[Picture]:
    """The pictures of a table; none for a table without one."""
    make = PICTURES.get(table.name.split()[0])
    return make(table) if make and table.rows else []


def _numbers(rows: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0) -> Tuple[Optional[float], ...]:
    values = [row.get(key) for row in rows]
    return tuple(None if value is None or isinstance(value, str) else float(value) / scale for value in values)


def _modelled(rows: Sequence[Mapping[str, Any]], key: str, lower: str = "", upper: str = "") -> Series:
    """A series of the model, with its interval."""
    ends = [_numbers(rows, lower or key + "_lower"), _numbers(rows, upper or key + "_upper")]
    low, high = (tuple(None if None in pair else side(pair) for pair in zip(*ends)) for side in (min, max))
    return Series(f"model, interval of {100 * INSIDE:.0f} %", _numbers(rows, key), low, high)


def _beside(
    title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str], key: str, axis: str, paper: str = ""
) -> Bars:
    series = [_modelled(rows, key)]
    if paper:
        series.append(Series("paper, measured", _numbers(rows, paper)))
    return Bars(title, tuple(names), Axis(axis), tuple(series), across=True)


def _speed_ups(table: Table, names: Callable[[Mapping[str, Any]], str]) -> List[Bars]:
    found = []
    for key, paper, whose in (("realised", "", OURS), ("papers_realised", "paper_realised", THEIRS)):
        rows = [row for row in table.rows if isinstance(row.get(key), float)]
        title = f"{table.title.split(':')[0]}, {whose}"
        found.append(_beside(title, rows, list(map(names, rows)), key, "realised speed-up", paper))
    return found


def _table1(table: Table) -> List[Picture]:
    most = max(row["packing_factor"] for row in table.rows)  # that of batches without any padding
    found = _speed_ups(table, lambda row: f"{row['algorithm']} {row['depth']}")
    return [each._replace(limit=(f"{most:.3f}: no padding at all", most)) for each in found]


def _table2(table: Table) -> List[Picture]:
    return list(_speed_ups(table, lambda row: f"{row['model']} {row['length']}"))


def _decomposition(table: Table) -> List[Picture]:
    series = _modelled(table.rows, "median", "lower", "upper")
    names = tuple(row["part"] for row in table.rows)
    axis = Axis("% of the unpacked micro-batch's cycles")
    return [Bars(table.title.split(",")[0], names, axis, (series,), across=True)]


def _points(table: Table) -> List[Picture]:
    rows = table.rows
    names = tuple(f"{row['point']} {row['what']}" for row in rows)
    series = (Series("model", _numbers(rows, "error")), Series("31 % of peak", _numbers(rows, "trivial_error")))
    title = "Published throughputs: how far off the model is"
    return [Bars(title, names, Axis("error of sequences/s, %"), series, across=True)]


def _measured_beside(table: Table) -> List[Picture]:
    """Of each IPU the measured cycles beside the model's: all that it works, then class by class."""
    found: List[Picture] = []
    source = "".join(f", source {number}" for number in table.name.split()[1:])
    for kind, chosen in (("", True), (", by class", False)):
        rows = [row for row in table.rows if (row["class"] in ("", "all")) == chosen]
        if not rows:
            continue
        names = tuple(row["what"] if chosen else f"{row['what']}, {row['class']}" for row in rows)
        modelled = _modelled(
            [{key: row[key] / _MILLION for key in ("model", "lower", "upper")} for row in rows],
            "model",
            "lower",
            "upper",
        )
        series = (modelled, Series("measured", _numbers(rows, "measured", _MILLION)))
        title = f"Measured beside predicted{kind}{source}"
        found.append(Bars(title, names, Axis("million cycles of an update"), series, across=True))
    return found


def memory(made: RunPlan, name: str) -> Bars:
    """What a plan counts of each IPU's memory, and all that an IPU has."""
    parts = ("weights", "gradients", "optimizer", "kept", "at_work", "products")
    return Bars(
        f"Counted memory of each IPU, {name}",
        tuple(f"IPU {each.ipu}" for each in made.memory),
        Axis("MiB"),
        tuple(
            Series(part.replace("_", " "), tuple(getattr(each, part) / _MIB for each in made.memory)) for part in parts
        ),
        stacked=True,
        across=True,
        ends=tuple(f"{each.share:.0%}" for each in made.memory),
        limit=(f"an IPU's {IPU_BYTES / _MIB:,.0f} MiB", IPU_BYTES / _MIB),
        notes=("Code and exchange come on top.",),
    )


PICTURES: Dict[str, Callable[[Table], List[Picture]]] = {
    "table1": _table1,
    "decomposition": _decomposition,
    "table2": _table2,
    "points": _points,
    "measured_beside": _measured_beside,
}


def _gained(table: Table) -> Tuple[str, Tuple[Figure, ...]]:
    """The answer of the headline, and its figures."""
    ratios = [row for row in table.rows if row["ratio"] is not None]
    whole = ratios[-1]
    words = f"{whole['lower']:.3f} to {whole['upper']:.3f}, interval of {INSIDE:.0%}; the cycle model"
    figures = [Figure(f"{whole['ratio']:.3f} times", "as fast as unpacked", words)]
    if len(ratios) == 1:  # it does not fit
        return table.notes[0], tuple(figures)
    days = table.rows[-1]
    figures.append(Figure(whole["packed"], "sequences/s", f"{whole['unpacked']} unpacked; all replicas"))
    figures.append(Figure(f"{days['packed']:.2f}", "days", f"{days['unpacked']:.2f} unpacked; {days['what']}"))
    kernel = f"its kernel alone would be {ratios[0]['ratio']:.2f} times as fast"
    return f"Packing makes a whole run {whole['ratio']:.2f} times as fast; {kernel}.", tuple(figures)


def _without(name: str, title: str) -> str:
    """A title without the name that stands above all."""
    found = re.sub(f"^{re.escape(name)}: |[:,] {re.escape(name)}$", "", title)
    return title if found == title else found[0].upper() + found[1:]


def page_of(name: str, lead: str, found: Sequence[Table], words: Sequence[str]) -> Page:
    """One HTML page: what packing gains, where that is known; every table, its pictures above it.

    name: of what the page is about. lead: the answer where there is no headline. words: about the model.
    """
    sections: List[Section] = []
    first: List[Picture] = []
    figures: Tuple[Figure, ...] = ()
    for number, table in enumerate(found, start=1):
        drawn = pictures(table)
        if table.name == "headline":
            lead, figures = _gained(table)
        if not first:
            first, drawn = drawn[:1], drawn[1:]
        parts: List[Part] = [each._replace(title=_without(name, each.title)) for each in drawn]
        for each in table.printed():
            before = f"{table.title.split(':')[0]}. {each.title}" if table.parts else _without(name, table.title)
            parts.append(each._replace(name=f"{each.name}-{number}", title=before))
        heading = drawn[0].title if len(drawn) == 1 and not table.parts else table.title
        sections.append(Section(_without(name, heading), tuple(parts)))
    if words:
        sections.append(Section("About the model", tuple(words)))
    return Page(f"Cycles, overhead and speed-up: {name}", lead, tuple(sections), figures, tuple(first))
