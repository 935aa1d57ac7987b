"""Plain lengths to bins of indices: `pack_data.pack`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, List, Optional, Tuple

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
    """The packs of n sequences.

    If sequences were split or dropped, "sequence" is a piece here, and n counts the pieces.

    Attributes:
        pack: integers [n], the pack of each sequence, 0..packing.packs - 1.
        slot: integers [n], the place of each sequence among those of its pack, from 0.
        packing: the plan, with its accounting and its proof.
        fitted: the sequence and the tokens of each piece.
        multiple_of: slots of each sequence are a multiple of it.
        prices: with weights, the proof: `prices.prove(lengths, weights)` proves `packing.lower_bound`.
    """

    pack: np.ndarray
    slot: np.ndarray
    packing: Packing
    fitted: Fitted
    multiple_of: int = 1
    prices: Optional[TwoPrices] = None

    def __repr__(self) -> str:
        return f"PackedLengths({len(self.pack):,} sequences in {self.packing.packs:,} packs: .bins, .packing, .fitted)"

    @property
    def rounding(self) -> int:
        """Slots that multiple_of added; `packing` counts them as tokens."""
        lengths = self.fitted.lengths.astype(np.int64)
        return int((rounded_up(lengths, self.multiple_of) - lengths).sum())

    @cached_property
    def bins(self) -> List[np.ndarray]:
        """The indices of the sequences of each pack, in order of their slots; each of 0..n - 1 occurs once."""
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
    """Pack sequences of these lengths into as few rows as the optimal packer finds.

        packed = pack([5, 3, 2, 7], max_sequence_length=8)
        packed.bins                      # [array([0, 1]), array([3]), array([2])], in some order
        packed.pack, packed.slot         # for sequence i: its pack, and its place in that pack
        packed.packing.efficiency        # tokens / slots
        packed.packing.lower_bound       # no packing has fewer packs; `prove(packed.packing)` checks that again

    No pack holds more than max_sequence_length tokens or max_sequences_per_pack sequences, and each sequence is in
    exactly one. The time to solve depends on the lengths that occur, not on the number of sequences: a second if
    sequences in a pack are not limited, some seconds if they are. Each sequence adds some 20 bytes and 0.1
    microseconds. `bins` is computed on first use; for millions of packs, `pack` and `slot` are the smaller form.

    Args:
        lengths: whole numbers [n], each from 1 to max_sequence_length, in any order: what NumPy reads as an array, or a
            `datasets.Dataset` with a column length, lengths or input_ids.
        max_sequence_length: slots of a row.
        max_sequences_per_pack: packing depth; None for unlimited.
        seed: decides which of the sequences of one length goes where, and the order of the packs.
        longer: rule for sequences of more than max_sequence_length tokens: "raise" a ValueError, "truncate" them,
            "split" them into pieces, or "drop" them. `.fitted` maps the indices of `.bins` to the sequences::

                packed = pack([9, 2], max_sequence_length=4, longer="split")
                packed.fitted.example, packed.fitted.start    # [0, 0, 0, 1], [0, 4, 8, 0]
                print(packed.fitted.longer)      # 1 of 2 examples is longer than 4 tokens: split into 3 pieces

        budget: seconds, after which no further improvement is begun; the result then depends on how fast the machine
            is. Without it only the work that pays is done, measured in steps: the same input gives the same packs.
        multiple_of: slots of each sequence are rounded up to a multiple of it, as context and sequence parallelism or
            FP8 want them; it must divide max_sequence_length. `.rounding` counts the slots that this adds.
        weights: a second amount of each sequence, whole numbers [n] of at least 0, such as its images, masked tokens or
            squared length. `.packing` then has no certificate; the proof of its bound is `.prices`.
        capacity: sum of the weights that a pack holds at most.
        groups: whole numbers [n]; sequences of one number share a pack, such as the two of a preference pair.
            `.packing` and max_sequences_per_pack then count groups. longer="drop" leaves out every group that is longer
            than a row, whole.
        keep_order: packs hold consecutive sequences, in the order given. Taking each while it fits is then optimal: by
            induction, the k-th pack of any such packing ends no later than the k-th of this one.

    Returns:
        The pack and the slot of each sequence, with the packing and its proof.

    Raises:
        ValueError: a length does not fit, which names the sequence, or the options do not go together.
    """
    slots = whole_slots(max_sequence_length)
    multiple_of = whole_number("multiple_of", multiple_of, least=1)
    seed = whole_number("seed", seed, least=0)
    check_multiple(slots, multiple_of)
    weighted = weights is not None or capacity is not None
    if weighted + keep_order + (groups is not None) > 1:
        raise ValueError("weights, groups and keep_order do not go together; choose one of them")

    if hugging_face.is_data_set(lengths):
        lengths = hugging_face.lengths_of(lengths)
    fitted = fit(one_each("lengths", lengths), slots, longer)
    sizes = rounded_up(fitted.lengths, multiple_of)
    if weighted:
        weights = _of_examples("weights", [] if weights is None else weights, fitted)
        packed = _with_weights(
            fitted, sizes, weights, capacity, slots, max_sequences_per_pack, seed
        )
    elif keep_order:
        packed = _in_order(fitted, sizes, slots, max_sequences_per_pack)
    else:
        group = None
        items = sizes
        if groups is not None:
            fitted, group = _fit_groups(fitted, _group_numbers(groups, fitted), multiple_of)
            sizes = rounded_up(fitted.lengths, multiple_of)
            items = _group_sizes(sizes, group, fitted, slots)
        histogram = LengthHistogram.from_lengths(items, slots)
        packing = pack_optimally(
            histogram, max_sequences_per_pack=max_sequences_per_pack, budget=budget
        )
        pack, slot = assign(items, packing, seed)
        if group is not None:
            pack = pack[group]
            slot = _places(pack, slot[group])
        packed = PackedLengths(pack, slot, packing, fitted)
    return replace(packed, multiple_of=multiple_of)


def one_each(name: str, values: Any) -> np.ndarray:
    """Return an argument with one whole number for each sequence as an array of one dimension."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(
            f"{name} = {shown(values)}; pass one whole number for each sequence ({error})"
        ) from None
    if array.ndim != 1:
        raise ValueError(
            f"{name} have {array.ndim} dimensions; pass one whole number for each sequence"
        )
    return array


def _of_examples(name: str, values: Any, fitted: Fitted) -> np.ndarray:
    array = one_each(name, values)
    examples = fitted.longer.examples
    if len(array) != examples:
        raise ValueError(f"{len(array)} {name} for {examples} lengths; pass one for each sequence")
    return array


def _group_numbers(values: Any, fitted: Fitted) -> np.ndarray:
    """Return the group of each example, integers [examples], numbered from 0 without a gap."""
    groups = one_each("groups", values)
    if groups.dtype == object:
        groups = np.array(groups.tolist())
    # A column with gaps is one of floats, and all gaps would be one group.
    if groups.size and groups.dtype.kind not in "iu":
        raise ValueError(f"groups must be whole numbers, one for each sequence; got {groups.dtype}")
    groups = _of_examples("groups", groups, fitted)
    return np.unique(groups, return_inverse=True)[1].reshape(-1)


def _fit_groups(
    fitted: Fitted, group_of_example: np.ndarray, multiple_of: int
) -> Tuple[Fitted, np.ndarray]:
    """Return the pieces to pack and the group of each; under "drop", no group that is longer than a row."""
    if fitted.longer.rule == "drop":
        sizes = rounded_up(fitted.example_lengths.astype(np.int64), multiple_of)
        size_of_group = np.bincount(group_of_example, sizes)
        is_too_long = size_of_group > fitted.longer.max_sequence_length
        fitted = fitted.without_groups(group_of_example, is_too_long)

    group = np.unique(group_of_example[fitted.example], return_inverse=True)[1]
    return fitted, group.reshape(-1)


def _group_sizes(sizes: np.ndarray, group: np.ndarray, fitted: Fitted, slots: int) -> np.ndarray:
    """Return the slots of each group, int64 [groups]."""
    size_of_group = np.bincount(group, sizes).astype(np.int64)
    is_too_long = size_of_group[group] > slots
    if is_too_long.any():
        first = int(is_too_long.argmax())
        raise ValueError(
            f"the group of sequence {fitted.example[first]} has {size_of_group[group[first]]} tokens; "
            f"a row has {slots}: cut its sequences, or pass longer='drop' to leave out the group"
        )
    return size_of_group


def _places(pack: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Return the place of each sequence in its pack, int64 [n], in the order of `within`, and then as given."""
    order = np.lexsort((within, pack))
    first = np.searchsorted(pack[order], pack)
    place = np.empty(len(pack), np.int64)
    place[order] = np.arange(len(pack))
    return place - first


def _in_order(
    fitted: Fitted, sizes: np.ndarray, slots: int, max_sequences_per_pack: Optional[int]
) -> PackedLengths:
    """Pack consecutive sequences: each pack takes the next ones while they fit."""
    depth = packing_depth(max_sequences_per_pack)
    count = len(sizes)
    ends = np.cumsum(sizes, dtype=np.int64)
    # The sequence behind the last one of a pack that begins with each.
    stop = np.searchsorted(ends, ends - sizes + slots, side="right")
    if depth is not None:
        stop = np.minimum(stop, np.arange(count) + depth)
    after = stop.tolist()
    starts = []
    begin = 0
    while begin < count:
        starts.append(begin)
        begin = after[begin]

    packs = [(sizes[start : after[start]].tolist(), 1) for start in starts]
    packing = Packing.of("in order", LengthHistogram.from_lengths(sizes, slots), depth, packs)
    firsts = np.array(starts, np.int64)
    depths = np.diff(np.append(firsts, count))
    pack = np.repeat(np.arange(len(firsts)), depths)
    return PackedLengths(pack, np.arange(count) - firsts[pack], packing, fitted)


def _with_weights(
    fitted: Fitted,
    sizes: np.ndarray,
    weights: np.ndarray,
    capacity: Any,
    slots: int,
    depth: Optional[int],
    seed: int,
) -> PackedLengths:
    """Pack with two capacities. weights: of each sequence, and so of its piece, also if the sequence was truncated."""
    began = time.perf_counter()
    random = np.random.default_rng(seed)
    if fitted.longer.rule == "split" and fitted.longer.longer:
        raise ValueError(
            "longer = 'split' does not tell the weight of each piece; pass lengths and weights of pieces"
        )
    names = fitted.example
    sizes, weights = within_capacities(sizes, weights[names], slots, capacity, names)
    order = random.permutation(len(sizes))  # decides which of equal sequences goes where
    packed = pack_two(
        sizes[order],
        weights[order],
        max_sequence_length=slots,
        capacity=capacity,
        max_sequences_per_pack=depth,
    )
    pack = np.empty_like(packed.pack)
    slot = np.empty_like(packed.slot)
    pack[order] = random.permutation(packed.packs)[packed.pack]
    slot[order] = packed.slot

    by_pack = sizes[np.lexsort((slot, pack))].tolist()
    ends = np.cumsum(np.bincount(pack, minlength=packed.packs)).tolist()
    packs = [(by_pack[start:end], 1) for start, end in zip([0, *ends], ends)]
    packing = Packing.of(
        "two capacities",
        LengthHistogram.from_lengths(sizes, slots),
        depth,
        packs,
        solve_seconds=time.perf_counter() - began,
        lower_bound=packed.lower_bound,
    )
    return PackedLengths(pack, slot, packing, fitted, prices=packed.prices)
