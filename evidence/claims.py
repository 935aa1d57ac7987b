"""What docs/evidence.md claims: `claims.yml`, written before the runs, and what their cells say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import yaml

from evidence.runner import Cell
from evidence.statistics import LEVEL, Interval, equivalence, holm, power, students
from evidence.training_shown import METRICS, TrainingShown
from evidence.writer import Shown, bars, small
from pack_data.cli.command import counted
from pack_data.display.picture import Picture

FILE = Path(__file__).with_name("claims.yml")


class Finding(NamedTuple):
    """What came of a claim."""

    figures: str  # one line
    kept: Optional[bool]  # claim, A/A and control, before Holm's adjustment; None: not measured yet
    p: Optional[float] = None  # None: no chance is involved; 1 of a test that is not measured yet
    picture: Optional[Picture] = None


Results = Mapping[str, Any]


def told() -> Dict[str, Dict[str, Any]]:
    """The claims by name, as they were written."""
    found: Dict[str, Dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["claims"]
    return found


def findings(results: Results) -> Dict[str, Finding]:
    """Of each claim, from the results by the names of their folders; from one commit, so that one must be recorded."""
    of_one_commit = {name: each for name, each in results.items() if each.settings.get("commit")}
    return {name: KINDS[claim["kind"]](claim, of_one_commit) for name, claim in told().items()}


def verdicts(found: Mapping[str, Finding]) -> Dict[str, str]:
    """In words. P values are adjusted over all claims that have one."""
    adjusted = holm({name: each.p for name, each in found.items() if each.p is not None})
    words = {}
    for name, each in found.items():
        significant = adjusted.get(name, 0.0) < LEVEL
        if each.kept is None:
            words[name] = "not measured"
            continue
        words[name] = "shown" if each.kept and significant else "not shown"
        if name in adjusted:
            words[name] += f" (P {adjusted[name]:.2g} of {counted(len(adjusted), 'test')}, Holm)"
    return words


def _missing(shown: Optional[Shown], arms: Sequence[str], seeds: Sequence[int]) -> bool:
    return shown is None or any(Cell(arm, seed) not in shown.cells for arm in arms for seed in seeds)


_NOTHING = Finding("no finished run.", None)
_UNTESTED = _NOTHING._replace(p=1.0)


def _limit(claim: Mapping[str, Any], results: Results) -> Finding:
    """Every run keeps the limit; the controls break theirs."""
    first, second, no_mask, limit = claim["first"], claim["second"], claim["no_mask"], float(claim["limit"])
    means, seeds, shown = claim.get("means", first), claim["seeds"], results.get(claim["run"])
    if shown is None or _missing(shown, (first, second, means, no_mask, "unpacked"), seeds):
        return _NOTHING
    apart = max(map(abs, shown.differences(first, second, "loss", seeds)))
    least = min(shown.differences(no_mask, "unpacked", "loss", seeds))
    words, kept = "", apart < limit and least > claim["least_without_mask"]
    if "means" in claim:
        off = min(map(abs, shown.differences(means, second, "loss", seeds)))
        words, kept = f"losses as means over micro-batches at least {small(off)}, ", kept and off > limit
    words = f"at most {small(apart)} nats apart, limit {small(limit)}; {words}without the mask at least {least:+.3f}."
    return Finding(f"{counted(len(seeds), 'seed')}: {words}", kept)


def _equivalence(claim: Mapping[str, Any], results: Results) -> Finding:
    """The interval lies within the margin of each metric; A/A's too; the control's lies wholly beyond one."""
    first, second, again, control = (claim[name] for name in ("first", "second", "again", "control"))
    shown, pilot = results.get(claim["run"]), results.get(claim["pilot"]["run"])
    few = claim.get("control_seeds", claim["seeds"])
    if (
        shown is None
        or _missing(shown, (first, second, again), claim["seeds"])
        or _missing(shown, (control, second), few)
        or _missing(pilot, (first, second), claim["pilot"]["seeds"])
    ):
        return _UNTESTED
    assert isinstance(shown, TrainingShown) and isinstance(pilot, TrainingShown)
    lines, kept, fails, p, strength = [], True, False, 0.0, 1.0
    drawn: Dict[str, Dict[str, Optional[Interval]]] = {}
    for metric, margin in claim["margins"].items():
        values = shown.differences(first, second, metric, claim["seeds"])
        found = students(values)
        same = students(shown.differences(again, claim["again_beside"], metric, claim["seeds"]))
        wrong = students(shown.differences(control, second, metric, few))
        kept = kept and found.within(margin) and same.within(margin)
        fails = fails or wrong.low > margin
        p = max(p, equivalence(values, margin))
        spread = float(np.std(pilot.differences(first, second, metric, claim["pilot"]["seeds"]), ddof=1))
        strength = min(strength, power(spread, margin, len(values)))
        what = "" if len(claim["margins"]) == 1 else f"{METRICS[metric]} "
        form = "+.4f" if max(map(abs, found[:3])) >= 5e-4 else "+.1e"
        lines.append(f"{what}{found.words(form)} nats, margin {margin:g}; A/A {same.words(form)}")
        lines[-1] += f"; control {wrong.words('+.3f')}"
        for words, each in ((first, found), (again, same)):
            shares = Interval(each.mean / margin, each.low / margin, each.high / margin, each.seeds)
            drawn.setdefault(METRICS[metric], {})[shown.words[words]] = shares
    error = f"{shown.over_sequences(first, second, claim['seeds']):{form[1:]}}"
    tail = f"{counted(len(claim['seeds']), 'seed')}; power {strength:.3f}; over sequences ±{error}"
    levels = [("margin", 1.0), ("minus the margin", -1.0)]
    picture = bars("", f"held-out loss against {shown.words[second]}, in margins", drawn, levels)
    return Finding("; ".join([*lines, tail]) + ".", kept and fails, p, picture)


def _speed(claim: Mapping[str, Any], results: Results) -> Finding:
    shown = results.get(claim["run"])
    if shown is None or _missing(shown, (), ()) or not shown.timings or shown.draws < claim["draws"]:
        return _UNTESTED
    return Finding(shown.verdict() + ".", shown.all_pass, shown.p)


def _answers(claim: Mapping[str, Any], results: Results) -> Finding:
    shown = results.get(claim["run"])
    if shown is None or _missing(shown, (f"{claim['task']}_packed",), claim["seeds"]):
        return _NOTHING
    packed, no_mask, answers = shown.answers(claim["task"])
    words = f"{packed:,} of {answers:,} answers differ; without the mask {no_mask:,}."
    return Finding(words, packed == 0 and no_mask > claim["least_without_mask"] * answers)


KINDS: Dict[str, Callable[[Mapping[str, Any], Results], Finding]] = {
    "limit": _limit,
    "equivalence": _equivalence,
    "speed": _speed,
    "answers": _answers,
}
