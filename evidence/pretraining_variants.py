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
    times: int = 1  # the packs of an update


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


def _larger_updates() -> Dict[str, Variant]:
    """The rules for larger updates at other p than the packing factor: at depth 2, with 2 and 3 times the packs."""
    found = {}
    for rule in ("betas", "none", "betas_rate"):
        base = VARIANTS[rule]
        found[f"{rule}_depth_2"] = base._replace(words=f"{base.words}, depth 2", store="depth_2")
        for times in (2, 3):
            found[f"{rule}_times_{times}"] = base._replace(words=f"{base.words}, {times} times the packs", times=times)
    return found


FIRST = tuple(VARIANTS)[:8]  # what is run at length
VARIANTS.update(_larger_updates())
# The runs of each rule of section 3.3, from small updates to large ones; the reference has p = 1.
RULES = {
    words: ("unpacked", *(f"{rule}{part}" for part in ("_depth_2", "", "_times_2", "_times_3")))
    for rule, words in {
        "betas_rate": "betas ** p, learning rate x p",
        "betas": "betas ** p",
        "none": "no adjustment",
    }.items()
}
# Beside them accumulation / p, which keeps the sequences of an update: at depth 2 and at the experiment's own.
ACCUMULATED = ("unpacked", "depth_2", "packed")
IN_TABLE = tuple(name for name in VARIANTS if "_times_" not in name and not name.endswith("_depth_2"))

# Of each size, the most telling first; at length only what no smaller size can tell.
OF_SIZE: Dict[str, Tuple[str, ...]] = {
    "quick": tuple(VARIANTS)[:3],
    "minutes": tuple(VARIANTS),
    "hours": FIRST,
    "full": FIRST,
}
