"""A source of sequences or packs: files of one format, whose records are read one after another.

source = open_source("wiki/", format="auto", skip_bad=3)
source.kind                       # "examples", "packs", "tokens" or "token_packs"
for record in source.read(): ...  # record.value, record.origin (file and number), record.foreign
source.bad.count                  # bad records skipped in the last reading
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from pack_data.formats import bert_tfrecord
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
    split_at_starts,
)
from pack_data.formats.saved import selected_files
from pack_data.reading.bad_records import MOST_RECORD_BYTES, BadRecords
from pack_data.reading.durable import PathLike
from pack_data.reading.fields import printable, whole_number
from pack_data.reading.words import in_blocks
from pack_data.store.data_set import MANIFEST, read_manifest
from pack_data.store.sequences import Sequences

_WITH_COLUMNS = ("parquet", "arrow", "jsonl")
_BLOCK_OF_EXAMPLES = 512  # small: as Python numbers they take ten times the memory of a column


def module_of(format: str) -> ModuleType:
    """Return the module that reads a format."""
    return importlib.import_module(f"pack_data.formats.{FORMATS[format]}")


@dataclass
class Source:
    """Files of one format, read record by record; at most a block of rows is in memory."""

    path: str
    format: str
    kind: str
    files: List[str]
    # Of the reader: chosen columns, or which TFRecord.
    options: Mapping[str, Any]
    skip_bad: int
    max_record_bytes: int
    bad: BadRecords = field(default_factory=BadRecords)
    # The records and tokens of the last reading, packs not taken apart.
    came_in: Tally = field(default_factory=dict)
    # Foreign columns that examples() cannot assign to one sequence, or that blocks() or a conversion cannot hold.
    foreign_lost: Tuple[str, ...] = ()
    model: Optional[Record] = None  # the record whose columns blocks() holds; None: the first

    @property
    def unpacked_kind(self) -> str:
        """The kind of the records of `examples`: "examples" or "tokens"."""
        return UNPACKED[self.kind]

    def groups(self, size: int) -> List[Source]:
        """Split the source into groups of consecutive files of `size` bytes or more together (the last may have less).

        All have the columns of the first record.  The groups depend only on the sizes of the files.
        """
        self.model = next(self.examples(), None)
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
        self.bad = BadRecords(self.skip_bad, self.max_record_bytes)
        yield from counting(self._records(), self.kind, self.came_in)

    def _records(self) -> Iterator[Record]:
        module = module_of(self.format)
        for file in self.files:
            if not hasattr(module, "blocks"):
                yield from module.read(file, self.bad, **self.options)
                continue
            for block in module.blocks(file, self.bad, **self.options):
                yield from block.records()

    def examples(self) -> Iterator[Record]:
        """Yield the sequences of `read`; those of a pack have the origin of their pack."""
        if self.kind == self.unpacked_kind:
            yield from self.read()
            return
        if self.format == "store":
            manifest = read_manifest(Path(self.path))
            self.came_in.update(records=manifest.packs, tokens=manifest.tokens)
            yield from module_of("store").sequences(self.path)
            return
        for record in self.read():
            self.lose(record.foreign)
            if self.kind == "packs":
                values: List[Any] = checked_pack(record.value)[1]
            else:
                values = split_at_starts(record.value)
            for value in values:
                yield Record(record.origin, value)

    def lose(self, names: Iterable[str]) -> None:
        """Add names of columns to `foreign_lost`."""
        self.foreign_lost = tuple(sorted({*self.foreign_lost, *names}))

    def blocks(self, size: int = 4096, longest: Optional[int] = None) -> Iterator[Sequences]:
        """Yield `examples` in columns, `size` sequences at a time.

        Foreign columns of one integer in the first record become scalars.  All others are left out and named in
        `foreign_lost`, as are columns that the first record lacks.  Raises ValueError that names the record if a
        sequence has more than `longest` tokens or other columns than the first.
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

    def _pieces(self, longest: Optional[int]) -> Iterator[Sequences]:
        first = self.model or next(self.examples(), None)
        if first is None:
            return
        scalars = integer_columns(first)
        module = module_of(self.format)
        if self.kind != "tokens" or not hasattr(module, "blocks"):
            yield from self._checked(self.examples(), first, longest)
            return
        self.bad = BadRecords(self.skip_bad, self.max_record_bytes)
        for file in self.files:
            for block in module.blocks(file, self.bad, **self.options):
                columns = block.columns()
                if (
                    columns is None
                    or list(columns.tokens) != list(first.value)
                    or not columns.scalars.keys() >= set(scalars)
                    or (longest is not None and columns.lengths.max() > longest)
                ):
                    yield from self._checked(block.records(), first, longest)
                    continue
                self.lose(set(block.foreign) - set(scalars))
                numbers = {name: columns.scalars[name] for name in scalars}
                yield Sequences.of_tokens(columns.lengths, columns.tokens, numbers)

    def _checked(
        self, records: Iterable[Record], first: Record, longest: Optional[int]
    ) -> Iterator[Sequences]:
        for block in in_blocks(records, _BLOCK_OF_EXAMPLES):
            yield self._block(block, first, longest)

    def _block(self, block: List[Record], first: Record, longest: Optional[int]) -> Sequences:
        """Return records in columns.  Raises ValueError that names the record unless it has the columns of `first`."""
        is_plain = self.unpacked_kind == "tokens"
        names = list(first.value) if is_plain else []
        lengths = []
        for record in block:
            if is_plain and list(record.value) != names:
                raise ValueError(
                    f"{record.origin}: columns {', '.join(record.value)}, but the first record has {', '.join(names)}; "
                    "choose columns with --columns"
                )
            length = len(record.value[names[0]] if is_plain else record.value.input_ids)
            if longest is not None and length > longest:
                raise ValueError(
                    f"{record.origin}: {length} tokens, a pack has {longest} slots (--max-sequence-length); "
                    "sequences are not truncated"
                )
            lengths.append(length)

        foreign = set().union(*(record.foreign for record in block))
        scalars = integer_columns(first)
        self.lose(foreign - set(scalars))
        numbers = {}
        for name in scalars:
            numbers[name] = np.array([_number(record, name) for record in block], np.int64)
        values = [record.value for record in block]
        if not is_plain:
            sequences = Sequences.from_examples(values)
            sequences.scalars.update(numbers)
            return sequences
        tokens = {name: np.concatenate([value[name] for value in values]) for name in names}
        return Sequences.of_tokens(np.array(lengths, np.int64), tokens, numbers)

    def shape(self) -> RowWidths:
        """Return the row widths, from the first file with a valid record; None for what the format does not fix."""
        module = module_of(self.format)
        if hasattr(module, "shape"):
            for file in self.files:
                widths = module.shape(file, **self.options)
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

    def summary(self, ignored: Optional[Sequence[str]] = None) -> str:
        """Return a line that names the files and the columns of tokens; "" for a data set of this package.

        Args:
            ignored: The columns that are not used; None for those that are no tokens and no integers.
        """
        if self.format == "store":
            return ""
        line = f"{self.kind.replace('_', ' ')} from {_pattern(self.files)}"
        first = next(self.examples(), None)
        if first is None or self.unpacked_kind != "tokens":
            return printable(f"{line} ({self.format})")
        noun = "column" if len(first.value) == 1 else "columns"
        line += f", {noun} {', '.join(first.value)}"
        if ignored is None:
            ignored = sorted(set(first.foreign) - set(integer_columns(first)))
        if ignored:
            line += f"; ignored: {', '.join(ignored)}"
        return printable(line)

    def report(self) -> str:
        """Return the bad records of the last reading, one per line."""
        return "\n".join(printable(f"skipped {bad}") for bad in self.bad.found)


def _pattern(files: Sequence[str]) -> str:
    """Return the name of a file, or one pattern for several."""
    names = [os.path.basename(file) for file in files]
    if len(names) == 1:
        return names[0]
    before = os.path.commonprefix(names).rstrip("0123456789")
    return f"{before}*{os.path.splitext(names[0])[1]} ({len(names)} files)"


def _integer_value(value: Any) -> Optional[int]:
    """Return a foreign value if it is one integer of 32 bits (alone, or in an array or list), else None."""
    try:
        values = np.atleast_1d(value.as_py() if hasattr(value, "as_py") else value)
    # A time without a value in Python, or lists of several lengths.
    except (ValueError, OverflowError):
        return None
    is_integer = values.shape == (1,) and values.dtype.kind in "iu"
    return int(values[0]) if is_integer and -(2**31) <= values[0] < 2**31 else None


def _number(record: Record, name: str) -> int:
    """Return a foreign integer of a record.  Raises ValueError if it has none."""
    number = _integer_value(record.foreign.get(name))
    if number is None:
        raise ValueError(f"{record.origin}: lacks the integer column {name} of the first record")
    return number


def integer_columns(record: Record) -> List[str]:
    """Return the names of the foreign columns that hold one integer, sorted."""
    return sorted(
        name for name, value in record.foreign.items() if _integer_value(value) is not None
    )


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
    if format == "auto":
        format = format_of(next(filter(os.path.getsize, files), files[0]))  # parts may be empty
    if columns and format not in _WITH_COLUMNS:
        raise ValueError(
            f"{path}: columns can be chosen in Parquet, Arrow and JSONL files only, this is {format}"
        )
    options: Dict[str, Any] = {"columns": tuple(columns)} if columns else {}
    module = module_of(format)
    if module is bert_tfrecord:
        options["format"] = format
    return Source(
        path, format, module.kind(files[0], **options), files, options, skip_bad, max_record_bytes
    )
