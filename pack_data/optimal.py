"""Packing at the limit, with a proof: `python -m pack_data.optimal`.

The cutting-stock linear programme (column_generation.py) says how few packs there can be; its solution is rounded to
whole packs (rounding.py); its prices, as whole numbers, become a certificate that anyone can check (certificate.py).
"""
from __future__ import annotations

import argparse
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from pack_data.certificate import Certificate, best_pack_value, prove, statement
from pack_data.column_generation import relax
from pack_data.command import run_main, run_packer
from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.packing import Packing
from pack_data.rounding import whole_packs

_PRICE_UNITS = 1 << 40  # prices are rounded down to multiples of 1 / this: a loss of less than 1e-9 packs in a thousand


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int]) -> Packing:
    """Packs with as few packs as the linear programme allows, give or take one or two; the result carries the proof.

    max_sequences_per_pack None is unlimited.
    """
    start = time.perf_counter()
    S, counts, lengths = histogram.max_sequence_length, histogram.counts, histogram.lengths
    packs: List[Tuple[Tuple[int, ...], int]] = []
    prices: List[int] = []
    if len(lengths):
        room = S // int(lengths[0])
        depth = room if max_sequences_per_pack is None else min(max_sequences_per_pack, room)
        relaxation = relax(lengths, counts[lengths], S, depth)
        prices = np.floor(relaxation.prices * _PRICE_UNITS).astype(np.int64).tolist()
        packs = whole_packs(relaxation, counts, depth, target=int(np.ceil(relaxation.bound - 1e-6)))
    denominator = max(1, best_pack_value(lengths.tolist(), prices, S, max_sequences_per_pack))
    certificate = Certificate(S, max_sequences_per_pack, tuple(lengths.tolist()), tuple(prices), denominator)
    worth = sum(count * price for count, price in zip(counts[lengths].tolist(), prices))
    return Packing.of(
        "optimal", histogram, max_sequences_per_pack, packs, solve_seconds=time.perf_counter() - start,
        lower_bound=-(-worth // denominator), lp_bound=float(Fraction(worth, denominator)), certificate=certificate)


def main(argv: Optional[Sequence[str]] = None) -> int:
    made: List[Packing] = []

    def pack_and_keep(histogram: LengthHistogram, **options: Any) -> Packing:
        made.append(pack(histogram, **options))
        return made[-1]

    json = False

    def options(args: argparse.Namespace) -> Dict[str, Any]:
        nonlocal json
        json = args.json
        return {}

    status = run_packer(
        argv, pack_and_keep, name="optimal", options=options,
        description="As few packs as provably possible: the cutting-stock linear programme, rounded, with a certificate.")
    for packing in made:
        if not json:
            print("\n" + statement(packing, prove(packing.certificate, packing.placed())))
    return status


if __name__ == "__main__":
    raise SystemExit(run_main(main))
