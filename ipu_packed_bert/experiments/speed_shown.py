"""The table and the picture of the experiment `speed`, from its finished cells alone: nothing is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.compare_unpacked import EXPECTED
from ipu_packed_bert.experiments import tables
from ipu_packed_bert.experiments.runner import Row, read_run
from ipu_packed_bert.experiments.statistics import CONFIDENCE, TWICE, students

WHOLE, EMULATED = " whole", "emulated"
MARGIN = 0.1  # of the packing factor: a speed-up within it is the factor's
LAYERS = {"base": 12, "large": 24, "tiny": 4}
_TICKS = (1, 1.25, 1.5, 2, 3, 4, 5, 6)
ATTENTIONS = {"dense": "mask over the row", "within": "within each sequence"}


class Ratio(NamedTuple):
    """A ratio of times: the geometric mean of the rounds, and an interval of `CONFIDENCE`."""

    middle: float
    low: float
    high: float

    def within(self, value: float, margin: float) -> bool:
        return (1 - margin) * value < self.low and self.high < (1 + margin) * value

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(values: Sequence[float]) -> Ratio:
    """Of its values in the rounds: the mean of their logarithms, with Student's interval; one round has no interval.

    Where a value is not above 0, as a difference of two times may be: the median, without an interval.
    """
    if min(values) <= 0:
        return Ratio(float(np.median(values)), 0.0, float("inf"))
    found = students(np.log(np.asarray(values, dtype=np.float64)).tolist())
    return Ratio(*(float(np.exp(each)) for each in (found.mean, found.low, found.high)))


class Case(NamedTuple):
    """A row length, a width, a type."""

    slots: int
    width: str
    precision: str


class Timings:
    """The rounds of one case."""

    def __init__(self, case: Case, rows: Sequence[Row], layers: Optional[int]) -> None:
        self.case, self.rows, self._timed = case, rows, layers
        self.factor = sum(row["sequences"] for row in rows) / sum(row["packs"] for row in rows)

    def has(self, attention: str) -> bool:
        return f"packed_{attention}_s" in self.rows[0]

    def speed_up(self, packed: str, unpacked: str = "", *, layers: Optional[int] = None) -> Ratio:
        """Of packed rows with one attention over unpacked ones with the same or another one.

        The rounds have packs of other factors: what is taken is the share of its factor that each realises, times the
        factor of all. layers: of a model in which so many of them do what the timed ones did.
        """
        return ratio(
            [
                self.factor
                * (_seconds(row, "unpacked", unpacked or packed, self._grown(layers)))
                / _seconds(row, "packed", packed, self._grown(layers))
                / (row["sequences"] / row["packs"])
                for row in self.rows
            ]
        )

    def _grown(self, layers: Optional[int]) -> Optional[float]:
        return None if layers is None or self._timed is None else layers / self._timed

    @property
    def estimated(self) -> bool:
        """Whether embeddings and heads were timed too, so that whole models can be told from one layer."""
        return self.has("heads")

    def whole(self, packed: str, unpacked: str = "") -> Ratio:
        """As `speed_up`, of the whole model of this width."""
        return self.speed_up(packed, unpacked, layers=LAYERS[self.case.width] if self.estimated else None)

    @property
    def again(self) -> Ratio:
        """The same packs timed a second time: the first time over the second."""
        return ratio([row["packed_dense_s"] / row["again_s"] for row in self.rows])

    @property
    def one(self) -> Ratio:
        """The speed-up of packs of one sequence."""
        return ratio([row["unpacked_dense_s"] / row["one_s"] for row in self.rows])

    @property
    def gradients(self) -> float:
        """The largest difference of an update's gradients, packed and unpacked, relative."""
        return max(value for row in self.rows for name, value in row.items() if name.endswith("_gradients"))

    def realised(self) -> bool:
        """Whether the speed-up, with the better attention, is within `MARGIN` of the factor, or above."""
        return any((1 - MARGIN) * self.factor < self.whole(each).low for each in ATTENTIONS if self.has(each))

    def why_nothing(self) -> str:
        """Why these timings show nothing; empty where they show something."""
        if not self.again.within(1.0, TWICE):
            return f"the same packs timed twice differ, {self.again}"
        if (1 - MARGIN) * self.factor < self.one.high:
            return f"packs of one sequence pass the test as well, {self.one}"
        if not self.gradients <= EXPECTED[self.case.precision]:
            return f"packed and unpacked gradients differ by {self.gradients:.1e}: it is not the same work"
        return ""


def _seconds(row: Row, layout: str, attention: str, grown: Optional[float]) -> float:
    """grown: times the layers that were timed."""
    seconds = row[f"{layout}_{attention}_s"]
    if grown is None:
        return seconds
    heads = row[f"{layout}_heads_s"]
    return heads + grown * (seconds - heads)


class SpeedShown:
    """What the cells of one folder say, whichever of them are finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        run = read_run(self.folder)
        self.size, self.facts = run.settings, run.facts
        rows: Dict[Tuple[Case, bool], List[Row]] = {}
        self.emulated: List[Case] = []
        for cell, found in run.cells.items():
            slots, width, precision = cell.variant.replace(WHOLE, "").split()
            case = Case(int(slots), width, precision)
            if found[0].get(EMULATED):
                self.emulated += [case] if case not in self.emulated else []
            else:
                rows.setdefault((case, cell.variant.endswith(WHOLE)), []).extend(found)
        order = list(self.size["widths"]), ["float32", "bfloat16"]

        def place(key: Tuple[Case, bool]) -> Any:
            case = key[0]
            return case.slots, order[0].index(case.width), order[1].index(case.precision)

        keys = sorted(rows, key=place)
        self.timings = [Timings(case, rows[case, whole], self.size["layers"]) for case, whole in keys if not whole]
        self.wholes = [Timings(case, rows[case, whole], None) for case, whole in keys if whole]

    @property
    def nothing(self) -> List[Timings]:
        return [each for each in self.timings if each.why_nothing()]

    @property
    def shows(self) -> bool:
        """Whether there are rows, and each of them shows something."""
        return bool(self.timings) and not self.nothing

    # ---- the table ---------------------------------------------------------------------------------------------------

    def text(self) -> str:
        return self.table() + "\n" + self.notes()

    def table(self) -> str:
        lines = [self._line(each) for each in self.timings]
        lines += [[f"{case.slots:,}", case.width, case.precision, "no bfloat16", *[""] * 7] for case in self.emulated]
        kind = "timed" if self.size["layers"] is None else "whole model"
        return tables.markdown(
            [
                "slots",
                "width",
                "type",
                "factor",
                f"mask over the row, {kind}",
                f"within each sequence, {kind}",
                "of the factor",
                "packed within, unpacked mask",
                "timed: mask, within",
                "packs of one",
                "same packs twice",
            ],
            lines,
        )

    def _line(self, each: Timings) -> List[str]:
        case = each.case
        both = [name for name in ATTENTIONS if each.has(name)]
        wholes = {name: each.whole(name) for name in both}
        shares = [f"{100 * wholes[name].middle / each.factor:.0f} %" for name in both]
        timed = ", ".join(f"{each.speed_up(name).middle:.2f}" for name in both)
        nothing = "" if not each.why_nothing() else " shows nothing"
        return [
            f"{case.slots:,}",
            case.width,
            case.precision,
            f"{each.factor:.2f}",
            *(str(wholes[name]) if name in wholes else "" for name in ATTENTIONS),
            ", ".join(shares),
            str(each.whole("within", "dense")) if "within" in both else "",
            timed,
            str(each.one),
            str(each.again) + nothing,
        ]

    def notes(self) -> str:
        facts, size = self.facts, self.size
        lines = [
            f"Claim: the speed-up is at least {1 - MARGIN:.0%} of the packing factor, with the better attention. "
            f"Control: packs of one sequence may not pass this test, and the same packs timed twice have to agree "
            f"within {TWICE:.0%}. **{self.verdict()}.**",
            f"Geometric mean of the rounds, {CONFIDENCE:.0%} interval in brackets (Student's t of the logarithms), "
            f"{facts['clock']}; forward and backward pass, packed and unpacked in turn in one process, each round on "
            "other packs. *Factor*: sequences in a pack, of those timed. Both sides have the attention that a column "
            "names; within each sequence unpacked rows skip their padding too, so packing has less left to gain. "
            "*Packed within, unpacked mask*: packs without a mask against BERT as it is without packs.",
        ]
        if size["layers"] is not None:
            lines.append(
                f"Timed: {_layers(size['layers'])} with embeddings and heads, and embeddings and heads alone. Whole "
                "model, estimated: embeddings and heads once, and "
                + " or ".join(f"{LAYERS[width]} times ({width})" for width in size["widths"])
                + " what the layer adds."
            )
            lines += [self._checked(each) for each in self.wholes if self._of(each.case)]
        if self.emulated:
            lines.append("No bfloat16: this processor has no products of this type, so nothing was timed.")
        if self.timings:
            worst = {
                name: [each.gradients for each in self.timings if each.case.precision == name] for name in EXPECTED
            }
            lines.append(
                "Packed and unpacked gradients of an update differ by at most "
                + ", ".join(f"{max(found):.0e} in {name}" for name, found in worst.items() if found)
                + "."
            )
        rows = facts["rows"]
        factors = ", ".join(
            f"{found['packing_factor']:.2f} at {int(slots):,} (depth {found['depth']})" for slots, found in rows.items()
        )
        lines.append(
            f"Lengths: {facts['corpus']}, {facts['vocabulary']}; packing factor of all packs {factors}. "
            f"Micro-batches of {size['slots_at_once']:,} slots, at least a row. {facts['machine']}."
        )
        return "\n".join(lines) + "\n"

    def verdict(self) -> str:
        if not self.timings:
            return "shows nothing yet: no case is timed"
        telling = [each for each in self.timings if not each.why_nothing()]
        missed = [_name(each.case) for each in telling if not each.realised()]
        said = f"{len(telling) - len(missed)} of {len(telling)} cases pass"
        said += f" (not shown: {' / '.join(missed)})" if missed else ""
        said += f"; the control fails in all {len(telling)} as it must" if telling else ""
        for each in self.nothing:
            said += f"; {_name(each.case)} shows nothing: {each.why_nothing()}"
        return said

    def _of(self, case: Case) -> Optional[Timings]:
        return next((each for each in self.timings if each.case == case), None)

    def _checked(self, whole: Timings) -> str:
        estimate = self._of(whole.case)
        assert estimate is not None
        share = whole.speed_up("dense").middle / whole.factor
        expected = estimate.whole("dense").middle / estimate.factor
        return (
            f"The estimate against all {LAYERS[whole.case.width]} layers, mask over the row, {_name(whole.case)}: "
            f"{100 * expected:.1f} % of the factor estimated, {100 * share:.1f} % timed."
        )

    # ---- the picture -------------------------------------------------------------------------------------------------

    def draw(self, folder: Path, stem: str = "") -> List[Path]:
        """Speed-ups of whole models over the row length, a panel for each width, beside the packing factor."""
        from ipu_packed_bert.experiments.pictures import STYLES, finish
        from pack_data.display.picture import new_figure

        widths = [width for width in self.size["widths"] if any(each.case.width == width for each in self.timings)]
        if not widths:
            return []
        curves: Dict[str, Callable[[Timings], Optional[Ratio]]] = {
            f"{precision}, {words}": _of_curve(precision, attention)
            for precision in ("float32", "bfloat16")
            for attention, words in ATTENTIONS.items()
        }
        figure, axes = new_figure(5.4 * len(widths), 4.2, columns=len(widths))
        for width, axis in zip(widths, axes):
            cases = [each for each in self.timings if each.case.width == width]
            factors = {int(slots): found["packing_factor"] for slots, found in self.facts["rows"].items()}
            slots = sorted({each.case.slots for each in cases})
            axis.plot(
                slots,
                [factors[each] for each in slots],
                color="#777777",
                linestyle=":",
                marker="_",
                label="packing factor",
            )
            for (label, of), (colour, dashes), marker in zip(curves.items(), STYLES[1:], "osD^"):
                found = [(each.case.slots, of(each), factors[each.case.slots] / each.factor) for each in cases]
                points = [(x, y, scale) for x, y, scale in found if y is not None]
                if not points:
                    continue
                middles = [scale * y.middle for _, y, scale in points]
                ends = [[scale * (y.middle - y.low), scale * (y.high - y.middle)] for _, y, scale in points]
                spread = np.maximum(np.array(ends).T, 0.0)
                axis.errorbar(
                    [x for x, _, _ in points],
                    middles,
                    np.where(np.isfinite(spread), spread, 0.0),
                    color=colour,
                    linestyle=dashes,
                    marker=marker,
                    markersize=5,
                    capsize=3,
                    label=label,
                )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(slots, [f"{each:,}" for each in slots])
            axis.set_yticks(_TICKS, [f"{each:g}" for each in _TICKS])
            axis.set_ylim(0.9, 1.15 * max(factors.values()))
            axis.minorticks_off()
            axis.axhline(1.0, color="#bbbbbb", linewidth=0.8)
            axis.set_title(f"BERT-{width}")
            axis.set_xlabel("slots of a row")
            axis.set_ylabel("speed-up over unpacked rows")
            axis.grid(alpha=0.25)
        handles, labels = axes[0].get_legend_handles_labels()
        caption = (
            f"Geometric mean of the rounds, as a share of the factor timed, times that of all packs (dotted); bars: "
            f"{CONFIDENCE:.0%} interval. Both sides with the same attention."
        )
        return [finish(figure, Path(folder) / f"{stem}speed_ups.png", handles, labels, columns=3, caption=caption)]


def _of_curve(precision: str, attention: str) -> Callable[[Timings], Optional[Ratio]]:
    return lambda each: each.whole(attention) if each.case.precision == precision and each.has(attention) else None


def _name(case: Case) -> str:
    return f"{case.slots:,} slots, {case.width}, {case.precision}"


def _layers(number: int) -> str:
    return "one layer" if number == 1 else f"{number} layers"
