"""Characters that a vocabulary cannot spell or removes, counted and reported by one rule wherever text is read."""

from __future__ import annotations

import unicodedata
from collections import Counter
from itertools import chain
from typing import Any, Iterable, Iterator, NamedTuple, Optional, Sequence

# Shares of the characters above which a remark is printed.
_MOST_UNKNOWN = 0.05
_MOST_REMOVED = 0.01


class Spelling(NamedTuple):
    """Counts of the characters of texts, without white space, and of the characters that get no token.

    A command that reads texts adds up the counts of its blocks and prints the remarks:

        counts = []
        for block in blocks_of_texts:
            encodings = vocabulary.cut(block)
            counts.append(vocabulary.spelling(block, encodings))
        for remark in Spelling.total(counts).remarks():
            print(remark, file=sys.stderr)

    Attributes:
        characters: all characters that are not white space.
        unknown: characters of words that become [UNK].
        removed: vowel signs and similar marks that the tokenizer strips, as if they were accents.
    """

    characters: int = 0
    unknown: int = 0
    removed: int = 0

    @classmethod
    def total(cls, counts: Iterable[Sequence[int]]) -> Spelling:
        """Return the sum of the counts of several texts."""
        return cls(*map(sum, zip(*counts)))

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        encodings: Sequence[Any],
        unknown_id: Optional[int],
        strips_marks: bool,
    ) -> Spelling:
        """Count the characters of texts.

        Args:
            texts: some texts.
            encodings: the encodings of the tokenizers library for them.
            unknown_id: the id of [UNK], None if there is none.
            strips_marks: whether the tokenizer strips combining marks.

        Returns:
            The counts of these texts.
        """
        unknown = 0
        for text, encoding in zip(texts, encodings):
            ids = encoding.ids
            if unknown_id in ids:
                for number, (start, end) in zip(ids, encoding.offsets):
                    if number == unknown_id:
                        unknown += _written(text[start:end])
        removed = _vowel_signs(texts) if strips_marks else 0
        return cls(sum(map(_written, texts)), unknown, removed)

    def remarks(self) -> Iterator[str]:
        """Yield a line for each kind of lost character whose share is above its limit."""
        if self.unknown > _MOST_UNKNOWN * self.characters:
            yield (
                f"{self.unknown / self.characters:.0%} of the text's characters are in words that become [UNK], "
                "because the vocabulary cannot spell them; use one made for such text (build --vocabulary or "
                "--tokenizer, or none of them to train one on it)"
            )
        if self.removed > _MOST_REMOVED * self.characters:
            yield (
                f"{self.removed / self.characters:.0%} of the text's characters are vowel signs and similar marks, "
                "which a lower-case vocabulary strips as accents; build with --keep-case to keep them"
            )


def _written(text: str) -> int:
    """Return the number of characters that are not white space."""
    return sum(map(len, text.split()))


def _vowel_signs(texts: Sequence[str]) -> int:
    """Count the marks that are not accents, such as the vowel signs of Devanagari, Thai, Hebrew and Arabic."""
    counts = Counter(chain.from_iterable(text for text in texts if not text.isascii()))
    return sum(
        count * sum(map(_is_vowel_sign, unicodedata.normalize("NFD", character)))
        for character, count in counts.items()
    )


def _is_vowel_sign(character: str) -> bool:
    """Return True for a mark of a script, unless it is an accent of Latin, Greek or Cyrillic."""
    if unicodedata.category(character) != "Mn":
        return False
    # Accents are called combining, as are the voiced sound marks of Japanese.
    name = unicodedata.name(character)
    return "KATAKANA" in name or not name.startswith(("COMBINING", "VARIATION"))
