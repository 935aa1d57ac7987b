"""Fill packs to the last slot, one strategy after another: near the bound in a fraction of a second.

Decreasing fits waste slots in two ways. If most sequences take slightly less than a third or a quarter of a pack, the
rest of the pack suits no other sequence. And if packs have a limit on sequences, the short ones come last and use up
the limit while slots stay empty.

Here the longest sequence left opens a pack, and as soon as two sequences fill the rest exactly, they are added. Of all
such pairs the one with the most similar lengths is taken, which keeps the short sequences that fill any room. If the
number of sequences is limited, a pack also takes some of the shortest, so that it reaches a wanted depth; several
depths are tried. The rule is in the spirit of the minimum-bin-slack heuristic (Gupta and Ho, 1999).
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import numpy as np

from pack_data.solver.free_slots import Packs, count_packs

SECONDS_PER_STRATEGY = 4e-5  # measured mean time for one strategy, on one core
_MAX_SPARE_SLOTS = 2  # slots that a pair of sequences may leave empty
# Pairs looked at first, from the middle of the room outwards: nearly always one of these windows has a pair.
_WINDOWS_OF_PAIRS = (32, 512, 8192)
# Slots per occurring length above which pairs are searched by length instead of by slot.
_SPARSE_SLOTS = 16
# If a mean pack has fewer sequences than this share of the limit, the limit hardly matters.
_SHALLOW_SHARE = 0.45
# Depths that are tried, as multiples of the mean number of sequences per pack.
_DEPTHS_TRIED = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)
# Approximate number of strategies that `fill_evenly` makes.
_EVEN_PACKS = 2000
# Steps of its bisection: the share is exact to 1 / 4096.
_HALVINGS_OF_SHARE = 12


def fill_exactly(counts: np.ndarray, max_sequences_per_pack: Optional[int], target: int) -> Packs:
    """Return the fewest packs over a few depths that packs are made to reach; stop at `target` packs.

    The time grows with the number of different strategies, 10 to 200 microseconds each: most if the pairs that fill a
    pack are hard to find.

    Args:
        counts: sequences by length, int [S + 1]; at least one sequence.
        max_sequences_per_pack: largest depth; None is unlimited.
        target: number of packs that is few enough.
    """
    depth = len(counts) - 1 if max_sequences_per_pack is None else max_sequences_per_pack
    best: Packs = []
    for wanted in depths_tried(counts, depth):
        packs = _Filling(counts, depth).packs(wanted)
        if not best or count_packs(packs) < count_packs(best):
            best = packs
        if count_packs(best) <= target:
            break
    return best


def depths_tried(counts: np.ndarray, depth: int) -> List[int]:
    """Return the depths that packs should reach, in the order in which they are tried; 0 sets no depth."""
    S = len(counts) - 1
    sequences = int(counts.sum())
    shortest = int(np.flatnonzero(counts)[0])
    if sequences <= depth or (depth + 1) * shortest > S:
        return [0]
    # Mean number of sequences in a pack without an empty slot.
    mean = sequences * S / int(counts @ np.arange(S + 1))
    if mean < _SHALLOW_SHARE * depth:
        return [0]
    depths = {0, depth}
    for share in _DEPTHS_TRIED:
        depths.add(min(depth, max(3, round(share * mean))))
    return sorted(depths)


class _Filling:
    """The sequences that are left, by length."""

    def __init__(self, counts: np.ndarray, depth: int) -> None:
        self._S = len(counts) - 1
        self._depth = depth
        self._left: List[int] = counts.tolist()
        # By length: 1 if sequences are left, else 0.
        self._present = bytearray((counts > 0).tobytes())
        self._present_array = np.frombuffer(self._present, np.uint8)  # the same memory
        self._lengths = np.flatnonzero(counts)
        self._sparse = _SPARSE_SLOTS * len(self._lengths) < self._S

    def packs(self, wanted: int) -> Packs:
        """Pack all sequences, at least `wanted` in a pack if they fit."""
        packs: Packs = []
        longest = self._present.rfind(1)
        while longest > 0:
            pack = self._pack(longest, wanted)
            repeats = min(self._left[length] // number for length, number in pack.items())
            strategy: List[int] = []
            for length, number in pack.items():
                self._left[length] -= repeats * number
                self._present[length] = self._left[length] > 0
                strategy += [length] * number
            packs.append((tuple(strategy), repeats))
            longest = self._present.rfind(1, 0, longest + 1)
        return packs

    def _pack(self, longest: int, wanted: int) -> Dict[int, int]:
        """Return {length: number} of one pack with the longest sequence and, if they fit, at least `wanted` sequences.

        Its sequences stay among those that are left, but their lengths may no longer be `_present`.
        """
        present = self._present
        pack: Dict[int, int] = {}
        room = self._S
        seats = self._depth
        shortest = 0
        length = longest
        number = 1
        while length > 0:
            pack[length] = pack.get(length, 0) + number
            present[length] = self._left[length] > pack[length]
            room -= number * length
            seats -= number
            wanted -= number
            if not room or not seats:
                break

            pair: Tuple[int, ...] = ()
            if wanted <= 1 and room <= longest and present[room]:
                pair = (room,)
            elif wanted <= 2 and seats > 1 and room <= 2 * longest:
                pair = self._pair(room, pack)
            if pair:
                for last in pair:
                    pack[last] = pack.get(last, 0) + 1
                break

            number = 1
            if wanted > 2:
                shortest = present.find(1, shortest)
                if 0 < shortest <= room // wanted:
                    length = shortest
                    number = min(self._left[length] - pack.get(length, 0), wanted - 2)
                else:
                    # The wanted number does not fit.
                    wanted = 0
            if wanted <= 2:
                length = present.rfind(1, 0, min(room, longest) + 1)
        return pack

    def _pair(self, room: int, pack: Dict[int, int]) -> Tuple[int, ...]:
        """Return two lengths, as near to each other as possible, that fill the room or nearly so; () if none do."""
        for total in range(room, max(1, room - _MAX_SPARE_SLOTS - 1), -1):
            half = total // 2  # pairs are (total - half + i, half - i) for i = 0, 1, ...
            middle_occurs_once = total == 2 * half and self._left[half] < 2 + pack.get(half, 0)
            first = 1 if middle_occurs_once else 0
            search = self._sparse_pair if self._sparse else self._dense_pair
            shorter = search(total, first)
            if shorter:
                return total - shorter, shorter
        return ()

    def _sparse_pair(self, total: int, first: int) -> int:
        """Return the shorter length of the pair, from pair `first` on, by a search over lengths; 0 if there is none."""
        longest = total // 2 - first
        shorter = self._lengths[: self._lengths.searchsorted(longest, side="right")][::-1]
        if not len(shorter):
            return 0
        both = self._present_array[shorter] & self._present_array[total - shorter]
        index = int(both.argmax())
        return int(shorter[index]) if both[index] else 0

    def _dense_pair(self, total: int, first: int) -> int:
        """Return the shorter length of the pair, from pair `first` on, by a search over slots; 0 if there is none."""
        half = total // 2
        start = first
        for window in (*_WINDOWS_OF_PAIRS, half):
            stop = min(half, window)
            if start < stop:
                longer = self._present_array[total - half + start : total - half + stop]
                shorter = self._present_array[half - stop + 1 : half - start + 1][::-1]
                both = longer & shorter
                index = int(both.argmax())
                if both[index]:
                    return half - start - index
                start = stop
            if stop == half:
                break
        return 0


def fill_evenly(counts: np.ndarray, max_sequences_per_pack: int) -> Packs:
    """Return packs with as many sequences as possible, for data with many sequences and slots to spare.

    The longest sequence left opens a pack, and the other places take sequences evenly from all that are left, or from
    the shorter ones if those are too long. So the longest sequences get short companions, and no more than they need.
    With very many sequences several equal packs are made at a time, in about `_EVEN_PACKS` steps.

    Args:
        counts: sequences by length, int [S + 1].
        max_sequences_per_pack: largest depth.
    """
    S = len(counts) - 1
    depth = max_sequences_per_pack
    left = counts.astype(np.int64)
    sequences = int(left.sum())
    most_repeats = max(1, sequences // (depth * _EVEN_PACKS))
    packs: Packs = []
    while sequences:
        longest = int(np.flatnonzero(left)[-1])
        companions = min(depth, sequences) - 1
        chosen = _even_companions(left, companions, S - longest)
        lengths, number = np.unique(np.append(chosen, longest), return_counts=True)
        too_few = (number > left[lengths]).any()
        if too_few or int(chosen.sum()) + longest > S:
            lengths, number = _shortest_companions(left, longest, companions)
        available = int((left[lengths] // number).min())
        repeats = min(int(left[longest]), most_repeats, available)
        left[lengths] -= repeats * number
        sequences -= repeats * int(number.sum())
        strategy = np.repeat(lengths, number).tolist()
        packs.append((tuple(strategy), repeats))
    return packs


def _even_companions(left: np.ndarray, companions: int, room: int) -> np.ndarray:
    """Return lengths at even ranks among the largest share of the shortest sequences from which they fit.

    The longest sequence is not among them. If they fit from no share, the result is too long.
    """
    if not companions:
        return np.zeros(0, np.int64)
    below = np.cumsum(left)
    others = int(below[-1]) - 1
    places = (np.arange(companions) + 0.5) / companions

    def at_share(share: float) -> np.ndarray:
        ranks = np.minimum((share * others * places).astype(np.int64), others - 1)
        return np.searchsorted(below, ranks, side="right")

    if int(at_share(1.0).sum()) <= room:
        return at_share(1.0)
    low = 0.0
    high = 1.0
    for _ in range(_HALVINGS_OF_SHARE):
        middle = (low + high) / 2
        if int(at_share(middle).sum()) <= room:
            low = middle
        else:
            high = middle
    return at_share(low)


def _shortest_companions(
    left: np.ndarray, longest: int, companions: int
) -> Tuple[np.ndarray, np.ndarray]:
    """Return (lengths, numbers) of a pack of the longest sequence and the shortest others that fit beside it."""
    lengths = np.flatnonzero(left)
    available = left[lengths]
    available[-1] -= 1  # the longest itself
    tokens = np.cumsum(np.minimum(available, companions) * lengths)
    seats = companions
    room = len(left) - 1 - longest
    fitting = int(np.searchsorted(tokens, room, side="right"))
    pack = {longest: 1}
    for length, count in zip(lengths[: fitting + 1].tolist(), available[: fitting + 1].tolist()):
        number = min(count, seats, room // length)
        if number:
            pack[length] = pack.get(length, 0) + number
            seats -= number
            room -= number * length
    return np.array(list(pack)), np.array(list(pack.values()))
