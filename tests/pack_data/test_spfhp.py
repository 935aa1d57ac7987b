"""SPFHP and LPFHP against the published packers, to the pack."""

import pytest

from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram

# Packs by depth, and the deepest pack without a limit: the published programs (graphcore/examples,
# tutorials/blogs_code/packedBERT) on the published histograms.
# Fmt: skip.
PUBLISHED = [
    (
        "spfhp",
        "wikipedia_512",
        16,
        {
            1: 16_279_552,
            2: 10_101_683,
            3: 9_094_695,
            4: 8_658_996,
            6: 8_324_436,
            8: 8_224_673,
            10: 8_176_869,
            12: 8_166_708,
            16: 8_166_708,
            None: 8_166_708,
        },
    ),
    ("spfhp", "squad_1_1_384", 3, {2: 45_335, 3: 40_711, None: 40_711}),
    (
        "lpfhp",
        "wikipedia_512",
        29,
        {2: 10_099_081, 3: 9_090_154, 4: 8_657_119, 8: 8_207_569, 12: 8_149_619, 16: 8_140_006, None: 8_138_483},
    ),
    ("lpfhp", "squad_1_1_384", 4, {None: 40_631}),
]


@pytest.mark.parametrize("packer, name, deepest, packs", PUBLISHED)
def test_as_many_packs_as_the_published_program(packer, name, deepest, packs):
    histogram = LengthHistogram.published(name)
    for depth, expected in packs.items():
        packing = get_packer(packer)(histogram, max_sequences_per_pack=depth)
        packing.check(histogram)
        assert (packing.packs, packing.largest_depth) == (expected, min(depth or deepest, deepest))
