"""What the experiment on a trained BERT says, from its finished cells alone."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence, Union

import numpy as np

from evidence.pretraining_shown import WORDS, PretrainingShown, against, metrics
from evidence.pretraining_variants import CLAIM, CONTROL, REFERENCE
from evidence.runner import Row
from evidence.statistics import Interval, difference
from evidence.writer import Table, curve, curves
from pack_data.cli.command import counted
from pack_data.display.picture import Lines, Picture

START, AT_ONCE = "start", "at_once"  # cells
TESTED = (CLAIM, CONTROL, REFERENCE)
IN_TABLE = (*TESTED, "no_positions", "separators", "micro_batch_means")


class TrainedShown(PretrainingShown):
    in_table = (REFERENCE, *(name for name in IN_TABLE if name != REFERENCE))
    in_curves = in_table[:-1]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.settings = {**self.settings, **self.facts.get("model", {})}  # of another checkpoint than the size's

    def _rows(self, variant: str) -> List[Row]:
        """Of the cell of this name, whatever its seed; none where it is not finished."""
        return next((rows for cell, rows in self.cells.items() if cell.variant == variant), [])

    def at_once(self) -> Dict[str, Interval]:
        """What packs cost the start, as each variant sees packs, more than the same sequences unpacked."""
        start = self._rows(START)
        return {
            row["change"]: difference([self.scores(row)], [self.scores(start[-1])])
            for row in self._rows(AT_ONCE)
            if start
        }

    # ---- the block

    def parts(self) -> List[Union[str, Table]]:
        found = self.at_once()
        if not found:
            return super().parts()
        start, rows = self._rows(START)[-1], {row["change"]: row for row in self._rows(AT_ONCE)}
        rows[REFERENCE] = {name[len("all_") :]: value for name, value in start.items() if name.startswith("all_")}
        table = Table(
            [
                ("packs", WORDS.get),
                ("masked tokens, nats", lambda name: metrics(rows[name])[0]),
                ("right, %", lambda name: metrics(rows[name])[1]),
                ("next sentence right, %", lambda name: metrics(rows[name])[2]),
                ("loss against unpacked", lambda name: found[name].words("+.3f") if name in found else None),
            ],
            [REFERENCE, *found],
        )
        return [
            "At once: the shared start, scored on the held-out sequences **in packs**, as each variant sees packs. "
            "Nothing is trained. Interval: over sequences. Scored unpacked it is one model, whatever the variant.",
            "",
            table,
            "After training: every run scored on the same sequences **unpacked**.",
            "",
            *super().parts(),
        ]

    def sizes(self) -> str:
        size = self.settings
        sequences = f"{size['sequences']:,} sequences a run"
        updates = sorted({int(value) for name in self.variants() for value in self.last(name, "updates")})
        if updates:
            sequences += f" in {' to '.join(f'{each:,}' for each in dict.fromkeys((updates[0], updates[-1])))} updates"
        heads = f"its heads trained with {counted(size['start'], 'unpacked update')} that all runs share"
        return f"{size['checkpoint'] or 'A network from nothing'}, {heads}, then {sequences}. {self.network()}"

    # ---- the pictures

    def columns(self, name: str, value: str) -> np.ndarray:
        """From the start on, which has processed nothing."""
        found = super().columns(name, value)
        start = self._rows(START)
        first = start[-1][value] if start and value.startswith(("mlm_", "nsp_", "loss")) else 0.0
        return np.concatenate([np.full((len(found), 1), first), found], axis=1)

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        found = {WORDS[name]: interval for name, interval in self.at_once().items()}
        at_once = {"at_once": [against(found, "A trained BERT on packs, at once")]} if found else {}
        return {**at_once, **super().pictures()}

    def curves(self) -> List[Lines]:
        """Without those over time; the loss of each packed run minus that of packed training as it should be."""
        lines = []
        for name in self.in_curves:
            seeds = self.common(name, CLAIM) if name not in (CLAIM, REFERENCE) else []
            if seeds:
                places = [[self.seeds(each).index(seed) for seed in seeds] for each in (name, CLAIM)]
                losses = [self.columns(each, "loss")[place] for each, place in zip((name, CLAIM), places)]
                sequences = 1e-3 * self.columns(name, "sequences")[places[0]]
                lines.append(curve(WORDS[name], sequences, losses[0] - losses[1]))
        drawn = super().curves()[:2]
        if lines:
            x, y = "sequences processed, thousands", "nats, masked token and next sentence"
            drawn.append(curves("Loss more than packed", x, y, lines, [("packed, all adjustments", 0.0)]))
        return drawn
