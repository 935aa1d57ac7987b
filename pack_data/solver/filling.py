"""Packs filled to the last slot, one strategy after another, for a histogram: near the bound in a fraction of a second.

Decreasing fits waste in two ways. Where most sequences take a third or a quarter of a pack, three of them fit and the
room that is left suits no other. And where packs have a limit on sequences, the short ones come last and use up the
limit while slots stay empty. Here the longest sequence left opens a pack, and as soon as two sequences fill what is
left of it exactly, they are put there: of all such pairs the one whose lengths are nearest to each other, so that the
short ones, which fill any room, are kept. For a limit on sequences packs are made deep: between the longest and the
pair they take the shortest sequences, so that the pack holds a given number where they fit. Which number is best is
found by trying. The rule is in the spirit of the minimum-bin-slack heuristic (Gupta and Ho, 1999).
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import numpy as np

from pack_data.solver.free_slots import Strategy

Packs = List[Tuple[Strategy, int]]  # (lengths of a pack, packs like it)

MADE = 4e-5  # seconds that one strategy takes, about
_SPARE = 3  # a pair leaves fewer slots than this empty
_NEAR = (32, 512, 8192)  # places looked at first, from the middle outwards: nearly always one of them has a pair
_FEW = 16  # slots for each length that occurs, from which on lengths are looked through instead of slots
_EVEN_PACKS, _HALVINGS_OF_SHARE = 2000, 12
_SHALLOW = 0.45  # of the depth: where a mean pack has fewer sequences, the limit hardly matters
_DEEP = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)  # times the sequences of a mean pack: depths that are tried


def fill_exactly(counts: np.ndarray, max_sequences_per_pack: Optional[int], target: int) -> Packs:
    """The fewest packs over a few depths that packs are made to have; `target` packs are enough.

    counts int [S + 1] of at least one sequence. Deterministic. The cost grows with the number of different strategies,
    10 to 200 microseconds each: most where the pairs that fill a pack are hard to find.
    """
    depth = len(counts) - 1 if max_sequences_per_pack is None else max_sequences_per_pack
    best: Packs = []
    fewest = 0
    for number in depths_tried(counts, depth):
        packs = _Filling(counts, depth).packs(number)
        made = sum(count for _, count in packs)
        if not best or made < fewest:
            best, fewest = packs, made
        if fewest <= target:
            break
    return best


def depths_tried(counts: np.ndarray, depth: int) -> List[int]:
    """Sequences that packs are made to have, in turn; 0: as many as come."""
    S, sequences = len(counts) - 1, int(counts.sum())
    if sequences <= depth or (depth + 1) * int(np.flatnonzero(counts)[0]) > S:
        return [0]
    mean = sequences * S / int(counts @ np.arange(S + 1))  # of a pack without an empty slot
    if mean < _SHALLOW * depth:
        return [0]
    return sorted({0, depth, *(min(depth, max(3, round(share * mean))) for share in _DEEP)})


class _Filling:
    """The sequences that are left, by length."""

    def __init__(self, counts: np.ndarray, depth: int) -> None:
        self._S, self._depth = len(counts) - 1, depth
        self._left: List[int] = counts.tolist()
        self._there = bytearray((counts > 0).tobytes())  # 1 where sequences are left: searched as bytes and as an array
        self._array = np.frombuffer(self._there, np.uint8)
        self._lengths = np.flatnonzero(counts)
        self._few = _FEW * len(self._lengths) < self._S

    def packs(self, wanted: int) -> Packs:
        """Packs for all, with at least `wanted` sequences where they fit."""
        packs: Packs = []
        longest = self._there.rfind(1)
        while longest > 0:
            held = self._pack(longest, wanted)
            repeats = min(self._left[length] // number for length, number in held.items())
            for length, number in held.items():
                self._left[length] -= repeats * number
                self._there[length] = self._left[length] > 0
            packs.append((tuple(length for length, number in held.items() for _ in range(number)), repeats))
            longest = self._there.rfind(1, 0, longest + 1)
        return packs

    def _pack(self, longest: int, wanted: int) -> Dict[int, int]:
        """{length: number} of one pack with the longest sequence and, where they fit, at least `wanted` sequences.

        Its sequences stay among those that are left, but that `_there` may lack their lengths.
        """
        there = self._there
        held: Dict[int, int] = {}
        room, seats, length, number, shortest = self._S, self._depth, longest, 1, 0
        while length > 0:
            held[length] = held.get(length, 0) + number
            there[length] = self._left[length] > held[length]
            room -= number * length
            seats -= number
            wanted -= number
            number = 1
            if not room or not seats:
                break
            pair: Tuple[int, ...] = ()
            if wanted <= 1 and room <= longest and there[room]:
                pair = (room,)
            elif wanted <= 2 and seats > 1 and room <= 2 * longest:
                pair = self._pair(room, held)
            if pair:
                for last in pair:
                    held[last] = held.get(last, 0) + 1
                break
            if wanted > 2:
                shortest = there.find(1, shortest)
                if 0 < shortest <= room // wanted:
                    length = shortest
                    number = min(self._left[length] - held.get(length, 0), wanted - 2)
                else:  # there is no room for so many
                    wanted = 0
            if wanted <= 2:
                length = there.rfind(1, 0, min(room, longest) + 1)
        return held

    def _pair(self, room: int, held: Dict[int, int]) -> Tuple[int, ...]:
        """Two lengths of together `room` slots or just below, as near to each other as can be; none: ()."""
        array = self._array
        for total in range(room, max(1, room - _SPARE), -1):
            half = total // 2  # pairs (total - half + i, half - i) for i = 0, 1, ...
            twice = total == 2 * half and self._left[half] < 2 + held.get(half, 0)
            start = 1 if twice else 0  # one sequence is no pair
            if self._few:
                shorter = self._lengths[: self._lengths.searchsorted(half - start, side="right")][::-1]
                both = array[shorter] & array[total - shorter]
                index = int(both.argmax()) if len(both) else 0
                if len(both) and both[index]:
                    return total - int(shorter[index]), int(shorter[index])
                continue
            for reach in (*_NEAR, half):
                stop = min(half, reach)
                if start < stop:
                    longer = array[total - half + start : total - half + stop]
                    both = array[half - stop + 1 : half - start + 1][::-1] & longer
                    index = int(both.argmax())
                    if both[index]:
                        return total - half + start + index, half - start - index
                    start = stop
                if stop == half:
                    break
        return ()


def fill_evenly(counts: np.ndarray, max_sequences_per_pack: int) -> Packs:
    """Packs with as many sequences as may be, for data where sequences are many and slots are not scarce.

    The longest sequence left opens a pack, and the other places take sequences evenly out of all that are left, or out
    of the shorter ones where those are too long: so the longest get short companions, as few of them as they need.
    counts int [S + 1]. With very many sequences some packs are made alike at a time, about `_EVEN_PACKS` times in all.
    """
    S, depth = len(counts) - 1, max_sequences_per_pack
    left = counts.astype(np.int64)
    packs: Packs = []
    every = int(left.sum())
    most_alike = max(1, every // (depth * _EVEN_PACKS))
    while every:
        below = np.cumsum(left)
        longest = int(np.searchsorted(below, every - 1, side="right"))
        companions = min(depth, every) - 1
        alike = min(int(left[longest]), most_alike)
        places = (np.arange(companions) + 0.5) / max(1, companions)

        def evenly(
            share: float, below: np.ndarray = below, places: np.ndarray = places, most: int = every
        ) -> np.ndarray:
            """The lengths at these places among the shortest `share` of all but the longest."""
            ranks = np.minimum((share * (most - 1) * places).astype(np.int64), most - 2)
            return np.searchsorted(below, ranks, side="right")

        low, high = 0.0, 1.0
        if companions and int(evenly(high).sum()) + longest > S:
            for _ in range(_HALVINGS_OF_SHARE):
                middle = (low + high) / 2
                low, high = (middle, high) if int(evenly(middle).sum()) + longest <= S else (low, middle)
        else:
            low = high
        chosen = evenly(low) if companions else np.zeros(0, np.int64)
        lengths, number = np.unique(np.append(chosen, longest), return_counts=True)
        if (number > left[lengths]).any() or int(chosen.sum()) + longest > S:  # so few fit: the shortest there are
            shortest = np.flatnonzero(left)
            number = left[shortest].copy()
            number[-1] -= 1
            tokens = np.cumsum(np.minimum(number, companions) * shortest)
            fitting = int(np.searchsorted(tokens, S - longest, side="right"))
            held = {longest: 1}
            seats, room = companions, S - longest
            for length, count in zip(shortest[: fitting + 1].tolist(), number[: fitting + 1].tolist()):
                taken = min(count, seats, room // length)
                if taken:
                    held[length] = held.get(length, 0) + taken
                    seats, room = seats - taken, room - taken * length
            lengths, number = np.array(list(held)), np.array(list(held.values()))
        alike = min(alike, int((left[lengths] // number).min()))
        left[lengths] -= alike * number
        every -= alike * int(number.sum())
        packs.append((tuple(np.repeat(lengths, number).tolist()), alike))
    return packs
