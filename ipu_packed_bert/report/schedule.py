"""A weight update over time, as a table of each IPU's cycles by what it does, and as one picture."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ipu_packed_bert.cycles.calibration import Calibration
from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.pipeline import Pipeline
from ipu_packed_bert.cycles.schedule import BUBBLE, KINDS, WAITING, WORK, Schedule, Stretch, schedule
from ipu_packed_bert.report.measured import Measured
from ipu_packed_bert.report.paper import ADDED_UP
from pack_data.display.picture import Axis, Skip, Tile, Tiles
from pack_data.display.table import COMPUTED, CONFIGURED, MODEL, Column, Table, modelled, percent, spread

WORKS = "works"
_SERIES = (WORK[0], WAITING, *WORK[1:], KINDS[-1], BUBBLE)  # so that waiting has the lightest colour
_MILLION = 1e6
_LONG = 3.0  # pipeline cycles: of what takes longer, and is alike throughout, one is drawn at either end


def cycles_by_kind(pipeline: Pipeline, accumulation: int, parameters: Parameters) -> Any:
    """[IPUs x (all that it works, each of `KINDS`, together), draws]."""
    rows = []
    found = schedule(pipeline, accumulation, parameters)
    for kinds in found.totals():
        rows += [sum(kinds[kind] for kind in WORK), *kinds.values(), sum(kinds.values())]
    return np.stack([np.atleast_1d(row + 0.0 * parameters.factor) for row in rows])


def table(
    name: str, pipeline: Pipeline, accumulation: int, calibration: Calibration, measured: Optional[Measured] = None
) -> Table:
    """measured: of the same configuration; its IPUs' cycles stand beside what each IPU works."""
    found = schedule(pipeline, accumulation, calibration.parameters)
    intervals = calibration.intervals(lambda each: cycles_by_kind(pipeline, accumulation, each))
    beside = {work.ipu: work.cycles for work in measured.work} if measured is not None else {}
    what = (WORKS, *KINDS, "together")
    rows: List[Dict[str, Any]] = []
    for ipu in range(found.ipus):
        for kind, interval in zip(what, intervals[ipu * len(what) :]):
            if not any(interval):
                continue  # nothing is off chip, or there is one replica
            row = {"ipu": f"IPU {ipu}", "what": kind, **spread("cycles", interval)}
            row["share"] = percent(interval.value / found.cycles)
            if kind == WORKS and ipu in beside:
                row["measured"] = beside[ipu]
                row["difference"] = percent(beside[ipu] / interval.value - 1.0)
            rows.append(row)
    columns = [
        Column("ipu", "IPU", CONFIGURED),
        Column("what", "what", CONFIGURED),
        modelled("cycles", "M cycles", ",.2f", _MILLION),
        Column("share", "%", MODEL, ".2f"),
    ]
    if measured is not None and beside:
        columns.append(Column("measured", "measured", measured.source, ",.2f", scale=_MILLION))
        columns.append(Column("difference", "measured/model %", COMPUTED, "+.1f"))
    notes = [
        f"An update of {accumulation:,} micro-batches in {pipeline.placement.stages} stages on {found.ipus} "
        f"{'IPU' if found.ipus == 1 else 'IPUs'} a replica: {found.cycles / _MILLION:,.3f} million cycles, "
        f"{pipeline.target.seconds(found.cycles):.4f} s on {pipeline.target.name}, the host's part included. %: of it.",
        f"{WORKS}: {', '.join(WORK)} together. {WAITING}: for the slowest IPU, the busiest link and the other IPUs' "
        f"updates. {BUBBLE}: stages without a micro-batch, while the pipeline fills and drains.",
    ]
    if beside and measured is not None:
        notes.append(f"measured: {measured.detail}; of an IPU only what it works.")
    title = f"{name}: an update over time, million cycles of each IPU"
    picture = _drawn(name, found, {row["ipu"]: row for row in rows if row["what"] == WORKS})
    return Table("schedule", title, tuple(columns), rows, (*notes, *ADDED_UP), pictures=(picture,))


def _drawn(name: str, found: Schedule, works: Mapping[str, Mapping[str, Any]]) -> Tiles:
    """The schedule as it stands, but for pipeline cycles that are alike: of these the first and the last.

    works: `WORKS` of each IPU, by its name; its cycles, and those measured, stand beside the IPU's row.
    """
    names = [kind for kind in _SERIES if any(totals[kind] for totals in found.totals())]
    tiles: List[Tile] = []
    skips: List[Skip] = []
    for stretch in found.stretches:
        length = stretch.cycles
        if stretch.number < 0:
            skips += _long(stretch, _LONG * found.stretches[0].cycles)
        elif stretch.repeats > _LONG:
            left, right = stretch.start + length, stretch.end - length
            about = f"{stretch.repeats - 2:,} more pipeline cycles like the one before"
            skips.append(Skip(left / _MILLION, right / _MILLION, f"{about}, {right - left:,.0f} cycles"))
        kept = range(stretch.repeats) if stretch.repeats <= _LONG else (0, stretch.repeats - 1)
        for repeat in kept:
            for span in stretch.spans:
                start = stretch.start + repeat * length + span.start
                about = f"IPU {span.ipu}, {span.kind}: {span.cycles:,.0f} cycles"
                if span.stage >= 0 and span.kind != BUBBLE:
                    about += f" in stage {span.stage}, micro-batch {stretch.number + repeat - span.stage + 1:,}"
                ends = start / _MILLION, (start + span.cycles) / _MILLION
                tiles.append(Tile(*ends, span.ipu + 0.1, span.ipu + 0.9, names.index(span.kind), about))
    rows = []
    for ipu in range(found.ipus):
        row = works.get(f"IPU {ipu}", {})
        words = f"IPU {ipu}: {row['cycles'] / _MILLION:,.0f} M" if row else f"IPU {ipu}"
        rows.append(words + (f", measured {row['measured'] / _MILLION:,.0f} M" if "measured" in row else ""))
    roles = tuple("padding" if kind == BUBBLE else "" for kind in names)
    x = Axis("million cycles since the update's beginning", skips=tuple(skips))
    title = f"An update over time: {name}"
    return Tiles(title, x, Axis(""), tuple(names), tuple(tiles), rows=tuple(rows), roles=roles)


def _long(stretch: Stretch, most: float) -> List[Skip]:
    """Of what no IPU changes in for more than `most` cycles, the middle."""
    edges = sorted({stretch.start, stretch.end, *(stretch.start + span.start for span in stretch.spans)})
    found: List[Tuple[float, float]] = [pair for pair in zip(edges, edges[1:]) if pair[1] - pair[0] > most]
    third = most / _LONG
    return [
        Skip((left + third) / _MILLION, (right - third) / _MILLION, f"{right - left - 2 * third:,.0f} cycles alike")
        for left, right in found
    ]
