"""What the pre-training experiment says, from its finished cells alone: nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np

from evidence.pretraining_variants import (
    ACCUMULATED,
    CALIBRATION_SEEDS,
    CLAIM,
    CONTROL,
    IN_TABLE,
    REFERENCE,
    RULES,
    VARIANTS,
)
from evidence.runner import Cell, Row
from evidence.statistics import CONFIDENCE, SHARE, Interval, Scores, Verdict
from evidence.writer import Shown, Table, bars, curve, curves, limited, spread
from pack_data.cli.command import counted
from pack_data.display.picture import Line, Lines, Picture

WORDS = {name: variant.words for name, variant in VARIANTS.items()}
ACCUMULATION = "accumulation / p"
NO_NSP = "no_nsp"  # has no loss of the next sentence, so that masked tokens alone are compared


class PretrainingShown(Shown):
    """What the cells of one folder say, whichever of them are finished."""

    in_table: Sequence[str] = IN_TABLE
    in_curves: Sequence[str] = ("unpacked", "packed", "betas", "none", "no_mask")
    uncounted = CALIBRATION_SEEDS

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        lasts = [rows[-1] for rows in self.cells.values()]
        scored = {(row["held_out_data"], len(row["mlm_centinats"])) for row in lasts}
        if len(scored) > 1 or any(number != len(self.facts["masked"]) for _, number in scored):
            raise ValueError(f"{self.folder}: the cells were scored on different held-out sequences; measure them anew")

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def variants(self) -> List[str]:
        """Those of the table with a finished seed that counts, in the order of the experiment."""
        return [name for name in self.in_table if self.seeds(name)]

    def last(self, name: str, value: str) -> np.ndarray:
        """The last measurement of every seed of a variant, of all scored sequences."""
        rows = [self.cells[Cell(name, seed)][-1] for seed in self.seeds(name)]
        return np.array([row.get(f"all_{value}", row.get(value, np.nan)) for row in rows])

    def scores(self, row: Row) -> Scores:
        nsp = row.get("nsp_millinats")
        return Scores(
            np.array(self.facts["masked"]),
            np.array(row["mlm_centinats"]) / 100,
            None if nsp is None else np.array(nsp) / 1000,
        )

    def against(self, name: str, *, masked_only: bool = False) -> Optional[Interval]:
        """The difference to unpacked over the seeds that both have; None where there is none."""
        return self.difference(name, REFERENCE, masked_only=masked_only or name == NO_NSP)

    @property
    def margin(self) -> Optional[float]:
        cost = self.cost(CLAIM, CONTROL)
        return None if cost is None or cost.low <= 0 else SHARE * cost.mean

    def verdict(self) -> Verdict:
        return self.equivalence(CLAIM, CONTROL, REFERENCE, names="packed, unpacked and the control")

    @property
    def passes(self) -> bool:
        return self.verdict().shows

    def p(self, name: str) -> float:
        """How many times the sequences of an unpacked update its updates have."""
        return float(self.last(REFERENCE, "updates")[0] / self.last(name, "updates")[0])

    def rules(self) -> Dict[str, List[str]]:
        """The finished runs of each rule of section 3.3; empty without those at other p than the packing factor."""
        if not self.seeds(REFERENCE):
            return {}
        found = {words: [name for name in names if self.seeds(name)] for words, names in RULES.items()}
        return {words: names for words, names in found.items() if len(names) > 2}

    # ---- the block ---------------------------------------------------------------------------------------------------

    def parts(self) -> List[Union[str, Table]]:
        rules = self.rules_table()
        parts: List[Union[str, Table]] = [self.table(), *self.notes()]
        if rules is None:
            return parts
        return [
            *parts,
            "",
            "How far the rules of section 3.3 carry: loss against unpacked, p times the sequences in 1 / p of the "
            "updates.\nAccumulation / p keeps the sequences of an update, whatever p is; packs of these lengths reach "
            "no larger p.",
            "",
            rules,
        ]

    def table(self) -> Table:
        constant = self.facts["baseline"]
        return Table(
            [
                ("run", WORDS.get),
                ("masked tokens, nats", lambda name: spread(self.last(name, "mlm_loss"))),
                ("right, %", lambda name: spread(100 * self.last(name, "mlm_accuracy"), 1)),
                ("next sentence right, %", self._next_sentence),
                ("loss against unpacked (interval)", self._loss),
                ("passes the test", self._test),
                ("processor s", lambda name: spread(self.last(name, "processor_seconds"), 0)),
                ("seeds", lambda name: str(len(self.seeds(name)))),
            ],
            self.variants(),
            [["most frequent answers (no model)", *metrics(constant)]],
        )

    def _next_sentence(self, name: str) -> Optional[str]:
        return None if name == NO_NSP else spread(100 * self.last(name, "nsp_accuracy"), 1)

    def _loss(self, name: str) -> Optional[str]:
        return None if name == REFERENCE else _words(self.against(name), "+.3f")

    def _test(self, name: str) -> str:
        interval = self.against(name)
        if name in (REFERENCE, NO_NSP) or interval is None or self.margin is None or interval.seeds < 2:
            return ""
        return "yes" if interval.within(self.margin) else "no"

    def rules_table(self) -> Optional[Table]:
        """The loss against unpacked over p, a line a rule."""
        rules = self.rules()
        if not rules:
            return None
        # A column for each size of the updates that some rule has a finished run of; another rule may lack it.
        runs = {words: RULES[words] for words in rules}
        sizes = [place for place in range(1, 5) if any(self.seeds(names[place]) for names in runs.values())]
        if any(map(self.seeds, ACCUMULATED[1:])):
            runs[ACCUMULATION] = (*ACCUMULATED, "", "")

        def p_of(place: int) -> str:
            return f"p = {self.p(next(names[place] for names in runs.values() if self.seeds(names[place]))):.1f}"

        def cell(place: int) -> Callable[[str], Optional[str]]:
            return lambda words: _words(self.against(runs[words][place]), "+.2f")

        return Table([("rule", str), *((p_of(place), cell(place)) for place in sizes)], list(runs))

    def notes(self) -> List[str]:
        """What the table does not say."""
        cost, facts = self.cost(CLAIM, CONTROL), self.facts
        margin = "The margin is not measured yet."
        if cost is not None:
            seeds = f"{counted(cost.seeds, 'seed')} that {'does' if cost.seeds == 1 else 'do'} not count"
            margin = f"Removing the mask costs {cost.words('+.3f')} nats on {seeds}, measured first"
            margin += f"; the margin is a quarter of it, {self.margin:.4f}." if self.margin else "."
        # Next sentence prediction may be all that tells claim and control apart.
        masked = {name: self.against(name, masked_only=True) for name in (CLAIM, CONTROL)}
        alone = "; ".join(f"{WORDS[name]} {found.words('+.3f')}" for name, found in masked.items() if found)
        return [
            f"Claim: packed training is equivalent to unpacked training. Control: packed without the mask. "
            f"**{self.verdict().why}.**",
            margin,
            *([f"Of masked tokens alone, against unpacked: {alone} nats."] if alone else []),
            f"Loss: of a masked token and of the next sentence, together; without next sentence prediction of masked "
            f"tokens alone. Intervals: {CONFIDENCE:.0%}, over sequences and seeds, of one seed over sequences alone; "
            f"±: one standard deviation of the seeds.",
            f"{facts['sequences']['held_out']:,} held-out sequences, unpacked, of documents that no training sequence "
            f"comes from.",
            f"{self.sizes()}; {facts['machine']}.",
        ]

    def sizes(self) -> str:
        """Of data and network, in words."""
        sequences = f"{self.settings['sequences']:,} sequences a run drawn from {self.facts['sequences']['training']:,}"
        return f"{self.network()}, {sequences}"

    def network(self) -> str:
        size = self.settings
        return (
            f"Corpus {size['corpus']}, {size['max_sequence_length']} slots, p = {self.facts['packing_factor']:.3f} at "
            f"depth {size['depth']}, hidden {size['hidden_size']}, {counted(size['num_layers'], 'layer')}, AdamW, no "
            f"dropout"
        )

    # ---- the pictures ------------------------------------------------------------------------------------------------

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        """Curves, and the differences at their ends; none without a finished cell that counts."""
        if not self.variants():
            return {}
        found: Dict[str, Sequence[Picture]] = {"curves": self.curves()}
        differences = {WORDS[name]: self.against(name) for name in self.variants() if name != REFERENCE}
        known = {name: interval for name, interval in differences.items() if interval is not None}
        if known:
            found["differences"] = [against(known, "Held-out loss against unpacked training", self.margin)]
        rules = self.rule_curves()
        if rules:
            constant = self.facts["baseline"]
            level = ("most frequent answers, no model", constant["mlm_loss"] + constant["nsp_loss"])
            p = "p: sequences in a pack (accumulation / p), in an update over those of unpacked (others)"
            found["rules"] = [curves("Rules of section 3.3", p, "held-out loss at the end, nats", rules, [level])]
        return found

    def curves(self) -> List[Lines]:
        constant, sequences = self.facts["baseline"], "sequences processed, thousands"
        unigram = [("most frequent tokens, no model", constant["mlm_loss"])]
        majority = [("always the same answer", 100 * constant["nsp_accuracy"])]

        def of(x: str, y: str, x_scale: float, scale: float = 1.0) -> List[Line]:
            names = filter(self.seeds, self.in_curves)
            return [curve(WORDS[n], x_scale * self.columns(n, x), scale * self.columns(n, y)) for n in names]

        loss, right = "held-out loss, nats", "right, % of held-out sequences"
        accuracy, seconds = of("sequences", "nsp_accuracy", 1e-3, 100.0), "processor seconds, one thread"
        return [
            curves("Masked tokens", sequences, loss, of("sequences", "mlm_loss", 1e-3), unigram),
            curves("Next sentence", sequences, right, accuracy, majority),
            curves("Masked tokens over time", seconds, loss, of("processor_seconds", "mlm_loss", 1.0), unigram),
        ]

    def rule_curves(self) -> List[Line]:
        """The loss at the end over p, a line a rule."""
        of_p = {words: {name: self.p(name) for name in names} for words, names in self.rules().items()}
        if of_p and all(map(self.seeds, ACCUMULATED)):
            of_p[ACCUMULATION] = {name: float(self.last(name, "packing_factor")[0]) for name in ACCUMULATED}
        found = []
        for words, names in of_p.items():
            seeds = [seed for seed in self.seeds(REFERENCE) if all(seed in self.seeds(name) for name in names)]
            lasts = [[self.cells[Cell(name, seed)][-1] for name in names] for seed in seeds]
            losses = np.array([[row["mlm_loss"] + row["nsp_loss"] for row in rows] for rows in lasts])
            if seeds:
                found.append(curve(words, np.array([list(names.values())] * len(seeds)), losses))
        return found


def against(found: Mapping[str, Interval], title: str, margin: Optional[float] = None) -> Picture:
    """Differences with their intervals; the margin on both sides of 0."""
    levels = [] if margin is None else [("margin", margin), ("minus the margin", -margin)]
    names = {name + (" (control)" if name == WORDS[CONTROL] else ""): each for name, each in found.items()}
    drawn = {f"difference with its {CONFIDENCE:.0%} interval": limited(names, margin or 0.0)}
    return bars(title, "nats more than unpacked", drawn, levels, form="+.3f")


def metrics(row: Mapping[str, float]) -> List[str]:
    """Loss of masked tokens, percent right of them, of next sentences."""
    return [f"{row['mlm_loss']:.3f}", f"{100 * row['mlm_accuracy']:.1f}", f"{100 * row['nsp_accuracy']:.1f}"]


def _words(interval: Optional[Interval], form: str) -> Optional[str]:
    return interval and interval.words(form)
