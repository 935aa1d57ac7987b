"""Stretches of a single text, such as a book, that are held out; what lies between two of them remains one document."""

from __future__ import annotations

from itertools import chain, groupby
from typing import Iterable, Iterator, Tuple

from pack_data.building.held_out import position
from pack_data.text.corpus import Document, cut_document

# Paragraphs per stretch: a hundredth of the text's paragraphs within these limits, but at most a twentieth of them.
_SHORTEST = 20
_LONGEST = 100


def runs(
    paragraphs: Iterable[Document], count: int, share: float
) -> Iterator[Tuple[Document, bool]]:
    """Yield the runs of paragraphs of one side, each as a document in parts, and whether it is held out.

    At least one stretch is held out, and at least one is not. A larger share adds stretches to those of a smaller one.

    count: paragraphs of the text, at least two, without the parts that continue a paragraph.
    """
    size = min(max(count // 100, _SHORTEST), _LONGEST, max(1, count // 20))
    number = count // size
    order = sorted(range(number), key=lambda stretch: position([str(stretch)]))
    held_out = order[: min(number - 1, max(1, round(share * number)))]

    def with_sides() -> Iterator[Tuple[bool, Document]]:
        place = -1
        for paragraph in paragraphs:
            place += not paragraph.continues
            yield place * number // count in held_out, paragraph

    for is_held_out, run in groupby(with_sides(), key=lambda with_side: with_side[0]):
        lines = chain.from_iterable(paragraph.lines for _, paragraph in run)
        for part in cut_document("", lines):
            yield part, is_held_out
