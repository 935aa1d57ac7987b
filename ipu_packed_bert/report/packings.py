"""Packings of a histogram, kept in the cache (a packer is deterministic), and their packing factors."""

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
    """The figures of a packing in a report."""

    efficiency: float
    packing_factor: float
    largest_depth: int


def packing(
    histogram: LengthHistogram, packer: str, depth: Optional[int], *, folder: Path
) -> PackingSummary:
    """Return the summary of a packing, from the cache if it is there.

    Args:
        histogram: the lengths to pack.
        packer: name of the packer.
        depth: most sequences of a pack; None: unlimited.
        folder: directory of the cache.
    """
    key = repr((_sources_digest(), [int(count) for count in histogram.counts], packer, depth))
    path = folder / f"packing_{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return PackingSummary(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # absent or damaged: pack again
        result = get_packer(packer)(histogram, max_sequences_per_pack=depth)
        summary = PackingSummary(result.efficiency, result.packing_factor, result.largest_depth)
        write_cache(path, json.dumps(summary._asdict()))
        return summary


def factor_of(
    config: Config,
    packer: str,
    depth: Optional[int],
    *,
    option: Optional[float],
    histogram: Optional[LengthHistogram],
    folder: Path,
) -> PackingFactor:
    """Return the packing factor of a run: of --packing-factor, of the histogram, or of the paper.

    Args:
        config: the configuration of the run.
        packer: name of the packer.
        depth: most sequences of a pack; None: unlimited.
        option: the value of --packing-factor, which goes first.
        histogram: used if it has the configuration's length; None: the published histogram of this length.
        folder: directory of the cache.

    Raises:
        ValueError: there is none for the configuration's length.
    """
    slots = config.data.max_sequence_length
    if depth == 1:
        return PackingFactor(1.0, "unpacked")

    def packed(histogram: LengthHistogram, packer: str, depth: Optional[int]) -> float:
        return packing(histogram, packer, depth, folder=folder).packing_factor

    factor = planned_factor(
        slots, packer, depth, given=option, histogram=histogram, factor_of=packed
    )
    if factor is None:
        raise ValueError(
            f"{config.path}: data.max_sequence_length is {slots}, for which there is no published histogram; pass "
            "--packing-factor or --histogram"
        )
    return factor


def _sources_digest() -> str:
    """Return a digest of the sources of pack_data."""
    digest = hashlib.sha256()
    for path in sorted(Path(pack_data.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
