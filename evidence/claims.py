"""The claims of docs/evidence.md (`claims.yml`, written before the runs), judged by the cells of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import yaml

from evidence.runner import Cell
from evidence.statistics import LEVEL, Interval, equivalence, holm, power, students
from evidence.training_shown import METRICS, TrainingShown
from evidence.writer import Shown, bars, small
from pack_data.display.picture import Picture
from pack_data.reading.words import counted

FILE = Path(__file__).with_name("claims.yml")


class Finding(NamedTuple):
    """The result of a claim."""

    figures: str  # one line
    kept: Optional[bool]  # claim, A/A and control, before Holm's adjustment; None: not measured yet
    p: Optional[float] = None  # None: no chance is involved; 1 of a test that is not measured yet
    picture: Optional[Picture] = None


Claim = Mapping[str, Any]  # of claims.yml
Results = Mapping[str, Any]  # runs, by name of their directory


def told() -> Dict[str, Claim]:
    """Return the claims of `claims.yml`, by name."""
    text = FILE.read_text(encoding="utf-8")
    claims: Dict[str, Claim] = yaml.safe_load(text)["claims"]
    return claims


def findings(results: Results) -> Dict[str, Finding]:
    """Judge each claim by results of the directories by name; results without a recorded commit do not count."""
    recorded = {name: shown for name, shown in results.items() if shown.settings.get("commit")}
    judged = {}
    for name, claim in told().items():
        judge = KINDS[claim["kind"]]
        judged[name] = judge(claim, recorded)
    return judged


def verdicts(judged: Mapping[str, Finding]) -> Dict[str, str]:
    """Describe each finding; P values are adjusted over all claims with a P value."""
    p_values = {name: finding.p for name, finding in judged.items() if finding.p is not None}
    adjusted = holm(p_values)
    tests = counted(len(adjusted), "test")

    words = {}
    for name, finding in judged.items():
        if finding.kept is None:
            words[name] = "not measured"
            continue
        p = adjusted.get(name)
        significant = p is None or p < LEVEL
        words[name] = "shown" if finding.kept and significant else "not shown"
        if p is not None:
            words[name] += f" (P {p:.2g} of {tests}, Holm)"
    return words


def _missing(
    shown: Optional[Shown],
    arms: Sequence[str],
    seeds: Sequence[int],
) -> bool:
    """Return True if a run has no results for one of these arms and seeds."""
    if shown is None:
        return True
    cells = {Cell(arm, seed) for arm in arms for seed in seeds}
    return not cells <= shown.cells.keys()


_NOTHING = Finding("no finished run.", None)
_UNTESTED = _NOTHING._replace(p=1.0)


def _limit(claim: Claim, results: Results) -> Finding:
    """Check that every run is within the limit, and that the controls are beyond theirs."""
    first = claim["first"]
    second = claim["second"]
    no_mask = claim["no_mask"]
    means = claim.get("means", first)
    limit = float(claim["limit"])
    seeds = claim["seeds"]
    shown = results.get(claim["run"])
    if shown is None or _missing(shown, (first, second, means, no_mask, "unpacked"), seeds):
        return _NOTHING

    differences = shown.differences(first, second, "loss", seeds)
    largest = max(map(abs, differences))
    least = min(shown.differences(no_mask, "unpacked", "loss", seeds))
    kept = largest < limit and least > claim["least_without_mask"]
    words = [
        f"{counted(len(seeds), 'seed')}:",
        f"at most {small(largest)} nats apart, limit {small(limit)};",
    ]
    if "means" in claim:
        differences = shown.differences(means, second, "loss", seeds)
        smallest = min(map(abs, differences))
        kept = kept and smallest > limit
        words.append(f"losses as means over micro-batches at least {small(smallest)},")
    words.append(f"without the mask at least {least:+.3f}.")
    return Finding(" ".join(words), kept)


class _Comparison(NamedTuple):
    """Differences of held-out losses in one metric, and their tests."""

    metric: str
    margin: float
    difference: Interval
    same: Interval  # A/A
    control: Interval
    p: float
    power: float

    def words(self, form: str) -> str:
        """Format the three intervals."""
        difference = self.difference.words(form)
        same = self.same.words(form)
        control = self.control.words("+.3f")
        return f"{difference} nats, margin {self.margin:g}; A/A {same}; control {control}"

    @property
    def kept(self) -> bool:
        """True if the claim and A/A are within the margin."""
        return self.difference.within(self.margin) and self.same.within(self.margin)

    @property
    def form(self) -> str:
        """The format of the difference."""
        largest = max(map(abs, self.difference[:3]))
        return "+.4f" if largest >= 5e-4 else "+.1e"


def _compared(
    claim: Claim,
    shown: TrainingShown,
    pilot: TrainingShown,
    metric: str,
) -> _Comparison:
    """Test the differences of one metric, of A/A and of the control."""
    first = claim["first"]
    second = claim["second"]
    seeds = claim["seeds"]
    control_seeds = claim.get("control_seeds", seeds)
    margin = claim["margins"][metric]
    values = shown.differences(first, second, metric, seeds)
    same = shown.differences(claim["again"], claim["again_beside"], metric, seeds)
    control = shown.differences(claim["control"], second, metric, control_seeds)
    pilot_values = pilot.differences(first, second, metric, claim["pilot"]["seeds"])
    deviation = float(np.std(pilot_values, ddof=1))
    return _Comparison(
        metric=metric,
        margin=margin,
        difference=students(values),
        same=students(same),
        control=students(control),
        p=equivalence(values, margin),
        power=power(deviation, margin, len(values)),
    )


def _equivalence(claim: Claim, results: Results) -> Finding:
    """Check that the intervals of all metrics and of A/A are within their margins, and a control's wholly beyond."""
    first = claim["first"]
    second = claim["second"]
    seeds = claim["seeds"]
    control_seeds = claim.get("control_seeds", seeds)
    shown = results.get(claim["run"])
    pilot = results.get(claim["pilot"]["run"])
    if (
        _missing(shown, (first, second, claim["again"]), seeds)
        or _missing(shown, (claim["control"], second), control_seeds)
        or _missing(pilot, (first, second), claim["pilot"]["seeds"])
    ):
        return _UNTESTED
    assert isinstance(shown, TrainingShown) and isinstance(pilot, TrainingShown)

    # Tests.
    comparisons = [_compared(claim, shown, pilot, metric) for metric in claim["margins"]]
    kept = all(comparison.kept for comparison in comparisons)
    control_fails = any(comparison.control.low > comparison.margin for comparison in comparisons)
    p = max(comparison.p for comparison in comparisons)

    # Words and picture.
    lines = []
    for comparison in comparisons:
        name = f"{METRICS[comparison.metric]} " if len(comparisons) > 1 else ""
        lines.append(name + comparison.words(comparison.form))
    lowest_power = min(comparison.power for comparison in comparisons)
    lines.append(counted(len(seeds), "seed"))
    lines.append(f"power {lowest_power:.3f}")
    picture = _in_margins(claim, shown, comparisons)
    return Finding("; ".join(lines) + ".", kept and control_fails, p, picture)


def _in_margins(claim: Claim, shown: TrainingShown, comparisons: Sequence[_Comparison]) -> Picture:
    """Draw the intervals of a claim and of its A/A, in margins."""
    first = shown.words[claim["first"]]
    again = shown.words[claim["again"]]
    reference = shown.words[claim["second"]]
    drawn: Dict[str, Dict[str, Optional[Interval]]] = {}
    for comparison in comparisons:
        margin = comparison.margin
        drawn[METRICS[comparison.metric]] = {
            first: comparison.difference.over(margin),
            again: comparison.same.over(margin),
        }
    levels = [("margin", 1.0), ("minus the margin", -1.0)]
    return bars("", f"held-out loss against {reference}, in margins", drawn, levels)


def _speed(claim: Claim, results: Results) -> Finding:
    """Check the speed-up of all cases."""
    shown = results.get(claim["run"])
    if shown is None or not shown.timings or shown.draws < claim["draws"]:
        return _UNTESTED
    return Finding(shown.verdict() + ".", shown.all_pass, shown.p)


def _answers(claim: Claim, results: Results) -> Finding:
    """Check that packs change no answer, and that packs without the mask do."""
    shown = results.get(claim["run"])
    if shown is None or _missing(shown, (claim["arm"],), claim["seeds"]):
        return _NOTHING
    packed, no_mask, answers = shown.answers()
    words = f"{packed:,} of {answers:,} answers differ; without the mask {no_mask:,}."
    least = claim["least_without_mask"] * answers
    return Finding(words, packed == 0 and no_mask > least)


KINDS: Dict[str, Callable[[Claim, Results], Finding]] = {
    "limit": _limit,
    "equivalence": _equivalence,
    "speed": _speed,
    "answers": _answers,
}
