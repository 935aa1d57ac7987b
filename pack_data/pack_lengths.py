"""Plain lengths to bins of indices: `pack_data.pack`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, List, Optional

import numpy as np

from pack_data.building.assignment import assign
from pack_data.histogram import LengthHistogram
from pack_data.lengths.overlong import Fitted, fit
from pack_data.optimal import pack as pack_optimally
from pack_data.packing import Packing
from pack_data.reading.fields import shown, whole_number
from pack_data.solver.two_capacities import TwoPrices, pack_two, within_capacities


@dataclass(frozen=True, eq=False)
class PackedLengths:
    """Where each of n sequences stands.

    pack: integers [n], the pack of each sequence, 0..packing.packs - 1. slot: integers [n], its place among the
    sequences of its pack, from 0. packing: the plan, with its accounting and its proof. fitted: which tokens of which
    sequence each piece is; where sequences were split or dropped, "sequence" is a piece here, and n counts the pieces.
    """

    pack: np.ndarray
    slot: np.ndarray
    packing: Packing
    fitted: Fitted
    prices: Optional[TwoPrices] = None  # where there are weights: `prices.prove(lengths, weights)` proves lower_bound

    def __repr__(self) -> str:
        return f"PackedLengths({len(self.pack):,} sequences in {self.packing.packs:,} packs: .bins, .packing, .fitted)"

    @cached_property
    def bins(self) -> List[np.ndarray]:
        """For each pack the indices of its sequences, in order of their slots: each index of 0..n - 1 stands once."""
        order = np.lexsort((self.slot, self.pack))
        ends = np.cumsum(np.bincount(self.pack, minlength=self.packing.packs)).tolist()
        return [order[start:end] for start, end in zip([0, *ends], ends)]


def pack(
    lengths: Any,
    *,
    max_sequence_length: int,
    max_sequences_per_pack: Optional[int] = None,
    seed: int = 0,
    longer: str = "raise",
    weights: Any = None,
    capacity: Optional[int] = None,
) -> PackedLengths:
    """Packs sequences of these lengths into as few rows of max_sequence_length slots as the optimal packer finds.

        packed = pack([5, 3, 2, 7], max_sequence_length=8)
        packed.bins                      # [array([0, 1]), array([3]), array([2])], in some order
        packed.pack, packed.slot         # for sequence i: its pack, and its place in that pack
        packed.packing.efficiency        # tokens / slots
        packed.packing.lower_bound       # no packing has fewer packs; `prove(packed.packing)` checks that again

    lengths: whole numbers [n], each from 1 to max_sequence_length, in any order: list, array, or what NumPy reads.
    max_sequences_per_pack: the packing depth; None is unlimited.
    seed: decides which of the sequences of one length goes where, and the order of the packs.
    longer: what becomes of a sequence of more than max_sequence_length tokens: "raise" a ValueError, "truncate" it,
    "split" it into pieces, "drop" it. `.fitted` says what each index of `.bins` is a piece of, and how much was lost:
        packed = pack([9, 2], max_sequence_length=4, longer="split")
        packed.fitted.example, packed.fitted.start, packed.fitted.stop    # [0, 0, 0, 1], [0, 4, 8, 0], [4, 8, 9, 2]
        print(packed.fitted.longer)      # 1 of 2 examples is longer than 4 tokens: split into 3 pieces

    weights, capacity: a second amount of each sequence, whole numbers [n] of at least 0, such as its images, masked
    tokens or squared length, and how much of it a pack holds at most. Then the packer is that of
    solver/two_capacities.py, `.packing` has no certificate, and the proof of its bound is `.prices`.

    No pack holds more than max_sequence_length tokens or max_sequences_per_pack sequences, and each sequence is in
    exactly one. The time to solve depends on the lengths that occur, not on how many sequences have them: a second
    where sequences in a pack are not limited, some seconds where they are. Each sequence adds some 20 bytes and 0.1
    microseconds.
    `bins` is made when it is first asked for; for millions of packs, `pack` and `slot` are the smaller form.
    Raises ValueError, which names the sequence, where a length does not fit.
    """
    given = _one_each("lengths", lengths)
    seed = whole_number("seed", seed, least=0)
    fitted = fit(given, max_sequence_length, longer)
    histogram = LengthHistogram.from_lengths(fitted.lengths, max_sequence_length)
    if weights is not None or capacity is not None:
        given = _one_each("weights", [] if weights is None else weights)
        return _packed_with_weights(fitted, histogram, given, capacity, max_sequences_per_pack, seed)
    packing = pack_optimally(histogram, max_sequences_per_pack=max_sequences_per_pack, progress=False)
    return PackedLengths(*assign(fitted.lengths, packing, seed), packing, fitted)


def _one_each(name: str, values: Any) -> np.ndarray:
    """An argument with one whole number for each sequence, as an array of one dimension."""
    try:
        given = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} = {shown(values)}; give one whole number for each sequence ({error})") from None
    if given.ndim != 1:
        raise ValueError(f"{name} have {given.ndim} dimensions; give one whole number for each sequence")
    return given


def _packed_with_weights(
    fitted: Fitted, histogram: LengthHistogram, given: np.ndarray, capacity: Any, depth: Optional[int], seed: int
) -> PackedLengths:
    """given: the weight of each sequence, and so of its piece, also where the sequence was truncated."""
    start, random = time.perf_counter(), np.random.default_rng(seed)
    if len(given) != fitted.longer.examples:
        raise ValueError(f"{len(given)} weights for {fitted.longer.examples} lengths; give one for each sequence")
    if fitted.longer.rule == "split" and fitted.longer.longer:
        raise ValueError("longer = 'split' does not tell the weight of each piece; give lengths and weights of pieces")
    S, names = histogram.max_sequence_length, fitted.example
    lengths, weights = within_capacities(fitted.lengths, given[names], S, capacity, names)
    order = random.permutation(len(lengths))  # of equal sequences, who goes where
    found = pack_two(
        lengths[order], weights[order], max_sequence_length=S, capacity=capacity, max_sequences_per_pack=depth
    )
    pack, slot = np.empty_like(found.pack), np.empty_like(found.slot)
    pack[order], slot[order] = random.permutation(found.packs)[found.pack], found.slot
    by_pack = lengths[np.lexsort((slot, pack))].tolist()
    ends = np.cumsum(np.bincount(pack, minlength=found.packs)).tolist()
    packs = ((by_pack[start:end], 1) for start, end in zip([0, *ends], ends))
    packing = Packing.of(
        "two capacities",
        histogram,
        depth,
        packs,
        solve_seconds=time.perf_counter() - start,
        lower_bound=found.lower_bound,
    )
    return PackedLengths(pack, slot, packing, fitted, found.prices)
