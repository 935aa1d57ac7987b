"""The packing factor of a data set that does not exist yet: given, of a histogram, or the paper's."""

from __future__ import annotations

import argparse
import math
import sys
from functools import lru_cache
from typing import Callable, NamedTuple, Optional

from pack_data.packers import get_packer, packs_at_depth
from pack_data.packing.histogram import PUBLISHED, LengthHistogram

# Packing factors in the paper's Table 2 (packedBERT) by slots; no histogram for 128 slots is published.
PAPER_FACTORS = {128: 1.17, 384: 1.70}


class PackingFactor(NamedTuple):
    """Mean sequences per pack, and where the figure comes from."""

    value: float
    source: str


def parse_factor(text: str) -> float:
    """An argparse type: sequences per pack, a number of at least 1."""
    try:
        return checked_factor(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no packing factor: a pack holds at least one sequence; give a number from 1 on"
        ) from None


def checked_factor(value: float, depth: Optional[int] = None) -> float:
    """The value, if it can be the packing factor of packs of up to `depth` sequences; ValueError otherwise.

    Depth 1 is not checked: unpacked runs, which stand beside packed ones with one option for all, do not use it.
    """
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"--packing-factor {value:g}: a pack holds at least one sequence; give a number from 1 on")
    if depth not in (None, 1) and value > depth:
        raise ValueError(
            f"--packing-factor {value:g}: a pack holds at most {depth} sequences (data.max_sequences_per_pack); "
            "give no more than that, or raise the depth"
        )
    return value


def published_for(slots: int) -> Optional[LengthHistogram]:
    """The published histogram for packs of so many slots, None where there is none."""
    return next((LengthHistogram.published(name) for name in PUBLISHED if name.endswith(f"_{slots}")), None)


def planned_factor(
    slots: int,
    packer: str,
    max_sequences_per_pack: Optional[int],
    *,
    given: Optional[float] = None,
    histogram: Optional[LengthHistogram] = None,
    factor_of: Optional[Callable[[LengthHistogram, str, Optional[int]], float]] = None,
) -> Optional[PackingFactor]:
    """The factor given, else that of a histogram for packs of so many slots, else the paper's; None where none exists.

    histogram: instead of the published one; it counts only if it is for packs of `slots`. factor_of: how a histogram is
    packed; None: by the packer, which is said on stderr. A packer that does not pack at this depth is replaced by the
    optimal one.
    """
    if given is not None:
        return PackingFactor(checked_factor(given, max_sequences_per_pack), "--packing-factor")
    found = published_for(slots) if histogram is None else histogram
    if found is not None and found.max_sequence_length == slots:
        packer = packer if packer != "none" and packs_at_depth(packer, max_sequences_per_pack) else "optimal"
        which = f"the published histogram {found.name}" if found.name in PUBLISHED else f"the histogram {found.name}"
        value = (factor_of or _packed_factor)(found, packer, max_sequences_per_pack)
        return PackingFactor(value, f"{which}, packed by {packer}")
    if slots in PAPER_FACTORS:
        return PackingFactor(
            PAPER_FACTORS[slots],
            f"the paper's Table 2 for {slots} slots (packedBERT); the data set's own counts once it is built",
        )
    return None


@lru_cache(maxsize=None)
def _packed_factor(histogram: LengthHistogram, packer: str, max_sequences_per_pack: Optional[int]) -> float:
    print(
        f"packing the histogram {histogram.name} with {packer} for its packing factor; --packing-factor saves the "
        "seconds",
        file=sys.stderr,
        flush=True,
    )
    return get_packer(packer)(histogram, max_sequences_per_pack=max_sequences_per_pack).packing_factor
