"""The table and the pictures of the pre-training experiment, from its finished cells alone: nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.experiments import tables
from ipu_packed_bert.experiments.pretraining_variants import (
    ACCUMULATED,
    CALIBRATION,
    CALIBRATION_SEEDS,
    CLAIM,
    CONTROL,
    IN_TABLE,
    REFERENCE,
    RULES,
    VARIANTS,
)
from ipu_packed_bert.experiments.runner import Cell, Row, read_run
from ipu_packed_bert.experiments.statistics import CONFIDENCE, SHARE, Interval, Scores, Verdict, difference, verdict
from pack_data.cli.command import counted

IN_CURVES = ("unpacked", "packed", "betas", "none", "no_mask")


class PretrainingShown:
    """What the cells of one folder say, whichever of them are finished."""

    in_table: Sequence[str] = IN_TABLE
    in_curves: Sequence[str] = IN_CURVES

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        found = read_run(self.folder)
        self.size, self.facts, self._cells = found.settings, found.facts, found.cells
        self.words = {name: variant.words for name, variant in VARIANTS.items()}
        self._check()
        self._intervals: Dict[Tuple[str, str, bool], Optional[Interval]] = {}

    def _check(self) -> None:
        """Raises ValueError where the cells were not scored on the same held-out sequences."""
        lasts = [rows[-1] for rows in self._cells.values()]
        scored = {(row["held_out_data"], len(row["mlm_centinats"])) for row in lasts}
        if len(scored) > 1 or any(number != len(self.facts["masked"]) for _, number in scored):
            raise ValueError(f"{self.folder}: the cells were scored on different held-out sequences; measure them anew")

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def seeds(self, name: str) -> List[int]:
        """The finished seeds of a variant that count."""
        return sorted(cell.seed for cell in self._cells if cell.variant == name and not self._calibrates(cell))

    def _calibrates(self, cell: Cell) -> bool:
        return cell.seed in CALIBRATION_SEEDS

    def variants(self) -> List[str]:
        """Those of the table with a finished seed that counts, in the order of the experiment."""
        return [name for name in self.in_table if self.seeds(name)]

    def last(self, name: str, value: str) -> np.ndarray:
        """The last measurement of every seed of a variant, of all scored sequences."""
        rows = [self._cells[Cell(name, seed)][-1] for seed in self.seeds(name)]
        return np.array([row.get(f"all_{value}", row.get(value, np.nan)) for row in rows])

    def columns(self, name: str, value: str) -> np.ndarray:
        """One value of a variant's measurements: [seeds, points]."""
        return np.array([[row[value] for row in self._cells[Cell(name, seed)]] for seed in self.seeds(name)])

    def scores(self, name: str, seeds: Sequence[int]) -> List[Scores]:
        return [self._scores(self._cells[Cell(name, seed)][-1]) for seed in seeds]

    def _scores(self, row: Row) -> Scores:
        nsp = row.get("nsp_millinats")
        return Scores(
            np.array(self.facts["masked"]),
            np.array(row["mlm_centinats"]) / 100,
            None if nsp is None else np.array(nsp) / 1000,
        )

    def against(self, name: str, other: str, *, masked_only: bool = False) -> Optional[Interval]:
        """The difference of two variants over the seeds that both have; None where there is none."""
        key = name, other, masked_only
        if key not in self._intervals:
            seeds = [seed for seed in self.seeds(name) if seed in self.seeds(other)]
            self._intervals[key] = self._difference(name, other, seeds, masked_only) if seeds else None
        return self._intervals[key]

    def _difference(self, name: str, other: str, seeds: Sequence[int], masked_only: bool) -> Interval:
        return difference(self.scores(name, seeds), self.scores(other, seeds), masked_only=masked_only)

    def cost(self) -> Optional[Interval]:
        """What the missing mask costs on the seeds that do not count."""
        seeds = [seed for seed in CALIBRATION_SEEDS if all(Cell(name, seed) in self._cells for name in CALIBRATION)]
        return self._difference(CONTROL, CLAIM, seeds, False) if seeds else None

    @property
    def margin(self) -> Optional[float]:
        cost = self.cost()
        return None if cost is None or cost.low <= 0 else SHARE * cost.mean

    def verdict(self) -> Verdict:
        claim, control = self.against(CLAIM, REFERENCE), self.against(CONTROL, REFERENCE)
        if claim is None or control is None:
            return Verdict(False, False, "shows nothing yet: packed, unpacked and the control have no common seed")
        return verdict(self.cost(), claim, control)

    def p(self, name: str) -> float:
        """How many times the sequences of an unpacked update its updates have."""
        return float(self.last(REFERENCE, "updates")[0] / self.last(name, "updates")[0])

    def rules(self) -> Dict[str, List[str]]:
        """The finished runs of each rule of section 3.3; empty without those at other p than the packing factor."""
        if not self.seeds(REFERENCE):
            return {}
        found = {words: [name for name in names if self.seeds(name)] for words, names in RULES.items()}
        return {words: names for words, names in found.items() if len(names) > 2}

    # ---- the table ---------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Markdown: the table, the verdict, where the numbers come from."""
        return self.table() + "\n" + self.notes() + self.rules_table()

    def rules_table(self) -> str:
        """The loss against unpacked over p, a line a rule."""
        rules = self.rules()
        if not rules:
            return ""
        # A column for each size of the updates that some rule has a finished run of; another rule may lack it.
        sizes = list(enumerate(zip(*(RULES[words] for words in rules))))[1:]
        columns = [(place, names) for place, names in sizes if any(map(self.seeds, names))]
        by_rule = {words: [names[number] for _, names in columns] for number, words in enumerate(rules)}
        if any(map(self.seeds, ACCUMULATED[1:])):
            by_rule["accumulation / p"] = [dict(enumerate(ACCUMULATED)).get(place, "") for place, _ in columns]
        lines = []
        for words, names in by_rule.items():
            found = [self.against(name, REFERENCE) for name in names]
            cells = ["" if at is None else f"{at.mean:+.2f} ({at.low:+.2f} to {at.high:+.2f})" for at in found]
            lines.append([words, *cells])
        heads = [f"p = {self.p(next(filter(self.seeds, names))):.1f}" for _, names in columns]
        return (
            "\nHow far the rules of section 3.3 carry: loss against unpacked, p times the sequences in 1 / p of the "
            "updates.\nAccumulation / p keeps the sequences of an update, whatever p is; packs of these lengths reach "
            "no larger p.\n\n" + tables.markdown(["rule", *heads], lines)
        )

    def table(self) -> str:
        lines = []
        for name in self.variants():
            interval = self.against(name, REFERENCE, masked_only=name == "no_nsp")
            lines.append(
                [
                    self.words[name],
                    tables.spread(self.last(name, "mlm_loss")),
                    tables.spread(100 * self.last(name, "mlm_accuracy"), 1),
                    "" if name == "no_nsp" else tables.spread(100 * self.last(name, "nsp_accuracy"), 1),
                    "" if name == REFERENCE or interval is None else interval_words(interval),
                    self._test(name, interval),
                    tables.spread(self.last(name, "processor_seconds"), 0),
                    str(len(self.seeds(name))),
                ]
            )
        constant = self.facts["baseline"]
        lines.append(
            [
                "most frequent answers (no model)",
                f"{constant['mlm_loss']:.3f}",
                f"{100 * constant['mlm_accuracy']:.1f}",
                f"{100 * constant['nsp_accuracy']:.1f}",
                *[""] * 4,
            ]
        )
        return tables.markdown(
            [
                "run",
                "masked tokens, nats",
                "right, %",
                "next sentence right, %",
                "loss against unpacked (interval)",
                "passes the test",
                "processor s",
                "seeds",
            ],
            lines,
        )

    def _test(self, name: str, interval: Optional[Interval]) -> str:
        if name in (REFERENCE, "no_nsp") or interval is None or self.margin is None or interval.seeds < 2:
            return ""
        return "yes" if interval.within(self.margin) else "no"

    def notes(self) -> str:
        """What the table does not say."""
        cost, facts = self.cost(), self.facts
        margin = "The margin is not measured yet."
        if cost is not None:
            seeds = f"{counted(cost.seeds, 'seed')} that {'does' if cost.seeds == 1 else 'do'} not count"
            margin = f"Removing the mask costs {interval_words(cost)} nats on {seeds}, measured first"
            margin += f"; the margin is a quarter of it, {self.margin:.4f}." if self.margin else "."
        return "\n".join(
            [
                f"Claim: packed training is equivalent to unpacked training. Control: packed without the mask. "
                f"**{self.verdict().why}.**",
                margin,
                *self._masked_alone(),
                f"Loss: of a masked token and of the next sentence, together; without next sentence prediction of "
                f"masked tokens alone. Intervals: {CONFIDENCE:.0%}, over sequences and seeds, of one seed over "
                f"sequences alone; ±: one standard deviation of the seeds.",
                f"{facts['sequences']['held_out']:,} held-out sequences, unpacked, of documents that no training "
                f"sequence comes from.",
                f"{self.sizes()}; {facts['machine']}.",
                "",
            ]
        )

    def _masked_alone(self) -> List[str]:
        """What claim and control cost of masked tokens alone: next sentence prediction may be all that tells them."""
        words = [
            f"{self.words[name]} {interval_words(found)}"
            for name in (CLAIM, CONTROL)
            for found in [self.against(name, REFERENCE, masked_only=True)]
            if found is not None
        ]
        return [f"Of masked tokens alone, against unpacked: {'; '.join(words)} nats."] if words else []

    def sizes(self) -> str:
        """Of data and network, in words."""
        size, facts = self.size, self.facts
        return (
            f"Corpus {size['corpus']}, {size['max_sequence_length']} slots, p = {facts['packing_factor']:.3f} at depth "
            f"{size['depth']}, hidden {size['hidden_size']}, {counted(size['num_layers'], 'layer')}, AdamW, no "
            f"dropout, {size['sequences']:,} sequences a run drawn from {facts['sequences']['training']:,}"
        )

    # ---- the pictures ------------------------------------------------------------------------------------------------

    def draw(self, folder: Path, stem: str = "") -> List[Path]:
        """Curves, and the differences at their ends; none without a finished cell that counts."""
        from ipu_packed_bert.experiments import pictures

        if not self.variants():
            return []
        paths = [Path(folder) / f"{stem}curves.png", Path(folder) / f"{stem}differences.png"]
        pictures.draw(self._panels(), paths[0], caption=self._caption())
        bars = [
            pictures.Bar(self.words[name], interval, control=name == CONTROL)
            for name in self.variants()
            for interval in [self.against(name, REFERENCE, masked_only=name == "no_nsp")]
            if name != REFERENCE and interval is not None
        ]
        if not bars:
            return paths[:1]
        constant = self.facts["baseline"]
        apart = constant["mlm_loss"] + constant["nsp_loss"]
        apart -= float((self.last(REFERENCE, "mlm_loss") + self.last(REFERENCE, "nsp_loss")).mean())
        pictures.draw_differences(
            bars,
            paths[1],
            margin=self.margin,
            title="Held-out loss against unpacked training",
            x_label="nats more than unpacked, at the end",
            caption=f"Point: mean over seeds, hollow: one seed. Bar: {CONFIDENCE:.0%} interval over sequences and "
            "seeds, an arrow where it goes on.\nGrey band: the margin, a quarter of what removing the mask costs "
            f"(measured on other seeds).\nThe most frequent answers without a model stand at {apart:+.2f} nats.",
        )
        rules = self._rules_panel()
        if rules.curves:
            paths.append(Path(folder) / f"{stem}rules.png")
            pictures.draw([rules], paths[-1], caption=self._caption("\n"), width=7.0)
        return paths

    def _rules_panel(self):
        from ipu_packed_bert.experiments.pictures import Curve, Line, Panel

        of_p = {words: {name: self.p(name) for name in names} for words, names in self.rules().items()}
        if of_p and all(map(self.seeds, ACCUMULATED)):
            of_p["accumulation / p"] = {name: float(self.last(name, "packing_factor")[0]) for name in ACCUMULATED}
        curves = []
        for words, names in of_p.items():
            seeds = [seed for seed in self.seeds(REFERENCE) if all(seed in self.seeds(name) for name in names)]
            if not seeds:
                continue
            lasts = [[self._cells[Cell(name, seed)][-1] for name in names] for seed in seeds]
            losses = [[row["mlm_loss"] + row["nsp_loss"] for row in rows] for rows in lasts]
            curves.append(Curve(words, np.array([list(names.values())] * len(seeds)), np.array(losses)))
        constant = self.facts["baseline"]
        return Panel(
            "Rules of section 3.3",
            "p: sequences in a pack (accumulation / p), in an update over those of unpacked (others)",
            "held-out loss at the end, nats",
            curves,
            Line(constant["mlm_loss"] + constant["nsp_loss"], "most frequent answers, no model"),
            marked=True,
        )

    def _panels(self):
        from ipu_packed_bert.experiments.pictures import Curve, Line, Panel

        names = [name for name in self.in_curves if self.seeds(name)]

        def curves(x: str, y: str, scale: float, x_scale: float = 1.0) -> List[Curve]:
            return [
                Curve(self.words[name], x_scale * self.columns(name, x), scale * self.columns(name, y))
                for name in names
            ]

        constant = self.facts["baseline"]
        unigram = Line(constant["mlm_loss"], "most frequent tokens, no model")
        majority = Line(100 * constant["nsp_accuracy"], "always the same answer")
        return [
            Panel(
                "Masked tokens",
                "sequences processed, thousands",
                "held-out loss, nats",
                curves("sequences", "mlm_loss", 1.0, 1e-3),
                unigram,
            ),
            Panel(
                "Next sentence",
                "sequences processed, thousands",
                "right, % of held-out sequences",
                curves("sequences", "nsp_accuracy", 100.0, 1e-3),
                majority,
                digits=1,
            ),
            Panel(
                "Masked tokens over time",
                "processor seconds, one thread",
                "held-out loss, nats",
                curves("processor_seconds", "mlm_loss", 1.0),
                unigram,
            ),
        ]

    def _caption(self, between: str = " ") -> str:
        seeds = max(len(self.seeds(name)) for name in self.variants())
        return (
            f"Line: mean over up to {counted(seeds, 'seed')}. Band: from the lowest to the highest.{between}Number: "
            f"last value. {self.facts['sequences']['held_out']:,} unpacked held-out sequences."
        )


def interval_words(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
