"""The optimal packer, with a proof: `python -m pack_data.optimal`.

Decreasing fits and bounds that need no solver come first (solver/search.py). If they leave a gap that is worth more
time, the cutting-stock linear programme bounds the number of packs (solver/column_generation.py). Its solution is
rounded to whole packs (solver/rounding.py); its prices, as whole numbers, become a certificate that anyone can check.
"""

from __future__ import annotations

import time
from typing import Optional

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import packing_depth, shown
from pack_data.solver.free_slots import count_packs
from pack_data.solver.search import Limits, ProvedPacks, pack_quickly


def pack(
    histogram: LengthHistogram,
    *,
    max_sequences_per_pack: Optional[int],
    budget: Optional[float] = None,
) -> Packing:
    """Pack into nearly the fewest packs possible, with a proof.

    No packing of this depth has fewer packs than `lower_bound`, which is proved exactly; a better packing could save at
    most `packs - lower_bound`. This gap has no guaranteed limit; docs/packing.md gives measured ones. A step is begun
    only if its possible gain is worth its time (solver/search.py).

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth; None for unlimited.
        budget: seconds after which no step is begun, and within which each one is; the result then depends on the speed
            of the machine. None begins the steps that pay.

    Returns:
        A packing with its lower bound and certificate.

    Raises:
        ValueError: the depth or the budget is out of range.
    """
    max_sequences_per_pack = packing_depth(max_sequences_per_pack)
    if budget is not None and not (isinstance(budget, (int, float)) and budget > 0):
        raise ValueError(f"budget = {shown(budget)}; must be a number of seconds above 0")
    start = time.perf_counter()
    best = _search(histogram, Limits.of(histogram, max_sequences_per_pack, budget))
    if budget is None:
        # A larger limit must not lead to more packs, so the packs of smaller limits count as well.
        for limits in best.smaller_limits():
            smaller = _search(histogram, limits)
            best = best.with_fewer(smaller.packs)
            # The bounds of still smaller limits are at least as high.
            if smaller.lower_bound >= count_packs(best.packs):
                break
    return Packing.of(
        "optimal",
        histogram,
        max_sequences_per_pack,
        best.packs,
        solve_seconds=time.perf_counter() - start,
        lower_bound=best.lower_bound,
        lp_bound=float(best.worth),
        certificate=best.certificate,
    )


def _search(histogram: LengthHistogram, limits: Limits) -> ProvedPacks:
    """Return the packs found at one limit on sequences per pack."""
    best = pack_quickly(histogram, limits)
    if not best.pays(best.programme_seconds):
        return best
    # Imported here because loading SciPy takes longer than most packings.
    from pack_data.solver.programmes import improved

    return improved(best)


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("optimal"))
