"""The runs of the pre-training experiment: what each changes, and which of them set the margin."""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

REFERENCE, CLAIM, CONTROL = "unpacked", "packed", "no_mask"
CALIBRATION = (CLAIM, CONTROL)
CALIBRATION_SEEDS = (101, 102)  # of the runs that set the margin, at length the first; no compared run has them


class Variant(NamedTuple):
    words: str
    store: str = "packed"
    adjustment: str = "accumulation"
    change: str = ""  # of the batch, by the names in CHANGES
    rate_times_p: bool = False
    next_sentence: bool = True


VARIANTS: Dict[str, Variant] = {
    "unpacked": Variant("unpacked", "unpacked", "none"),
    "packed": Variant("packed, all adjustments"),
    "no_mask": Variant("without the mask", change="mask"),
    "betas": Variant("betas ** p, larger updates", adjustment="betas"),
    "none": Variant("no adjustment, larger updates", adjustment="none"),
    "no_positions": Variant("without the position reset", change="positions"),
    "separators": Variant("without mask and position reset", change="mask positions"),
    "micro_batch_means": Variant("losses as means over micro-batches", change="scales"),
    "betas_rate": Variant("betas ** p, learning rate x p", adjustment="betas", rate_times_p=True),
    "depth_2": Variant("packed at depth 2", "depth_2"),
    "depth_8": Variant("packed at depth 8", "depth_8"),
    "no_nsp": Variant("without next sentence prediction", next_sentence=False),
}
# Of each size, the most telling first; at length only what no smaller size can tell.
OF_SIZE: Dict[str, Tuple[str, ...]] = {
    "quick": tuple(VARIANTS)[:3],
    "minutes": tuple(VARIANTS),
    "hours": tuple(VARIANTS)[:8],
    "full": tuple(VARIANTS)[:8],
}
