"""Packs as a map-style data set, as torch's DataLoader takes it; torch is not imported.

    rows = PackDataset("data/mine", as_tensor=torch.from_numpy)
    loader = DataLoader(rows, batch_size=2, collate_fn=rows.collate, num_workers=4)

An `IndexBatchSampler` over `rows.lengths` adds ranks, epochs and resume. `pack_data.pack_dataset` packs examples first.
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Union

import numpy as np

from pack_data.batching.collators import alike, padding_free_batch, token_columns
from pack_data.batching.identity import digest_of_examples, digest_of_values
from pack_data.reading.fields import shown
from pack_data.store.boundaries import positions_of, sequences_in
from pack_data.store.data_set import MANIFEST, PackStore
from pack_data.store.meanings import TOKENS
from pack_data.store.packs import BERT, decode
from pack_data.store.sequences import Sequences, starts_of
from pack_data.store.trained_labels import IGNORED, labels_of, states_labels

if TYPE_CHECKING:
    from pack_data.lengths.overlong import Longer
    from pack_data.pack_lengths import PackedLengths

_logger = logging.getLogger(__name__)

_OF_ROWS = ("input_mask", "positions")  # columns that a row has beside those of its examples
_IDENTIFYING_EXAMPLES = 1024  # read for the identity: 0.1 s of a data set on disk
_Row = Dict[str, np.ndarray]


class PackDataset:
    """The rows of a packing: `len(rows)` and `rows[number]`, a mapping of arrays.

    A row of token sequences has the columns with one value per token, input_mask (the number of the sequence, from 1)
    and positions. Padding, at the end of a built row and after a sequence up to its multiple_of, is zeros. A row of
    BERT has the fields of a batch (`PackStore.batch`).

    Args:
        source: a built data set (its directory, or a PackStore), or examples: a sequence of mappings with input_ids
            such as a `datasets.Dataset`, which are read when a row is read, or `Sequences` in memory.
        packed: the packing that `pack` returned for the lengths of the examples.
        as_tensor: function applied to each array of a batch, such as torch.from_numpy.

    Raises:
        ValueError: examples without their packing, a built data set with one, or a packing of other examples.
    """

    def __init__(
        self,
        source: Any,
        *,
        packed: Optional[PackedLengths] = None,
        as_tensor: Callable[[np.ndarray], Any] = np.asarray,
        **options: Any,
    ) -> None:
        self.as_tensor = as_tensor
        self._rows: Union[_StoredRows, _PackedRows]
        if is_built(source):
            if packed is not None or options:
                raise ValueError(
                    f"{shown(source)}: is packed already; leave out {', '.join(options) or 'packed'}"
                )
            self._rows = _StoredRows(
                source if isinstance(source, PackStore) else PackStore.open(Path(source))
            )
        elif packed is None:
            raise ValueError(
                f"{shown(source)}: is not packed yet; use pack_dataset(source, max_sequence_length=...)"
            )
        elif options:
            raise TypeError(f"PackDataset has no options {', '.join(options)}; pack_dataset has")
        elif isinstance(source, (str, Path)):
            raise ValueError(
                f"{source}: a path, not examples; use pack_dataset(source, packed=packed)"
            )
        else:
            self._rows = _PackedRows(source, packed)

    @property
    def longer(self) -> Optional[Longer]:
        """The examples longer than a row and what was cut off; None for a data set that was built before."""
        return self._rows.longer

    @property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row, int64 [rows], for a batch sampler."""
        return self._rows.lengths

    @property
    def identity(self) -> str:
        """Digest of content and packing, computed at first use: equal for the same rows in the same order.

        A built data set is identified by the checksums of its shards and a file by all its tokens. Of a sequence of
        examples, all lengths and the content of up to 1,024 evenly spaced examples count.
        """
        return self._rows.identity

    @property
    def is_bert(self) -> bool:
        """True if the rows have the fields of BERT, all of one shape."""
        return self._rows.of_bert

    def __len__(self) -> int:
        return len(self._rows.lengths)

    def __getitem__(self, number: int) -> _Row:
        rows = len(self)
        if not -rows <= number < rows:
            raise IndexError(f"row {number}: out of range; rows are 0 to {rows - 1}")
        return self._rows.rows([number % rows])[0]

    def __getitems__(self, numbers: Sequence[int]) -> List[_Row]:
        """Return the rows of a batch at once, for a DataLoader."""
        return self._rows.rows(numbers)

    def collate(self, rows: Sequence[_Row]) -> Dict[str, Any]:
        """Return a batch of rows: token sequences as `padding_free_batch`, all in one row; rows of BERT stacked.

        labels are the column of this name, else input_ids; ignored (-100) where a mask of the loss is 0.

        Args:
            rows: from `rows[number]`.

        Returns:
            The arrays of the batch, after `as_tensor`.
        """
        batch: Dict[str, np.ndarray] = {}
        if not self._rows.of_bert:
            batch = _padding_free(rows, self._rows.multiple_of)
        elif rows:
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return {name: self.as_tensor(values) for name, values in batch.items()}


def is_built(source: Any) -> bool:
    """Return True for a built data set: a PackStore, or the directory of one."""
    if isinstance(source, (str, Path)):
        return (Path(source) / MANIFEST).is_file()
    return isinstance(source, PackStore)


class _StoredRows:
    """The rows of a built data set. A worker process opens its directory for itself."""

    longer = None

    def __init__(self, store: PackStore) -> None:
        self._store = store
        self.of_bert = store.schema.kind == BERT
        self.multiple_of = store.schema.multiple_of
        self.lengths = store.lengths()["lengths"].sum(axis=1, dtype=np.int64)

    def rows(self, numbers: Sequence[int]) -> List[_Row]:
        batch = decode(self._store.schema, self._store.records(np.array(numbers, np.int64)))
        return [
            {name: values[row] for name, values in batch.items()} for row in range(len(numbers))
        ]

    @property
    def identity(self) -> str:
        return digest_of_values(self._store.manifest.digest, self._packs())

    def _packs(self) -> List[str]:
        """Return the checksums of the shards; the digest of the data set does not depend on how it is packed."""
        return [shard.sha256 for shard in self._store.manifest.shards]

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_store": (self._store.folder, self._packs())}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        folder, packs = state["_store"]
        self.__dict__.update(state, _store=PackStore.open(folder))
        if self._packs() != packs:
            raise ValueError(
                f"{folder}: was built again while it was being read; start the run again"
            )


class _PackedRows:
    """The rows of examples and a packing of their lengths."""

    of_bert = False

    def __init__(self, examples: Any, packed: PackedLengths) -> None:
        packed_examples = packed.fitted.longer.examples
        if len(examples) != packed_examples:
            raise ValueError(
                f"packed: a packing of {packed_examples} examples for {len(examples)} examples; pass the lengths of "
                "these examples to pack"
            )
        self._examples = _Examples(examples) if isinstance(examples, Sequences) else examples
        self._fitted = packed.fitted
        self._bins = packed.bins
        self.longer = packed.fitted.longer
        if self.longer.longer:
            unlabelled = self._without_a_label_left()
            count = f"; {len(unlabelled):,} examples keep no label: {shown(unlabelled)}"
            _logger.warning("%s%s", self.longer, count if unlabelled else "")
        self.multiple_of = packed.multiple_of
        self.lengths = np.array(
            [self._fitted.lengths[bin_].sum() for bin_ in packed.bins], np.int64
        )

    def rows(self, numbers: Sequence[int]) -> List[_Row]:
        rows = []
        for number in numbers:
            pieces = [self._piece(int(piece)) for piece in self._bins[number]]
            rows.append(_joined(pieces, self.multiple_of))
        return rows

    @cached_property
    def identity(self) -> str:
        fitted = self._fitted
        depths = [len(bin_) for bin_ in self._bins]
        pieces = np.concatenate([*self._bins, np.zeros(0, np.int64)])
        packing = [
            fitted.example_lengths,
            fitted.example,
            fitted.start,
            fitted.lengths,
            depths,
            pieces,
        ]

        if isinstance(self._examples, _Examples):
            content = [
                values for column in sorted(self._examples.tokens.items()) for values in column
            ]
        else:
            content = [digest_of_examples(self._examples, _IDENTIFYING_EXAMPLES)]
        return digest_of_values(self.multiple_of, *packing, *content)

    def _without_a_label_left(self) -> List[int]:
        """Return the numbers of the examples of which truncation has left no label to predict."""
        columns = getattr(self._examples, "column_names", None)
        if columns is not None and not states_labels(dict.fromkeys(columns, ())):
            return []  # without reading the table
        fitted = self._fitted
        cut = np.flatnonzero(fitted.lengths < fitted.example_lengths[fitted.example])
        unlabelled = []
        for piece in cut if fitted.longer.rule == "truncate" else ():
            number, start = fitted.beginning(int(piece))
            example = self._examples[number]
            if not states_labels(example):
                continue
            # The first token is never predicted.
            predicted = labels_of(example, f"example {number}")[1:] != IGNORED
            kept = predicted[start : int(fitted.stop[piece]) - 1]
            if predicted.any() and not kept.any():
                unlabelled.append(number)
        return unlabelled

    def _piece(self, number: int) -> _Row:
        example, start = self._fitted.beginning(number)
        stop = start + int(self._fitted.lengths[number])
        columns = self._examples[example]
        tokens = len(columns[TOKENS])
        packed_tokens = int(self._fitted.example_lengths[example])
        if tokens != packed_tokens:
            raise ValueError(
                f"example {example} has {tokens} tokens, but was packed as an example of {packed_tokens} tokens; "
                "pass the lengths of these examples to pack"
            )
        values_of = token_columns(columns, f"example {example}")
        return {name: np.asarray(values)[start:stop] for name, values in values_of.items()}


class _Examples:
    """Sequences in memory, as examples."""

    def __init__(self, sequences: Sequences) -> None:
        self.lengths = sequences.lengths
        self.tokens = sequences.tokens
        self._starts = starts_of(sequences.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> _Row:
        start = int(self._starts[number])
        stop = start + int(self.lengths[number])
        return {name: values[start:stop] for name, values in self.tokens.items()}


def _joined(pieces: Sequence[_Row], multiple_of: int) -> _Row:
    """Join the pieces one after another, each with zeros up to a multiple."""
    columns: Dict[str, List[np.ndarray]] = {}
    # Runs of tokens: their lengths, and the numbers of their sequences, 0 for padding.
    runs: List[int] = []
    numbers: List[int] = []
    sequences = 0
    for piece in alike(pieces):
        tokens = len(piece[TOKENS])
        gap = -tokens % multiple_of
        span, lengths = sequences_in(piece, "an example of a row")
        runs += [span.start, *lengths.tolist(), tokens - span.stop + gap]
        numbers += [0, *range(sequences + 1, sequences + len(lengths) + 1), 0]
        sequences += len(lengths)
        for name, values in piece.items():
            values = np.asarray(values)
            columns.setdefault(name, []).append(np.pad(values, (0, gap)) if gap else values)

    row = {
        name: np.concatenate(parts) for name, parts in columns.items() if len(parts) == len(pieces)
    }
    mask = np.repeat(np.array(numbers, np.int32), runs)
    positions = positions_of(np.array(runs, np.int64)) * (mask > 0)
    return {**row, "input_mask": mask, "positions": positions.astype(np.int32)}


def _padding_free(rows: Sequence[_Row], multiple_of: int) -> _Row:
    """Return the sequences of these rows in one row, without the padding at their ends."""
    sequences = []
    for row in rows:
        firsts = np.flatnonzero((row["positions"] == 0) & (row["input_mask"] > 0))
        ends = firsts + np.bincount(row["input_mask"])[1:]
        # A built data set may have position_ids, of examples that are rows.
        columns = {name: values for name, values in row.items() if name not in _OF_ROWS}
        for start, end in zip(firsts.tolist(), ends.tolist()):
            sequences.append({name: values[start:end] for name, values in columns.items()})
    return padding_free_batch(sequences, multiple_of=multiple_of)
