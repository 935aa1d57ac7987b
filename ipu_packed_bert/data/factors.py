"""The packing factor of a data set that does not exist yet: from an option, a histogram, or the paper."""

from __future__ import annotations

import argparse
import math
import sys
from functools import lru_cache
from typing import NamedTuple, Optional

from pack_data.packers import get_packer, packs_at_depth
from pack_data.packing.histogram import PUBLISHED, LengthHistogram

# Packing factors in the paper's Table 2 (packedBERT) by slots; no histogram for 128 slots is published.
PAPER_FACTORS = {128: 1.17, 384: 1.70}


class PackingFactor(NamedTuple):
    """Mean sequences per pack, and where the figure comes from."""

    value: float
    source: str


def parse_factor(text: str) -> float:
    """Parse sequences per pack, a number of at least 1, for argparse."""
    try:
        return checked_factor(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a packing factor: a pack holds at least one sequence; pass a number of at least 1"
        ) from None


def checked_factor(value: float, depth: Optional[int] = None) -> float:
    """Return the value if packs of up to `depth` sequences can have this packing factor.

    Depth 1 is not checked, because unpacked runs ignore the factor and may share the option with packed ones.

    Raises:
        ValueError: if the value is below 1, not finite, or above the depth.
    """
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(
            f"--packing-factor {value:g}: a pack holds at least one sequence; pass a number of at least 1"
        )
    if depth not in (None, 1) and value > depth:
        raise ValueError(
            f"--packing-factor {value:g}: a pack holds at most {depth} sequences (data.max_sequences_per_pack); "
            "pass no more than that, or raise the depth"
        )
    return value


def published_for(slots: int) -> Optional[LengthHistogram]:
    """Return the published histogram for packs of some number of slots, None if there is none."""
    for name in PUBLISHED:
        if name.endswith(f"_{slots}"):
            return LengthHistogram.published(name)
    return None


def planned_factor(
    slots: int,
    packer: str,
    max_sequences_per_pack: Optional[int],
    *,
    given: Optional[float] = None,
    histogram: Optional[LengthHistogram] = None,
) -> Optional[PackingFactor]:
    """Return ``given``, or the factor of a histogram for packs of `slots`, or the paper's, or None.

    Args:
        slots: slots of a pack.
        packer: name of the packer; the optimal one replaces packers that do not support this depth.
        max_sequences_per_pack: packing depth, None for unlimited.
        given: value of --packing-factor, if any.
        histogram: replaces the published one, if it is for packs of `slots`.

    Returns:
        The factor and its source.

    Raises:
        ValueError: ``given`` is not possible at this depth.
    """
    if given is not None:
        return PackingFactor(checked_factor(given, max_sequences_per_pack), "--packing-factor")
    lengths = published_for(slots) if histogram is None else histogram
    if lengths is not None and lengths.max_sequence_length == slots:
        if packer == "none" or not packs_at_depth(packer, max_sequences_per_pack):
            packer = "optimal"
        published = "published " if lengths.name in PUBLISHED else ""
        value = _packed_factor(lengths, packer, max_sequences_per_pack)
        return PackingFactor(value, f"the {published}histogram {lengths.name}, packed by {packer}")
    if slots in PAPER_FACTORS:
        return PackingFactor(
            PAPER_FACTORS[slots],
            f"the paper's Table 2 for {slots} slots (packedBERT); the data set's factor applies once it is built",
        )
    return None


@lru_cache(maxsize=None)
def _packed_factor(
    histogram: LengthHistogram, packer: str, max_sequences_per_pack: Optional[int]
) -> float:
    print(
        f"packing the histogram {histogram.name} with {packer} for its packing factor; pass --packing-factor to skip"
        " this",
        file=sys.stderr,
        flush=True,
    )
    packing = get_packer(packer)(histogram, max_sequences_per_pack=max_sequences_per_pack)
    return packing.packing_factor
