"""The results of the experiment `speed`, from its finished cells; nothing is timed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from evidence.runner import Row
from evidence.statistics import CONFIDENCE, LEVEL, TWICE, Interval, above, ratio
from evidence.writer import Shown, Table
from ipu_packed_bert.training.compare_unpacked import EXPECTED
from pack_data.display.picture import Axis, Line, Lines, Picture

WHOLE, EMULATED = " whole", "emulated"
MARGIN = 0.1  # of the packing factor: a speed-up within it is the factor's
LAYERS = {"base": 12, "large": 24, "tiny": 4}  # of the whole model of each width
ATTENTIONS = {"dense": "mask over the row", "within": "within each sequence"}
PRECISIONS = ("float32", "bfloat16")


class Case(NamedTuple):
    """A row length, a width, a type."""

    slots: int
    width: str
    precision: str

    def __str__(self) -> str:
        return f"{self.slots:,} slots, {self.width}, {self.precision}"


class Timings:
    """The rounds of one case.  layers: that were timed; None: all."""

    def __init__(self, case: Case, rows: Sequence[Row], layers: Optional[int]) -> None:
        self.case = case
        self.rows = rows
        self._timed = layers
        packs = sum(row["packs"] for row in rows)
        self.factor = sum(row["sequences"] for row in rows) / packs

    def has(self, attention: str) -> bool:
        return f"packed_{attention}_s" in self.rows[0]

    def attentions(self) -> List[str]:
        """Return the attentions that were timed."""
        return [name for name in ATTENTIONS if self.has(name)]

    def speed_ups(
        self,
        packed: str,
        unpacked: str = "",
        *,
        layers: Optional[int] = None,
    ) -> List[float]:
        """Return the speed-ups of the rounds: packed rows over unpacked ones, with the same attention or another.

        The rounds have packs of other factors: the result is the share of its factor that each realises, times the
        factor of all.  layers: of a model in which so many layers do what the timed ones did.
        """
        grown = None if layers is None or self._timed is None else layers / self._timed

        def seconds(row: Row, layout: str, attention: str) -> float:
            timed = row[f"{layout}_{attention}_s"]
            if grown is None:
                return timed
            heads = row[f"{layout}_heads_s"]
            return heads + grown * (timed - heads)

        speed_ups = []
        for row in self.rows:
            speed_up = seconds(row, "unpacked", unpacked or packed) / seconds(row, "packed", packed)
            factor = row["sequences"] / row["packs"]
            speed_ups.append(self.factor * speed_up / factor)
        return speed_ups

    def wholes(self, packed: str, unpacked: str = "") -> List[float]:
        """Return `speed_ups` of the whole model of this width, if embeddings and heads were timed too."""
        layers = LAYERS[self.case.width] if self.has("heads") else None
        return self.speed_ups(packed, unpacked, layers=layers)

    def whole(self, packed: str, unpacked: str = "") -> Interval:
        return ratio(self.wholes(packed, unpacked))

    def share(self, speed_up: Interval) -> float:
        """Return a speed-up in percent of the factor."""
        return 100 * speed_up.mean / self.factor

    @property
    def again(self) -> Interval:
        """The same packs timed a second time: the first time over the second."""
        return ratio([row["packed_dense_s"] / row["again_s"] for row in self.rows])

    @property
    def one(self) -> Interval:
        """The speed-up of packs of one sequence."""
        return ratio([row["unpacked_dense_s"] / row["one_s"] for row in self.rows])

    @property
    def gradients(self) -> float:
        """The largest relative difference of an update's gradients, packed and unpacked."""
        differences = []
        for row in self.rows:
            differences += [value for name, value in row.items() if name.endswith("_gradients")]
        return max(differences)

    @property
    def p(self) -> float:
        """P value that the speed-up, with the better of the attentions, is within `MARGIN` of the factor or above."""
        bound = (1 - MARGIN) * self.factor
        p_values = [above(self.wholes(name), bound) for name in self.attentions()]
        return min(1.0, len(p_values) * min(p_values))

    def realised(self) -> bool:
        return self.p < LEVEL

    def why_nothing(self) -> str:
        """Return why these timings show nothing, or "" if they show something."""
        if self.again.low <= 1 - TWICE or self.again.high >= 1 + TWICE:
            return f"the same packs timed twice differ, {self.again.words('.2f')}"
        if (1 - MARGIN) * self.factor < self.one.high:
            return f"packs of one sequence pass the test as well, {self.one.words('.2f')}"
        if not self.gradients <= EXPECTED[self.case.precision]:
            return f"packed and unpacked gradients differ by {self.gradients:.1e}: it is not the same work"
        return ""


class SpeedShown(Shown):
    """The results in one run's directory: its finished cells."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rows: Dict[Tuple[Case, bool], List[Row]] = {}
        self.emulated: List[Case] = []
        for cell, of_cell in self.cells.items():
            slots, width, precision = cell.variant.replace(WHOLE, "").split()
            case = Case(int(slots), width, precision)
            if not of_cell[0].get(EMULATED):
                is_whole = cell.variant.endswith(WHOLE)
                rows.setdefault((case, is_whole), []).extend(of_cell)
            elif case not in self.emulated:
                self.emulated.append(case)

        layers = self.settings["layers"]
        keys = sorted(rows, key=self._place)
        self.timings = [
            Timings(case, rows[case, False], layers) for case, is_whole in keys if not is_whole
        ]
        self.wholes = [Timings(case, rows[case, True], None) for case, is_whole in keys if is_whole]

    def _place(self, key: Tuple[Case, bool]) -> Tuple[int, int, int]:
        case, _ = key
        width = list(self.settings["widths"]).index(case.width)
        return case.slots, width, PRECISIONS.index(case.precision)

    @property
    def nothing(self) -> List[Timings]:
        """The cases that show nothing."""
        return [timings for timings in self.timings if timings.why_nothing()]

    @property
    def draws(self) -> int:
        """Draws of packs that every case has."""
        variants = {cell.variant for cell in self.cells if not cell.variant.endswith(WHOLE)}
        return min((len(self.seeds(variant)) for variant in variants), default=0)

    @property
    def all_pass(self) -> bool:
        """True if every case shows something, and has the speed-up that is claimed."""
        return (
            bool(self.timings)
            and not self.nothing
            and all(timings.realised() for timings in self.timings)
        )

    @property
    def p(self) -> float:
        """P value that the speed-up of every case is as claimed: the largest of all cases."""
        return max(timings.p for timings in self.timings)

    # ---- the block ---------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        kind = "timed" if self.settings["layers"] is None else "whole model"
        wholes = [(f"{words}, {kind}", _whole_words(name)) for name, words in ATTENTIONS.items()]
        return Table(
            [
                ("slots", lambda each: f"{each.case.slots:,}"),
                ("width", lambda each: each.case.width),
                ("type", lambda each: each.case.precision),
                ("factor", lambda each: f"{each.factor:.2f}"),
                *wholes,
                ("of the factor", _shares),
                ("packed within, unpacked mask", _whole_words("within", "dense")),
                ("timed: mask, within", _timed_words),
                ("packs of one", lambda each: each.one.words(".2f")),
                ("same packs twice", _twice),
            ],
            self.timings,
            [
                [f"{case.slots:,}", case.width, case.precision, "no bfloat16"]
                for case in self.emulated
            ],
        )

    def parts(self) -> List[Union[str, Table]]:
        facts = self.facts
        size = self.settings
        layers = size["layers"]
        lines: List[Union[str, Table]] = [
            self.table(),
            f"Claim: the speed-up is at least {1 - MARGIN:.0%} of the packing factor, with the better attention. "
            "Control: packs of one sequence may not pass this test, and the same packs timed twice have to agree "
            f"within {TWICE:.0%}. **{self.verdict()}.**",
            f"Geometric mean of the rounds, {CONFIDENCE:.0%} interval in brackets (Student's t of the logarithms), "
            f"{facts['clock']}; forward and backward pass, packed and unpacked in turn in one process, each round on "
            "other packs. *Factor*: sequences in a pack, of those timed. Both sides have the attention that a column "
            "names. "
            "*Packed within, unpacked mask*: packs without a mask against BERT as it is without packs.",
        ]
        if layers is not None:
            times = " or ".join(f"{LAYERS[width]} times ({width})" for width in size["widths"])
            timed = "one layer" if layers == 1 else f"{layers} layers"
            lines.append(
                f"Timed: {timed} with embeddings and heads, and embeddings and heads alone. Whole model, estimated: "
                f"embeddings and heads once, and {times} what the layer adds."
            )
            estimates = {timings.case: timings for timings in self.timings}
            lines += [
                _checked(whole, estimates[whole.case])
                for whole in self.wholes
                if whole.case in estimates
            ]
        if self.emulated:
            lines.append(
                "No bfloat16: this processor has no products of this type, so nothing was timed."
            )
        differences = []
        for precision in EXPECTED:
            gradients = [
                timings.gradients for timings in self.timings if timings.case.precision == precision
            ]
            if gradients:
                differences.append(f"{max(gradients):.0e} in {precision}")
        differ = ", ".join(differences)
        if differ:
            lines.append(f"Packed and unpacked gradients of an update differ by at most {differ}.")
        factors = ", ".join(
            f"{row['packing_factor']:.2f} at {int(slots):,} (depth {row['depth']})"
            for slots, row in facts["rows"].items()
        )
        return [
            *lines,
            f"Lengths: {facts['corpus']}, {facts['vocabulary']}; packing factor of all packs {factors}. "
            f"Micro-batches of {size['slots_at_once']:,} slots, at least a row. {facts['machine']}.",
        ]

    def verdict(self) -> str:
        """Describe which cases pass the test, and whether the controls fail."""
        if not self.timings:
            return "shows nothing yet: no case is timed"
        telling = [timings for timings in self.timings if not timings.why_nothing()]
        missed = [str(timings.case) for timings in telling if not timings.realised()]
        words = f"{len(telling) - len(missed)} of {len(telling)} cases pass"
        if missed:
            words += f" (not shown: {' / '.join(missed)})"
        if telling:
            words += f"; the control fails in all {len(telling)} as it must"
        for timings in self.nothing:
            words += f"; {timings.case} shows nothing: {timings.why_nothing()}"
        return words

    # ---- the picture -------------------------------------------------------------------------------------------------

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        """Draw the speed-ups of whole models over the row length for each width, with the packing factor."""
        drawn: List[Picture] = []
        for width in self.settings["widths"]:
            cases = [timings for timings in self.timings if timings.case.width == width]
            if cases:
                axes = Axis("slots of a row", log=2), Axis("speed-up over unpacked rows")
                drawn.append(Lines(f"BERT-{width}", *axes, tuple(self._lines(cases))))
        return {"speed_ups": drawn} if drawn else {}

    def _lines(self, cases: Sequence[Timings]) -> List[Line]:
        factors = {int(slots): row["packing_factor"] for slots, row in self.facts["rows"].items()}
        slots = sorted({timings.case.slots for timings in cases})
        of_all = tuple(factors[number] for number in slots)
        lines = [Line("packing factor", tuple(map(float, slots)), of_all)]
        for precision, (attention, words) in itertools.product(PRECISIONS, ATTENTIONS.items()):
            points = []
            for timings in cases:
                if timings.case.precision == precision and timings.has(attention):
                    # The share of the factor timed, times that of all packs.
                    scale = factors[timings.case.slots] / timings.factor
                    mean, low, high, _ = timings.whole(attention)
                    points.append(
                        (float(timings.case.slots), scale * mean, scale * low, scale * high)
                    )
            if points:
                x, mean_ends, low_ends, high_ends = zip(*points)
                lines.append(
                    Line(f"{precision}, {words}", x, mean_ends, lower=low_ends, upper=high_ends)
                )
        return lines


def _whole_words(packed: str, unpacked: str = "") -> Callable[[Timings], Optional[str]]:
    """Return a cell: the speed-up of the whole model, if the attention was timed."""
    return lambda each: each.whole(packed, unpacked).words(".2f") if each.has(packed) else None


def _shares(timings: Timings) -> str:
    return ", ".join(f"{timings.share(timings.whole(name)):.0f} %" for name in timings.attentions())


def _timed_words(timings: Timings) -> str:
    return ", ".join(f"{ratio(timings.speed_ups(name)).mean:.2f}" for name in timings.attentions())


def _twice(timings: Timings) -> str:
    words = timings.again.words(".2f")
    return f"{words} shows nothing" if timings.why_nothing() else words


def _checked(whole: Timings, estimate: Timings) -> str:
    """Compare the estimate of a whole model with its time."""
    timed = whole.share(ratio(whole.speed_ups("dense")))
    estimated = estimate.share(estimate.whole("dense"))
    return (
        f"The estimate against all {LAYERS[whole.case.width]} layers, mask over the row, {whole.case}: "
        f"{estimated:.1f} % of the factor estimated, {timed:.1f} % timed."
    )
