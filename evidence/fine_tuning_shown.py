"""What the fine-tuning experiment says, from the files of its finished cells alone."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from evidence.runner import Cell, Row
from evidence.statistics import CONFIDENCE, TWICE, Interval, median_interval, students
from evidence.ways import AGAIN, INFERENCE, LONGEST, MAXIMUM, NO_MASK, PACKED, SORTED, TRAINING, WAYS
from evidence.ways import WORDS as WAY_WORDS
from evidence.writer import Shown, Table, bars, small, spread
from pack_data.cli.command import counted
from pack_data.display.picture import Picture

WORDS = {"banking77": "BANKING77 at 64", "squad": "SQuAD at 384"}
SCORE = {"banking77": "accuracy", "squad": "F1"}
# Updates may part by rounding, which Adam enlarges; without the mask they must part by so many times more.
CLEARLY = 100.0
_Line = Tuple[str, str]  # of a table: task and way


class Answers(NamedTuple):
    """How many answers of the same model differ from those of each question alone in its row."""

    packed: int
    no_mask: int
    answers: int


class FineTuningShown(Shown):
    """What the cells of one folder say, whichever of them are finished."""

    @property
    def tasks(self) -> List[str]:
        """Those with a finished cell."""
        kinds = (PACKED, SORTED, NO_MASK, "same", "times")
        return [t for t in WORDS if any(cell.variant in [f"{t}_{kind}" for kind in kinds] for cell in self.cells)]

    # ---- scores

    def lasts(self, task: str, way: str) -> List[Row]:
        """The last row of each seed."""
        variant = f"{task}_{way}"
        return [self.cells[Cell(variant, seed)][-1] for seed in self.seeds(variant)]

    def percent(self, task: str, way: str) -> List[float]:
        """Scores, by seed."""
        return [float(np.mean(row["points"])) for row in self.lasts(task, way)]

    def score_against_sorted(self, task: str, way: str) -> Optional[Interval]:
        """Points above those of rows sorted by length, over the seeds that both have; None where there is none."""
        names = [f"{task}_{each}" for each in (way, SORTED)]
        points = [
            [np.mean(self.cells[Cell(name, seed)][-1]["points"]) for seed in self.common(*names)] for name in names
        ]
        return students([one - other for one, other in zip(*points)]) if points[0] else None

    def answers(self, task: str) -> Optional[Answers]:
        """Over all seeds; None where no packed run is finished."""
        rows = self.lasts(task, PACKED)
        if not rows:
            return None
        packed, no_mask = (sum(row[f"answered_{way}"]["different"] for row in rows) for way in (PACKED, NO_MASK))
        return Answers(packed, no_mask, sum(row[f"answered_{PACKED}"]["answers"] for row in rows))

    # ---- the same updates

    def same(self, task: str) -> Optional[Dict[str, float]]:
        """How far logits are from those after packed updates, by way; None where it is not measured."""
        rows = self.cells.get(Cell(f"{task}_same", 1))
        return None if rows is None else {row["way"]: row["logits"] for row in rows}

    def same_shown(self, task: str) -> bool:
        found = self.same(task)
        return found is not None and found[NO_MASK] > CLEARLY * max(found[MAXIMUM], found[LONGEST])

    # ---- times

    def timed(self, task: str) -> bool:
        return bool(self._seconds(task, TRAINING, PACKED))

    def per_sequence(self, task: str, what: str, way: str) -> Interval:
        """Milliseconds of a sequence: the median round's."""
        return median_interval([1e3 * seconds for seconds in self._seconds(task, what, way)])

    def against_packed(self, task: str, what: str, way: str) -> Interval:
        """Times of the packed way's time, round by round."""
        found = (self._seconds(task, what, each) for each in (way, PACKED))
        return median_interval([seconds / packed for seconds, packed in zip(*found)])

    def _seconds(self, task: str, what: str, way: str) -> List[float]:
        """Of a sequence in each round, scaled by slots from those that were timed to all there are: fewer sequences
        that are sorted by length differ more in length within a pass."""
        rows = [r for r in self.cells.get(Cell(f"{task}_times", 1), []) if (r["what"], r["way"]) == (what, way)]
        known = self.facts[task][what]
        slots = known["slots_per_token"][PACKED if way == AGAIN else way] * known["tokens"] / known["sequences"]
        return [slots * row["seconds"] / row["slots"] for row in rows]

    def timing_shown(self, task: str, what: str) -> bool:
        """Whether the same way timed twice takes as long, by an interval that is narrow enough to tell."""
        again = self.against_packed(task, what, AGAIN)
        return 1 - TWICE < again.low <= 1.0 <= again.high < 1 + TWICE

    # ---- the block

    def parts(self) -> List[Union[str, Table]]:
        if not self.tasks:
            return ["No run is finished yet."]
        claims: List[str] = []
        for task in self.tasks:
            claims += [f"**{WORDS[task]}.**", *self._claims(task), ""]
        return [self._table(TRAINING), self._table(INFERENCE), *claims, *self._origin()]

    def _table(self, what: str) -> Table:
        def of_time(words: Callable[[str, str], str]) -> Callable[[_Line], Optional[str]]:
            return lambda line: words(*line) if line[1] in (*WAYS, AGAIN) and self.timed(line[0]) else None

        def slots(line: _Line) -> Optional[str]:
            task, way = line
            found = self.facts[task][what]["slots_per_token"].get(PACKED if way == NO_MASK else way)
            return None if found is None else f"{found:.2f}"

        def milliseconds(task: str, way: str) -> str:
            each = self.per_sequence(task, what, way)
            return each.words(".2f" if each.mean < 10 else ".1f")

        def tokens(task: str, way: str) -> str:
            known = self.facts[task][what]
            return f"{1e3 * known['tokens'] / known['sequences'] / self.per_sequence(task, what, way).mean:,.0f}"

        def ratio(task: str, way: str) -> str:
            return "" if way == PACKED else self.against_packed(task, what, way).words(".2f")

        def name(line: _Line) -> str:
            return f"{WORDS[line[0]]}, {WAY_WORDS.get(line[1], line[1])}"

        no_model = "most frequent answer (no model)"
        lines = []
        for task in self.tasks:
            lines += [(task, way) for way in WAYS]
            lines += [(task, AGAIN)] if self.timed(task) else []
            lines += [(task, NO_MASK)] if self.lasts(task, PACKED) else []
            lines += [(task, no_model)] if what == TRAINING else []
        first = (
            ("score, %", self._score) if what == TRAINING else ("answers that differ from padded ones", self._differ)
        )
        return Table(
            [
                (what, name),
                first,
                ("slots a token", slots),
                ("ms a sequence", of_time(milliseconds)),
                ("tokens/s", of_time(tokens)),
                ("time, packed = 1", of_time(ratio)),
            ],
            lines,
        )

    def _score(self, line: _Line) -> str:
        task, way = line
        if way not in WAY_WORDS:
            return f"{SCORE[task]} {self.facts[task]['no_model']:.2f}"
        if way in (MAXIMUM, LONGEST):
            return "as packed" if self.same_shown(task) and self.lasts(task, PACKED) else ""
        scores = self.percent(task, way)
        return f"{SCORE[task]} {spread(scores, 2)}" if scores else ""

    def _differ(self, line: _Line) -> str:
        task, way = line
        found = self.answers(task) if way in (PACKED, NO_MASK) else None
        return "" if found is None else f"{getattr(found, way):,} of {found.answers:,}"

    def _claims(self, task: str) -> List[str]:
        lines = [] if self.same(task) is None else [self._same_words(task)]
        lines.append(self._score_words(task) if self.lasts(task, PACKED) else "No run that is scored is finished yet.")
        return [*filter(None, lines)] + [
            self._time_words(task, what) for what in (TRAINING, INFERENCE) if self.timed(task)
        ]

    def _same_words(self, task: str) -> str:
        found, timing = self.same(task), self.settings["timing"][task]
        assert found is not None
        numbers = (
            f"after {counted(timing['updates'], 'update')} from one start the logits of held-out sequences are at "
            f"most {small(max(found[MAXIMUM], found[LONGEST]))} apart, without the mask {small(found[NO_MASK])}; the "
            f"updates moved them by {small(found['start'])}"
        )
        if not self.same_shown(task):
            return f"Same updates: **shows nothing**, as the missing mask does not stand out from rounding: {numbers}."
        return (
            f"Padded to the maximum, to the longest and packed make the same updates up to rounding: {numbers}. One "
            f"score stands for the three."
        )

    def _score_words(self, task: str) -> str:
        found = {way: self.score_against_sorted(task, way) for way in (PACKED, NO_MASK)}
        words = "; ".join(f"{WAY_WORDS[way]} {each.words('+.2f')}" for way, each in found.items() if each)
        return (
            words
            and f"Observed over the seeds that both have, {SCORE[task]} in points above rows sorted by length: {words}."
        )

    def _time_words(self, task: str, what: str) -> str:
        """A difference counts where its interval is apart from that of the same way timed twice."""
        again = self.against_packed(task, what, AGAIN)
        head, twice = f"{what.capitalize()} on this device", again.words(".2f")
        if not self.timing_shown(task, what):
            return f"{head}: **shows nothing**, the packed way timed twice takes {twice} of its own time."
        groups: Dict[str, List[str]] = {}
        for way in (MAXIMUM, LONGEST, SORTED):
            ratio = self.against_packed(task, what, way)
            words = "packing gains nothing over rows"
            if ratio.high < again.low:
                words = "packing is slower than rows"
            elif ratio.low > again.high:
                words = "packing is faster than rows"
            groups.setdefault(words, []).append(f"{WAY_WORDS[way]} ({ratio.words('.2f')})")
        said = "; ".join(f"{words} {', '.join(found)}" for words, found in groups.items())
        return (
            f"{head}: **{said}**. Control: packed timed twice, {twice}, has to hold 1.00 and lie within {TWICE:.0%} of "
            f"it; a gain lies wholly above this interval."
        )

    def _origin(self) -> List[str]:
        lines = []
        for task in self.tasks:
            known, epochs = self.facts[task], counted(self.settings[task]["epochs"], "epoch")
            training, updates = known[TRAINING], known["updates_per_epoch"]
            lines.append(
                f"{WORDS[task]}: {training['sequences']:,} sequences in {epochs} of {updates:,} updates, "
                f"{training['sequences'] / updates:.1f} sequences an update in every way, "
                f"{training['packing_factor']:.2f} in a packed row, packing takes {known['packing_seconds']:.2g} s "
                f"once; {known[INFERENCE]['sequences']:,} sequences answered."
            )
        return [
            *lines,
            f"Weights of {self.settings['checkpoint']}, AdamW, no dropout, every pass with at most as many slots. ±: "
            f"one standard deviation of the seeds. Intervals: {CONFIDENCE:.0%}; of scores over the seeds, of times of "
            "the median over rounds in which the ways take turns.",
            "Engines with static shapes (IPU) pad to the maximum where they do not pack; only engines that take rows "
            "of any length can sort.",
            "Times are seconds of one thread on its processor, with the layout of the rows, of a sample, scaled by "
            f"slots to all sequences; {self.facts['machine']}.",
        ]

    # ---- the picture

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        """Time of a sequence in each way, and its score, for each task."""
        drawn: List[Picture] = []
        for task in self.tasks:
            if self.timed(task):
                times = {
                    f"{what}, median with its {CONFIDENCE:.0%} interval": {
                        WAY_WORDS[way]: self.per_sequence(task, what, way) for way in WAYS
                    }
                    for what in (TRAINING, INFERENCE)
                }
                drawn.append(bars(f"{WORDS[task]}: time", "ms a sequence, one thread", times))
            found = {WAY_WORDS[way]: self.percent(task, way) for way in (PACKED, SORTED, NO_MASK)}
            if self.lasts(task, PACKED):
                scores = {
                    name: Interval(float(np.mean(each)), min(each), max(each), len(each))
                    for name, each in found.items()
                    if each
                }
                level = ("most frequent answer, no model", self.facts[task]["no_model"])
                unit = f"{SCORE[task]} on held-out examples, %"
                series = {"mean, lowest and highest seed": scores}
                drawn.append(bars(f"{WORDS[task]}: score", unit, series, [level], form=".2f"))
        return {"ways": drawn} if drawn else {}
