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

WHOLE = " whole"  # ends the name of a cell of a whole model
EMULATED = "emulated"
MARGIN = 0.1  # largest relative difference of a speed-up from the packing factor
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
    """The rounds of one case.

    Args:
        case: The case.
        rows: The rounds.
        layers: The number of timed layers; None: all.
    """

    def __init__(self, case: Case, rows: Sequence[Row], layers: Optional[int]) -> None:
        self.case = case
        self.rows = rows
        self._timed_layers = layers
        packs = sum(row["packs"] for row in rows)
        self.factor = sum(row["sequences"] for row in rows) / packs

    def has(self, attention: str) -> bool:
        """Return True if an attention, or "heads", was timed."""
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

        The packs of the rounds have different factors.  A result is the realised share of the factor of its round,
        times the factor of all rounds.

        Args:
            packed: The attention of packed rows.
            unpacked: The attention of unpacked rows; by default the same.
            layers: Estimate a model of this number of layers from the timed ones.
        """

        def seconds(row: Row, layout: str, attention: str) -> float:
            timed = row[f"{layout}_{attention}_s"]
            if layers is None or self._timed_layers is None:
                return timed
            heads = row[f"{layout}_heads_s"]
            return heads + layers / self._timed_layers * (timed - heads)

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
        """Return the mean of `wholes`."""
        return ratio(self.wholes(packed, unpacked))

    def share(self, speed_up: Interval) -> float:
        """Return a speed-up in percent of the factor."""
        return 100 * speed_up.mean / self.factor

    @property
    def again(self) -> Interval:
        """The first time of the same packs over the second."""
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
        """P value of a speed-up of at least the factor less `MARGIN`, with the better of the attentions."""
        bound = (1 - MARGIN) * self.factor
        p_values = [above(self.wholes(name), bound) for name in self.attentions()]
        return min(1.0, len(p_values) * min(p_values))

    def realised(self) -> bool:
        """Return True if the speed-up passes its test."""
        return self.p < LEVEL

    def why_nothing(self) -> str:
        """Return the reason why these timings show nothing, or "" if they show something."""
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
        layers: Dict[Case, List[Row]] = {}
        models: Dict[Case, List[Row]] = {}
        self.emulated: List[Case] = []
        for cell, rows in self.cells.items():
            slots, width, precision = cell.variant.replace(WHOLE, "").split()
            case = Case(int(slots), width, precision)
            if not rows[0].get(EMULATED):
                kind = models if cell.variant.endswith(WHOLE) else layers
                kind.setdefault(case, []).extend(rows)
            elif case not in self.emulated:
                self.emulated.append(case)

        number = self.settings["layers"]
        self.timings = [
            Timings(case, layers[case], number) for case in sorted(layers, key=self._place)
        ]
        self.wholes = [
            Timings(case, models[case], None) for case in sorted(models, key=self._place)
        ]

    def _place(self, case: Case) -> Tuple[int, int, int]:
        """Return the key that sorts the cases."""
        width = list(self.settings["widths"]).index(case.width)
        return case.slots, width, PRECISIONS.index(case.precision)

    @property
    def nothing(self) -> List[Timings]:
        """The cases that show nothing."""
        return [timings for timings in self.timings if timings.why_nothing()]

    @property
    def draws(self) -> int:
        """The smallest number of draws of packs of a case."""
        variants = {cell.variant for cell in self.cells if not cell.variant.endswith(WHOLE)}
        return min((len(self.seeds(variant)) for variant in variants), default=0)

    @property
    def all_pass(self) -> bool:
        """True if every case shows something and passes its test."""
        if not self.timings or self.nothing:
            return False
        return all(timings.realised() for timings in self.timings)

    @property
    def p(self) -> float:
        """P value of the claim for every case: the largest of all cases."""
        return max(timings.p for timings in self.timings)

    # ---- the block ---------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """Return the table of the cases."""
        kind = "timed" if self.settings["layers"] is None else "whole model"
        wholes = [(f"{words}, {kind}", _whole_words(name)) for name, words in ATTENTIONS.items()]
        return Table(
            [
                ("slots", lambda timings: f"{timings.case.slots:,}"),
                ("width", lambda timings: timings.case.width),
                ("type", lambda timings: timings.case.precision),
                ("factor", lambda timings: f"{timings.factor:.2f}"),
                *wholes,
                ("of the factor", _shares),
                ("packed within, unpacked mask", _whole_words("within", "dense")),
                ("timed: mask, within", _timed_words),
                ("packs of one", lambda timings: timings.one.words(".2f")),
                ("same packs twice", _twice),
            ],
            self.timings,
            [
                [f"{case.slots:,}", case.width, case.precision, "no bfloat16"]
                for case in self.emulated
            ],
        )

    def parts(self) -> List[Union[str, Table]]:
        size = self.settings
        layers = size["layers"]
        lines: List[Union[str, Table]] = [
            self.table(),
            f"Claim: the speed-up is at least {1 - MARGIN:.0%} of the packing factor, with the better attention. "
            "Control: packs of one sequence may not pass this test, and the same packs timed twice have to agree "
            f"within {TWICE:.0%}. **{self.verdict()}.**",
            f"Geometric mean of the rounds, {CONFIDENCE:.0%} interval in brackets (Student's t of the logarithms), "
            f"{self.facts['clock']}; forward and backward pass, packed and unpacked in turn in one process, each round "
            "on other packs. *Factor*: sequences in a pack, of those timed. Both sides have the attention that a "
            "column names. "
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
            for whole in self.wholes:
                if whole.case in estimates:
                    lines.append(_checked(whole, estimates[whole.case]))
        if self.emulated:
            lines.append(
                "No bfloat16: this processor has no products of this type, so nothing was timed."
            )
        if self.timings:
            lines.append(self._gradient_words())
        return [*lines, self._origin()]

    def _gradient_words(self) -> str:
        """Return the line about the differences of gradients."""
        differences = []
        for precision in EXPECTED:
            cases = [timings for timings in self.timings if timings.case.precision == precision]
            if cases:
                largest = max(timings.gradients for timings in cases)
                differences.append(f"{largest:.0e} in {precision}")
        words = ", ".join(differences)
        return f"Packed and unpacked gradients of an update differ by at most {words}."

    def _origin(self) -> str:
        """Return the line about data and machine."""
        facts = self.facts
        factors = []
        for slots, row in facts["rows"].items():
            factors.append(f"{row['packing_factor']:.2f} at {int(slots):,} (depth {row['depth']})")
        words = ", ".join(factors)
        return (
            f"Lengths: {facts['corpus']}, {facts['vocabulary']}; packing factor of all packs {words}. "
            f"Micro-batches of {self.settings['slots_at_once']:,} slots, at least a row. {facts['machine']}."
        )

    def verdict(self) -> str:
        """Describe the cases that pass the test, and the controls."""
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
        """Return the lines of a picture: the packing factor, and a line for each type and attention."""
        rows = self.facts["rows"]
        slots = sorted({timings.case.slots for timings in cases})
        factors = tuple(rows[str(number)]["packing_factor"] for number in slots)
        lines = [Line("packing factor", tuple(map(float, slots)), factors)]
        for precision, (attention, words) in itertools.product(PRECISIONS, ATTENTIONS.items()):
            points = []
            for timings in cases:
                if timings.case.precision == precision and timings.has(attention):
                    # The realised share of the factor of the timed packs, times the factor of all packs.
                    number = timings.case.slots
                    scale = rows[str(number)]["packing_factor"] / timings.factor
                    mean, low, high, _ = timings.whole(attention)
                    points.append((float(number), scale * mean, scale * low, scale * high))
            if points:
                x, means, lows, highs = zip(*points)
                lines.append(Line(f"{precision}, {words}", x, means, lower=lows, upper=highs))
        return lines


def _whole_words(packed: str, unpacked: str = "") -> Callable[[Timings], Optional[str]]:
    """Return the function of a cell: the speed-up of the whole model, if the attention was timed."""

    def cell(timings: Timings) -> Optional[str]:
        return timings.whole(packed, unpacked).words(".2f") if timings.has(packed) else None

    return cell


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
