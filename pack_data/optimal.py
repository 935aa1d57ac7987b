"""The optimal packer, with a proof: `python -m pack_data.optimal`.

Decreasing fits and bounds that need no solver come first (solver/search.py). Where they leave a gap that is worth its
time, the cutting-stock linear programme says how few packs there can be (solver/column_generation.py). Its solution is
rounded to whole packs (solver/rounding.py); its prices, as whole numbers, become a certificate that anyone can check.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Optional

from pack_data.cli.command import positive_seconds, run_main
from pack_data.lengths.packer_command import run_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, statement
from pack_data.reading.fields import packing_depth
from pack_data.solver.search import Limits, found_quickly


def pack(
    histogram: LengthHistogram,
    *,
    max_sequences_per_pack: Optional[int],
    budget: Optional[float] = None,
) -> Packing:
    """Packs into very nearly as few packs as any packing of this depth can; the result carries the proof.

    What holds always: no packing of this depth has fewer packs than `lower_bound`, an exact proof, and `packs -
    lower_bound` is the most that a better packing could save. What is measured stands in docs/packing.md; the gap has
    no guaranteed limit. A step is begun only where what it may win is worth its time (solver/search.py).

    max_sequences_per_pack None is unlimited.  budget: seconds in which every step is begun, and after which none is;
    then the result depends on how fast the machine is.
    """
    max_sequences_per_pack = packing_depth(max_sequences_per_pack)
    start = time.perf_counter()
    found = found_quickly(histogram, Limits.of(histogram, max_sequences_per_pack, budget))
    if found.pays(found.programme_seconds):
        # Imported here because loading SciPy takes longer than most packings.
        from pack_data.solver.programmes import improved

        found = improved(found)
    return Packing.of(
        "optimal",
        histogram,
        max_sequences_per_pack,
        found.packs,
        solve_seconds=time.perf_counter() - start,
        lower_bound=found.lower_bound,
        lp_bound=float(found.worth),
        certificate=found.certificate,
    )


main = partial(
    run_packer,
    pack=pack,
    name="optimal",
    description="As few packs as possible, with a proof: the cutting-stock linear programme, rounded.",
    options={
        "--budget": dict(
            type=positive_seconds,
            metavar="SECONDS",
            help="stop improving after so long, with the best packing found and its proven gap; the result then "
            "depends on how fast the machine is",
        )
    },
    rare=["--budget"],
    statement=statement,
)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
