"""Opens a source: finds its format and what it holds, and reads its records one after another.

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

# Format -> its module in this package, and what it holds where that is always the same.
FORMATS: Dict[str, Tuple[str, Optional[str]]] = {
    "mlperf_tfrecord": ("bert_tfrecord", "examples"),
    "packed_tfrecord": ("bert_tfrecord", "packs"),
    "cls_last_tfrecord": ("bert_tfrecord", "packs"),
    "hdf5": ("hdf5", "examples"),
    "parquet": ("parquet", None),
    "arrow": ("parquet", None),
    "jsonl": ("jsonl", None),
    "megatron": ("megatron", "tokens"),
    "packed_parquet": ("parquet", None),
    "store": ("store", None),
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
    **dict.fromkeys(("tfrecord", "tfrecords"), "TFRecord"),
    **dict.fromkeys(("hdf5", "h5"), "hdf5"),
    "parquet": "parquet",
    "arrow": "arrow",
    **dict.fromkeys(("jsonl", "ndjson"), "jsonl"),
}
_FRAMES_TO_LOOK_AT = 64


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"pack_data.formats.{FORMATS[name][0]}")


def _natural(name: str) -> List[object]:
    """part-2 before part-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _suffix(name: str) -> str:
    return _SUFFIXES.get(re.sub(r"\.gz$|(?<=jsonl)\.(xz|bz2)$", "", name.lower()).rpartition(".")[2], "")


def files_of(path: str) -> List[str]:
    """The data files of a path: itself, or those in the folder, in the order of their numbers.  Raises ValueError.

    In a folder only names that tell a format count (`.tfrecord`, `.tfrecord.gz`, `.hdf5`, `.parquet`, `.arrow`,
    `.jsonl`, `.idx` beside `.bin`, and `part-00000` or `part-00000-of-00500`, as MLPerf's scripts write them); another
    index or a readme beside them does not.
    """
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file or folder")
    if not os.path.isdir(path):
        index = path[:-4] + ".idx"  # of Megatron, whose tokens alone say nothing
        check_regular(index if path.endswith(".bin") and os.path.isfile(index) else path)
        return [index if path.endswith(".bin") and os.path.isfile(index) else path]
    names = sorted((name for name in os.listdir(path) if os.path.isfile(os.path.join(path, name))), key=_natural)
    named = [
        name
        for name in names
        if _suffix(name)
        or name.endswith(".idx")
        and name[:-4] + ".bin" in names
        or re.fullmatch(r"part-\d+(-of-\d+)?(\.gz)?", name)
    ]
    if not named:
        raise ValueError(
            f"{path}: no data file in this folder; looked for "
            f"{', '.join('.' + suffix for suffix in _SUFFIXES)}, .idx beside .bin and part-NNNNN; "
            "plain texts go to packed-bert build --corpus"
        )
    return [os.path.join(path, name) for name in named]


def _features(path: str) -> Iterator[Set[str]]:
    """The features of the first records that can be read.  ValueError where the file is damaged before the first."""
    read = 0
    try:
        for _, data in islice(tfrecord.read_frames(path, BadRecords(allowed=_FRAMES_TO_LOOK_AT)), _FRAMES_TO_LOOK_AT):
            read += 1
            with suppress(RecordError):
                yield set(tfrecord.parse(data))
    except ValueError:
        if not read:
            raise


def _tfrecord_format(path: str) -> str:
    """Which TFRecord this is: the format that most of its first records have the features of.  Raises ValueError.

    A packed record has every feature of an unpacked one. So one that has only some of the others is of neither format
    and does not count: it would be read as unpacked, and all good records behind it called bad.
    """
    wanted = {name: {field.name for field in fields} for name, fields in bert_tfrecord.FIELDS.items()}
    packed_only = wanted["packed_tfrecord"] - wanted["mlperf_tfrecord"]
    names: Set[str] = set()
    votes: Counter = Counter()
    for names in _features(path):
        complete = [name for name, own in wanted.items() if own <= names]
        if complete and not (complete[0] == "mlperf_tfrecord" and packed_only & names):
            votes[complete[0]] += 1
    if votes:
        name, most = votes.most_common(1)[0]
        if 2 * most > sum(votes.values()):
            return name
        found = " and ".join(f"{count} as {name}" for name, count in sorted(votes.items()))
        raise ValueError(f"{path}: its first records read {found}; name the format (--format, --from-format)")
    if not names:
        raise ValueError(f"{path}: no record of this TFRecord file can be read; name its format to see why")
    raise ValueError(
        f"{path}: TFRecord with features {', '.join(sorted(names)[:12])}: no format known here; "
        "name the one it should be to see what is missing (--format, --from-format)"
    )


def _detect(path: str) -> str:
    """The format of a path, from its content.  Raises ValueError."""
    if os.path.isfile(os.path.join(path, MANIFEST)):
        return "store"
    files = files_of(path)
    first = next((file for file in files if os.path.getsize(file)), files[0])  # parts may be empty
    with open_regular(first) as file:
        head = file.read(12)
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if _suffix(first) == "jsonl" or head.lstrip()[:1] in (b"{", b"[") and b"\0" not in head:
        return "jsonl"
    # A TFRecord begins with a length of eight bytes, the last of them 0; only then its checksum's package is needed.
    with said_of(first):
        is_frame = (
            len(head) == 12
            and head[5:8] == b"\0\0\0"
            and tfrecord.masked_crc(head[:8]) == tfrecord.HEADER.unpack(head)[1]
        )
    if is_frame or head.startswith(tfrecord.GZIP_MAGIC) or _suffix(first) == "TFRecord":
        return _tfrecord_format(first)
    if not head:
        raise ValueError(f"{first}: the file is empty")
    if head.startswith(b"\x93NUMPY"):
        refuse_sequences(first)
    raise ValueError(f"{first}: begins like none of the known formats ({', '.join(FORMATS)})")


@dataclass
class Source:
    """Files of one format.  They are read one record at a time; at most a block of rows is in memory."""

    path: str
    format: str
    kind: str
    files: List[str]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the reader: chosen columns, or which TFRecord
    skip_bad: int = 0
    max_record_bytes: int = MOST_RECORD_BYTES
    bad: BadRecords = field(default_factory=BadRecords)
    # Foreign columns that examples() could not give to one sequence, or blocks() not hold.
    foreign_lost: Tuple[str, ...] = ()
    model: Optional[Record] = None  # whose columns blocks() holds; None: the first record that is read

    @property
    def unpacked_kind(self) -> str:
        """What `examples` yields: "examples" or "tokens"."""
        return UNPACKED[self.kind]

    def groups(self, size: int) -> List[Source]:
        """This source in parts: files that follow one another and have `size` bytes or more together, or the last.

        Each has the columns of the first record of all. It depends on nothing but the sizes of the files.
        """
        self.model = next(self.examples(), None)
        groups: List[List[str]] = [[]]
        held = 0
        for file in self.files:
            if held >= size:
                groups.append([])
                held = 0
            groups[-1].append(file)
            held += sum(os.path.getsize(path) for path in self.with_tokens(file))
        return [replace(self, files=group, bad=BadRecords(), foreign_lost=()) for group in groups]

    def with_tokens(self, file: str) -> List[str]:
        """The files that are read for one of `files`: beside an index of Megatron its tokens."""
        return [file, tokens_file(file)] if self.format == "megatron" else [file]

    def read(self) -> Iterator[Record]:
        """Every good record, file after file.  ValueError at the first bad one beyond `skip_bad`."""
        self.bad = BadRecords(self.skip_bad, self.max_record_bytes)
        module = module_of(self.format)
        for file in self.files:
            yield from module.read(file, self.bad, **self.options)

    def examples(self) -> Iterator[Record]:
        """The records of `read`, packs taken apart into their sequences (each with the origin of its pack)."""
        if self.kind == self.unpacked_kind:
            yield from self.read()
        elif self.format == "store":
            yield from module_of("store").sequences(self.path)
        else:
            for record in self.read():
                if record.foreign:
                    self.foreign_lost = tuple(sorted(set(self.foreign_lost) | set(record.foreign)))
                of_bert = self.kind == "packs"
                values: List[Any] = checked_pack(record.value)[1] if of_bert else split_at_starts(record.value)
                for value in values:
                    yield Record(record.origin, value)

    def blocks(self, size: int = 4096, longest: Optional[int] = None) -> Iterator[Sequences]:
        """`examples` in columns, `size` sequences at a time.

        Foreign columns of one integer in the first record become scalars; the others are left out and named in
        `foreign_lost`, those that the first record lacks too.
        ValueError, naming the record, where a sequence has more than `longest` tokens or other columns than the first.
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
        scalars, module = integer_columns(first), module_of(self.format)
        if self.kind != "tokens" or not hasattr(module, "blocks"):
            yield from self._checked(self.examples(), first, scalars, longest)
            return
        self.bad = BadRecords(self.skip_bad, self.max_record_bytes)
        for file in self.files:
            for read in module.blocks(file, self.bad, **self.options):
                found = read.columns()
                if (
                    found is not None
                    and list(found.tokens) == list(first.value)
                    and found.scalars.keys() >= set(scalars)
                    and (longest is None or found.lengths.max() <= longest)
                ):
                    self.foreign_lost = tuple(sorted({*self.foreign_lost, *read.foreign} - set(scalars)))
                    yield Sequences.of_tokens(
                        found.lengths, found.tokens, {name: found.scalars[name] for name in scalars}
                    )
                    continue
                yield from self._checked(iter(read.records()), first, scalars, longest)

    def _checked(
        self, records: Iterator[Record], first: Record, scalars: Sequence[str], longest: Optional[int]
    ) -> Iterator[Sequences]:
        # Small blocks: examples as Python numbers take ten times the memory.
        for block in iter(lambda: list(islice(records, 512)), []):
            yield self._block(block, first, scalars, longest)

    def _block(self, block: List[Record], first: Record, scalars: Sequence[str], longest: Optional[int]) -> Sequences:
        plain = self.unpacked_kind == "tokens"
        names = list(first.value) if plain else []
        lost = set(self.foreign_lost)
        for record in block:
            tokens = record.value if plain else {"input_ids": record.value.input_ids}
            if plain and list(tokens) != names:
                raise ValueError(
                    f"{record.origin}: columns {', '.join(tokens)} where the first record has {', '.join(names)}; "
                    "choose some with --columns"
                )
            length = len(next(iter(tokens.values())))
            if longest is not None and length > longest:
                raise ValueError(
                    f"{record.origin}: {length} tokens, a pack has {longest} slots (--max-sequence-length); nothing "
                    "is cut"
                )
            lost.update(record.foreign)
            if any(_integer_value(record.foreign.get(name)) is None for name in scalars):
                raise ValueError(
                    f"{record.origin}: the integer columns {', '.join(scalars)} of the first record are not all here"
                )
        self.foreign_lost = tuple(sorted(lost - set(scalars)))
        numbers = {
            name: np.array([_integer_value(record.foreign[name]) for record in block], np.int64) for name in scalars
        }
        if plain:
            return Sequences.of_tokens(
                np.array([len(record.value[names[0]]) for record in block], np.int64),
                {name: np.concatenate([record.value[name] for record in block]) for name in names},
                numbers,
            )
        made = Sequences.from_examples([record.value for record in block])
        made.scalars.update(numbers)
        return made

    def shape(self) -> RowWidths:
        """Return the row widths, from the first file that has a good record; None for what the format does not fix."""
        module = module_of(self.format)
        for file in self.files:
            widths = module.shape(file, **self.options) if hasattr(module, "shape") else RowWidths()
            if widths.max_sequence_length is not None:
                return widths
        return RowWidths()

    def example_shape(self) -> RowWidths:
        """Row widths of the unpacked examples.

        A data set of this package says how many predictions a sequence may have. Other packs have one more for each of
        their sequences, which is taken off.
        """
        widths = self.shape()
        if self.kind != "packs" or widths.max_predictions is None:
            return widths
        # 0 where the data set does not say.
        predictions = read_manifest(Path(self.path)).max_predictions_per_sequence if self.format == "store" else 0
        size, most, depth = widths.of_packs()
        return RowWidths(size, predictions or max(1, most - depth))

    def report(self) -> str:
        """The bad records of the last reading, one a line."""
        return "\n".join(f"skipped {bad}" for bad in self.bad.found)


def _integer_value(value: Any) -> Optional[int]:
    """A foreign value that is one integer of 32 bits: a number, an Arrow scalar, an array or list of one; else None."""
    try:
        value = value.as_py() if hasattr(value, "as_py") else value
    except (ValueError, OverflowError):  # a time that Python has no value for
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return int(value) if whole and -(2**31) <= value < 2**31 else None


def integer_columns(record: Record) -> List[str]:
    return sorted(name for name, value in record.foreign.items() if _integer_value(value) is not None)


def open_source(
    path: Union[str, Path],
    format: str = "auto",
    skip_bad: int = 0,
    columns: Sequence[str] = (),
    max_record_bytes: int = MOST_RECORD_BYTES,
) -> Source:
    """A source to read from: a file, a folder of files of one format, or a data set of this package.

    format: one of FORMATS, or "auto" to tell from the content.  skip_bad: how many bad records may be left out.
    columns: for Parquet, Arrow and JSONL, the integer columns that make token sequences.  max_record_bytes: a longer
    record is a bad one.  Raises ValueError in one line.
    """
    path, skip_bad = str(path), whole_number("skip_bad", skip_bad, least=0)
    max_record_bytes = whole_number("max_record_bytes", max_record_bytes, least=1)
    if format == "auto":
        format = _detect(path)
    elif format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; choose from auto, {', '.join(FORMATS)}")
    if columns and format not in _WITH_COLUMNS:
        raise ValueError(f"{path}: columns can be chosen in Parquet, Arrow and JSONL files, this is {format}")
    files = [path] if format == "store" else files_of(path)
    options: Dict[str, Any] = {"columns": tuple(columns)} if columns else {}
    if FORMATS[format][0] == "bert_tfrecord":
        options["format"] = format
    module = module_of(format)
    # A format that always holds one kind still checks its first file.
    kind = FORMATS[format][1] or ""
    if hasattr(module, "kind"):
        kind = module.kind(files[0], **options)
    return Source(path, format, kind, files, options, skip_bad, max_record_bytes)
