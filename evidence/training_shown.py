"""The results of the pre-training experiments, from their finished cells; nothing is trained."""

from __future__ import annotations

import itertools
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from evidence import arms
from evidence.runner import Cell
from evidence.statistics import CONFIDENCE, Interval, students
from evidence.writer import Part, Pictures, Shown, Table, curve, curves, small, spread
from pack_data.display.picture import Lines
from pack_data.reading.words import counted

METRICS = {"loss": "loss", "mlm_loss": "masked tokens", "nsp_loss": "next sentence"}


class TrainingShown(Shown):
    """The results in a run's file."""

    words: Mapping[str, str]  # arm -> words
    reference: str
    uncounted = arms.PILOT_SEEDS

    # ---- numbers

    def value(self, arm: str, seed: int, metric: str) -> float:
        """Return the last measurement, over all scored sequences."""
        row = self.cells[Cell(arm, seed)][-1]
        of_all = f"all_{metric}"
        name = of_all if of_all in row else metric
        return float(row[name])

    def differences(
        self, first: str, second: str, metric: str, seeds: Optional[Sequence[int]] = None
    ) -> List[float]:
        """Return the first arm minus the second, seed by seed; raise KeyError for a missing cell."""
        differences = []
        for seed in self.common(first, second) if seeds is None else seeds:
            value = self.value(first, seed, metric)
            reference = self.value(second, seed, metric)
            differences.append(value - reference)
        return differences

    def against(self, arm: str, metric: str = "loss") -> Optional[Interval]:
        """Return the difference from the reference over the common seeds; None for the reference or without seeds."""
        reference = self.reference
        if arm.endswith(arms.DOUBLE):
            reference += arms.DOUBLE
        if arm == reference:
            return None
        differences = self.differences(arm, reference, metric)
        return students(differences) if differences else None

    # ---- the page

    def named(self) -> List[str]:
        """Return the arms with a finished seed outside the pilot."""
        return [arm for arm in self.words if self.seeds(arm)]

    def parts(self) -> List[Part]:
        size = self.settings
        facts = self.facts
        return [
            self.table(),
            "±: one standard deviation of the seeds. Against the reference: mean over the seeds, "
            f"{CONFIDENCE:.0%} interval in brackets (Student's t over the seeds; of one seed none). Loss: a masked "
            "token's and a sequence's next sentence, together.",
            f"{facts['sequences']['held_out']:,} held-out sequences, unpacked, of documents that no training sequence "
            "comes from.",
            f"Corpus {size['corpus']}, {size['max_sequence_length']} slots, packing factor "
            f"{facts['packing_factor']:.3f} at depth {size['depth']}, hidden {size['hidden_size']}, "
            f"{counted(size['num_layers'], 'layer')}, AdamW, no dropout, {size['sequences']:,} sequences a run drawn "
            f"from {facts['sequences']['training']:,}; {facts['machine']}; commit {size['commit'][:9]}.",
        ]

    def table(self) -> Table:
        """Return the table of scores, a line for each arm."""

        def last(metric: str, digits: int, scale: float = 1.0) -> Any:
            def cell(arm: str) -> str:
                values = [scale * self.value(arm, seed, metric) for seed in self.seeds(arm)]
                return spread(values, digits)

            return cell

        def against(metric: str, words: str) -> Any:
            heading = f"{words}, against {self.words[self.reference]}"
            return heading, lambda arm: _words(self.against(arm, metric))

        def updates(arm: str) -> str:
            first = Cell(arm, self.seeds(arm)[0])
            return f"{self.cells[first][-1]['updates']:,}"

        return Table(
            [
                ("run", self.words.get),
                ("masked tokens, nats", last("mlm_loss", 4)),
                ("right, %", last("mlm_accuracy", 1, 100)),
                ("next sentence, nats", last("nsp_loss", 4)),
                ("right, %", last("nsp_accuracy", 1, 100)),
                *itertools.starmap(against, METRICS.items()),
                ("updates", updates),
                ("seeds", lambda arm: str(len(self.seeds(arm)))),
            ],
            self.named(),
            [_constant(self.facts["baseline"])],
        )

    # ---- the pictures

    def pictures(self) -> Pictures:
        return {"curves": self.curves()} if self.named() else {}

    def curves(self) -> List[Lines]:
        """Draw the arms in float32."""
        pictures = []
        for metric in ("mlm_loss", "nsp_loss"):
            lines = []
            for arm in self.named():
                if not arm.endswith(arms.DOUBLE):
                    thousands = 1e-3 * self.columns(arm, "sequences")
                    losses = self.columns(arm, metric)
                    lines.append(curve(self.words[arm], thousands, losses))
            level = ("most frequent answers, no model", self.facts["baseline"][metric])
            x = "sequences processed, thousands"
            y = "held-out loss, nats"
            pictures.append(curves(METRICS[metric], x, y, lines, [level]))
        return pictures


class UpdatesShown(TrainingShown):
    """The results of `updates`."""

    words = {
        name: arm.words + (", float64" if arm.double else "") for name, arm in arms.ARMS.items()
    }
    reference = arms.UNPACKED

    def apart(self, first: str, second: str) -> Tuple[np.ndarray, np.ndarray]:
        """Return updates and |difference| of the loss along the runs, [seeds, points]."""
        seeds = self.common(first, second)
        losses = self.columns(first, "loss", seeds)
        others = self.columns(second, "loss", seeds)
        updates = self.columns(first, "step", seeds)
        return updates, np.abs(losses - others)

    def pictures(self) -> Pictures:
        pairs = {
            "packed, float64": (arms.PACKED + arms.DOUBLE, arms.UNPACKED + arms.DOUBLE),
            "packed, float32": (arms.PACKED, arms.UNPACKED),
            "packed in another order, float32": (arms.AGAIN, arms.PACKED),
            "losses as means over micro-batches, float64": (
                arms.MEANS + arms.DOUBLE,
                arms.UNPACKED + arms.DOUBLE,
            ),
            "without the mask": (arms.NO_MASK, arms.UNPACKED),
        }
        lines = []
        for words, pair in pairs.items():
            if self.common(*pair):
                updates, differences = self.apart(*pair)
                visible = np.maximum(differences, 1e-17)  # the axis is logarithmic
                lines.append(curve(words, updates, visible))
        pictures = super().pictures()
        if lines:
            title = "How far runs are from unpacked ones"
            y = "difference of held-out losses, nats"
            level = ("limit in float64", 1e-6)
            pictures["apart"] = [curves(title, "updates", y, lines, [level], log=10)]
        return pictures


class OrderShown(TrainingShown):
    """The results of `order`."""

    words = arms.ORDERS
    reference = "random"


def _words(difference: Optional[Interval]) -> Optional[str]:
    """Format a difference from the reference."""
    if difference is None:
        return None
    if abs(difference.mean) < 1e-5:  # rounding
        return small(difference.mean)
    return difference.words("+.4f")


def _constant(baseline: Mapping[str, float]) -> List[str]:
    """Return the scores of constant answers as a line of the table."""
    return [
        "most frequent answers (no model)",
        f"{baseline['mlm_loss']:.4f}",
        f"{100 * baseline['mlm_accuracy']:.1f}",
        f"{baseline['nsp_loss']:.4f}",
        f"{100 * baseline['nsp_accuracy']:.1f}",
    ]
