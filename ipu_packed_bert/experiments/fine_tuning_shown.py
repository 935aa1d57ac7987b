"""What the fine-tuning experiment says, from the files of its finished cells alone: text and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from ipu_packed_bert.experiments import tables
from ipu_packed_bert.experiments.runner import Cell, Row, read_run
from ipu_packed_bert.experiments.statistics import (
    CONFIDENCE,
    SHARE,
    TWICE,
    Interval,
    Scores,
    Verdict,
    difference,
    median_interval,
    verdict,
)
from ipu_packed_bert.experiments.ways import AGAIN, INFERENCE, LONGEST, MAXIMUM, NO_MASK, PACKED, SORTED, TRAINING, WAYS
from ipu_packed_bert.experiments.ways import WORDS as WAY_WORDS
from pack_data.cli.command import counted

CALIBRATION_SEED = 101  # sets the margin and does not count
WORDS = {"banking77": "BANKING77 at 64", "squad": "SQuAD at 384"}
SCORE = {"banking77": "accuracy", "squad": "F1"}
# Updates may part by rounding, which Adam enlarges; without the mask they must part by so many times more.
CLEARLY = 100.0


class FineTuningShown:
    """What the cells of one folder say, whichever of them are finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        found = read_run(self.folder)
        self.size, self.facts, self._cells = found.settings, found.facts, found.cells

    @property
    def tasks(self) -> List[str]:
        """Those with a finished cell."""
        return [task for task in WORDS if any(cell.variant in self._names(task) for cell in self._cells)]

    def _names(self, task: str) -> List[str]:
        return [f"{task}_{name}" for name in (PACKED, SORTED, NO_MASK, "same", "times")]

    # ---- scores

    def seeds(self, task: str, way: str) -> List[int]:
        """The finished seeds that count."""
        return sorted(c.seed for c in self._cells if c.variant == f"{task}_{way}" and c.seed != CALIBRATION_SEED)

    def last(self, task: str, way: str, seed: int) -> Row:
        return self._cells[Cell(f"{task}_{way}", seed)][-1]

    def scores(self, task: str, way: str) -> List[float]:
        """Percent, by seed."""
        return [float(np.mean(self.last(task, way, seed)["points"])) for seed in self.seeds(task, way)]

    def lost(self, task: str, first: str, second: str, seeds: Sequence[int]) -> Optional[Interval]:
        """Points that the first way scores less than the second one; None without a seed."""
        if not seeds:
            return None
        return difference(*([self._lost(task, way, seed) for seed in seeds] for way in (first, second)))

    def _lost(self, task: str, way: str, seed: int) -> Scores:
        points = np.array(self.last(task, way, seed)["points"], dtype=np.float64)
        return Scores(np.ones(len(points)), 100.0 - points, np.zeros(len(points)))

    def common(self, task: str, first: str, second: str) -> List[int]:
        return [seed for seed in self.seeds(task, first) if seed in self.seeds(task, second)]

    def cost(self, task: str) -> Optional[Interval]:
        """What the missing mask costs on the seed that does not count."""
        there = all(Cell(f"{task}_{way}", CALIBRATION_SEED) in self._cells for way in (PACKED, NO_MASK))
        return self.lost(task, NO_MASK, PACKED, [CALIBRATION_SEED]) if there else None

    def verdict(self, task: str) -> Verdict:
        """Whether packed scores as sorted padding, in an experiment that notices a missing mask."""
        claim, control = (self.lost(task, way, SORTED, self.common(task, way, SORTED)) for way in (PACKED, NO_MASK))
        if claim is None or control is None:
            return Verdict(False, False, "shows nothing yet: packed, sorted and the control have no common seed")
        return verdict(self.cost(task), claim, control, unit="points lost", digits=2)

    # ---- the same updates

    def same(self, task: str) -> Optional[Dict[str, float]]:
        """How far logits are from those after packed updates, by way; None where it is not measured."""
        rows = self._cells.get(Cell(f"{task}_same", 1))
        return None if rows is None else {row["way"]: row["logits"] for row in rows}

    def same_shown(self, task: str) -> bool:
        found = self.same(task)
        return found is not None and found[NO_MASK] > CLEARLY * max(found[MAXIMUM], found[LONGEST])

    # ---- times

    def rounds(self, task: str, what: str, way: str) -> List[Row]:
        rows = self._cells.get(Cell(f"{task}_times", 1), [])
        return [row for row in rows if (row["what"], row["way"]) == (what, way)]

    def timed(self, task: str) -> bool:
        return bool(self.rounds(task, TRAINING, PACKED))

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
        known = self.facts[task][what]
        slots = known["slots_per_token"][PACKED if way == AGAIN else way] * known["tokens"] / known["sequences"]
        return [slots * row["seconds"] / row["slots"] for row in self.rounds(task, what, way)]

    def timing_shown(self, task: str, what: str) -> bool:
        """Whether the same way timed twice takes as long, by an interval that is narrow enough to tell."""
        again = self.against_packed(task, what, AGAIN)
        return 1 - TWICE < again.low <= 1.0 <= again.high < 1 + TWICE

    @property
    def shows(self) -> bool:
        """Whether every control of what is finished fails as it must; False where nothing is."""
        found = [
            self.timing_shown(task, what) for task in self.tasks if self.timed(task) for what in (TRAINING, INFERENCE)
        ]
        for task in self.tasks:
            if self.seeds(task, PACKED):
                found.append(self.verdict(task).shows)
            if self.same(task) is not None:
                found.append(self.same_shown(task))
        return bool(found) and all(found)

    # ---- text

    def text(self) -> str:
        """Markdown: the tables, the verdicts, where the numbers come from."""
        if not self.tasks:
            return "No run is finished yet.\n"
        parts = [self._table(TRAINING), self._table(INFERENCE)]
        parts += [self._notes(task) for task in self.tasks]
        return "\n".join([*parts, self._origin()]) + "\n"

    def _table(self, what: str) -> str:
        lines = []
        for task in self.tasks:
            known = self.facts[task][what]
            for way in (*WAYS, AGAIN, NO_MASK):
                timed = way != NO_MASK and self.timed(task)
                if not timed and (way == AGAIN or (way == NO_MASK and not self.seeds(task, PACKED))):
                    continue
                cells = ["", ""]
                ratio = ""
                if timed:
                    each = self.per_sequence(task, what, way)
                    rate = 1e3 * known["tokens"] / known["sequences"] / each.mean
                    cells = [_spread(each, 2 if each.mean < 10 else 1), f"{rate:,.0f}"]
                    ratio = "" if way == PACKED else _spread(self.against_packed(task, what, way), 2)
                slots = known["slots_per_token"].get(PACKED if way == NO_MASK else way)
                lines.append(
                    [
                        f"{WORDS[task]}, {WAY_WORDS[way]}",
                        self._score(task, way) if what == TRAINING else self._differing(task, way),
                        "" if slots is None else f"{slots:.2f}",
                        *cells,
                        ratio,
                    ]
                )
            if what == TRAINING:
                constant = f"{SCORE[task]} {self.facts[task]['no_model']:.2f}"
                lines.append([f"{WORDS[task]}, most frequent answer (no model)", constant, *[""] * 4])
        first = "score, %" if what == TRAINING else "answers that differ from padded ones"
        heads = [what, first, "slots a token", "ms a sequence", "tokens/s", "time, packed = 1"]
        return tables.markdown(heads, lines)

    def _score(self, task: str, way: str) -> str:
        if way in (MAXIMUM, LONGEST):
            return "as packed" if self.same_shown(task) and self.seeds(task, PACKED) else ""
        scores = self.scores(task, way)
        return f"{SCORE[task]} {tables.spread(scores, 2)}" if scores else ""

    def _differing(self, task: str, way: str) -> str:
        lasts = [self.last(task, PACKED, seed) for seed in self.seeds(task, PACKED)]
        found = [row[f"answered_{way}"] for row in lasts if f"answered_{way}" in row]
        if not found:
            return ""
        return f"{sum(each['different'] for each in found):,} of {sum(each['answers'] for each in found):,}"

    def _notes(self, task: str) -> str:
        lines = [f"**{WORDS[task]}.**"]
        if self.same(task) is not None:
            lines.append(self._same_words(task))
        if self.seeds(task, PACKED):
            lines.append(self._score_words(task))
        else:
            lines.append("No run that is scored is finished yet.")
        if self.timed(task):
            lines += [self._time_words(task, what) for what in (TRAINING, INFERENCE)]
        return "\n".join(lines) + "\n"

    def _same_words(self, task: str) -> str:
        found, timing = self.same(task), self.size["timing"][task]
        assert found is not None
        numbers = (
            f"after {counted(timing['updates'], 'update')} from one start the logits of held-out sequences are at most "
            f"{tables.small(max(found[MAXIMUM], found[LONGEST]))} apart, without the mask "
            f"{tables.small(found[NO_MASK])}; the updates moved them by {tables.small(found['start'])}"
        )
        if self.same_shown(task):
            return (
                f"Padded to the maximum, to the longest and packed make the same updates up to rounding: {numbers}. "
                f"One score stands for the three."
            )
        return f"Same updates: **shows nothing**, as the missing mask does not stand out from rounding: {numbers}."

    def _score_words(self, task: str) -> str:
        cost = self.cost(task)
        found = (
            f"Claim: packed fine-tuning scores as sorted padding. Control: packed without the mask. "
            f"**{self.verdict(task).why}.** "
        )
        if cost is not None:
            margin = f"a quarter of it, {SHARE * cost.mean:.2f}, is the margin" if cost.low > 0 else "so no margin"
            found += (
                f"On a seed that does not count, the mask's removal costs {cost.mean:+.2f} ({cost.low:+.2f} to "
                f"{cost.high:+.2f}) points; {margin}."
            )
        return found

    def _time_words(self, task: str, what: str) -> str:
        """A difference counts where its interval is apart from that of the same way timed twice."""
        again = self.against_packed(task, what, AGAIN)
        head = f"{what.capitalize()} on this device"
        if not self.timing_shown(task, what):
            return f"{head}: **shows nothing**, the packed way timed twice takes {_spread(again, 2)} of its own time."
        groups: Dict[str, List[str]] = {}
        for way in (MAXIMUM, LONGEST, SORTED):
            ratio = self.against_packed(task, what, way)
            words = "packing gains nothing over rows"
            if ratio.high < again.low:
                words = "packing is slower than rows"
            elif ratio.low > again.high:
                words = "packing is faster than rows"
            groups.setdefault(words, []).append(f"{WAY_WORDS[way]} ({_spread(ratio, 2)})")
        said = "; ".join(f"{words} {', '.join(found)}" for words, found in groups.items())
        return (
            f"{head}: **{said}**. Control: packed timed twice, {_spread(again, 2)}, has to hold 1.00 and lie within "
            f"{TWICE:.0%} of it; a gain lies wholly above this interval."
        )

    def _origin(self) -> str:
        lines = []
        for task in self.tasks:
            known, size = self.facts[task], self.size[task]
            training, tested = known[TRAINING], known[INFERENCE]
            mean = training["sequences"] / known["updates_per_epoch"]
            lines.append(
                f"{WORDS[task]}: {training['sequences']:,} sequences in {counted(size['epochs'], 'epoch')} of "
                f"{known['updates_per_epoch']:,} updates, {mean:.1f} sequences an update in every way, "
                f"{training['packing_factor']:.2f} in a packed row, packing takes "
                f"{known['packing_seconds']:.2g} s once; {tested['sequences']:,} sequences answered."
            )
        lines.append(
            f"Weights of {self.size['checkpoint']}, AdamW, no dropout, every pass with at most as many slots. ±: one "
            f"standard deviation of the seeds. Intervals: {CONFIDENCE:.0%}; of scores over examples and seeds, of "
            f"times of the median over rounds in which the ways take turns."
        )
        lines.append(
            "Engines with static shapes (IPU) pad to the maximum where they do not pack; only engines that take rows "
            "of any length can sort."
        )
        clock = "seconds of one thread on its processor"
        lines.append(
            f"Times are {clock}, with the layout of the rows, of a sample, scaled by slots to all sequences; "
            f"{self.facts['machine']}."
        )
        return "\n".join(lines)

    # ---- the picture

    def draw(self, folder: Path, stem: str = "") -> List[Path]:
        """Time of a sequence in each way beside its score, a row of panels for each task."""
        from ipu_packed_bert.experiments.pictures import STYLES, finish
        from pack_data.display.picture import new_figure

        if not self.tasks:
            return []
        figure, axes = new_figure(11.0, 0.7 + 2.9 * len(self.tasks), rows=len(self.tasks), columns=2)
        lines = (*WAYS, NO_MASK)
        for number, task in enumerate(self.tasks):
            times, scores = axes[2 * number], axes[2 * number + 1]
            for place, way in enumerate(lines):
                if way != NO_MASK and self.timed(task):
                    for what, shift, style in ((TRAINING, -0.15, 0), (INFERENCE, 0.15, 1)):
                        self._point(times, self.per_sequence(task, what, way), place + shift, STYLES[style][0], what)
                found = self.scores(task, PACKED if way in (MAXIMUM, LONGEST) else way)
                if found and (way not in (MAXIMUM, LONGEST) or self.same_shown(task)):
                    colour = STYLES[2][0] if way == NO_MASK else STYLES[0][0]
                    each = Interval(float(np.mean(found)), min(found), max(found), len(found))
                    self._point(scores, each, place, colour, "control" if way == NO_MASK else "")
            if self.seeds(task, PACKED):
                line = dict(color="#777777", linewidth=1.0, linestyle=":", label="most frequent answer, no model")
                scores.axvline(self.facts[task]["no_model"], **line)
            for axis in (times, scores):
                axis.set_ylim(len(lines) - 0.5, -0.5)
                axis.grid(axis="x", alpha=0.25)
            times.set_yticks(range(len(lines)), [WAY_WORDS[way] for way in lines], fontsize=9)
            scores.set_yticks(range(len(lines)), [""] * len(lines))
            times.set_xlim(0, 1.08 * times.get_xlim()[1])
            for axis, there in ((times, self.timed(task)), (scores, bool(self.seeds(task, PACKED)))):
                if not there:
                    axis.set_xticks([])
                    axis.text(0.5, 0.5, "not finished yet", transform=axis.transAxes, ha="center", color="#777777")
            times.set_xlabel("ms a sequence, one thread")
            scores.set_xlabel(f"{SCORE[task]} on held-out examples, %")
            times.set_title(f"{WORDS[task]}: time")
            scores.set_title(f"{WORDS[task]}: score")
        handles: Dict[str, Any] = {}
        for axis in axes:
            for handle, label in zip(*axis.get_legend_handles_labels()):
                handles.setdefault(label, handle)
        caption = (
            f"Time: median over rounds with its {CONFIDENCE:.0%} interval. Score: mean over seeds, from the lowest to "
            "the highest seed.\nPadded to the maximum, to the longest and packed make the same updates: one score."
        )
        path = Path(folder) / f"{stem}ways.png"
        return [finish(figure, path, list(handles.values()), list(handles), columns=3, caption=caption)]

    @staticmethod
    def _point(axis: Any, each: Interval, place: float, colour: str, label: str) -> None:
        marker = {INFERENCE: "s", "control": "X"}.get(label, "o")
        axis.plot([each.low, each.high], [place, place], color=colour, linewidth=2.2)
        axis.plot([each.mean], [place], marker=marker, color=colour, markersize=6, linestyle="", label=label or None)
        axis.annotate(
            f"{each.mean:.3g}", (each.high, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8
        )


def _spread(interval: Interval, digits: int) -> str:
    return f"{interval.mean:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"
