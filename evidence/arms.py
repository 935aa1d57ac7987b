"""The arms of the pre-training experiments: changes of batches before the engine gets them, or of the configuration."""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple

import numpy as np

from evidence.packed_runs import micro_batch_means, update_scales
from ipu_packed_bert.data.global_batches import Batch


class Arm(NamedTuple):
    """The updates of a run.

    Packs have a mask over the row, like the program of an IPU; rows of one sequence have the attention of the host
    engine, which skips padding.
    """

    words: str
    alone: bool = False  # each sequence of the packs is alone in a row
    changes: str = ""  # of each batch, by the names in CHANGES
    adjustment: str = "accumulation"
    double: bool = False

    @property
    def attention(self) -> str:
        """The setting engine.attention."""
        return "auto" if self.alone else "eager"


def without_mask(batch: Batch) -> Batch:
    """Let all tokens of a pack attend to one another; padding stays hidden."""
    return {**batch, "input_mask": (batch["input_mask"] > 0).astype(batch["input_mask"].dtype)}


def without_position_reset(batch: Batch) -> Batch:
    """Set positions 0, 1, 2, ... through the pack, across its sequences; 0 in padding."""
    through = np.arange(batch["positions"].shape[1], dtype=batch["positions"].dtype)
    return {
        **batch,
        "positions": np.where(batch["input_mask"] > 0, through, np.zeros_like(through)),
    }


def reversed_rows(batch: Batch) -> Batch:
    """Reverse the rows of an update, so that other rows share a micro-batch; the update is the same."""
    return {name: np.ascontiguousarray(values[::-1]) for name, values in batch.items()}


CHANGES: Dict[str, Callable[[Batch, int], Batch]] = {
    "mask": lambda batch, _: without_mask(batch),
    "positions": lambda batch, _: without_position_reset(batch),
    "order": lambda batch, _: reversed_rows(batch),
    "scales": micro_batch_means,
}

PACKED = "packed"
UNPACKED = "unpacked"
AGAIN = "reordered"
NO_MASK = "no_mask"
MEANS = "means"
DOUBLE = "_float64"  # ends the name of an arm in double precision
ARMS: Dict[str, Arm] = {
    PACKED: Arm("packed"),
    UNPACKED: Arm("unpacked", alone=True),
    AGAIN: Arm("packed, rows of an update in reverse", changes="order"),
    NO_MASK: Arm("without the mask", changes="mask"),
    MEANS: Arm("losses as means over micro-batches", changes="scales"),
    "no_positions": Arm("without the position reset", changes="positions"),
    "separators": Arm("without mask and position reset", changes="mask positions"),
    "betas": Arm("betas ** p, larger updates", adjustment="betas"),
    "none": Arm("no adjustment, larger updates", adjustment="none"),
}
ARMS.update({name + DOUBLE: ARMS[name]._replace(double=True) for name in (PACKED, UNPACKED, MEANS)})

# The orders of the same sequences (`order`).
ORDERS = {
    "packs": "in the order of packs",
    "random": "in random order",
    "random_again": "in another random order",
    "sorted": "from short to long",
    "by_word": "sorted by their most frequent word",
}
PILOT_SEEDS = (101, 102, 103)  # for the margins only


def changed(batch: Batch, arm: Arm, micro_batch: int) -> Batch:
    """Change a batch for an arm, in double precision also its scales."""
    if arm.double:
        batch = update_scales(batch, micro_batch)
    for name in arm.changes.split():
        batch = CHANGES[name](batch, micro_batch)
    return batch
