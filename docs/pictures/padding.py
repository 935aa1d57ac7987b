"""README's picture: the rows of the published Wikipedia histogram before and after packing.

    python docs/pictures/padding.py [FILE]        # default: padding.svg beside this script

Both halves have one scale, so their heights are the numbers of rows. Each line of pixels is the row at that place among
all rows, which stand in the order of their longest sequence.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import List, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data import LengthHistogram, Packing, get_packer
from pack_data.files import write_atomically

HERE = Path(__file__).resolve().parent
DEPTH = 3
WIDTH, LINES = 300, 256  # pixels of a row, and of the rows before packing
PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 356" width="700" height="356" role="img">
<title>{title}</title>
<style>
text {{ font: 16px sans-serif; fill: #1a202c }} .large {{ font-weight: bold }}
.page {{ fill: #ffffff; stroke: #cbd5e0 }}
.padding {{ fill: #f6ad55 }} .s1 {{ fill: #1a4e8a }} .s2 {{ fill: #4a90d9 }} .s3 {{ fill: #a3cdf5 }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #edf2f7 }} .page {{ fill: #1a202c; stroke: #4a5568 }} }}
</style>
<rect class="page" x="0.5" y="0.5" width="699" height="355" rx="8"/>
{content}
</svg>
"""


class Half(NamedTuple):
    """A packing and where it stands."""

    packing: Packing
    left: int
    heading: str


def lines(packing: Packing, count: int) -> List[Tuple[int, ...]]:
    """The strategies of `count` rows at even distances among all rows, longest first sequences first."""
    ends = np.cumsum(packing.repeats, dtype=np.int64)
    places = (2 * np.arange(count) + 1) * packing.packs // (2 * count)
    return [packing.strategies[each] for each in np.searchsorted(ends, places, side="right").tolist()]


def areas(rows: Sequence[Tuple[int, ...]], slots: int, left: int, top: int) -> List[str]:
    """The padding as one block, and on it the first, second, ... sequences of all rows, the deepest layer first."""
    drawn = [f'<rect class="padding" x="{left}" y="{top}" width="{WIDTH}" height="{len(rows)}"/>']
    for layer in range(max(map(len, rows)), 0, -1):
        ends = groupby(left + sum(row[:layer]) * WIDTH / slots for row in rows)
        steps = "".join(f"H{end:.1f}v{len(list(same))}" for end, same in ends)
        drawn.append(f'<path class="s{layer}" d="M{left} {top}{steps}H{left}z"/>')
    return drawn


def picture(before: Packing, after: Packing) -> str:
    """The page, as SVG. The share of padding in both headings is exact; the areas are those of the lines drawn."""
    slots = before.max_sequence_length
    halves = [Half(before, 30, "Each sequence in its row"), Half(after, 370, f"Up to {DEPTH} sequences in a row")]
    content, words = [], []
    for packing, left, heading in halves:
        share = f"{packing.packs:,} rows, {1 - packing.efficiency:.1%} padding"
        words.append(f"{heading}: {share}")
        rows = lines(packing, round(LINES * packing.packs / before.packs))
        content += [
            f'<text class="large" x="{left}" y="30">{heading}</text>',
            f'<text x="{left}" y="52">{share}</text>',
            *areas(rows, slots, left, 64),
        ]
    for number, (kind, name) in enumerate(
        [("s1", "first sequence of a row"), ("s2", "second"), ("s3", "third"), ("padding", "padding")]
    ):
        content.append(f'<rect class="{kind}" x="370" y="{216 + 26 * number}" width="18" height="18"/>')
        content.append(f'<text x="396" y="{231 + 26 * number}">{name}</text>')
    content.append(
        f'<text x="30" y="343">{slots} slots, {before.sequences:,} sequences of Wikipedia; same scale</text>'
    )
    return PAGE.format(title="; ".join(words), content="\n".join(content))


def draw() -> str:
    histogram = LengthHistogram.published("wikipedia_512")
    before, after = (
        get_packer(name)(histogram, max_sequences_per_pack=depth) for name, depth in [("none", 1), ("optimal", DEPTH)]
    )
    return picture(before, after)


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "padding.svg", draw().encode())
