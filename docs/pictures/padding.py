"""README's picture: the rows of the published Wikipedia histogram before and after packing.

    python docs/pictures/padding.py [FILE]        # default: padding.svg beside this script

Both halves have one scale, so their widths are the numbers of rows. Each bar stands for as many rows, in the order of
their longest sequence. It is the first picture of `packed-bert look wikipedia_512`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Tuple

from pack_data import LengthHistogram, get_packer
from pack_data.display.picture import Bars, write
from pack_data.inspection.page_sections import rows_picture

HERE = Path(__file__).resolve().parent
DEPTH = 3


def halves() -> Tuple[Bars, Bars]:
    histogram = LengthHistogram.published("wikipedia_512")
    before, after = (
        get_packer(name)(histogram, max_sequences_per_pack=depth)
        for name, depth in [("none", 1), ("optimal", DEPTH)]
    )
    return (
        rows_picture(before, "Each sequence in its row", before.packs),
        rows_picture(after, f"Up to {DEPTH} sequences in a row", before.packs),
    )


if __name__ == "__main__":
    write(halves(), Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "padding.svg")
