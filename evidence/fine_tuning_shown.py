"""The results of the fine-tuning experiment, from the files of its finished cells."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from evidence.runner import Cell, Row
from evidence.statistics import CONFIDENCE, TWICE, Interval, extremes, median_interval, students
from evidence.ways import (
    AGAIN,
    INFERENCE,
    LONGEST,
    MAXIMUM,
    NO_MASK,
    PACKED,
    SORTED,
    TRAINING,
    WAYS,
)
from evidence.ways import WORDS as WAY_WORDS
from evidence.writer import CellText, Part, Pictures, Shown, Table, bars, small, spread
from pack_data.display.picture import Picture
from pack_data.reading.words import counted

WORDS = {"banking77": "BANKING77 at 64", "squad": "SQuAD at 384"}
SCORE = {"banking77": "accuracy", "squad": "F1"}
# Updates may differ by rounding, which Adam enlarges; without the mask they must differ by so many times more.
CLEARLY = 100.0
_Line = Tuple[str, str]  # of a table: task and way


class Answers(NamedTuple):
    """Answers of the same model that differ from those of each question alone in its row."""

    packed: int
    no_mask: int
    answers: int


class FineTuningShown(Shown):
    """The results in one run's directory: its finished cells."""

    @property
    def tasks(self) -> List[str]:
        """The tasks with a finished cell."""
        variants = {cell.variant for cell in self.cells}
        tasks = []
        for task in WORDS:
            kinds = {f"{task}_{kind}" for kind in (PACKED, SORTED, NO_MASK, "same", "times")}
            if variants & kinds:
                tasks.append(task)
        return tasks

    # ---- scores

    def lasts(self, task: str, way: str) -> List[Row]:
        """Return the last row of each seed."""
        variant = f"{task}_{way}"
        return [self.cells[Cell(variant, seed)][-1] for seed in self.seeds(variant)]

    def percent(self, task: str, way: str) -> List[float]:
        """Return the score of each seed."""
        return [float(np.mean(row["points"])) for row in self.lasts(task, way)]

    def score_against_sorted(self, task: str, way: str) -> Optional[Interval]:
        """Return the points above rows sorted by length, over the seeds that both have; None if they have none."""
        variant = f"{task}_{way}"
        reference = f"{task}_{SORTED}"
        differences = []
        for seed in self.common(variant, reference):
            points = self.cells[Cell(variant, seed)][-1]["points"]
            others = self.cells[Cell(reference, seed)][-1]["points"]
            differences.append(float(np.mean(points) - np.mean(others)))
        return students(differences) if differences else None

    def answers(self, task: str) -> Optional[Answers]:
        """Return the answers of all seeds; None if no packed run is finished."""
        rows = self.lasts(task, PACKED)
        if not rows:
            return None
        packed = no_mask = answers = 0
        for row in rows:
            packed += row[f"answered_{PACKED}"]["different"]
            no_mask += row[f"answered_{NO_MASK}"]["different"]
            answers += row[f"answered_{PACKED}"]["answers"]
        return Answers(packed, no_mask, answers)

    # ---- the same updates

    def same(self, task: str) -> Optional[Dict[str, float]]:
        """Return the distance of logits from those after packed updates, by way; None if it is not measured."""
        rows = self.cells.get(Cell(f"{task}_same", 1))
        if rows is None:
            return None
        return {row["way"]: row["logits"] for row in rows}

    def same_shown(self, task: str) -> bool:
        """Return True if the missing mask stands out from rounding."""
        distances = self.same(task)
        if distances is None:
            return False
        rounding = max(distances[MAXIMUM], distances[LONGEST])
        return distances[NO_MASK] > CLEARLY * rounding

    # ---- times

    def timed(self, task: str) -> bool:
        return bool(self._seconds(task, TRAINING, PACKED))

    def per_sequence(self, task: str, what: str, way: str) -> Interval:
        """Return the milliseconds of a sequence: the median of the rounds."""
        return median_interval([1e3 * seconds for seconds in self._seconds(task, what, way)])

    def against_packed(self, task: str, what: str, way: str) -> Interval:
        """Return the time over that of the packed way: the median of the rounds."""
        of_way = self._seconds(task, what, way)
        of_packed = self._seconds(task, what, PACKED)
        ratios = [seconds / packed for seconds, packed in zip(of_way, of_packed)]
        return median_interval(ratios)

    def _seconds(self, task: str, what: str, way: str) -> List[float]:
        """Return the time of a sequence in each round, scaled by slots from those that were timed to all.

        Fewer sequences that are sorted by length differ more in length within a pass.
        """
        rows = self.cells.get(Cell(f"{task}_times", 1), [])
        facts = self.facts[task][what]
        laid_out = PACKED if way == AGAIN else way
        slots = facts["slots_per_token"][laid_out] * facts["tokens"] / facts["sequences"]
        rounds = [row for row in rows if (row["what"], row["way"]) == (what, way)]
        return [slots * row["seconds"] / row["slots"] for row in rounds]

    def timing_shown(self, task: str, what: str) -> bool:
        """Return True if the same way timed twice takes as long, by an interval that is narrow enough."""
        again = self.against_packed(task, what, AGAIN)
        return 1 - TWICE < again.low <= 1.0 <= again.high < 1 + TWICE

    # ---- the block

    def parts(self) -> List[Part]:
        if not self.tasks:
            return ["No run is finished yet."]
        claims: List[str] = []
        for task in self.tasks:
            claims += [f"**{WORDS[task]}.**", *self._claims(task), ""]
        return [self._table(TRAINING), self._table(INFERENCE), *claims, *self._origin()]

    def _table(self, what: str) -> Table:
        def of_time(words: Callable[[str, str], str]) -> CellText:
            def cell(line: _Line) -> Optional[str]:
                task, way = line
                return words(task, way) if way in (*WAYS, AGAIN) and self.timed(task) else None

            return cell

        def slots(line: _Line) -> Optional[str]:
            task, way = line
            laid_out = PACKED if way == NO_MASK else way
            per_token = self.facts[task][what]["slots_per_token"].get(laid_out)
            return None if per_token is None else f"{per_token:.2f}"

        def milliseconds(task: str, way: str) -> str:
            interval = self.per_sequence(task, what, way)
            return interval.words(".2f" if interval.mean < 10 else ".1f")

        def tokens(task: str, way: str) -> str:
            facts = self.facts[task][what]
            tokens = facts["tokens"] / facts["sequences"]
            seconds = 1e-3 * self.per_sequence(task, what, way).mean
            return f"{tokens / seconds:,.0f}"

        def ratio(task: str, way: str) -> str:
            return "" if way == PACKED else self.against_packed(task, what, way).words(".2f")

        def name(line: _Line) -> str:
            task, way = line
            return f"{WORDS[task]}, {WAY_WORDS.get(way, way)}"

        first = ("answers that differ from padded ones", self._differ)
        if what == TRAINING:
            first = ("score, %", self._score)
        return Table(
            [
                (what, name),
                first,
                ("slots a token", slots),
                ("ms a sequence", of_time(milliseconds)),
                ("tokens/s", of_time(tokens)),
                ("time, packed = 1", of_time(ratio)),
            ],
            self._table_lines(what),
        )

    def _table_lines(self, what: str) -> List[_Line]:
        lines = []
        for task in self.tasks:
            ways = list(WAYS)
            if self.timed(task):
                ways.append(AGAIN)
            if self.lasts(task, PACKED):
                ways.append(NO_MASK)
            if what == TRAINING:
                ways.append("most frequent answer (no model)")
            lines += [(task, way) for way in ways]
        return lines

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
        answers = self.answers(task)
        if answers is None or way not in (PACKED, NO_MASK):
            return ""
        return f"{getattr(answers, way):,} of {answers.answers:,}"

    def _claims(self, task: str) -> List[str]:
        lines = []
        distances = self.same(task)
        if distances is not None:
            lines.append(self._same_words(task, distances))
        if self.lasts(task, PACKED):
            lines.append(self._score_words(task))
        else:
            lines.append("No run that is scored is finished yet.")
        if self.timed(task):
            lines += [self._time_words(task, what) for what in (TRAINING, INFERENCE)]
        return list(filter(None, lines))

    def _same_words(self, task: str, distances: Dict[str, float]) -> str:
        updates = counted(self.settings["timing"][task]["updates"], "update")
        largest = small(max(distances[MAXIMUM], distances[LONGEST]))
        numbers = (
            f"after {updates} from one start the logits of held-out sequences are at most {largest} apart, without the "
            f"mask {small(distances[NO_MASK])}; the updates moved them by {small(distances['start'])}"
        )
        if not self.same_shown(task):
            return f"Same updates: **shows nothing**, as the missing mask does not stand out from rounding: {numbers}."
        return (
            f"Padded to the maximum, to the longest and packed make the same updates up to rounding: {numbers}. One "
            f"score stands for the three."
        )

    def _score_words(self, task: str) -> str:
        parts = []
        for way in (PACKED, NO_MASK):
            interval = self.score_against_sorted(task, way)
            if interval:
                parts.append(f"{WAY_WORDS[way]} {interval.words('+.2f')}")
        if not parts:
            return ""
        words = "; ".join(parts)
        return f"Observed over the seeds that both have, {SCORE[task]} in points above rows sorted by length: {words}."

    def _time_words(self, task: str, what: str) -> str:
        """Describe the times; a difference counts if its interval is apart from that of the same way timed twice."""
        again = self.against_packed(task, what, AGAIN)
        head = f"{what.capitalize()} on this device"
        twice = again.words(".2f")
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
        verdicts = [f"{words} {', '.join(ways)}" for words, ways in groups.items()]
        verdict = "; ".join(verdicts)
        return (
            f"{head}: **{verdict}**. Control: packed timed twice, {twice}, has to hold 1.00 and lie within {TWICE:.0%} "
            "of it; a gain lies wholly above this interval."
        )

    def _origin(self) -> List[str]:
        lines = []
        for task in self.tasks:
            facts = self.facts[task]
            epochs = counted(self.settings[task]["epochs"], "epoch")
            training = facts[TRAINING]
            updates = facts["updates_per_epoch"]
            lines.append(
                f"{WORDS[task]}: {training['sequences']:,} sequences in {epochs} of {updates:,} updates, "
                f"{training['sequences'] / updates:.1f} sequences an update in every way, "
                f"{training['packing_factor']:.2f} in a packed row, packing takes {facts['packing_seconds']:.2g} s "
                f"once; {facts[INFERENCE]['sequences']:,} sequences answered."
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

    def pictures(self) -> Pictures:
        """Draw the time of a sequence in each way, and its score, for each task."""
        drawn: List[Picture] = []
        for task in self.tasks:
            if self.timed(task):
                drawn.append(self._times_picture(task))
            if self.lasts(task, PACKED):
                drawn.append(self._scores_picture(task))
        return {"ways": drawn} if drawn else {}

    def _times_picture(self, task: str) -> Picture:
        times = {}
        for what in (TRAINING, INFERENCE):
            intervals = {WAY_WORDS[way]: self.per_sequence(task, what, way) for way in WAYS}
            times[f"{what}, median with its {CONFIDENCE:.0%} interval"] = intervals
        return bars(f"{WORDS[task]}: time", "ms a sequence, one thread", times)

    def _scores_picture(self, task: str) -> Picture:
        scores = {}
        for way in (PACKED, SORTED, NO_MASK):
            values = self.percent(task, way)
            if values:
                scores[WAY_WORDS[way]] = extremes(values)
        series = {"mean, lowest and highest seed": scores}
        level = ("most frequent answer, no model", self.facts[task]["no_model"])
        unit = f"{SCORE[task]} on held-out examples, %"
        return bars(f"{WORDS[task]}: score", unit, series, [level], form=".2f")
