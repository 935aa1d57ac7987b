"""Detects the format and content of a source, and reads its records one after another.

source = open_source("wiki/", format="auto", skip_bad=3)
source.kind                       # "examples", "packs", "tokens" or "token_packs"
for record in source.read(): ...  # record.value, record.origin (file and number), record.foreign
source.bad.count                  # bad records skipped in the last reading
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np

from pack_data.cli.bad_records import MOST_RECORD_BYTES, BadRecords
from pack_data.formats import bert_tfrecord, tfrecord
from pack_data.formats.megatron import MAGIC as MEGATRON_MAGIC
from pack_data.formats.megatron import tokens_file
from pack_data.formats.records import (
    UNPACKED,
    Record,
    RecordError,
    RowWidths,
    checked_pack,
    split_at_starts,
)
from pack_data.reading.fields import said_of, whole_number
from pack_data.reading.files import check_regular, open_regular
from pack_data.reading.npy import refuse_sequences
from pack_data.store.data_set import MANIFEST, read_manifest
from pack_data.store.sequences import Sequences

# Format -> the module of this package that reads it.
FORMATS: Dict[str, str] = {
    "mlperf_tfrecord": "bert_tfrecord",
    "packed_tfrecord": "bert_tfrecord",
    "cls_last_tfrecord": "bert_tfrecord",
    "hdf5": "hdf5",
    "parquet": "parquet",
    "arrow": "parquet",
    "jsonl": "jsonl",
    "megatron": "megatron",
    "packed_parquet": "parquet",
    "store": "store",
}
_WITH_COLUMNS = ("parquet", "arrow", "jsonl")
_MAGIC = (
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),
    (MEGATRON_MAGIC, "megatron"),
)
_SUFFIXES = {
    "tfrecord": "TFRecord",
    "tfrecords": "TFRecord",
    "hdf5": "hdf5",
    "h5": "hdf5",
    "parquet": "parquet",
    "arrow": "arrow",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
}
_RECORDS_FOR_DETECTION = 64  # of a TFRecord, some of which may be damaged
_BLOCK_OF_EXAMPLES = 512  # small: as Python numbers they take ten times the memory of a column


def module_of(format: str) -> ModuleType:
    """Return the module that reads a format."""
    return importlib.import_module(f"pack_data.formats.{FORMATS[format]}")


def _natural(name: str) -> List[object]:
    """Return a sort key that puts part-2 before part-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _suffix_format(name: str) -> str:
    uncompressed = re.sub(r"\.gz$|(?<=jsonl)\.(xz|bz2)$", "", name.lower())
    return _SUFFIXES.get(uncompressed.rpartition(".")[2], "")


def files_of(path: str) -> List[str]:
    """Return the data files of a path: the file itself, or those in the directory, in the order of their numbers.

    In a directory, only names that reveal a format count (`.tfrecord`, `.tfrecord.gz`, `.hdf5`, `.parquet`, `.arrow`,
    `.jsonl`, `.idx` with a `.bin`, and `part-00000` or `part-00000-of-00500`, as MLPerf's scripts write them); other
    files, such as a readme, are ignored.  Raises ValueError if there is none.
    """
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file or directory")
    if not os.path.isdir(path):
        index = path[:-4] + ".idx"
        # The tokens of Megatron do not show their type; the index does.
        file = index if path.endswith(".bin") and os.path.isfile(index) else path
        check_regular(file)
        return [file]

    names = {name for name in os.listdir(path) if os.path.isfile(os.path.join(path, name))}
    data_files = []
    for name in sorted(names, key=_natural):
        is_index = name.endswith(".idx") and name[:-4] + ".bin" in names
        if _suffix_format(name) or is_index or re.fullmatch(r"part-\d+(-of-\d+)?(\.gz)?", name):
            data_files.append(os.path.join(path, name))
    if not data_files:
        raise ValueError(
            f"{path}: no data file in this directory; expected {', '.join('.' + suffix for suffix in _SUFFIXES)}, "
            ".idx with .bin, or part-NNNNN (for plain text use packed-bert build --corpus)"
        )
    return data_files


def _features(path: str) -> Iterator[Set[str]]:
    """Yield the features of the first readable records.  Raises ValueError if the file is damaged before the first."""
    frames = 0
    any_damage = BadRecords(allowed=_RECORDS_FOR_DETECTION)
    try:
        for _, data in islice(tfrecord.read_frames(path, any_damage), _RECORDS_FOR_DETECTION):
            frames += 1
            with suppress(RecordError):
                yield set(tfrecord.parse(data))
    except ValueError:
        if not frames:
            raise


def _tfrecord_format(path: str) -> str:
    """Return the format whose features most of the first records have.  Raises ValueError if there is none.

    A packed record has every feature of an unpacked one.  A record with only some of the others is of neither format
    and does not count: it would be read as unpacked, and all valid records after it would be bad ones.
    """
    packed_only = set(bert_tfrecord.FEATURES["packed_tfrecord"]) - set(
        bert_tfrecord.FEATURES["mlperf_tfrecord"]
    )
    names: Set[str] = set()
    votes: Counter = Counter()
    for names in _features(path):
        for format, types in bert_tfrecord.FEATURES.items():
            is_incomplete_pack = format == "mlperf_tfrecord" and packed_only & names
            if names.issuperset(types) and not is_incomplete_pack:
                votes[format] += 1
                break

    if votes:
        format, most = votes.most_common(1)[0]
        if 2 * most > sum(votes.values()):
            return format
        counts = " and ".join(f"{count} match {name}" for name, count in sorted(votes.items()))
        raise ValueError(
            f"{path}: of its first records, {counts}; pass the format with --format or --from-format"
        )
    if not names:
        raise ValueError(
            f"{path}: no record of this TFRecord file can be read; pass its format to see why"
        )
    raise ValueError(
        f"{path}: TFRecord of an unknown format, with features {', '.join(sorted(names)[:12])}; "
        "pass the format it should have to see what is missing (--format, --from-format)"
    )


def _detect(path: str) -> str:
    """Return the format of a path, from its content.  Raises ValueError."""
    if os.path.isfile(os.path.join(path, MANIFEST)):
        return "store"
    files = files_of(path)
    first = next((file for file in files if os.path.getsize(file)), files[0])  # parts may be empty
    with open_regular(first) as file:
        head = file.read(12)
    for magic, format in _MAGIC:
        if head.startswith(magic):
            return format
    is_json = head.lstrip()[:1] in (b"{", b"[") and b"\0" not in head
    if is_json or _suffix_format(first) == "jsonl":
        return "jsonl"
    with said_of(first):
        is_tfrecord = tfrecord.is_start_of_file(head)
    if is_tfrecord or _suffix_format(first) == "TFRecord":
        return _tfrecord_format(first)
    if not head:
        raise ValueError(f"{first}: the file is empty")
    if head.startswith(b"\x93NUMPY"):
        refuse_sequences(first)
    raise ValueError(f"{first}: not in a known format ({', '.join(FORMATS)})")


@dataclass
class Source:
    """Files of one format, read record by record; at most a block of rows is in memory."""

    path: str
    format: str
    kind: str
    files: List[str]
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the reader: chosen columns, or which TFRecord
    skip_bad: int = 0
    max_record_bytes: int = MOST_RECORD_BYTES
    bad: BadRecords = field(default_factory=BadRecords)
    # Foreign columns that examples() cannot assign to one sequence, or that blocks() cannot hold.
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
        """Return the files that are read for one of `files`: an index of Megatron and its tokens."""
        return [file, tokens_file(file)] if self.format == "megatron" else [file]

    def read(self) -> Iterator[Record]:
        """Yield every valid record, file after file.  Raises ValueError at the first bad one beyond `skip_bad`."""
        self.bad = BadRecords(self.skip_bad, self.max_record_bytes)
        module = module_of(self.format)
        for file in self.files:
            yield from module.read(file, self.bad, **self.options)

    def examples(self) -> Iterator[Record]:
        """Yield the sequences of `read`; those of a pack have the origin of their pack."""
        if self.kind == self.unpacked_kind:
            yield from self.read()
            return
        if self.format == "store":
            yield from module_of("store").sequences(self.path)
            return
        for record in self.read():
            self.foreign_lost = tuple(sorted({*self.foreign_lost, *record.foreign}))
            values: List[Any] = (
                checked_pack(record.value)[1]
                if self.kind == "packs"
                else split_at_starts(record.value)
            )
            for value in values:
                yield Record(record.origin, value)

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
            yield from self._checked(self.examples(), first, scalars, longest)
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
                    yield from self._checked(iter(block.records()), first, scalars, longest)
                    continue
                self.foreign_lost = tuple(
                    sorted({*self.foreign_lost, *block.foreign} - set(scalars))
                )
                numbers = {name: columns.scalars[name] for name in scalars}
                yield Sequences.of_tokens(columns.lengths, columns.tokens, numbers)

    def _checked(
        self,
        records: Iterator[Record],
        first: Record,
        scalars: Sequence[str],
        longest: Optional[int],
    ) -> Iterator[Sequences]:
        for block in iter(lambda: list(islice(records, _BLOCK_OF_EXAMPLES)), []):
            yield self._block(block, first, scalars, longest)

    def _block(
        self, block: List[Record], first: Record, scalars: Sequence[str], longest: Optional[int]
    ) -> Sequences:
        """Return records in columns.  Raises ValueError that names the record unless it has the columns of `first`."""
        is_plain = self.unpacked_kind == "tokens"
        names = list(first.value) if is_plain else []
        lengths = []
        numbers: Dict[str, List[int]] = {name: [] for name in scalars}
        lost = set(self.foreign_lost)
        for record in block:
            if is_plain and list(record.value) != names:
                raise ValueError(
                    f"{record.origin}: columns {', '.join(record.value)}, but the first record has {', '.join(names)}; "
                    "choose columns with --columns"
                )
            lengths.append(len(record.value[names[0]] if is_plain else record.value.input_ids))
            if longest is not None and lengths[-1] > longest:
                raise ValueError(
                    f"{record.origin}: {lengths[-1]} tokens, a pack has {longest} slots (--max-sequence-length); "
                    "sequences are not truncated"
                )
            lost.update(record.foreign)
            for name, column in numbers.items():
                number = _integer_value(record.foreign.get(name))
                if number is None:
                    raise ValueError(
                        f"{record.origin}: lacks the integer column {name} of the first record"
                    )
                column.append(number)
        self.foreign_lost = tuple(sorted(lost - set(scalars)))

        if is_plain:
            tokens = {
                name: np.concatenate([record.value[name] for record in block]) for name in names
            }
            sequences = Sequences.of_tokens(np.array(lengths, np.int64), tokens)
        else:
            sequences = Sequences.from_examples([record.value for record in block])
        sequences.scalars.update(
            {name: np.array(column, np.int64) for name, column in numbers.items()}
        )
        return sequences

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
        # 0 if the manifest does not state it.
        predictions = (
            read_manifest(Path(self.path)).max_predictions_per_sequence
            if self.format == "store"
            else 0
        )
        return RowWidths(size, predictions or max(1, most - depth))

    def report(self) -> str:
        """Return the bad records of the last reading, one per line."""
        return "\n".join(f"skipped {bad}" for bad in self.bad.found)


def _integer_value(value: Any) -> Optional[int]:
    """Return a foreign value if it is one integer of 32 bits (alone, or in an array or list), else None."""
    try:
        values = np.atleast_1d(value.as_py() if hasattr(value, "as_py") else value)
    except (
        ValueError,
        OverflowError,
    ):  # a time without a value in Python, or lists of several lengths
        return None
    is_integer = values.shape == (1,) and values.dtype.kind in "iu"
    return int(values[0]) if is_integer and -(2**31) <= values[0] < 2**31 else None


def integer_columns(record: Record) -> List[str]:
    """Return the names of the foreign columns that hold one integer, sorted."""
    return sorted(
        name for name, value in record.foreign.items() if _integer_value(value) is not None
    )


def open_source(
    path: Union[str, Path],
    format: str = "auto",
    skip_bad: int = 0,
    columns: Sequence[str] = (),
    max_record_bytes: int = MOST_RECORD_BYTES,
) -> Source:
    """Open a source of sequences or packs.

    Args:
        path: A file, a directory of files of one format, or a data set of this package.
        format: One of FORMATS, or "auto" to detect it from the content.
        skip_bad: The number of bad records that may be left out.
        columns: For Parquet, Arrow and JSONL, the integer columns that make token sequences.
        max_record_bytes: A record of more bytes is a bad one.

    Returns:
        The source, of which nothing but the first record has been read.

    Raises:
        ValueError: Nothing there can be read, in one line.
    """
    path = str(path)
    skip_bad = whole_number("skip_bad", skip_bad, least=0)
    max_record_bytes = whole_number("max_record_bytes", max_record_bytes, least=1)
    if format == "auto":
        format = _detect(path)
    elif format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; choose from auto, {', '.join(FORMATS)}")
    if columns and format not in _WITH_COLUMNS:
        raise ValueError(
            f"{path}: columns can be chosen in Parquet, Arrow and JSONL files only, this is {format}"
        )
    files = [path] if format == "store" else files_of(path)
    options: Dict[str, Any] = {"columns": tuple(columns)} if columns else {}
    module = module_of(format)
    if module is bert_tfrecord:
        options["format"] = format
    return Source(
        path, format, module.kind(files[0], **options), files, options, skip_bad, max_record_bytes
    )
