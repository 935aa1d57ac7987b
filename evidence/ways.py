"""Ways to lay out the same sequences for a network: in packs, and each alone in its row with three kinds of padding.

In all ways a forward pass has at most the same number of slots, so about the same memory, and an update has the same
mean number of sequences.  Packed, padded to the maximum and padded to the longest have the same sequences in the same
updates.  Sorted has other updates, of sequences of about the same length, in random order.
"""

from __future__ import annotations

from itertools import chain
from typing import Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data.building.assignment import assign
from pack_data.packing.packing import Packing

MAXIMUM = "maximum"
LONGEST = "longest"
SORTED = "sorted"
PACKED = "packed"
WAYS = (MAXIMUM, LONGEST, SORTED, PACKED)
NO_MASK = "no_mask"  # packed, and every token attends to its whole row: the control of the scores
AGAIN = "packed_again"  # the packed way timed a second time: the control of the times
WORDS = {
    MAXIMUM: "padded to the maximum",
    LONGEST: "padded to the longest of the batch",
    SORTED: "sorted by length, padded to the longest",
    PACKED: "packed",
    AGAIN: "packed, timed again (control)",
    NO_MASK: "packed without the mask (control)",
}
TRAINING = "training"
INFERENCE = "inference"

# The stream of random numbers that orders the sequences of equal length, and the updates.
_SORTED = 3


_Row = Tuple[int, ...]  # numbers of its sequences


class Pass(NamedTuple):
    """One forward pass: the numbers of the sequences in each row, and the slots of a row."""

    rows: Tuple[_Row, ...]
    slots: int

    @property
    def sequences(self) -> List[int]:
        """Numbers of the sequences, row by row."""
        return list(chain(*self.rows))

    @property
    def size(self) -> int:
        """Slots of all rows."""
        return len(self.rows) * self.slots


Passes = Tuple[Pass, ...]


class Ways:
    """The passes of a set of sequences.

    Args:
        lengths: Lengths of the sequences, [n].
        packing: A packing of these lengths.
        rows_of_pass: Packed rows of a pass.
        rows_of_update: Packed rows of an update, at most; 0: those of a pass.
        seed: Seed of the order, which differs between epochs.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        packing: Packing,
        *,
        rows_of_pass: int,
        rows_of_update: int = 0,
        seed: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.packing = packing
        self.seed = seed
        self.rows_of_pass = rows_of_pass
        self.rows_of_update = rows_of_update or rows_of_pass
        self.slots = packing.max_sequence_length

    # ---- training

    @property
    def updates_per_epoch(self) -> int:
        """Updates of an epoch, the same number in every way."""
        return -(-self.packing.packs // self.rows_of_update)

    def updates(self, way: str, epoch: int = 0) -> List[Passes]:
        """Return the passes of each update of an epoch, in which every sequence occurs once."""
        if way == SORTED:
            parts = self._parts(epoch)
            random = np.random.default_rng([self.seed, _SORTED, epoch, 1])
            return [self._padded(parts[number]) for number in random.permutation(len(parts))]
        updates = []
        rows = self._packed_rows(epoch)
        number = self.updates_per_epoch
        ends = [update * len(rows) // number for update in range(number + 1)]
        for begin, end in zip(ends, ends[1:]):
            update_rows = rows[begin:end]
            if way == PACKED:
                updates.append(self._of_rows(update_rows))
            elif way == MAXIMUM:
                updates.append(self._full(chain(*update_rows)))
            else:
                updates.append(self._padded(chain(*update_rows)))
        return updates

    def sample(self, way: str, number: int) -> List[Passes]:
        """Return a sample of the updates; sorted updates are sampled evenly over all lengths."""
        if way != SORTED:
            return self.updates(way)[:number]
        parts = self._parts(0)
        number = min(number, len(parts))
        chosen = [int((index + 0.5) * len(parts) / number) for index in range(number)]
        return [self._padded(parts[index]) for index in chosen]

    def _parts(self, epoch: int) -> List[np.ndarray]:
        """Sort the sequences by length, and divide them into one part for each update."""
        order = np.random.default_rng([self.seed, _SORTED, epoch]).permutation(len(self.lengths))
        order = order[np.argsort(self.lengths[order], kind="stable")]
        return np.array_split(order, self.updates_per_epoch)

    # ---- inference

    def all_passes(self, way: str) -> Passes:
        """Return passes with every sequence once, without updates."""
        order = np.arange(len(self.lengths))
        if way == PACKED:
            return self._of_rows(self._packed_rows(0))
        if way == MAXIMUM:
            return self._full(order)
        if way == SORTED:
            order = np.argsort(self.lengths, kind="stable")
        return self._padded(order)

    # ---- rows

    def _packed_rows(self, epoch: int) -> List[_Row]:
        """Return the numbers of the sequences of each packed row."""
        place = assign(self.lengths, self.packing, (self.seed, epoch))
        order = np.lexsort((place.slot, place.pack))
        ends = np.cumsum(np.bincount(place.pack, minlength=self.packing.packs))
        return [tuple(row.tolist()) for row in np.split(order, ends[:-1])]

    def _full(self, numbers: Iterable[int]) -> Passes:
        """Put each sequence alone in a row of full length."""
        return self._of_rows([(int(number),) for number in numbers])

    def _of_rows(self, rows: Sequence[_Row]) -> Passes:
        """Distribute rows of full length over passes."""
        size = self.rows_of_pass
        starts = range(0, len(rows), size)
        return tuple(Pass(tuple(rows[first : first + size]), self.slots) for first in starts)

    def _padded(self, numbers: Iterable[int]) -> Passes:
        """Put each sequence in a row of the longest length of its pass, with at most the slots of a packed pass."""
        passes: List[Pass] = []
        rows: List[_Row] = []
        longest = 0
        for number in map(int, numbers):
            length = int(self.lengths[number])
            if rows and (len(rows) + 1) * max(longest, length) > self.rows_of_pass * self.slots:
                passes.append(Pass(tuple(rows), longest))
                rows = []
                longest = 0
            rows.append((number,))
            longest = max(longest, length)
        if rows:
            passes.append(Pass(tuple(rows), longest))
        return tuple(passes)


def slots_per_token(updates: Sequence[Passes], lengths: np.ndarray) -> float:
    """Return the computed slots per token."""
    slots = tokens = 0
    for part in chain(*updates):
        slots += part.size
        tokens += int(lengths[part.sequences].sum())
    return slots / tokens
