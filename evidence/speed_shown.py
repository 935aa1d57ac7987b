"""What the experiment `speed` says, from its finished cells alone: nothing is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

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
    """The rounds of one case. layers: that were timed; None: all."""

    def __init__(self, case: Case, rows: Sequence[Row], layers: Optional[int]) -> None:
        self.case, self.rows, self._timed = case, rows, layers
        self.factor = sum(row["sequences"] for row in rows) / sum(row["packs"] for row in rows)

    def has(self, attention: str) -> bool:
        return f"packed_{attention}_s" in self.rows[0]

    def speed_ups(self, packed: str, unpacked: str = "", *, layers: Optional[int] = None) -> List[float]:
        """Of packed rows with one attention over unpacked ones with the same or another one, in each round.

        The rounds have packs of other factors: what is taken is the share of its factor that each realises, times the
        factor of all. layers: of a model in which so many of them do what the timed ones did.
        """
        grown = None if layers is None or self._timed is None else layers / self._timed

        def seconds(row: Row, layout: str, attention: str) -> float:
            found = row[f"{layout}_{attention}_s"]
            return found if grown is None else row[f"{layout}_heads_s"] + grown * (found - row[f"{layout}_heads_s"])

        return [
            self.factor
            * (seconds(row, "unpacked", unpacked or packed) / seconds(row, "packed", packed))
            / (row["sequences"] / row["packs"])
            for row in self.rows
        ]

    def wholes(self, packed: str, unpacked: str = "") -> List[float]:
        """As `speed_ups`, of the whole model of this width, where embeddings and heads were timed too."""
        return self.speed_ups(packed, unpacked, layers=LAYERS[self.case.width] if self.has("heads") else None)

    def whole(self, packed: str, unpacked: str = "") -> Interval:
        return ratio(self.wholes(packed, unpacked))

    def share(self, found: Interval) -> float:
        """Percent of the factor."""
        return 100 * found.mean / self.factor

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
        """The largest difference of an update's gradients, packed and unpacked, relative."""
        return max(value for row in self.rows for name, value in row.items() if name.endswith("_gradients"))

    @property
    def p(self) -> float:
        """That the speed-up, with the better attention, is within `MARGIN` of the factor or above; two may try."""
        found = [above(self.wholes(each), (1 - MARGIN) * self.factor) for each in ATTENTIONS if self.has(each)]
        return min(1.0, len(found) * min(found))

    def realised(self) -> bool:
        return self.p < LEVEL

    def why_nothing(self) -> str:
        """Why these timings show nothing; empty where they show something."""
        if self.again.low <= 1 - TWICE or self.again.high >= 1 + TWICE:
            return f"the same packs timed twice differ, {self.again.words('.2f')}"
        if (1 - MARGIN) * self.factor < self.one.high:
            return f"packs of one sequence pass the test as well, {self.one.words('.2f')}"
        if not self.gradients <= EXPECTED[self.case.precision]:
            return f"packed and unpacked gradients differ by {self.gradients:.1e}: it is not the same work"
        return ""


class SpeedShown(Shown):
    """What the cells of one folder say, whichever of them are finished."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rows: Dict[Tuple[Case, bool], List[Row]] = {}
        self.emulated: List[Case] = []
        for cell, found in self.cells.items():
            slots, width, precision = cell.variant.replace(WHOLE, "").split()
            case = Case(int(slots), width, precision)
            if found[0].get(EMULATED):
                self.emulated += [case] if case not in self.emulated else []
            else:
                rows.setdefault((case, cell.variant.endswith(WHOLE)), []).extend(found)
        widths = list(self.settings["widths"])

        def place(key: Tuple[Case, bool]) -> Any:
            return key[0].slots, widths.index(key[0].width), PRECISIONS.index(key[0].precision)

        keys = sorted(rows, key=place)
        layers = self.settings["layers"]
        self.timings = [Timings(case, rows[case, whole], layers) for case, whole in keys if not whole]
        self.wholes = [Timings(case, rows[case, whole], None) for case, whole in keys if whole]

    @property
    def nothing(self) -> List[Timings]:
        return [each for each in self.timings if each.why_nothing()]

    @property
    def draws(self) -> int:
        """How many draws of packs every case has."""
        cases = {cell.variant for cell in self.cells if not cell.variant.endswith(WHOLE)}
        return min((len(self.seeds(each)) for each in cases), default=0)

    @property
    def all_pass(self) -> bool:
        """Whether every case shows something, and has the speed-up that is claimed."""
        return bool(self.timings) and not self.nothing and all(each.realised() for each in self.timings)

    @property
    def p(self) -> float:
        """That the speed-up of every case is as claimed: the largest P value of a case, with its better attention."""
        return max(each.p for each in self.timings)

    # ---- the block ---------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        kind = "timed" if self.settings["layers"] is None else "whole model"

        def whole(packed: str, unpacked: str = "") -> Callable[[Timings], Optional[str]]:
            return lambda each: each.whole(packed, unpacked).words(".2f") if each.has(packed) else None

        def each_attention(words: Callable[[Timings, str], str]) -> Callable[[Timings], str]:
            return lambda each: ", ".join(words(each, name) for name in ATTENTIONS if each.has(name))

        return Table(
            [
                ("slots", lambda each: f"{each.case.slots:,}"),
                ("width", lambda each: each.case.width),
                ("type", lambda each: each.case.precision),
                ("factor", lambda each: f"{each.factor:.2f}"),
                *((f"{words}, {kind}", whole(name)) for name, words in ATTENTIONS.items()),
                ("of the factor", each_attention(lambda each, name: f"{each.share(each.whole(name)):.0f} %")),
                ("packed within, unpacked mask", whole("within", "dense")),
                ("timed: mask, within", each_attention(lambda each, name: f"{ratio(each.speed_ups(name)).mean:.2f}")),
                ("packs of one", lambda each: each.one.words(".2f")),
                ("same packs twice", _twice),
            ],
            self.timings,
            [[f"{case.slots:,}", case.width, case.precision, "no bfloat16"] for case in self.emulated],
        )

    def parts(self) -> List[Union[str, Table]]:
        facts, size, layers = self.facts, self.settings, self.settings["layers"]
        lines: List[Union[str, Table]] = [
            self.table(),
            f"Claim: the speed-up is at least {1 - MARGIN:.0%} of the packing factor, with the better attention. "
            f"Control: packs of one sequence may not pass this test, and the same packs timed twice have to agree "
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
            estimates = {each.case: each for each in self.timings}
            lines += [_checked(each, estimates[each.case]) for each in self.wholes if each.case in estimates]
        if self.emulated:
            lines.append("No bfloat16: this processor has no products of this type, so nothing was timed.")
        worst = {name: [each.gradients for each in self.timings if each.case.precision == name] for name in EXPECTED}
        differ = ", ".join(f"{max(found):.0e} in {name}" for name, found in worst.items() if found)
        if differ:
            lines.append(f"Packed and unpacked gradients of an update differ by at most {differ}.")
        factors = ", ".join(
            f"{found['packing_factor']:.2f} at {int(slots):,} (depth {found['depth']})"
            for slots, found in facts["rows"].items()
        )
        return [
            *lines,
            f"Lengths: {facts['corpus']}, {facts['vocabulary']}; packing factor of all packs {factors}. "
            f"Micro-batches of {size['slots_at_once']:,} slots, at least a row. {facts['machine']}.",
        ]

    def verdict(self) -> str:
        if not self.timings:
            return "shows nothing yet: no case is timed"
        telling = [each for each in self.timings if not each.why_nothing()]
        missed = [str(each.case) for each in telling if not each.realised()]
        said = f"{len(telling) - len(missed)} of {len(telling)} cases pass"
        said += f" (not shown: {' / '.join(missed)})" if missed else ""
        said += f"; the control fails in all {len(telling)} as it must" if telling else ""
        return said + "".join(f"; {each.case} shows nothing: {each.why_nothing()}" for each in self.nothing)

    # ---- the picture -------------------------------------------------------------------------------------------------

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        """Speed-ups of whole models over the row length for each width, beside the packing factor."""
        factors = {int(slots): found["packing_factor"] for slots, found in self.facts["rows"].items()}
        drawn: List[Picture] = []
        for width in self.settings["widths"]:
            cases = [each for each in self.timings if each.case.width == width]
            slots = sorted({each.case.slots for each in cases})
            lines = [Line("packing factor", tuple(map(float, slots)), tuple(factors[each] for each in slots))]
            for precision in PRECISIONS:
                for name, words in ATTENTIONS.items():
                    of = [each for each in cases if each.case.precision == precision and each.has(name)]
                    # The share of the factor timed, times that of all packs.
                    found = [(factors[each.case.slots] / each.factor, each.whole(name)) for each in of]
                    ends = [tuple(scale * interval[end] for scale, interval in found) for end in range(3)]
                    x = tuple(float(each.case.slots) for each in of)
                    if of:
                        lines.append(Line(f"{precision}, {words}", x, ends[0], lower=ends[1], upper=ends[2]))
            if cases:
                x_axis, y_axis = Axis("slots of a row", log=2), Axis("speed-up over unpacked rows")
                drawn.append(Lines(f"BERT-{width}", x_axis, y_axis, tuple(lines)))
        return {"speed_ups": drawn} if drawn else {}


def _twice(each: Timings) -> str:
    return each.again.words(".2f") + (" shows nothing" if each.why_nothing() else "")


def _checked(whole: Timings, estimate: Timings) -> str:
    timed, estimated = whole.share(ratio(whole.speed_ups("dense"))), estimate.share(estimate.whole("dense"))
    return (
        f"The estimate against all {LAYERS[whole.case.width]} layers, mask over the row, {whole.case}: "
        f"{estimated:.1f} % of the factor estimated, {timed:.1f} % timed."
    )
