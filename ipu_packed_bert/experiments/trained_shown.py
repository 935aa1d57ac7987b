"""The tables and the pictures of the experiment on a trained BERT, from its finished cells alone."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional

import numpy as np

from ipu_packed_bert.experiments import tables
from ipu_packed_bert.experiments.pretraining_shown import PretrainingShown, interval_words
from ipu_packed_bert.experiments.pretraining_variants import CLAIM, CONTROL, REFERENCE
from ipu_packed_bert.experiments.runner import Row
from ipu_packed_bert.experiments.statistics import CONFIDENCE, Interval, difference
from pack_data.cli.command import counted

START, AT_ONCE = "start", "at_once"  # cells
TESTED = (CLAIM, CONTROL, REFERENCE)
IN_TABLE = (*TESTED, "no_positions", "separators", "micro_batch_means")


class TrainedShown(PretrainingShown):
    in_table = (REFERENCE, *(name for name in IN_TABLE if name != REFERENCE))
    in_curves = in_table[:-1]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.size = {**self.size, **self.facts.get("model", {})}  # of another checkpoint than the size's

    def _rows(self, variant: str) -> List[Row]:
        """Of the cell of this name, whatever its seed; none where it is not finished."""
        return next((rows for cell, rows in self._cells.items() if cell.variant == variant), [])

    # ---- at once -----------------------------------------------------------------------------------------------------

    def at_once(self) -> Dict[str, Interval]:
        """What packs cost the start, as each variant sees packs, more than the same sequences unpacked."""
        start = self._rows(START)
        if not start:
            return {}
        unpacked = self._scores(start[-1])
        return {row["change"]: difference([self._scores(row)], [unpacked]) for row in self._rows(AT_ONCE)}

    def at_once_table(self) -> str:
        found, rows = self.at_once(), {row["change"]: row for row in self._rows(AT_ONCE)}
        if not found:
            return ""
        start = self._rows(START)[-1]
        unpacked = {name[len("all_") :]: value for name, value in start.items() if name.startswith("all_")}
        lines = [["unpacked", *_metrics(unpacked), ""]]
        lines += [[self.words[name], *_metrics(rows[name]), interval_words(each)] for name, each in found.items()]
        return (
            "At once: the shared start, scored on the held-out sequences **in packs**, as each variant sees packs. "
            "Nothing is trained. Interval: over sequences. Scored unpacked it is one model, whatever the variant.\n\n"
            + tables.markdown(
                ["packs", "masked tokens, nats", "right, %", "next sentence right, %", "loss against unpacked"], lines
            )
            + "\nAfter training: every run scored on the same sequences **unpacked**.\n\n"
        )

    # ---- text --------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        return self.at_once_table() + super().text()

    def sizes(self) -> str:
        size = self.size
        sequences = f"{size['sequences']:,} sequences a run"
        updates = sorted({int(value) for name in self.variants() for value in self.last(name, "updates")})
        if updates:
            sequences += f" in {' to '.join(f'{each:,}' for each in dict.fromkeys((updates[0], updates[-1])))} updates"
        heads = f"its heads trained with {counted(size['start'], 'unpacked update')} that all runs share"
        data = super().sizes().rsplit(", ", 1)[0]
        return f"{size['checkpoint'] or 'A network from nothing'}, {heads}, then {sequences}. {data}"

    # ---- pictures ----------------------------------------------------------------------------------------------------

    def columns(self, name: str, value: str) -> np.ndarray:
        """From the start on, which has processed nothing."""
        found = super().columns(name, value)
        start = self._rows(START)
        first = start[-1][value] if start and value.startswith(("mlm_", "nsp_", "loss")) else 0.0
        return np.concatenate([np.full((len(found), 1), first), found], axis=1)

    def draw(self, folder: Path, stem: str = "") -> List[Path]:
        from ipu_packed_bert.experiments import pictures

        found = self.at_once()
        if not found:
            return super().draw(folder, stem)
        path = Path(folder) / f"{stem}at_once.png"
        bars = [pictures.Bar(self.words[name], interval, control=name == CONTROL) for name, interval in found.items()]
        pictures.draw_differences(
            bars,
            path,
            margin=None,
            title="A trained BERT on packs, at once",
            x_label="nats more than on the same sequences unpacked",
            caption=f"Masked token and next sentence together. Bar: {CONFIDENCE:.0%} interval over sequences.",
        )
        return [path, *super().draw(folder, stem)]

    def _panels(self):
        panels = super()._panels()[:2]
        against = self._against_packed()
        return panels if against is None else [*panels, against]

    def _against_packed(self) -> Optional[object]:
        """The loss of each packed run minus that of packed training as it should be, seed by seed."""
        from ipu_packed_bert.experiments.pictures import Curve, Line, Panel

        curves = []
        for name in self.in_curves:
            if name in (CLAIM, REFERENCE):
                continue
            both = [self.seeds(each) for each in (name, CLAIM)]
            common = [seed for seed in both[0] if seed in both[1]]
            if not common:
                continue
            places = [[seeds.index(seed) for seed in common] for seeds in both]
            losses = [self.columns(each, "loss")[place] for each, place in zip((name, CLAIM), places)]
            curves.append(
                Curve(self.words[name], 1e-3 * self.columns(name, "sequences")[places[0]], losses[0] - losses[1])
            )
        if not curves:
            return None
        return Panel(
            "Loss more than packed, all adjustments",
            "sequences processed, thousands",
            "nats, masked token and next sentence",
            curves,
            Line(0.0, "packed, all adjustments"),
        )

    def _caption(self, between: str = " ") -> str:
        return f"{super()._caption(between)} Along the runs, and in the numbers here, {self.size['along']:,} of them."


def _metrics(row: Row) -> List[str]:
    return [f"{row['mlm_loss']:.3f}", f"{100 * row['mlm_accuracy']:.1f}", f"{100 * row['nsp_accuracy']:.1f}"]
