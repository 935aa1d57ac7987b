"""Packing at the limit, with a proof: `python -m pack_data.optimal`.

The cutting-stock linear programme (column_generation.py) says how few packs there can be; its solution is rounded to
whole packs (rounding.py); its prices, as whole numbers, become a certificate that anyone can check (certificate.py).
"""
from __future__ import annotations

import argparse
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from pack_data.balance import AttentionWork, balance_attention
from pack_data.certificate import Certificate, best_pack_value, prove_packing, statement
from pack_data.column_generation import FULL_ROWS, Relaxation, relax
from pack_data.command import ArgumentParser, depth_text, run_main, run_packer
from pack_data.fit_decreasing import fit_decreasing
from pack_data.histogram import LengthHistogram
from pack_data.packing import Packing
from pack_data.rounding import Packs, whole_packs

_PRICE_UNITS = 1 << 40  # prices are rounded down to multiples of 1 / this, a loss of less than 1e-9 of the bound
_SMALL = 256  # lengths; then the full programme is solved wherever the coarse one leaves a gap
_BENCHMARK_DEPTHS = (2, 3, 4, 8, 16, None)


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int], balance: Optional[str] = None) -> Packing:
    """Packs with as few packs as the linear programme allows, give or take one or two; the result carries the proof.

    max_sequences_per_pack None is unlimited.  balance "attention" evens out the sum of squared lengths over the packs
    afterwards; their number stays.
    """
    if balance not in (None, "attention"):
        raise ValueError(f"balance {balance!r}: there is 'attention', or None")
    start = time.perf_counter()
    S, counts, lengths = histogram.max_sequence_length, histogram.counts, histogram.lengths
    packs: Packs = []
    prices: List[int] = []
    if len(lengths):
        room = S // int(lengths[0])
        depth = room if max_sequences_per_pack is None else min(max_sequences_per_pack, room)
        packs = fit_decreasing(histogram, depth, lambda free: np.argsort(free, kind="stable"))
        relaxation = relax(lengths, counts[lengths], S, depth, incumbent=_number(packs))
        packs = _fewer(packs, relaxation, counts, depth)
        gap = _number(packs) - _target(relaxation)
        if not relaxation.exact and (gap > 2 and len(lengths) <= FULL_ROWS or gap > 0 and len(lengths) <= _SMALL):
            full = relax(lengths, counts[lengths], S, depth, incumbent=_number(packs), exact=True)
            relaxation = full if full.bound > relaxation.bound else relaxation
            packs = _fewer(packs, full, counts, depth)
        prices = np.floor(relaxation.prices * _PRICE_UNITS).astype(np.int64).tolist()
    denominator = max(1, best_pack_value(lengths.tolist(), prices, S, max_sequences_per_pack))
    worth = sum(count * price for count, price in zip(counts[lengths].tolist(), prices))
    packing = Packing.of(
        "optimal", histogram, max_sequences_per_pack, packs, solve_seconds=time.perf_counter() - start,
        lower_bound=-(-worth // denominator), lp_bound=float(Fraction(worth, denominator)),
        certificate=Certificate(S, max_sequences_per_pack, tuple(lengths.tolist()), tuple(prices), denominator))
    return packing if balance is None else balance_attention(packing)


def _number(packs: Packs) -> int:
    return sum(count for _, count in packs)


def _target(relaxation: Relaxation) -> int:
    """Packs that the bound asks for; solvers leave it a little too high or low, so a whole number is taken as met."""
    return int(np.ceil(relaxation.bound * (1 - 1e-12) - 1e-6))


def _fewer(packs: Packs, relaxation: Relaxation, counts: np.ndarray, depth: int) -> Packs:
    """These packs, or those that the relaxation leads to if they are fewer."""
    if _number(packs) <= _target(relaxation):
        return packs
    return min(packs, whole_packs(relaxation, counts, depth, _target(relaxation)), key=_number)


def benchmark_set(folder: Path, depths: Sequence[Optional[int]] = _BENCHMARK_DEPTHS) -> None:
    """Packs every histogram `*.csv` under the folder at every depth; prints packs, bound, gap and seconds as it goes."""
    paths = sorted(folder.rglob("*.csv"))
    if not paths:
        raise ValueError(f"{folder}: no histogram there; give a folder with CSV files 'length,count'")
    print(f"{'histogram':<34} {'S':>5} {'depth':>9} {'packs':>10} {'lp bound':>15} {'gap':>4} {'seconds':>8} {'cpu':>7}")
    gaps: List[int] = []
    slowest = 0.0
    for path in paths:
        histogram = LengthHistogram.from_csv(path, _declared_maximum(path))
        for depth in depths:
            cpu = time.process_time()
            packing = pack(histogram, max_sequences_per_pack=depth)
            cpu = time.process_time() - cpu
            packing.check(histogram)
            prove_packing(packing)
            gaps.append(packing.packs - packing.lower_bound)
            slowest = max(slowest, packing.solve_seconds)
            print(
                f"{histogram.name:<34} {histogram.max_sequence_length:>5} {depth_text(depth):>9} {packing.packs:>10,} "
                f"{packing.lp_bound:>15,.3f} {gaps[-1]:>4} {packing.solve_seconds:>8.2f} {cpu:>7.2f}", flush=True)
    print(
        f"{len(gaps)} packings, each proved: {gaps.count(0)} at the bound, {gaps.count(1)} one pack above it, "
        f"{gaps.count(2)} two, {sum(gap > 2 for gap in gaps)} more; the slowest took {slowest:.2f} s")


def _declared_maximum(path: Path) -> int:
    """The number in the file's name that no length exceeds (`squad_1_1_384.csv`: 384), else the longest length."""
    longest = LengthHistogram.from_csv(path, 1 << 20).longest
    return min((int(number) for number in re.findall(r"\d+", path.stem) if int(number) >= longest), default=longest)


def main(argv: Optional[Sequence[str]] = None) -> int:
    benchmark = ArgumentParser(add_help=False)
    benchmark.add_argument("--benchmark-set", type=Path)
    folder, others = benchmark.parse_known_args(argv)
    if folder.benchmark_set is not None:
        if others:
            raise ValueError(f"--benchmark-set goes alone, without {others[0]}")
        benchmark_set(folder.benchmark_set)
        return 0

    lines: List[str] = []

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--balance", choices=["attention"],
            help="even out the sum of squared lengths over the packs; their number stays")
        parser.add_argument(
            "--benchmark-set", metavar="FOLDER", help="instead: pack every histogram in the folder at depths 2 to unlimited")

    def options(args: argparse.Namespace) -> Dict[str, Any]:
        return {"balance": args.balance, "quiet": args.json}

    def pack_and_report(
        histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int], balance: Optional[str], quiet: bool,
    ) -> Packing:
        packing = pack(histogram, max_sequences_per_pack=max_sequences_per_pack)
        before = AttentionWork.of(packing)
        if balance is not None:
            packing = balance_attention(packing)
        proof = prove_packing(packing)
        if not quiet:
            if balance is not None:
                after = AttentionWork.of(packing)
                lines.append(f"attention work of a pack (sum of squared lengths): {before}; balanced: {after}")
            lines.append(statement(packing, proof))
        return packing

    status = run_packer(
        argv, pack_and_report, name="optimal", add_options=add_options, options=options,
        description="As few packs as provably possible: the cutting-stock linear programme, rounded, with a certificate.")
    for line in lines:
        print("\n" + line)
    return status


if __name__ == "__main__":
    raise SystemExit(run_main(main))
