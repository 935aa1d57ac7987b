"""Packs as rows of a table, for Hugging Face `datasets`; nothing is imported from it.

    dataset.map(PackRows(4096), batched=True, batch_size=10_000, remove_columns=dataset.column_names)
    IterableDataset.from_generator(packed_rows, gen_kwargs={"examples": source, "max_sequence_length": 4096})

`map` packs each batch by itself into as few rows as possible; it works on a streamed data set too, where the batch is
the window. `packed_rows` packs a stream with a bounded buffer and no windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence

import numpy as np

from pack_data.batching.collators import alike, token_columns
from pack_data.lengths.overlong import Longer
from pack_data.pack_lengths import pack
from pack_data.store.boundaries import positions_of, sequences_in
from pack_data.store.meanings import TOKENS
from pack_data.store.trained_labels import LABELS, labels_of
from pack_data.stream.pack_stream import PackStream

_Row = Dict[str, List[int]]

_LENGTHS = "seq_lengths"
# Values of padding that are not 0. It is a sequence of its own, so it is not masked.
_PADDING = {LABELS: -100, "attention_mask": 1}
_COLUMNS = [TOKENS, "position_ids", _LENGTHS]  # of every row


def pieces_of(example: Mapping[str, Any], longer: Longer, name: str) -> Iterator[Dict[str, Any]]:
    """Yield the example cut by the rule, without padding and without columns of other lengths than input_ids.

    A piece of several sequences has position_ids that restart.
    """
    columns = token_columns(example, name)
    span, _ = sequences_in(example, name)
    real = {column: values[span] for column, values in columns.items()}
    for start, stop in longer.spans(len(real[TOKENS]), name):
        yield {column: values[start:stop] for column, values in real.items()}


def _row_of(examples: Sequence[Mapping[str, Any]], multiple_of: int = 1) -> _Row:
    """Join the examples of a pack one after another; see `PackRows` for the columns."""
    parts = []
    lengths: List[int] = []
    for example in alike(examples):
        _, inside = sequences_in(example, "an example of a row")
        lengths += inside.tolist()
        columns = dict(example)
        if multiple_of > 1:
            columns.setdefault(LABELS, labels_of(example, "an example of a row"))
        parts.append(columns)
        gap = -len(example[TOKENS]) % multiple_of
        if gap:
            parts.append({name: [_PADDING.get(name, 0)] * gap for name in columns})
            lengths.append(gap)
    row: _Row = {}
    for column in _common_columns(parts):
        row[column] = np.concatenate([np.asarray(part[column]) for part in parts]).tolist()
    row["position_ids"] = positions_of(np.array(lengths, np.int64)).tolist()
    row[_LENGTHS] = lengths
    return row


def _common_columns(parts: Sequence[Mapping[str, Any]]) -> List[str]:
    return [column for column in parts[0] if all(column in part for part in parts)]


@dataclass(frozen=True)
class PackRows:
    """A function for `datasets.Dataset.map(..., batched=True)`: the batch's examples as packed rows.

    A row has the columns with one value for each token of input_ids; position_ids, which begin at 0 in each example;
    and seq_lengths, the tokens of each example.

    Args:
        max_sequence_length: slots of a row.
        max_sequences_per_pack: largest depth; None is unlimited.
        longer: rule of `pack_data.lengths.overlong` for longer examples.
        seed: seed of the order of the rows.
        budget: seconds for each batch, as in `pack_data.pack`; with one the rows are not repeatable.
        multiple_of: each example begins at a multiple of it, and the row ends at one. The padding behind an example
            counts as an example of its own; it has zeros, and -100 in labels, a column that every row has then.
    """

    max_sequence_length: int
    max_sequences_per_pack: Optional[int] = None
    longer: str = "raise"
    seed: int = 0
    budget: Optional[float] = None
    multiple_of: int = 1

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> Dict[str, List[List[int]]]:
        longer = Longer(self.longer, self.max_sequence_length)
        pieces: List[Any] = []
        for number, values in enumerate(zip(*batch.values())):
            example = dict(zip(batch, values))
            pieces += pieces_of(example, longer, f"example {number} of the batch")
        pieces = alike(pieces)
        packed = pack(
            np.array([len(piece[TOKENS]) for piece in pieces], np.int64),
            max_sequence_length=self.max_sequence_length,
            max_sequences_per_pack=self.max_sequences_per_pack,
            seed=self.seed,
            budget=self.budget,
            multiple_of=self.multiple_of,
        )
        rows = [
            _row_of([pieces[number] for number in bin_], self.multiple_of) for bin_ in packed.bins
        ]
        # A column that has as many values as tokens in some examples only, by chance, is not one of tokens.
        columns = _common_columns(rows) if rows else _COLUMNS
        return {column: [row[column] for row in rows] for column in columns}


def packed_rows(
    examples: Iterable[Mapping[str, Any]],
    max_sequence_length: int,
    *,
    longer: str = "raise",
    **options: Any,
) -> Iterator[_Row]:
    """Yield the rows of a stream of examples, with the columns of `PackRows`.

    Args:
        examples: mappings with input_ids.
        max_sequence_length: slots of a row.
        longer: rule of `pack_data.lengths.overlong` for longer examples.
        options: further options of `PackStream`.

    Yields:
        Rows in the order in which they are full.

    Raises:
        ValueError: an option is out of range, or an example does not fit the rule.
    """
    rule = Longer(longer, max_sequence_length)
    stream = PackStream(max_sequence_length, **options)

    def pieces() -> Iterator[Any]:
        for number, example in enumerate(examples):
            for piece in pieces_of(example, rule, f"example {number} of the stream"):
                yield piece, len(piece[TOKENS])

    for packed in stream.packs(pieces()):
        yield _row_of(packed.examples, stream.multiple_of)
