"""What the pre-training experiments say, from their finished cells alone: nothing is trained."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from evidence import arms
from evidence.runner import Cell
from evidence.statistics import CONFIDENCE, Interval, error_over_sequences, students
from evidence.writer import Shown, Table, curve, curves, small, spread
from pack_data.cli.command import counted
from pack_data.display.picture import Lines, Picture

METRICS = {"loss": "loss", "mlm_loss": "masked tokens", "nsp_loss": "next sentence"}


class TrainingShown(Shown):
    """What the cells of one folder say, whichever of them are finished."""

    words: Mapping[str, str]  # arm -> words
    reference: str
    uncounted = arms.PILOT_SEEDS

    # ---- numbers

    def value(self, arm: str, seed: int, metric: str) -> float:
        """Of the last measurement, over all scored sequences."""
        row = self.cells[Cell(arm, seed)][-1]
        return float(row[f"all_{metric}"] if f"all_{metric}" in row else row[metric])

    def differences(self, first: str, second: str, metric: str, seeds: Optional[Sequence[int]] = None) -> List[float]:
        """Of the first arm from the second one, seed by seed. KeyError where a cell is missing."""
        chosen = self.common(first, second) if seeds is None else seeds
        return [self.value(first, seed, metric) - self.value(second, seed, metric) for seed in chosen]

    def over_sequences(self, first: str, second: str, seeds: Sequence[int]) -> float:
        """Standard error over the held-out sequences of the difference of the loss, the mean of these seeds."""

        def of(arm: str, name: str) -> Any:
            return np.mean([self.cells[Cell(arm, seed)][-1][name] for seed in seeds], axis=0)

        mlm, nsp = (of(first, name) - of(second, name) for name in ("mlm_centinats", "nsp_millinats"))
        return error_over_sequences(np.array(self.facts["masked"], dtype=float), mlm / 100, nsp / 1000)

    def against(self, arm: str, metric: str = "loss") -> Optional[Interval]:
        """From the reference, over the seeds that both have."""
        reference = self.reference + (arms.DOUBLE if arm.endswith(arms.DOUBLE) else "")
        found = [] if arm == reference else self.differences(arm, reference, metric)
        return students(found) if found else None

    # ---- the page

    def named(self) -> List[str]:
        """Arms with a finished seed that counts."""
        return [arm for arm in self.words if self.seeds(arm)]

    def parts(self) -> List[Union[str, Table]]:
        size, facts = self.settings, self.facts
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
        def last(metric: str, digits: int, scale: float = 1.0) -> Any:
            return lambda arm: spread([scale * self.value(arm, seed, metric) for seed in self.seeds(arm)], digits)

        def against(metric: str) -> Any:
            return lambda arm: _words(self.against(arm, metric))

        def updates(arm: str) -> str:
            return f"{self.cells[Cell(arm, self.seeds(arm)[0])][-1]['updates']:,}"

        return Table(
            [
                ("run", self.words.get),
                ("masked tokens, nats", last("mlm_loss", 4)),
                ("right, %", last("mlm_accuracy", 1, 100)),
                ("next sentence, nats", last("nsp_loss", 4)),
                ("right, %", last("nsp_accuracy", 1, 100)),
                *((f"{words}, against {self.words[self.reference]}", against(name)) for name, words in METRICS.items()),
                ("updates", updates),
                ("seeds", lambda arm: str(len(self.seeds(arm)))),
            ],
            self.named(),
            [_constant(self.facts["baseline"])],
        )

    # ---- the pictures

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        return {"curves": self.curves()} if self.named() else {}

    def curves(self) -> List[Lines]:
        """Of the arms in float32."""
        constant, drawn = self.facts["baseline"], [arm for arm in self.named() if not arm.endswith(arms.DOUBLE)]
        found = []
        for metric, words in list(METRICS.items())[1:]:
            lines = [
                curve(self.words[arm], 1e-3 * self.columns(arm, "sequences"), self.columns(arm, metric))
                for arm in drawn
            ]
            level = ("most frequent answers, no model", constant[metric])
            found.append(curves(words, "sequences processed, thousands", "held-out loss, nats", lines, [level]))
        return found


class UpdatesShown(TrainingShown):
    words = {name: arm.words + (", float64" if arm.double else "") for name, arm in arms.ARMS.items()}
    reference = arms.UNPACKED

    def apart(self, first: str, second: str) -> Tuple[np.ndarray, np.ndarray]:
        """Along the runs: updates and |difference| of the loss, [seeds, points]."""
        seeds = self.common(first, second)

        def of(arm: str, name: str) -> np.ndarray:
            return np.array([[row[name] for row in self.cells[Cell(arm, seed)]] for seed in seeds])

        return of(first, "step"), np.abs(of(first, "loss") - of(second, "loss"))

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        pairs = {
            "packed, float64": (arms.PACKED + arms.DOUBLE, arms.UNPACKED + arms.DOUBLE),
            "packed, float32": (arms.PACKED, arms.UNPACKED),
            "packed in another order, float32": (arms.AGAIN, arms.PACKED),
            "losses as means over micro-batches, float64": (arms.MEANS + arms.DOUBLE, arms.UNPACKED + arms.DOUBLE),
            "without the mask": (arms.NO_MASK, arms.UNPACKED),
        }
        lines = [
            curve(words, steps, np.maximum(apart, 1e-17))
            for words, pair in pairs.items()
            if self.common(*pair)
            for steps, apart in [self.apart(*pair)]
        ]
        found = super().pictures()
        if lines:
            title, y = "How far runs are from unpacked ones", "difference of held-out losses, nats"
            found["apart"] = [curves(title, "updates", y, lines, [("limit in float64", 1e-6)], log=10)]
        return found


class OrderShown(TrainingShown):
    words = arms.ORDERS
    reference = "random"


def _words(found: Optional[Interval]) -> Optional[str]:
    if found is None:
        return None
    return small(found.mean) if abs(found.mean) < 1e-5 else found.words("+.4f")


def _constant(baseline: Mapping[str, float]) -> List[str]:
    """What constant answers score, as a line of the table."""
    return [
        "most frequent answers (no model)",
        f"{baseline['mlm_loss']:.4f}",
        f"{100 * baseline['mlm_accuracy']:.1f}",
        f"{baseline['nsp_loss']:.4f}",
        f"{100 * baseline['nsp_accuracy']:.1f}",
    ]
