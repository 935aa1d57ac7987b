"""The report's figures: the paper's values and the model's. Needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from ipu_packed_bert.report.tables import Table
from pack_data.plotting import new_figure, save

Panel = Callable[[Any, Table], None]


def draw(tables: Sequence[Table], path: Path) -> None:
    """Draw the panels of all tables into one file, one above the other; the file's suffix is .png or .svg."""
    drawn = [(table, panel) for table in tables for panel in PANELS.get(table.name, ())]
    if not drawn:
        raise ValueError(f"--plot: none of these tables has a picture; there are {', '.join(PANELS)}")
    figure, every = new_figure(8.5, 4.4 * len(drawn), rows=len(drawn))
    for axes, (table, panel) in zip(every, drawn):
        panel(axes, table)
        # A panel that shows part of a table has set a title that says which.
        title = table.title + (f": {axes.get_title()}" if axes.get_title() else "")
        axes.set_title("\n".join(textwrap.wrap(title, 75)), fontsize=9)
    save(figure, path)


def _bars(
    axes: Any,
    labels: Sequence[str],
    rows: Sequence[Dict[str, Any]],
    value: str,
    unit: str,
    *,
    paper: Optional[str] = None,
) -> None:
    """A bar of each row's `value` (a column of the model) with its interval; beside it that of the column `paper`."""
    width = 0.6 if paper is None else 0.4
    places = [place - (0.0 if paper is None else 0.2) for place in range(len(rows))]
    # Rounding may put the calibrated value just outside its interval; error bars must not be negative.
    errors = [
        [max(0.0, row[value] - row[value + "_lower"]) for row in rows],
        [max(0.0, row[value + "_upper"] - row[value]) for row in rows],
    ]
    axes.bar(
        places, [row[value] for row in rows], width, yerr=errors, capsize=2, label="model (its layout low to high)"
    )
    if paper is not None:
        axes.bar(
            [place + 0.4 for place in places],
            [row[paper] for row in rows],
            width,
            color="tab:orange",
            label="paper, measured",
        )
    axes.set_xticks(list(range(len(rows))))
    axes.set_xticklabels(labels, rotation=45, ha="right", fontsize=7)
    axes.set_ylabel(unit)
    axes.legend(fontsize=7)


# Nobody has measured this project's graphs: the paper's measurements belong beside the model of the paper's graph only.
THEIRS, OURS = "the paper's graph, model and measurement", "this project's graph, model only"


def _speedups(axes: Any, table: Table, names: Tuple[str, str], bottom: float, top: float, *, theirs: bool) -> None:
    key = "papers_realised" if theirs else "realised"
    rows = [row for row in table.rows if isinstance(row.get(key), float)]
    _bars(
        axes,
        [f"{row[names[0]]} {row[names[1]]}" for row in rows],
        rows,
        key,
        "realised speed-up",
        paper="paper_realised" if theirs else None,
    )
    axes.set_ylim(bottom, top)
    axes.set_title(THEIRS if theirs else OURS)


def _table1(theirs: bool) -> Panel:
    return lambda axes, table: _speedups(axes, table, ("algorithm", "depth"), 0.9, 2.1, theirs=theirs)


def _table2(theirs: bool) -> Panel:
    return lambda axes, table: _speedups(axes, table, ("model", "length"), 1.0, 1.8, theirs=theirs)


def _graphs(theirs: bool) -> Panel:
    def panel(axes: Any, table: Table) -> None:
        rows = [row for row in table.rows if (row.get("paper_overhead") is not None) == theirs]
        _bars(
            axes,
            [f"{row['graph'].split(' (')[0]}, {row['algorithm']} {row['depth']}" for row in rows],
            rows,
            "overhead",
            "overhead, %",
            paper="paper_overhead" if theirs else None,
        )
        axes.set_title(THEIRS if theirs else OURS.replace("graph", "graphs"))

    return panel


def _decomposition(axes: Any, table: Table) -> None:
    rows = table.rows[::-1]
    axes.barh([row["part"] for row in rows], [row["calibrated"] for row in rows], label="model, calibrated")
    axes.plot([row["lower"] for row in rows], [row["part"] for row in rows], "k|", label="low, high")
    axes.plot([row["upper"] for row in rows], [row["part"] for row in rows], "k|")
    axes.set_xlabel("percent of the unpacked micro-batch")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)


def _scaling(axes: Any, table: Table) -> None:
    devices = [row["devices"] for row in table.rows]
    axes.plot(devices, [row["packing"] for row in table.rows], "k--", label="packing")
    for column in table.columns[2:]:
        axes.plot(devices, [row[column.key] for row in table.rows], marker=".", label=column.title)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up over padding")
    axes.legend(fontsize=7)


def _points(axes: Any, table: Table) -> None:
    rows = [row for row in table.rows if row["unit"] == "seq/s"]
    places = range(len(rows))
    axes.bar([place - 0.2 for place in places], [row["error"] for row in rows], 0.4, label="model")
    axes.bar([place + 0.2 for place in places], [row["trivial_error"] for row in rows], 0.4, label="31 % of peak")
    axes.axhline(0.0, color="k", linewidth=0.8)
    axes.set_xticks(list(places))
    axes.set_xticklabels([f"{row['point']} {row['what']}" for row in rows], rotation=30, ha="right", fontsize=6)
    axes.set_ylabel("error of sequences/s, %")
    axes.legend(fontsize=7)


def _arrangements(axes: Any, table: Table) -> None:
    rows = table.rows[::-1]
    axes.barh([row["name"] for row in rows], [row["overhead_calibrated"] for row in rows])
    axes.set_xlabel("overhead, %")
    axes.tick_params(axis="y", labelsize=6)


PANELS: Dict[str, Tuple[Panel, ...]] = {
    "table1": (_table1(True), _table1(False)),
    "graphs": (_graphs(True), _graphs(False)),
    "decomposition": (_decomposition,),
    "table2": (_table2(True), _table2(False)),
    "scaling": (_scaling,),
    "points": (_points,),
    "arrangements": (_arrangements,),
}
