"""Plain lengths to bins of indices: `pack_data.pack`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, List, Optional

import numpy as np

from pack_data.building.assignment import assign
from pack_data.histogram import LengthHistogram
from pack_data.lengths.overlong import Fitted, fit
from pack_data.optimal import pack as pack_optimally
from pack_data.packing import Packing
from pack_data.reading import hugging_face
from pack_data.reading.fields import shown, whole_number


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

    No pack holds more than max_sequence_length tokens or max_sequences_per_pack sequences, and each sequence is in
    exactly one. The time to solve depends on the lengths that occur, not on how many sequences have them: a second
    where sequences in a pack are not limited, some seconds where they are. Each sequence adds some 20 bytes and 0.1
    microseconds.
    `bins` is made when it is first asked for; for millions of packs, `pack` and `slot` are the smaller form.
    Raises ValueError, which names the sequence, where a length does not fit.
    """
    try:
        given = np.asarray(hugging_face.lengths_of(lengths) if hugging_face.is_data_set(lengths) else lengths)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"lengths = {shown(lengths)}; give one whole number for each sequence ({error})") from None
    if given.ndim != 1:
        raise ValueError(f"lengths have {given.ndim} dimensions; give one whole number for each sequence")
    seed = whole_number("seed", seed, least=0)
    fitted = fit(given, max_sequence_length, longer)
    histogram = LengthHistogram.from_lengths(fitted.lengths, max_sequence_length)
    packing = pack_optimally(histogram, max_sequences_per_pack=max_sequences_per_pack, progress=False)
    return PackedLengths(*assign(fitted.lengths, packing, seed), packing, fitted)
