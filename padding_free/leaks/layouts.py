"""Rows that look like the data of a training: the lengths of their examples, and their tokens.

A row has the length of a training batch.  Its examples have one token, the length of the longest example, and lengths
on both sides of every number that may matter.  The longest example is first, in the middle and last.  So a fault that
begins late is in one of these rows: late in the row, late in an example, or after many examples.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np

from padding_free.leaks.placing import Example
from padding_free.losses import IGNORED

MOST_EXAMPLES = 4096  # of a row of short examples, or one for each 16 tokens of the row
_KERNEL_BLOCKS = (16, 32, 64, 128, 256)  # tokens that attention kernels process at once
_SHORT = (1, 1, 3, 1, 2, 1, 1, 2)  # lengths of the row of short examples, again and again
_KINDS = 4  # of tokens: an example in four has each


def row_lengths(
    row: int, longest: int, numbers: Sequence[int], draw: np.random.Generator
) -> List[List[int]]:
    """Choose the lengths of the examples of each row to probe, the most important row first.

    Args:
        row: Most tokens of a row.
        longest: Most tokens of an example.
        numbers: Numbers of the model that may be lengths.
        draw: Random generator.
    """
    longest = min(longest, row)
    if row < 4:
        few = ([1, row - 1], [1] * row, [row - 1, 1])
        return [lengths for lengths in few if min(lengths) > 0 and max(lengths) <= longest]
    near: Set[int] = set()
    for number in (*_KERNEL_BLOCKS, *numbers):
        near.update(range(number - 1, number + 2))
    possible = sorted(length for length in near if 1 < length <= longest)
    edges = draw.permutation(possible).astype(int).tolist()
    filled = partial(_filled, row, longest, edges, draw)

    # Many short examples, so that boundaries are everywhere.
    end = [1, min(2, longest)]
    short = np.resize(_SHORT, max(MOST_EXAMPLES, row // 16))
    fitting = short[short.cumsum() <= row - sum(end)]
    short_row = np.minimum([*fitting.tolist(), *end], longest).tolist()

    # The longest example at each place.  In the middle it is beside one of several tokens, which stretched positions
    # change.
    far = min(longest, row - 1)
    begin = min(3, longest)
    middle = min(longest, row - begin)
    has_end = row - begin - middle >= sum(end)
    rows = [
        filled([begin, middle], end if has_end else []),
        short_row,
        filled([], [1, far]),
        filled([far, 1], []),
    ]
    if edges:
        rows.append(filled([], end))
    return [list(lengths) for lengths in dict.fromkeys(map(tuple, rows))]


def _filled(
    row: int,
    longest: int,
    edges: List[int],
    draw: np.random.Generator,
    first: Sequence[int],
    last: Sequence[int],
) -> List[int]:
    """Fill a row to exactly `row` tokens: examples of one token, of the lengths `edges`, and of random lengths.

    edges: those that are used are removed.
    """
    lengths = list(first)
    left = row - sum(first) - sum(last)
    while left > 0:
        if left > 1 and len(lengths) % 3 == 0:
            length = 1
        elif edges and edges[-1] <= left:
            length = edges.pop()
        else:
            length = min(int(draw.integers(1, longest + 1)), left)
        lengths.append(length)
        left -= length
    return [*lengths, *last]


# ---- tokens


def _special(config: Any, name: str, vocabulary: int) -> Optional[int]:
    """Return the id of a special token of a configuration; the first of several."""
    number: Any = getattr(config, name, None)
    if isinstance(number, (list, tuple)) and number:
        number = number[0]
    is_id = isinstance(number, int) and not isinstance(number, bool)
    return number if is_id and 0 <= number < vocabulary else None


class ProbeTexts:
    """Draws the tokens of examples, with special tokens where a tokenizer puts them.

    Args:
        config: The configuration of the model.
        vocabulary: Number of the words.
        causal: Tokens see earlier ones only.  Then texts contain the padding token too, because it may be the end of
            text; encoders may find positions by it.
    """

    def __init__(self, config: Any, vocabulary: int, causal: bool) -> None:
        self._vocabulary = vocabulary
        self._causal = causal
        self._begin = _special(config, "bos_token_id", vocabulary)
        self._end = _special(config, "eos_token_id", vocabulary)
        self._padding = _special(config, "pad_token_id", vocabulary)
        inside = [_special(config, "sep_token_id", vocabulary), self._end]
        if causal:
            inside += [self._padding, self._begin]
        self._inside = [number for number in inside if number is not None]

    def _words(self, length: int, draw: np.random.Generator) -> np.ndarray:
        """Draw token ids, int64 [length], without padding."""
        ids = draw.integers(1, self._vocabulary, length)
        ids[ids == self._padding] = 0 if self._padding else 1
        return ids

    def _text(self, length: int, kind: int, draw: np.random.Generator) -> np.ndarray:
        """Draw an example: only words; from begin to end; with special tokens inside; both."""
        ids = self._words(length, draw)
        if kind >= 2 and self._inside:
            count = max(1, length // 8)
            ids[draw.integers(0, length, count)] = draw.choice(self._inside, count)
        if kind % 2 and self._begin is not None:
            ids[0] = self._begin
        if kind % 2 and self._end is not None and length > 1:
            ids[-1] = self._end
        return ids

    def __call__(
        self, lengths: Sequence[int], seed: int, shares_prefix: bool, is_shared: bool
    ) -> List[Example]:
        """Draw examples; a third of them have a prompt, which is not predicted.

        shares_prefix: examples begin with the same tokens.  is_shared: those of one length are equal.
        """
        draw = np.random.default_rng(seed)
        prefix = self._words(max(lengths), draw)
        shared: Dict[Tuple[int, bool], Example] = {}
        examples = []
        for number, length in enumerate(lengths):
            has_prompt = number % 3 == 1 and length > 3
            key = (length, has_prompt)
            if key not in shared or not is_shared:
                ids = self._text(length, number % _KINDS, draw)
                if shares_prefix:
                    ids[: length * 3 // 4] = prefix[: length * 3 // 4]
                shared[key] = self._labelled(ids, has_prompt)
            examples.append(shared[key])
        return examples

    def _labelled(self, ids: np.ndarray, has_prompt: bool) -> Example:
        labels = ids.copy()
        # Some collators of masked models keep the label of a first token; causal ones and others leave it out.
        first_predicted = len(ids) // 2 if has_prompt else int(not self._causal)
        labels[:first_predicted] = IGNORED
        return {"input_ids": ids, "labels": labels}
