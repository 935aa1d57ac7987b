"""Plain lengths to bins of indices: `pack_data.pack`, and packing by group, in order or with a second capacity."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from pack_data.building.assignment import assign
from pack_data.cli.terminal import progress_shown
from pack_data.lengths.overlong import Fitted, Longer, fit
from pack_data.optimal import pack as pack_optimally
from pack_data.packing.certificate import Proof
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.packing.packing import Packing, prove
from pack_data.reading import hugging_face
from pack_data.reading.durable import replacing, write_array, write_atomically
from pack_data.reading.fields import (
    Fields,
    one_line,
    packing_depth,
    parse_json,
    shown,
    whole_number,
)
from pack_data.reading.packages import load_package
from pack_data.reading.words import counted
from pack_data.solver.two_capacities import TwoPrices, pack_two, places, within_capacities
from pack_data.store.quantities import rounded_up
from pack_data.store.sequences import check_multiple

_IN_ORDER = "in order"
_TWO_CAPACITIES = "two capacities"
ROWS_ENDINGS = (".parquet", ".jsonl", ".npy")


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
        prices: of `pack_with_capacity`, the proof of the bound.
        weights: of `pack_with_capacity`, the second amount of each sequence, integers [n].
        group: of `pack_groups`, the group of each sequence, numbered from 0, integers [n].
    """

    pack: np.ndarray
    slot: np.ndarray
    packing: Packing
    fitted: Fitted
    multiple_of: int = 1
    prices: Optional[TwoPrices] = None
    weights: Optional[np.ndarray] = None
    group: Optional[np.ndarray] = None

    def __repr__(self) -> str:
        sequences = counted(len(self.pack), "sequence")
        packs = counted(self.packing.packs, "pack")
        return f"PackedLengths({sequences} in {packs}: .bins, .packing, .fitted)"

    def _repr_html_(self) -> str:
        """Return the accounting of the packing for a notebook."""
        return self.packing._repr_html_()

    @property
    def rounding(self) -> int:
        """Slots that multiple_of added; `packing` counts them as tokens."""
        lengths = self.fitted.lengths.astype(np.int64)
        return int((rounded_up(lengths, self.multiple_of) - lengths).sum())

    def prove(self) -> Proof:
        """Prove again that no packing under the same constraints has fewer packs than `packing.lower_bound`.

        Returns:
            The proof, with the lower bound.

        Raises:
            ValueError: the proof does not hold, or the packs are not packs of the sequences by `packing`.
        """
        self._check()
        proof = self._proof()
        if proof.lower_bound != self.packing.lower_bound:
            raise ValueError(
                f"packing: the proof is of {proof.lower_bound} packs, lower_bound is {self.packing.lower_bound}; "
                "pack again"
            )
        return proof

    def _proof(self) -> Proof:
        sizes = rounded_up(self.fitted.lengths, self.multiple_of)
        if self.prices and self.weights is not None:
            return self.prices.prove(sizes, self.weights)
        if self.packing.algorithm != _IN_ORDER:
            return prove(self.packing)

        tokens = np.bincount(self.pack, sizes).astype(np.int64)
        depths = np.bincount(self.pack)
        firsts = np.cumsum(depths) - depths
        takes_more = tokens[:-1] + sizes[firsts[1:]] <= self.packing.max_sequence_length
        if self.packing.max_sequences_per_pack is not None:
            takes_more &= depths[:-1] < self.packing.max_sequences_per_pack
        if takes_more.any() or (np.diff(self.pack) < 0).any():
            raise ValueError("packs in order: one could take the next sequence; pack again")
        return Proof(1, Fraction(len(tokens)), len(tokens))

    @cached_property
    def bins(self) -> List[np.ndarray]:
        """The indices of the sequences of each pack, in order of their slots; each of 0..n - 1 occurs once."""
        order, offsets = self._rows()
        return np.split(order, offsets[1:-1]) if len(offsets) > 1 else []

    def _rows(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return the sequences pack by pack, in order of their slots, and where each pack begins, and the end."""
        order = np.lexsort((self.slot, self.pack))
        packs = np.bincount(self.pack, minlength=self.packing.packs)
        return order, np.append(0, np.cumsum(packs)).astype(np.int64)

    def save(self, path: Union[str, os.PathLike]) -> None:
        """Write everything to one file, which `load` reads; for the rows alone see `save_rows`.

        Args:
            path: a name that ends in .npz.
        """
        path = _checked_name(path, (".npz",))
        header = {
            "packing": self.packing.recipe(),
            "longer": asdict(self.fitted.longer),
            "multiple_of": self.multiple_of,
            "prices": None if self.prices is None else asdict(self.prices),
        }
        arrays: Dict[str, Any] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "pack": self.pack,
            "slot": self.slot,
            "lengths": self.fitted.lengths,
            "example_lengths": self.fitted.example_lengths,
            "example": self.fitted.example,
            "start": self.fitted.start,
        }
        for name in ("weights", "group"):
            if getattr(self, name) is not None:
                arrays[name] = getattr(self, name)
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_atomically(path, content.getvalue())

    @classmethod
    def load(cls, path: Union[str, os.PathLike]) -> PackedLengths:
        """Read what `save` wrote.

        Args:
            path: the file.

        Returns:
            The packs.

        Raises:
            ValueError: the file is damaged, or its packs are not those of its sequences.
        """
        way_out = "write it again with PackedLengths.save"
        try:
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            fields = Fields.of(
                parse_json(arrays.pop("header").tobytes(), path, way_out), path, way_out
            )
            prices = fields.optional("prices", Fields.object)
            packed = cls(
                arrays["pack"],
                arrays["slot"],
                Packing.from_recipe(fields.object("packing")),
                Fitted(
                    arrays["lengths"],
                    Longer(**fields.object("longer").tree),
                    arrays["example_lengths"],
                    arrays["example"],
                    arrays["start"],
                ),
                fields.integer("multiple_of", least=1),
                None if prices is None else TwoPrices.from_json(prices),
                arrays.get("weights"),
                arrays.get("group"),
            )
            packed._check()
        except OSError:
            raise
        except Exception as error:  # NumPy and zipfile raise any type for a damaged file
            problem = one_line(error, 300)
            if not problem.startswith(f"{path}: "):
                problem = f"{path}: {problem}; {way_out}"
            raise ValueError(problem) from None
        return packed

    def _check(self) -> None:
        """Raise ValueError unless the sequences follow from the examples, and the packing from the sequences."""
        self._check_sequences()
        self._check_places()
        pack, sizes = self._packed_items()
        packing = self.packing
        again = Packing.of(
            packing.algorithm,
            LengthHistogram.from_lengths(sizes, packing.max_sequence_length),
            packing.max_sequences_per_pack,
            _packs_of(pack, sizes),
        )
        if (again.strategies, again.repeats) != (packing.strategies, packing.repeats):
            raise ValueError(
                "packing: its strategies and repeats are not those of pack and lengths"
            )

        if (
            self.prices
            and np.bincount(self.pack, self.weights).max(initial=0) > self.prices.capacity
        ):
            raise ValueError("weights: those of a pack exceed the capacity")

    def _check_sequences(self) -> None:
        """Raise ValueError unless the rule for longer examples gives these sequences."""
        fitted = self.fitted
        longer = fitted.longer
        if fitted.example_lengths.sum() != longer.tokens:  # before a length is cut into pieces
            raise ValueError(f"example_lengths: must be {longer.tokens} tokens")
        again = fit(fitted.example_lengths, self.packing.max_sequence_length, longer.rule)
        if self.group is not None and longer.partners:
            examples = np.arange(len(fitted.example_lengths))
            again = again.without_groups(examples, ~np.isin(examples, fitted.example))
        for name in ("lengths", "example", "start", "longer"):
            if not np.array_equal(getattr(fitted, name), getattr(again, name)):
                raise ValueError(
                    f"{name}: not that of example_lengths under the rule for longer examples"
                )

    def _check_places(self) -> None:
        """Raise ValueError unless each pack has its slots 0, 1, ..., in order if the packing is."""
        for name in ("pack", "slot", "weights", "group"):
            column = getattr(self, name)
            if column is None:
                continue
            if column.shape != self.fitted.lengths.shape or column.dtype.kind not in "iu":
                raise ValueError(f"{name}: must be one whole number for each sequence")

        in_order = self.packing.algorithm == _IN_ORDER
        within = np.arange(len(self.slot)) if in_order else self.slot
        are_places = np.array_equal(self.slot, places(self.pack, within))
        if not are_places or self.pack.max(initial=-1) >= self.packing.packs:
            raise ValueError(
                f"{self.packing.algorithm}: pack and slot are not the places 0, 1, ... of each pack; pack again"
            )

    def _packed_items(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return the pack and the slots of each item that the packing counts: a sequence, or a group of them."""
        sizes = rounded_up(self.fitted.lengths.astype(np.int64), self.multiple_of)
        if self.group is None:
            return self.pack, sizes
        pack = self.pack[np.unique(self.group, return_index=True)[1]]
        if not np.array_equal(pack[self.group], self.pack):
            raise ValueError("group: the sequences of a group are in several packs")
        return pack, np.bincount(self.group, sizes).astype(np.int64)

    def save_rows(self, path: Union[str, os.PathLike]) -> None:
        """Write the indices of the sequences of each row, for another loader.

        A .parquet or .jsonl file has a list `indices` in each row; if sequences were cut, also `start` and `stop`, the
        tokens of each. For rows.npy these are flat arrays, rows.npy, rows.start.npy and rows.stop.npy, and row r is
        offsets[r] to offsets[r + 1] of rows.offsets.npy.

        Args:
            path: a name that ends in .parquet, .jsonl or .npy.

        Raises:
            ValueError: the name ends otherwise.
        """
        path = _checked_name(path, ROWS_ENDINGS)
        order, offsets = self._rows()
        fitted = self.fitted
        columns = {"indices": fitted.example[order]}
        if fitted.longer.longer and fitted.longer.rule != "drop":
            columns.update(start=fitted.start[order], stop=fitted.stop[order])
        if path.suffix == ".npy":
            named = {"offsets": offsets, **columns}
            for name, values in reversed(list(named.items())):
                target = path if name == "indices" else path.with_suffix(f".{name}.npy")
                write_array(target, values)
        elif path.suffix == ".parquet":
            arrow = load_package("pyarrow", "this file format")
            lists = {
                name: arrow.LargeListArray.from_arrays(offsets, values)
                for name, values in columns.items()
            }
            with replacing(path) as temporary:
                load_package("pyarrow.parquet", "this file format").write_table(
                    arrow.table(lists), str(temporary), write_page_checksum=True
                )
        else:
            with replacing(path) as temporary, open(temporary, "w") as file:
                for start, end in zip(offsets.tolist(), offsets[1:].tolist()):
                    row = {name: values[start:end].tolist() for name, values in columns.items()}
                    file.write(json.dumps(row) + "\n")


def _checked_name(path: Union[str, os.PathLike], endings: Sequence[str]) -> Path:
    """Return the path of a file to write; ValueError unless its name has one of these endings."""
    if Path(path).suffix not in endings:
        *others, last = endings
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{path}: the name must end in {wanted}")
    return Path(path)


class _Pieces(NamedTuple):
    """Sequences that fit a row."""

    fitted: Fitted
    sizes: np.ndarray  # integers [pieces], slots of each
    slots: int  # of a row
    multiple_of: int


def _fitted(lengths: Any, max_sequence_length: int, longer: str, multiple_of: int) -> _Pieces:
    """Check the arguments that all functions share, and cut the sequences by the rule."""
    slots = whole_slots(max_sequence_length)
    multiple_of = whole_number("multiple_of", multiple_of, least=1)
    check_multiple(slots, multiple_of)
    if hugging_face.is_data_set(lengths):
        lengths = hugging_face.lengths_of(lengths)
    fitted = fit(one_each("lengths", lengths), slots, longer)
    return _Pieces(fitted, rounded_up(fitted.lengths, multiple_of), slots, multiple_of)


def pack(
    lengths: Any,
    *,
    max_sequence_length: int,
    max_sequences_per_pack: Optional[int] = None,
    seed: int = 0,
    longer: str = "raise",
    budget: Optional[float] = None,
    multiple_of: int = 1,
    progress: bool = False,
) -> PackedLengths:
    """Pack sequences of these lengths into as few rows as the optimal packer finds.

        packed = pack([5, 3, 2, 7], max_sequence_length=8)
        packed.bins                      # [array([0, 1]), array([3]), array([2])], in some order
        packed.pack, packed.slot         # for sequence i: its pack, and its place in that pack
        packed.packing.efficiency        # tokens / slots
        packed.packing.lower_bound       # no packing has fewer packs; `packed.prove()` checks that again

    No pack holds more than max_sequence_length tokens or max_sequences_per_pack sequences, and each sequence is in
    exactly one. The time to solve depends on the lengths that occur, not on the number of sequences: a second if
    sequences in a pack are not limited, some seconds if they are. Each sequence adds some 20 bytes and 0.1
    microseconds. `bins` is computed on first use; for millions of packs, `pack` and `slot` are the smaller form.

    `pack_groups`, `pack_with_capacity` and `pack_in_order` pack under a further constraint.

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
        progress: True to show progress on standard error.

    Returns:
        The pack and the slot of each sequence, with the packing and its proof.

    Raises:
        ValueError: a length does not fit, which names the sequence, or an option is out of range.
    """
    pieces = _fitted(lengths, max_sequence_length, longer, multiple_of)
    packing, pack, slot = _optimal(
        pieces.sizes, pieces.slots, max_sequences_per_pack, seed, budget, progress
    )
    return PackedLengths(pack, slot, packing, pieces.fitted, pieces.multiple_of)


def pack_groups(
    lengths: Any,
    groups: Any,
    *,
    max_sequence_length: int,
    max_sequences_per_pack: Optional[int] = None,
    seed: int = 0,
    longer: str = "raise",
    budget: Optional[float] = None,
    multiple_of: int = 1,
    progress: bool = False,
) -> PackedLengths:
    """Pack so that the sequences of a group share a pack, such as the two of a preference pair.

    Args:
        lengths: tokens of each sequence, as for `pack`.
        groups: group of each sequence, whole numbers [n].
        max_sequence_length: slots of a row.
        max_sequences_per_pack: groups of a pack at most; None for unlimited.
        seed: as for `pack`.
        longer: as for `pack`; "drop" leaves out every group that is longer than a row, whole.
        budget: as for `pack`.
        multiple_of: as for `pack`.
        progress: True to show progress on standard error.

    Returns:
        The pack and the slot of each sequence; `packing` counts groups, and so does its bound.

    Raises:
        ValueError: a group does not fit, which names a sequence, or an option is out of range.
    """
    pieces = _fitted(lengths, max_sequence_length, longer, multiple_of)
    number = _group_numbers(groups, pieces.fitted)
    fitted, group = _fit_groups(pieces.fitted, number, pieces.multiple_of)
    sizes = rounded_up(fitted.lengths, pieces.multiple_of)
    items = _group_sizes(sizes, group, fitted, pieces.slots)
    packing, pack, slot = _optimal(
        items, pieces.slots, max_sequences_per_pack, seed, budget, progress
    )
    pack = pack[group]
    place = places(pack, slot[group])
    return PackedLengths(pack, place, packing, fitted, pieces.multiple_of, group=group)


def pack_in_order(
    lengths: Any,
    *,
    max_sequence_length: int,
    max_sequences_per_pack: Optional[int] = None,
    longer: str = "raise",
    multiple_of: int = 1,
) -> PackedLengths:
    """Pack consecutive sequences, in their order.

    Each pack takes sequences while they fit. That is optimal: by induction, the k-th pack of any packing in this order
    ends no later than the k-th of this one.

    Args:
        lengths: tokens of each sequence, as for `pack`.
        max_sequence_length: slots of a row.
        max_sequences_per_pack: packing depth; None for unlimited.
        longer: as for `pack`.
        multiple_of: as for `pack`.

    Returns:
        The pack and the slot of each sequence. `packing.lower_bound` holds for packings in this order, and is reached;
        `prove` checks that no pack could have taken one more.

    Raises:
        ValueError: a length does not fit, which names the sequence, or an option is out of range.
    """
    pieces = _fitted(lengths, max_sequence_length, longer, multiple_of)
    sizes = pieces.sizes
    depth = packing_depth(max_sequences_per_pack)
    count = len(sizes)
    ends = np.cumsum(sizes, dtype=np.int64)
    # The sequence behind the last one of a pack that begins with each.
    stop = np.searchsorted(ends, ends - sizes + pieces.slots, side="right")
    if depth is not None:
        stop = np.minimum(stop, np.arange(count) + depth)
    after = stop.tolist()
    starts = []
    begin = 0
    while begin < count:
        starts.append(begin)
        begin = after[begin]

    firsts = np.array(starts, np.int64)
    pack = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, count)))
    slot = np.arange(count) - firsts[pack]
    packing = _packing_of(pack, pieces, _IN_ORDER, depth, lower_bound=len(firsts))
    return PackedLengths(pack, slot, packing, pieces.fitted, pieces.multiple_of)


def pack_with_capacity(
    lengths: Any,
    weights: Any,
    *,
    capacity: int,
    max_sequence_length: int,
    max_sequences_per_pack: Optional[int] = None,
    seed: int = 0,
    longer: str = "raise",
    multiple_of: int = 1,
) -> PackedLengths:
    """Pack under a second limit: the images, masked tokens or squared lengths of a pack, for example.

    Args:
        lengths: tokens of each sequence, as for `pack`.
        weights: second amount of each sequence, whole numbers [n] of at least 0.
        capacity: sum of the weights that a pack holds at most.
        max_sequence_length: slots of a row.
        max_sequences_per_pack: packing depth; None for unlimited.
        seed: as for `pack`.
        longer: as for `pack`, but not "split", which does not tell the weight of each piece. A truncated sequence keeps
            its weight.
        multiple_of: as for `pack`.

    Returns:
        The pack and the slot of each sequence; `prices` prove the bound of the packing, which has no certificate.

    Raises:
        ValueError: a length or a weight does not fit, which names the sequence, or an option is out of range.
    """
    began = time.perf_counter()
    pieces = _fitted(lengths, max_sequence_length, longer, multiple_of)
    fitted = pieces.fitted
    random = np.random.default_rng(whole_number("seed", seed, least=0))
    if fitted.longer.rule == "split" and fitted.longer.longer:
        raise ValueError(
            "longer = 'split' does not tell the weight of each piece; pass lengths and weights of pieces"
        )
    names = fitted.example
    weights = _of_examples("weights", weights, fitted)[names]
    sizes, weights = within_capacities(pieces.sizes, weights, pieces.slots, capacity, names)
    order = random.permutation(len(sizes))  # decides which of equal sequences goes where
    packed = pack_two(
        sizes[order],
        weights[order],
        max_sequence_length=pieces.slots,
        capacity=capacity,
        max_sequences_per_pack=max_sequences_per_pack,
    )
    pack = np.empty_like(packed.pack)
    slot = np.empty_like(packed.slot)
    pack[order] = random.permutation(packed.packs)[packed.pack]
    slot[order] = packed.slot
    packing = _packing_of(
        pack,
        pieces,
        _TWO_CAPACITIES,
        max_sequences_per_pack,
        solve_seconds=time.perf_counter() - began,
        lower_bound=packed.lower_bound,
    )
    return PackedLengths(
        pack, slot, packing, fitted, pieces.multiple_of, prices=packed.prices, weights=weights
    )


def _optimal(
    sizes: np.ndarray,
    slots: int,
    depth: Optional[int],
    seed: int,
    budget: Optional[float],
    progress: bool,
) -> Tuple[Packing, np.ndarray, np.ndarray]:
    """Return an optimal packing of these sizes, and the pack and the slot of each."""
    seed = whole_number("seed", seed, least=0)
    histogram = LengthHistogram.from_lengths(sizes, slots)
    with progress_shown(progress):
        packing = pack_optimally(histogram, max_sequences_per_pack=depth, budget=budget)
    return (packing, *assign(sizes, packing, seed))


def _packing_of(
    pack: np.ndarray,
    pieces: _Pieces,
    algorithm: str,
    depth: Optional[int],
    **others: Any,
) -> Packing:
    """Return the packing that consists of these packs."""
    histogram = LengthHistogram.from_lengths(pieces.sizes, pieces.slots)
    return Packing.of(algorithm, histogram, depth, _packs_of(pack, pieces.sizes), **others)


def _packs_of(pack: np.ndarray, sizes: np.ndarray) -> Iterator[Tuple[List[int], int]]:
    """Yield the sizes of the sequences in a pack, and the number of such packs."""
    sizes = sizes.astype(np.int64)[np.lexsort((sizes, pack))]
    depths = np.bincount(pack)
    firsts = np.cumsum(depths) - depths
    for depth in np.unique(depths[depths > 0]).tolist():
        places = firsts[depths == depth][:, None] + np.arange(depth)
        packs, counts = np.unique(sizes[places], axis=0, return_counts=True)
        yield from zip(packs.tolist(), counts.tolist())


def one_each(name: str, values: Any) -> np.ndarray:
    """Return an argument with one whole number for each sequence as an array of one dimension."""
    if isinstance(values, Iterator):
        values = list(values)
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
