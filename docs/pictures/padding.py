"""README's picture: the rows of the published Wikipedia histogram before and after packing.

    python docs/pictures/padding.py [FILE]        # default: padding.svg beside this script

Both halves have one scale, so their widths are the numbers of rows. Each bar stands for as many rows, in the order of
their longest sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Tuple

import numpy as np

from pack_data import LengthHistogram, Packing, get_packer
from pack_data.display.picture import Axis, Bars, Series, write

HERE = Path(__file__).resolve().parent
DEPTH = 3
BARS = 120  # of the rows before packing
NAMES = ("first sequence of a row", "second", "third")


def rows_of(packing: Packing, count: int) -> List[Tuple[int, ...]]:
    """The strategies of `count` rows at even distances among all rows, longest first sequences first."""
    ends = np.cumsum(packing.repeats, dtype=np.int64)
    places = (2 * np.arange(count) + 1) * packing.packs // (2 * count)
    return [packing.strategies[each] for each in np.searchsorted(ends, places, side="right").tolist()]


def half(heading: str, packing: Packing, whole: int) -> Bars:
    """whole: rows of the widest half. The share of padding is exact; the areas are those of the bars."""
    bars = round(BARS * packing.packs / whole)
    rows = rows_of(packing, bars)
    free = [float(packing.max_sequence_length - sum(row)) for row in rows]
    lengths = [[float(row[place]) if place < len(row) else None for row in rows] for place in range(DEPTH)]
    none = (None,) * (BARS - bars)  # rows that are not needed any more
    series = [Series(name, (*each, *none)) for name, each in zip(NAMES, lengths)]
    return Bars(
        f"{heading}: {packing.packs:,} rows, {1 - packing.efficiency:.1%} padding",
        tuple(map(str, rows)) + ("",) * len(none),
        Axis("slots", most=float(packing.max_sequence_length)),
        (*series, Series("padding", (*free, *none), padding=True)),
        along="rows",
        stacked=True,
        edges=tuple(whole * number / BARS for number in range(BARS + 1)),
    )


def halves() -> Tuple[Bars, Bars]:
    histogram = LengthHistogram.published("wikipedia_512")
    before, after = (
        get_packer(name)(histogram, max_sequences_per_pack=depth) for name, depth in [("none", 1), ("optimal", DEPTH)]
    )
    return (
        half("Each sequence in its row", before, before.packs),
        half(f"Up to {DEPTH} sequences in a row", after, before.packs),
    )


if __name__ == "__main__":
    write(halves(), Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "padding.svg")
