"""Fill packs to the last slot, or to the last seat: near the bound in a fraction of a second.

Decreasing fits waste slots in two ways. If most sequences take slightly less than a third or a quarter of a pack, the
rest of the pack suits no other sequence. And if packs have a limit on sequences, the short ones come last and use up
the limit while slots stay empty.

`fill_exactly` is for packs whose slots are scarce: the longest sequence left opens a pack, and as soon as two sequences
fill the rest exactly, they are added. Of all such pairs the one with the most similar lengths is taken, which keeps the
short sequences that fill any room. The rule is in the spirit of the minimum-bin-slack heuristic (Gupta and Ho, 1999).

`fill_seats` is for packs whose places for sequences, the seats, are scarce: every sequence, the longest first, goes
where most slots are left for each seat. This balances the packs as the rule of the longest processing time does
(Graham, 1969), and leaves the shortest sequences to the packs that have little room beside a long one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Callable, Dict, List, NamedTuple, Tuple

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.free_slots import Packs, Strategy, count_packs, longest_first

SECONDS_PER_STRATEGY = 4e-5  # measured mean time for one strategy, on one core
_MAX_SPARE_SLOTS = 2  # slots that a pair of sequences may leave empty
# Runs of packs without room for a sequence after which `fill_seats` gives the sequence up: 10 more save no pack.
_RUNS_TRIED = 16


def fill_exactly(counts: np.ndarray, max_sequences_per_pack: int, target: int) -> Packs:
    """Return the fewest packs of two rules; stop at `target` packs.

    One rule adds the longest sequence that fits, the other the longest of an even share of the room, so that packs get
    as many sequences as they need on average. The time grows with the number of different strategies, 10 to 200
    microseconds each: most if the pairs that fill a pack are hard to find.

    Args:
        counts: sequences by length, int [S + 1]; at least one sequence.
        max_sequences_per_pack: largest depth.
        target: number of packs that is few enough.
    """
    best: Packs = []
    for even in (False, True):
        packs = _Filling(counts, max_sequences_per_pack).packs(even)
        if not best or count_packs(packs) < count_packs(best):
            best = packs
        if count_packs(best) <= target:
            break
    return best


def take(
    pack: Dict[int, int], left: List[int], present: bytearray, most: int
) -> Tuple[Strategy, int]:
    """Take packs from the sequences left, as many as they and `most` allow.

    Args:
        pack: number of sequences by length.
        left: sequences by length, [S + 1].
        present: 1 for lengths of which sequences are left, else 0.
        most: most packs.

    Returns:
        The lengths in a pack, and the number of packs.
    """
    repeats = min(most, *(left[length] // number for length, number in pack.items()))
    strategy: List[int] = []
    for length, number in pack.items():
        left[length] -= repeats * number
        present[length] = left[length] > 0
        strategy += [length] * number
    return tuple(strategy), repeats


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
        self._sequences = int(counts.sum())
        self._tokens = int(counts @ np.arange(self._S + 1))

    def packs(self, even: bool) -> Packs:
        """Pack all sequences; if even, by even shares of the room."""
        packs: Packs = []
        longest = self._present.rfind(1)
        while longest > 0:
            wanted = 0
            if even:
                needed = max(self._tokens / self._S, self._sequences / self._depth)
                wanted = round(self._sequences / needed)
            pack = self._pack(longest, wanted)
            strategy, repeats = take(pack, self._left, self._present, self._sequences)
            packs.append((strategy, repeats))
            self._sequences -= repeats * len(strategy)
            self._tokens -= repeats * sum(strategy)
            longest = self._present.rfind(1, 0, longest + 1)
        return packs

    def _pack(self, longest: int, wanted: int) -> Dict[int, int]:
        """Return {length: number} of one pack with the longest sequence and, if they fit, at least `wanted` sequences.

        Its sequences stay among those that are left, but their lengths may no longer be `_present`.
        """
        present = self._present
        pack: Dict[int, int] = defaultdict(int)
        room = self._S
        seats = self._depth
        length = longest
        while length > 0:
            pack[length] += 1
            present[length] = self._left[length] > pack[length]
            room -= length
            seats -= 1
            wanted -= 1
            if not room or not seats:
                break

            pair: Tuple[int, ...] = ()
            if wanted <= 1 and room <= longest and present[room]:
                pair = (room,)
            elif wanted <= 2 and seats > 1 and room <= 2 * longest:
                pair = self._pair(room, pack)
            if pair:
                for last in pair:
                    pack[last] += 1
                break

            share = room
            if wanted > 2:
                share = room // wanted
            length = present.rfind(1, 0, min(share, longest) + 1)
            if length <= 0 and wanted > 2:
                # The wanted number does not fit.
                wanted = 0
                length = present.rfind(1, 0, min(room, longest) + 1)
        return pack

    def _pair(self, room: int, pack: Dict[int, int]) -> Tuple[int, ...]:
        """Return two lengths, as near to each other as possible, that fill the room or nearly so; () if none do."""
        for total in range(room, max(1, room - _MAX_SPARE_SLOTS - 1), -1):
            half = total // 2  # pairs are (total - half + i, half - i) for i = 0, 1, ...
            middle_occurs_once = total == 2 * half and self._left[half] < 2 + pack.get(half, 0)
            first = 1 if middle_occurs_once else 0
            shorter = self._shorter_of_pair(total, first)
            if shorter:
                return total - shorter, shorter
        return ()

    def _shorter_of_pair(self, total: int, first: int) -> int:
        """Return the shorter length of the pair, from pair `first` on; 0 if there is none."""
        longest = total // 2 - first
        shorter = self._lengths[: self._lengths.searchsorted(longest, side="right")][::-1]
        if not len(shorter):
            return 0
        both = self._present_array[shorter] & self._present_array[total - shorter]
        index = int(both.argmax())
        return int(shorter[index]) if both[index] else 0


class _OpenRun(NamedTuple):
    """Equal packs that are open; the smallest has most slots for each seat."""

    order: float  # - room / seats
    number: int  # of the run, which decides between equal ones
    room: int
    seats: int
    packs: int
    strategy: Strategy


def fill_seats(counts: np.ndarray, max_sequences_per_pack: int, least: int, most: int) -> Packs:
    """Return fewer packs than `most` whose seats are filled, or none.

    Args:
        counts: sequences by length, int [S + 1].
        max_sequences_per_pack: largest depth.
        least: packs that are needed at least.
        most: number of packs that is not worth trying.
    """
    return fewest(lambda packs: _fill_seats(counts, max_sequences_per_pack, packs), least, most)


def fewest(pack: Callable[[int], Packs], least: int, most: int) -> Packs:
    """Return packs by a rule that may need more than the number it is given, or none if it never fits.

    The number is doubled above `least` until the rule fits, and then halved in between.
    """
    best: Packs = []
    too_few = least - 1
    number = least
    while too_few < number < most:
        packs = pack(number)
        if packs and count_packs(packs) <= number:
            best = packs
            most = number
        else:
            too_few = number
        number = (too_few + most) // 2 if best else 2 * number - least + 1
    return best


def _fill_seats(counts: np.ndarray, depth: int, packs: int) -> Packs:
    """Return this many packs, and more for sequences without a place in them.

    Packs that are equal stay one run until the sequences of a length end inside it, so the time depends on the lengths
    that occur and the depth, not on the number of sequences.
    """
    S = len(counts) - 1
    closed: Packs = []
    over = np.zeros_like(counts)
    open_runs = [_OpenRun(-S / depth, 0, S, depth, packs, ())]
    runs = 1
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        skipped: List[_OpenRun] = []
        while left and open_runs and len(skipped) < _RUNS_TRIED:
            run = heapq.heappop(open_runs)
            if run.room < length:
                skipped.append(run)
                continue
            used = min(left, run.packs)
            left -= used
            if used < run.packs:
                heapq.heappush(open_runs, run._replace(packs=run.packs - used))
            room = run.room - length
            seats = run.seats - 1
            strategy = run.strategy + (length,)
            if room and seats:
                filled = _OpenRun(-room / seats, runs, room, seats, used, strategy)
                heapq.heappush(open_runs, filled)
                runs += 1
            else:
                closed.append((strategy, used))
        over[length] = left
        for run in skipped:
            heapq.heappush(open_runs, run)
    closed += [(run.strategy, run.packs) for run in open_runs if run.strategy]
    return closed + longest_first(LengthHistogram(over), depth)
