"""Packs as a map-style data set, as torch's DataLoader takes it; torch is not imported.

    rows = PackDataset("train.jsonl", max_sequence_length=4096, as_tensor=torch.from_numpy)
    loader = DataLoader(rows, batch_size=2, collate_fn=rows.collate, num_workers=4)

An `IndexBatchSampler` over `rows.lengths` adds ranks, epochs and resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import numpy as np

from pack_data.batching.collators import alike, padding_free_batch, token_columns
from pack_data.formats.detect import open_source
from pack_data.pack_lengths import PackedLengths, pack
from pack_data.reading import hugging_face
from pack_data.reading.fields import shown
from pack_data.store.data_set import MANIFEST, PackStore
from pack_data.store.packs import BERT, decode
from pack_data.store.sequences import Sequences, starts_of

_TOKENS = "input_ids"
_Row = Dict[str, np.ndarray]


class PackDataset:
    """The rows of a packing: `len(rows)` and `rows[number]`, a mapping of arrays.

    source: a built data set (its folder, or a PackStore); a file or folder that `pack_data.formats` reads, such as
    JSONL, Parquet or what `datasets` saved, which is read into memory and packed; or examples, a sequence of mappings
    with input_ids such as a `datasets.Dataset`, which are read when a row is asked for.
    max_sequence_length: slots of a row, for a source that is not packed yet. options: of `pack_data.pack`.
    packed: of examples, what `pack` made of their lengths, instead of packing them here.
    as_tensor: applied to each array of a batch, as torch.from_numpy.

    A row of token sequences has each column with one value a token, input_mask (the number of the sequence, from 1) and
    positions; padding, at the end of a built row and behind a sequence by its multiple_of, is zeros. A row of BERT has
    the fields of a batch (`PackStore.batch`).
    """

    def __init__(
        self,
        source: Any,
        *,
        max_sequence_length: Optional[int] = None,
        packed: Optional[PackedLengths] = None,
        as_tensor: Callable[[np.ndarray], Any] = np.asarray,
        **options: Any,
    ) -> None:
        self.as_tensor = as_tensor
        self._rows: Union[_StoredRows, _PackedRows]
        is_path = isinstance(source, (str, Path))
        if isinstance(source, PackStore) or (is_path and (Path(source) / MANIFEST).is_file()):
            if max_sequence_length is not None or packed is not None or options:
                raise ValueError(f"{shown(source)}: packed already; leave max_sequence_length, packed and options out")
            self._rows = _StoredRows(source if isinstance(source, PackStore) else PackStore.open(Path(source)))
            return
        examples = _Examples(_read(str(source))) if is_path else source
        if packed is None:
            if max_sequence_length is None:
                raise ValueError(f"{shown(source)}: is not packed yet; give max_sequence_length, the slots of a row")
            packed = pack(_lengths(examples), max_sequence_length=max_sequence_length, **options)
        self._rows = _PackedRows(examples, packed)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: real tokens of each row, for a batch sampler."""
        return self._rows.lengths

    @property
    def is_bert(self) -> bool:
        """Whether its rows have the fields of BERT, all of one shape."""
        return self._rows.of_bert

    def __len__(self) -> int:
        return len(self._rows.lengths)

    def __getitem__(self, number: int) -> _Row:
        rows = len(self)
        if not -rows <= number < rows:
            raise IndexError(f"row {number} was asked for; there are rows 0 to {rows - 1}")
        return self._rows.rows([number % rows])[0]

    def __getitems__(self, numbers: Sequence[int]) -> List[_Row]:
        """The rows of a batch at once, as a DataLoader asks for them."""
        return self._rows.rows(numbers)

    def collate(self, rows: Sequence[_Row]) -> Dict[str, Any]:
        """A batch of rows: token sequences as `padding_free_batch`, all in one row; rows of BERT stacked.

        labels: the column of this name, else input_ids; ignored (-100) where a column loss_mask is 0.
        """
        batch = _stacked(rows) if self._rows.of_bert else _padding_free(rows, self._rows.multiple_of)
        return {name: self.as_tensor(values) for name, values in batch.items()}


class _StoredRows:
    """Of a built data set. A worker process opens its folder for itself."""

    def __init__(self, store: PackStore) -> None:
        self._store = store
        self.of_bert, self.multiple_of = store.schema.kind == BERT, store.schema.multiple_of
        self.lengths = store.lengths()["lengths"].sum(axis=1, dtype=np.int64)

    def rows(self, numbers: Sequence[int]) -> List[_Row]:
        batch = decode(self._store.schema, self._store.records(np.array(numbers, np.int64)))
        return [{name: values[row] for name, values in batch.items()} for row in range(len(numbers))]

    def _packs(self) -> List[str]:
        """What tells packs apart; the digest is that of the sequences, in whichever packs."""
        return [shard.sha256 for shard in self._store.manifest.shards]

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_store": (self._store.folder, self._packs())}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        folder, packs = state["_store"]
        self.__dict__.update(state, _store=PackStore.open(folder))
        if self._packs() != packs:
            raise ValueError(f"{folder}: was built again while it was read; start the run again")


class _PackedRows:
    """Of examples and a packing of their lengths."""

    of_bert = False

    def __init__(self, examples: Any, packed: PackedLengths) -> None:
        if len(examples) != packed.fitted.longer.examples:
            raise ValueError(
                f"{len(examples)} examples, the packing is of {packed.fitted.longer.examples}; give the lengths of "
                "these examples to pack"
            )
        self._examples, self._fitted, self._bins = examples, packed.fitted, packed.bins
        self.multiple_of = packed.multiple_of
        self.lengths = np.array([self._fitted.lengths[bin_].sum() for bin_ in packed.bins], np.int64)

    def rows(self, numbers: Sequence[int]) -> List[_Row]:
        return [
            _joined([self._piece(int(piece)) for piece in self._bins[number]], self.multiple_of) for number in numbers
        ]

    def _piece(self, number: int) -> _Row:
        example, start = self._fitted.beginning(number)
        columns, length = self._examples[example], int(self._fitted.lengths[number])
        tokens = len(columns[_TOKENS])
        if tokens < start + length:
            raise ValueError(
                f"example {example} has {tokens} tokens, it was packed as one of {start + length} or more; give pack "
                "the lengths of these examples"
            )
        found = token_columns(columns, f"example {example}")
        return {name: np.asarray(values)[start : start + length] for name, values in found.items()}


class _Examples:
    """Sequences in memory, as examples."""

    def __init__(self, sequences: Sequences) -> None:
        self.lengths, self._tokens = sequences.lengths, sequences.tokens
        self._starts = starts_of(sequences.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> _Row:
        start, length = int(self._starts[number]), int(self.lengths[number])
        return {name: values[start : start + length] for name, values in self._tokens.items()}


def _read(path: str) -> Sequences:
    source = open_source(path)
    if source.unpacked_kind != "tokens":
        raise ValueError(f"{path}: holds {source.kind} of BERT; pack them with packed-bert build --from {path}")
    blocks = list(source.blocks())
    if not blocks or _TOKENS not in blocks[0].tokens:
        raise ValueError(f"{path}: has no column {_TOKENS}; rename the column of token ids")
    return Sequences.concatenate(blocks)


def _lengths(examples: Any) -> np.ndarray:
    if hugging_face.is_data_set(examples):  # of the tokens themselves: a column length may count something else
        return hugging_face.lengths_of(examples.select_columns([_TOKENS] if _TOKENS in examples.column_names else []))
    if isinstance(examples, _Examples):
        return examples.lengths
    return np.array([len(examples[number][_TOKENS]) for number in range(len(examples))], np.int64)


def _joined(pieces: Sequence[_Row], multiple_of: int) -> _Row:
    """The pieces one after another, each with zeros up to a multiple."""
    pieces = [{name: np.asarray(values) for name, values in piece.items()} for piece in alike(pieces)]
    names = [name for name in pieces[0] if all(name in piece for piece in pieces)]
    whole = [{name: piece[name] for name in names} for piece in pieces]
    for number, piece in enumerate(whole, 1):
        piece["input_mask"] = np.full(len(piece[_TOKENS]), number, np.int32)
        piece["positions"] = np.arange(len(piece[_TOKENS]), dtype=np.int32)
    gaps = [-len(piece[_TOKENS]) % multiple_of for piece in pieces]
    return {
        name: np.concatenate([np.pad(piece[name], (0, gap)) if gap else piece[name] for piece, gap in zip(whole, gaps)])
        for name in (*names, "input_mask", "positions")
    }


def _stacked(rows: Sequence[_Row]) -> _Row:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def _padding_free(rows: Sequence[_Row], multiple_of: int) -> _Row:
    sequences = []
    for row in rows:
        firsts = np.flatnonzero((row["positions"] == 0) & (row["input_mask"] > 0))
        ends = firsts + np.bincount(row["input_mask"])[1:]
        for start, end in zip(firsts.tolist(), ends.tolist()):
            ids = row[_TOKENS][start:end]
            labels = row["labels"][start:end] if "labels" in row else ids
            if "loss_mask" in row:
                labels = np.where(row["loss_mask"][start:end] != 0, labels, -100)
            sequences.append({_TOKENS: ids, "labels": labels})
    return padding_free_batch(sequences, multiple_of=multiple_of)
