"""Plain lengths to bins of indices: `pack_data.pack`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, List, Optional

import numpy as np

from pack_data.building.assignment import assign
from pack_data.lengths.overlong import Fitted, fit
from pack_data.optimal import pack as pack_optimally
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.packing.packing import Packing
from pack_data.reading import hugging_face
from pack_data.reading.fields import packing_depth, shown, whole_number
from pack_data.solver.two_capacities import TwoPrices, pack_two, within_capacities
from pack_data.store.sequences import check_multiple, rounded_up


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
    multiple_of: int = 1  # of which each sequence takes a multiple in slots
    prices: Optional[TwoPrices] = None  # where there are weights: `prices.prove(lengths, weights)` proves lower_bound

    def __repr__(self) -> str:
        return f"PackedLengths({len(self.pack):,} sequences in {self.packing.packs:,} packs: .bins, .packing, .fitted)"

    @property
    def rounding(self) -> int:
        """Slots that multiple_of added, which `packing` takes for tokens."""
        lengths = self.fitted.lengths.astype(np.int64)
        return int((rounded_up(lengths, self.multiple_of) - lengths).sum())

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
    budget: Optional[float] = None,
    multiple_of: int = 1,
    weights: Any = None,
    capacity: Optional[int] = None,
    groups: Any = None,
    keep_order: bool = False,
) -> PackedLengths:
    """Packs sequences of these lengths into as few rows of max_sequence_length slots as the optimal packer finds.

        packed = pack([5, 3, 2, 7], max_sequence_length=8)
        packed.bins                      # [array([0, 1]), array([3]), array([2])], in some order
        packed.pack, packed.slot         # for sequence i: its pack, and its place in that pack
        packed.packing.efficiency        # tokens / slots
        packed.packing.lower_bound       # no packing has fewer packs; `prove(packed.packing)` checks that again

    lengths: whole numbers [n], each from 1 to max_sequence_length, in any order: list, array, or what NumPy reads;
    or a `datasets.Dataset`, whose column length, lengths or input_ids says them.
    max_sequences_per_pack: the packing depth; None is unlimited.
    seed: decides which of the sequences of one length goes where, and the order of the packs.
    longer: what becomes of a sequence of more than max_sequence_length tokens: "raise" a ValueError, "truncate" it,
    "split" it into pieces, "drop" it. `.fitted` says what each index of `.bins` is a piece of, and how much was lost:
        packed = pack([9, 2], max_sequence_length=4, longer="split")
        packed.fitted.example, packed.fitted.start, packed.fitted.stop    # [0, 0, 0, 1], [0, 4, 8, 0], [4, 8, 9, 2]
        print(packed.fitted.longer)      # 1 of 2 examples is longer than 4 tokens: split into 3 pieces

    budget: seconds, after which no further improvement is begun; the result then depends on how fast the machine is.
    Without one only the work that pays is done, measured in steps: the same input gives the same packs everywhere.
    multiple_of: slots of each sequence are rounded up to a multiple of it, as context and sequence parallelism or FP8
    want them; `.rounding` counts the slots that adds, and `.packing` takes them for tokens. Rows need no rounding of
    their own: max_sequence_length must be a multiple of it as well.
    weights, capacity: a second amount of each sequence, whole numbers [n] of at least 0, such as its images, masked
    tokens or squared length, and how much of it a pack holds at most. Then the packer is that of
    solver/two_capacities.py, `.packing` has no certificate, and the proof of its bound is `.prices`.
    groups: whole numbers [n]; sequences of one number share a pack, such as the two of a preference pair. A group is
    one item to the packer: `.packing` and max_sequences_per_pack count groups.
    keep_order: packs hold consecutive sequences, in the order given. Taking each while it fits is then optimal: by
    induction, the k-th pack of any such packing ends no later than the k-th of this one.

    No pack holds more than max_sequence_length tokens or max_sequences_per_pack sequences, and each sequence is in
    exactly one. The time to solve depends on the lengths that occur, not on how many sequences have them: a second
    where sequences in a pack are not limited, some seconds where they are. Each sequence adds some 20 bytes and 0.1
    microseconds.
    `bins` is made when it is first asked for; for millions of packs, `pack` and `slot` are the smaller form.
    Raises ValueError, which names the sequence, where a length does not fit.
    """
    slots = whole_slots(max_sequence_length)
    multiple_of, seed = whole_number("multiple_of", multiple_of, least=1), whole_number("seed", seed, least=0)
    check_multiple(slots, multiple_of)
    weighted = weights is not None or capacity is not None
    if weighted + keep_order + (groups is not None) > 1:
        raise ValueError("weights, groups and keep_order do not go together; choose one of them")
    given = hugging_face.lengths_of(lengths) if hugging_face.is_data_set(lengths) else lengths
    fitted = fit(_one_each("lengths", given), slots, longer)
    taken = rounded_up(fitted.lengths, multiple_of)
    if weighted:
        weights = _one_each("weights", [] if weights is None else weights)
        found = _with_weights(fitted, taken, weights, capacity, slots, max_sequences_per_pack, seed)
        return replace(found, multiple_of=multiple_of)
    if keep_order:
        return replace(_in_order(fitted, taken, slots, max_sequences_per_pack), multiple_of=multiple_of)
    items, group = taken, None
    if groups is not None:
        groups = _one_each("groups", groups)
        if groups.dtype == object:
            groups = np.array(groups.tolist())
        # A column with gaps is one of floats, and all gaps would be one group.
        if groups.size and groups.dtype.kind not in "iu":
            raise ValueError(f"groups are whole numbers, one for each sequence; got {groups.dtype}")
        if len(groups) != fitted.longer.examples:
            raise ValueError(f"{len(groups)} groups for {fitted.longer.examples} lengths; give one for each sequence")
        group = np.unique(groups[fitted.example], return_inverse=True)[1].reshape(-1)  # from 0 without a gap
        items = _of_groups(taken, group, slots)
    histogram = LengthHistogram.from_lengths(items, slots)
    packing = pack_optimally(histogram, max_sequences_per_pack=max_sequences_per_pack, budget=budget)
    pack, slot = assign(items, packing, seed)
    if group is not None:
        pack, slot = pack[group], _places(pack[group], slot[group])
    return PackedLengths(pack, slot, packing, fitted, multiple_of)


def _of_groups(lengths: np.ndarray, group: np.ndarray, slots: int) -> np.ndarray:
    """int64 [groups]: slots that each takes."""
    together = np.bincount(group, lengths).astype(np.int64)
    if together.max(initial=0) > slots:
        first = int(np.flatnonzero(together[group] > slots)[0])
        raise ValueError(
            f"the group of sequence {first} has {together[group[first]]} tokens; a row has {slots}: drop or cut it"
        )
    return together


def _places(pack: np.ndarray, within: np.ndarray) -> np.ndarray:
    """int64 [n]: the place of each sequence in its pack, in the order of `within`, and then as given."""
    order = np.lexsort((within, pack))
    first = np.searchsorted(pack[order], pack)
    place = np.empty(len(pack), np.int64)
    place[order] = np.arange(len(pack))
    return place - first


def _in_order(fitted: Fitted, lengths: np.ndarray, slots: int, max_sequences_per_pack: Optional[int]) -> PackedLengths:
    """Each pack takes the next sequences while they fit."""
    depth = packing_depth(max_sequences_per_pack)
    ends = np.cumsum(lengths, dtype=np.int64)
    # behind the last sequence of a pack that begins with each
    stop = np.searchsorted(ends, ends - lengths + slots, side="right")
    if depth is not None:
        stop = np.minimum(stop, np.arange(len(lengths)) + depth)
    after, firsts = stop.tolist(), [0] if len(lengths) else []
    while firsts and after[firsts[-1]] < len(lengths):
        firsts.append(after[firsts[-1]])
    starts = np.array(firsts, np.int64)
    pack = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(lengths))))
    held = (lengths[begin:end].tolist() for begin, end in zip(firsts, [*firsts[1:], len(lengths)]))
    packing = Packing.of(
        "in order", LengthHistogram.from_lengths(lengths, slots), depth, ((strategy, 1) for strategy in held)
    )
    return PackedLengths(pack, np.arange(len(lengths)) - starts[pack], packing, fitted)


def _one_each(name: str, values: Any) -> np.ndarray:
    """An argument with one whole number for each sequence, as an array of one dimension."""
    try:
        given = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} = {shown(values)}; give one whole number for each sequence ({error})") from None
    if given.ndim != 1:
        raise ValueError(f"{name} have {given.ndim} dimensions; give one whole number for each sequence")
    return given


def _with_weights(
    fitted: Fitted, taken: np.ndarray, given: np.ndarray, capacity: Any, slots: int, depth: Optional[int], seed: int
) -> PackedLengths:
    """given: the weight of each sequence, and so of its piece, also where the sequence was truncated."""
    start, random = time.perf_counter(), np.random.default_rng(seed)
    if len(given) != fitted.longer.examples:
        raise ValueError(f"{len(given)} weights for {fitted.longer.examples} lengths; give one for each sequence")
    if fitted.longer.rule == "split" and fitted.longer.longer:
        raise ValueError("longer = 'split' does not tell the weight of each piece; give lengths and weights of pieces")
    names = fitted.example
    lengths, weights = within_capacities(taken, given[names], slots, capacity, names)
    order = random.permutation(len(lengths))  # of equal sequences, who goes where
    found = pack_two(
        lengths[order], weights[order], max_sequence_length=slots, capacity=capacity, max_sequences_per_pack=depth
    )
    pack, slot = np.empty_like(found.pack), np.empty_like(found.slot)
    pack[order], slot[order] = random.permutation(found.packs)[found.pack], found.slot
    by_pack = lengths[np.lexsort((slot, pack))].tolist()
    ends = np.cumsum(np.bincount(pack, minlength=found.packs)).tolist()
    packs = ((by_pack[start:end], 1) for start, end in zip([0, *ends], ends))
    packing = Packing.of(
        "two capacities",
        LengthHistogram.from_lengths(lengths, slots),
        depth,
        packs,
        solve_seconds=time.perf_counter() - start,
        lower_bound=found.lower_bound,
    )
    return PackedLengths(pack, slot, packing, fitted, prices=found.prices)
