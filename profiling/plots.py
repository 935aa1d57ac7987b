"""The report's figures: paper and model side by side. Needs matplotlib."""
from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, Sequence

from tables import Table


def draw(tables: Sequence[Table], path: Path) -> None:
    """One panel for each table that has a picture, into one file (its suffix says png or svg)."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    panels = {"table1": _table1, "graphs": _graphs, "decomposition": _decomposition, "table2": _table2, "scaling": _scaling,
              "points": _points, "arrangements": _arrangements}
    drawn = [table for table in tables if table.name in panels]
    if not drawn:
        raise ValueError(f"--plot: none of these tables has a picture; there are {', '.join(panels)}")
    figure = Figure(figsize=(8.5, 4.4 * len(drawn)), layout="constrained")
    for axes, table in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn):
        panels[table.name](axes, table)
        axes.set_title("\n".join(textwrap.wrap(table.title, 75)), fontsize=9)
    figure.savefig(str(path), dpi=150)


def _bars(axes: Any, labels: Sequence[str], ours: Sequence[float], low: Sequence[float], high: Sequence[float],
          paper: Sequence[Any], unit: str) -> None:
    places = range(len(labels))
    # Rounding may put the calibrated value a hair outside its interval; error bars must not be negative.
    errors = [[max(0.0, o - a) for o, a in zip(ours, low)], [max(0.0, b - o) for o, b in zip(ours, high)]]
    axes.bar([place - 0.2 for place in places], ours, 0.4, yerr=errors, capsize=2, label="model (low to high)")
    known = [(place + 0.2, value) for place, value in zip(places, paper) if isinstance(value, float)]
    axes.bar([place for place, _ in known], [value for _, value in known], 0.4, label="paper")
    axes.set_xticks(list(places))
    axes.set_xticklabels(labels, rotation=45, ha="right", fontsize=7)
    axes.set_ylabel(unit)
    axes.legend(fontsize=7)


def _table1(axes: Any, table: Table) -> None:
    rows = [row for row in table.rows if isinstance(row.get("realised"), float)]
    _bars(axes, [f"{row['algorithm']} {row['depth']}" for row in rows], [row["realised"] for row in rows],
          [row["realised_lower"] for row in rows], [row["realised_upper"] for row in rows],
          [row["paper_realised"] for row in rows], "realised speed-up")
    axes.set_ylim(0.9, 2.1)


def _graphs(axes: Any, table: Table) -> None:
    labels = [f"{row['graph'].split(' (')[0]}, {row['algorithm']} {row['depth']}" for row in table.rows]
    _bars(axes, labels, *([row[key] for row in table.rows] for key in ("overhead", "overhead_lower", "overhead_upper", "paper_overhead")),
          "overhead, %")


def _table2(axes: Any, table: Table) -> None:
    _bars(axes, [f"{row['model']} {row['length']}" for row in table.rows], [row["realised"] for row in table.rows],
          [row["realised_lower"] for row in table.rows], [row["realised_upper"] for row in table.rows],
          [row["paper_realised"] for row in table.rows], "realised speed-up")
    axes.set_ylim(1.0, 1.8)


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
