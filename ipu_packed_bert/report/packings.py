"""Packings of a histogram, kept in the cache (a packer's result never changes), and the packing factors they give."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple, Optional, Tuple

import pack_data
from ipu_packed_bert.cycles.matmul import write_cache
from ipu_packed_bert.data.factors import PackingFactor, planned_factor
from ipu_packed_bert.settings.config import Config
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram

PackingKey = Tuple[str, Optional[int]]  # packer, packing depth (None: unlimited)


class PackingSummary(NamedTuple):
    """What the report needs of a packing."""

    efficiency: float
    packing_factor: float
    largest_depth: int


def packing(
    histogram: LengthHistogram, packer: str, depth: Optional[int], *, folder: Path
) -> PackingSummary:
    """One packing, from the cache in `folder` where it is known."""
    key = repr((_sources_digest(), [int(count) for count in histogram.counts], packer, depth))
    path = folder / f"packing_{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return PackingSummary(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # absent or damaged: pack again
        made = get_packer(packer)(histogram, max_sequences_per_pack=depth)
        found = PackingSummary(made.efficiency, made.packing_factor, made.largest_depth)
        write_cache(path, json.dumps(found._asdict()))
        return found


def factor_of(
    config: Config,
    packer: str,
    depth: Optional[int],
    *,
    given: Optional[float],
    histogram: Optional[LengthHistogram],
    folder: Path,
) -> PackingFactor:
    """Sequences of a pack: given, of the histogram if it has the configuration's length, or the paper's.

    histogram: None: the published one of this length.
    """
    slots = config.data.max_sequence_length
    if depth == 1:
        return PackingFactor(1.0, "unpacked")

    def packed(histogram: LengthHistogram, packer: str, depth: Optional[int]) -> float:
        return packing(histogram, packer, depth, folder=folder).packing_factor

    made = planned_factor(slots, packer, depth, given=given, histogram=histogram, factor_of=packed)
    if made is None:
        raise ValueError(
            f"{config.path}: no histogram of length {slots} is known; give --packing-factor or --histogram"
        )
    return made


def _sources_digest() -> str:
    """Return a digest that changes whenever a packer's source does."""
    digest = hashlib.sha256()
    for path in sorted(Path(pack_data.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
