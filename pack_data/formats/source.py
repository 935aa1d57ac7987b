"""A source of sequences or packs: files of one format, whose records are read one after another.

source = open_source("wiki/", format="auto", skip_bad=3)
source.kind                       # "examples", "packs", "tokens" or "token_packs"
for record in source.read(): ...  # record.value, record.origin (file and number), record.foreign
source.bad.count                  # bad records skipped in the last reading
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from pack_data.formats import bert_tfrecord
from pack_data.formats.columns import LISTS, RowBlock, check_beside, token_columns
from pack_data.formats.data_files import data_files
from pack_data.formats.detect import FORMATS, format_of
from pack_data.formats.megatron import tokens_file
from pack_data.formats.records import (
    UNPACKED,
    Record,
    RowWidths,
    Tally,
    checked_pack,
    counting,
)
from pack_data.formats.saved import selected_files
from pack_data.reading.bad_records import MOST_RECORD_BYTES, BadRecords
from pack_data.reading.durable import PathLike
from pack_data.reading.fields import printable, whole_number
from pack_data.reading.words import in_blocks
from pack_data.store.data_set import MANIFEST, read_manifest
from pack_data.store.meanings import LENGTHS, OF_SEQUENCES, OF_TOKENS, REFUSED
from pack_data.store.sequences import Sequences

_ROWS_COMPARED = (
    100  # of the first file, to find columns of unknown names that belong to the tokens
)
_BLOCK_OF_EXAMPLES = 512  # small: as Python numbers they take ten times the memory of a column


def module_of(format: str) -> ModuleType:
    """Return the module that reads a format."""
    return importlib.import_module(f"pack_data.formats.{FORMATS[format]}")


@dataclass
class Source:
    """Files of one format, read record by record; at most a block of rows is in memory.

    columns: of token sequences, the tokens first; empty for other kinds. ignored: all other columns of the first file.
    are_chosen: True if the user chose the columns.
    """

    path: str
    format: str
    kind: str
    files: List[str]
    skip_bad: int
    max_record_bytes: int
    columns: Tuple[str, ...] = ()
    ignored: Tuple[str, ...] = ()
    are_chosen: bool = False
    bad: BadRecords = field(default_factory=BadRecords)
    # The records and tokens of the last reading, packs not taken apart.
    came_in: Tally = field(default_factory=dict)
    # Foreign columns that examples() cannot assign to one sequence, or that a conversion cannot hold.
    foreign_lost: Tuple[str, ...] = ()

    @property
    def unpacked_kind(self) -> str:
        """The kind of the records of `examples`: "examples" or "tokens"."""
        return UNPACKED[self.kind]

    @property
    def _options(self) -> Dict[str, str]:
        return {"format": self.format} if self.format in bert_tfrecord.FEATURES else {}

    def groups(self, size: int) -> List[Source]:
        """Split the source into groups of consecutive files of `size` bytes or more together (the last may have less).

        The groups depend only on the sizes of the files.
        """
        groups: List[List[str]] = [[]]
        group_bytes = 0
        for file in self.files:
            if group_bytes >= size:
                groups.append([])
                group_bytes = 0
            groups[-1].append(file)
            group_bytes += sum(os.path.getsize(path) for path in self.with_tokens(file))
        return [replace(self, files=group, bad=BadRecords(), foreign_lost=()) for group in groups]

    def with_tokens(self, file: str) -> List[str]:
        """Return the files that are read for one of `files`: an index, and the files that it points into."""
        if self.format == "megatron":
            return [file, tokens_file(file)]
        return [file, *selected_files(file)] if self.format == "arrow" else [file]

    def read(self) -> Iterator[Record]:
        """Yield every valid record, file after file.  Raises ValueError at the first bad one beyond `skip_bad`."""
        yield from self._counted(has_others=True)

    def _counted(self, *, has_others: bool) -> Iterator[Record]:
        self._begin()
        yield from counting(self._records(has_others), self.kind, self.came_in)

    def _begin(self) -> None:
        self.bad = BadRecords(self.skip_bad, self.max_record_bytes)

    def _records(self, has_others: bool) -> Iterator[Record]:
        if self.columns:
            for block in self._columns(has_others):
                yield from block.records(self.bad)
            return
        module = module_of(self.format)
        for file in self.files:
            yield from module.read(file, self.bad, **self._options)

    def _columns(self, has_others: bool = False) -> Iterator[RowBlock]:
        """Yield the columns of token sequences of all files in blocks of rows."""
        module = module_of(self.format)
        options: Dict[str, Any] = {"has_others": has_others}
        if self.format == "jsonl" and not self.are_chosen:
            known = (*OF_TOKENS, *OF_SEQUENCES, *REFUSED)
            options["refused"] = [name for name in known if name not in self.columns]
        for number, file in enumerate(self.files):
            if number and self.format in ("parquet", "arrow", "packed_parquet"):
                self._check_columns(file)
            yield from module.blocks(file, self.bad, self.columns, **options)

    def _check_columns(self, file: str) -> None:
        """Raise ValueError unless a file has the columns of the first one."""
        types = module_of(self.format).types(file)
        columns = token_columns(file, types, self.columns if self.are_chosen else ())
        if set(columns) != set(self.columns):
            raise ValueError(
                f"{file}: columns {', '.join(columns)}, but the first file has {', '.join(self.columns)}; choose "
                "columns with --columns"
            )

    def examples(self) -> Iterator[Record]:
        """Yield the sequences of `read`; those of a pack have the origin of their pack."""
        if self.kind == self.unpacked_kind:
            yield from self._counted(has_others=False)
            return
        if self.format == "store":
            manifest = read_manifest(Path(self.path))
            self.came_in.update(records=manifest.packs, tokens=manifest.tokens)
            for record in module_of("store").sequences(self.path):
                self.lose(record.foreign)
                yield record
            return
        for record in self.read():
            self.lose(record.foreign)
            for example in checked_pack(record.value)[1]:
                yield Record(record.origin, example)

    def lose(self, names: Iterable[str]) -> None:
        """Add names of columns to `foreign_lost`."""
        self.foreign_lost = tuple(sorted({*self.foreign_lost, *names}))

    def blocks(self, size: int = 4096, longest: Optional[int] = None) -> Iterator[Sequences]:
        """Yield `examples` in columns, `size` sequences at a time.

        Raises ValueError that names the record if a sequence has more than `longest` tokens.
        """
        waiting: List[Sequences] = []
        for piece in self._pieces(longest):
            waiting.append(piece)
            while sum(map(len, waiting)) >= size:
                joined = Sequences.concatenate(waiting)
                yield joined.part(0, size)
                waiting = [joined.part(size, len(joined))]
        if sum(map(len, waiting)):
            yield Sequences.concatenate(waiting)

    def lengths(self) -> Iterator[np.ndarray]:
        """Yield the number of tokens of each sequence, in blocks, integers [n]."""
        for piece in self._pieces(None):
            yield piece.lengths

    def _pieces(self, longest: Optional[int]) -> Iterator[Sequences]:
        if not self.columns:
            yield from self._checked(self.examples(), longest)
            return
        self._begin()
        for block in self._columns():
            sequences = block.sequences()
            if sequences is None or (longest is not None and sequences.lengths.max() > longest):
                yield from self._checked(block.records(self.bad), longest)
            else:
                yield sequences

    def _checked(self, records: Iterable[Record], longest: Optional[int]) -> Iterator[Sequences]:
        """Yield records in columns.  Raises ValueError that names a record which is longer."""
        for block in in_blocks(records, _BLOCK_OF_EXAMPLES):
            values = [record.value for record in block]
            if self.unpacked_kind == "tokens":
                names = list(values[0])
                lengths = [len(value[names[0]]) for value in values]
                tokens = {name: np.concatenate([value[name] for value in values]) for name in names}
                sequences = Sequences.of_tokens(np.array(lengths, np.int64), tokens)
            else:
                sequences = Sequences.from_examples(values)
            too_long = np.flatnonzero(sequences.lengths > (longest or np.inf))
            if len(too_long):
                first = int(too_long[0])
                raise ValueError(
                    f"{block[first].origin}: {sequences.lengths[first]} tokens, a pack has {longest} slots "
                    "(--max-sequence-length); sequences are not truncated"
                )
            yield sequences

    def shape(self) -> RowWidths:
        """Return the row widths, from the first file with a valid record; None for what the format does not fix."""
        module = module_of(self.format)
        if hasattr(module, "shape"):
            for file in self.files:
                widths = module.shape(file, **self._options)
                if widths.max_sequence_length is not None:
                    return widths
        return RowWidths()

    def example_shape(self) -> RowWidths:
        """Return the row widths of the unpacked examples.

        The manifest of a data set states the predictions per sequence.  Other packs have room for one more prediction
        per sequence, which is subtracted.
        """
        widths = self.shape()
        if self.kind != "packs" or widths.max_predictions is None:
            return widths
        size, most, depth = widths.of_packs()
        predictions = 0
        if self.format == "store":  # 0 if the manifest does not state it
            predictions = read_manifest(Path(self.path)).max_predictions_per_sequence
        return RowWidths(size, predictions or max(1, most - depth))

    def summary(self, *, has_others: bool = False) -> str:
        """Return a line that names the files, and the columns that are read and ignored; "" for a data set.

        Args:
            has_others: True if the other columns are kept.
        """
        if self.format == "store":
            return ""
        line = f"{self.kind.replace('_', ' ')} from {_pattern(self.files)}"
        if not self.columns:
            return printable(f"{line} ({self.format})")
        line += f", column{'s' if len(self.columns) > 1 else ''} {', '.join(self.columns)}"
        if self.ignored and not has_others:
            line += f"; ignored: {', '.join(self.ignored)}"
        return printable(line)

    def report(self) -> str:
        """Return the bad records of the last reading, one per line."""
        return "\n".join(printable(f"skipped {bad}") for bad in self.bad.found)


def _readable(rows: Iterator[Any]) -> Iterator[Any]:
    """Yield the first rows, up to a damage, which is an error when all rows are read."""
    with suppress(ValueError):
        yield from islice(rows, _ROWS_COMPARED)


def _pattern(files: Sequence[str]) -> str:
    """Return the name of a file, or one pattern for several."""
    names = [os.path.basename(file) for file in files]
    if len(names) == 1:
        return names[0]
    before = os.path.commonprefix(names).rstrip("0123456789")
    return f"{before}*{os.path.splitext(names[0])[1]} ({len(names)} files)"


def open_source(
    path: PathLike,
    format: str = "auto",
    skip_bad: int = 0,
    columns: Sequence[str] = (),
    max_record_bytes: int = MOST_RECORD_BYTES,
    split: str = "",
) -> Source:
    """Open a source of sequences or packs.

    Args:
        path: A file, a directory of files of one format, or a data set of this package.
        format: One of FORMATS, or "auto" to detect it from the content.
        skip_bad: The number of bad records that may be left out.
        columns: For Parquet, Arrow and JSONL, the integer columns that make token sequences.
        max_record_bytes: A record of more bytes is a bad one.
        split: Which split of a directory to read, such as "train", if there are several.

    Returns:
        The source, of which nothing but the first record has been read.

    Raises:
        ValueError: Nothing there can be read, in one line.
    """
    path = str(path)
    skip_bad = whole_number("skip_bad", skip_bad, least=0)
    max_record_bytes = whole_number("max_record_bytes", max_record_bytes, least=1)
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format {format!r} is not known; choose from auto, {', '.join(FORMATS)}")
    if format == "store" or (format == "auto" and os.path.isfile(os.path.join(path, MANIFEST))):
        format = "store"
        files = [path]
    else:
        files = data_files(path, split)
    first = next(filter(os.path.getsize, files), files[0])  # parts may be empty
    if format == "auto":
        format = format_of(first)
    module = module_of(format)
    if columns and not hasattr(module, "rows"):
        raise ValueError(
            f"{path}: columns can be chosen in Parquet, Arrow and JSONL files only, this is {format}"
        )
    source = Source(path, format, "tokens", files, skip_bad, max_record_bytes)
    if hasattr(module, "blocks"):
        types = module.types(first)
        source.columns = token_columns(first, types, columns)
        source.ignored = tuple(sorted(set(types) - set(source.columns)))
        source.are_chosen = bool(columns)
        if not columns and hasattr(module, "rows"):
            beside = [name for name in types if types[name].kind in LISTS or name in LENGTHS]
            rows = module.rows(first, BadRecords(_ROWS_COMPARED, max_record_bytes), beside)
            check_beside(first, source.columns, _readable(rows))
    else:
        source.kind = module.kind(first, **source._options)
    return source
