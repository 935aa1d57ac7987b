"""Readers of files of examples: JSON, JSONL and tables; plain, .gz or .xz, or standard input.

Errors name file, line and field; those of several records are reported together.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    IO,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    TypeVar,
    Union,
)

from ipu_packed_bert.settings.config import Config
from pack_data.formats.rows import read_rows
from pack_data.reading.bad_records import BadRecords
from pack_data.reading.compressed import open_unpacked
from pack_data.reading.fields import Fields, named, one_line, parse_json, shown
from pack_data.reading.words import Problems, counted

STANDARD_INPUT = "-"
# File name extension, before .gz or .xz -> format.
_FORMATS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".conll": "conll",
    ".conllu": "conllu",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "parquet",
    ".feather": "parquet",
    ".txt": "conll",
}
_SUFFIXES = (".gz", ".xz")
_MOST_CHARACTERS = 1 << 28  # of a decompressed JSON file, which is read into memory
_LONGEST_LINE = 1 << 24  # characters
_LONGEST_LABEL = 1000  # characters
_MOST_FAULTS = 20  # records named by one message
_WAY_OUT = "get the file again"


_Label = TypeVar("_Label")


@dataclass(frozen=True)
class ExampleSource:
    """A file or standard input; `str` returns its name for messages."""

    path: Path
    format: str = ""  # a value of _FORMATS; "" for other endings
    predicted: bool = False  # True: records are predicted, also those without a valid label
    unlabelled: List[str] = field(default_factory=list, compare=False)  # why labels are not used
    # Rows of CoNLL-U that are not words.
    skipped: List[str] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, name: Union[str, Path], format: Optional[str] = None) -> ExampleSource:
        """Return the source of a name; ``format`` is that of standard input, which has no extension."""
        path = Path(name)
        ending = Path(path.stem).suffix if path.suffix in _SUFFIXES else path.suffix
        return cls(path, format or _FORMATS.get(ending, ""))

    def __str__(self) -> str:
        return "standard input" if str(self.path) == STANDARD_INPUT else str(self.path)

    def label(self, read: Callable[[], _Label]) -> Optional[_Label]:
        """Return ``read()``, the label of a record; None if it is invalid and the record is only predicted."""
        try:
            return read()
        except ValueError as error:
            if not self.predicted:
                raise
            self.unlabelled.append(one_line(error, 1000))
            return None

    @contextmanager
    def _opened(self, newline: str) -> Iterator[IO[str]]:
        """Open the text, decompressed by the file name extension, without a byte order mark."""
        with contextlib.ExitStack() as stack:
            if str(self.path) == STANDARD_INPUT:
                file: Any = sys.stdin.buffer
            else:
                file = stack.enter_context(open_unpacked(self.path, way_out=_WAY_OUT))
            text = io.TextIOWrapper(file, "utf-8-sig", newline=newline)
            try:
                yield text
            except UnicodeDecodeError as error:
                raise ValueError(f"{self}: not UTF-8 text ({error.reason}); convert it") from None
            finally:
                text.detach()

    def lines(self, newline: str = "\n") -> Iterator[str]:
        """Yield the lines one by one; ``newline`` is that of Python's `open`."""
        with self._opened(newline) as file:
            for number in itertools.count(1):
                line = file.readline(_LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > _LONGEST_LINE:
                    raise ValueError(
                        f"{self} line {number}: more than {_LONGEST_LINE:,} characters; {_WAY_OUT}"
                    )
                yield line

    def json(self) -> Any:
        """Return the value of a JSON file."""
        with self._opened("\n") as file:
            text = file.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(
                f"{self}: more than {_MOST_CHARACTERS:,} characters, decompressed; split it"
            )
        return parse_json(text, str(self), _WAY_OUT)


@dataclass
class Faults:
    """The problems of the records of a file, collected and reported at once, one per line."""

    source: object  # the file's name for messages
    messages: List[str] = field(default_factory=list)
    count: int = 0

    @contextmanager
    def of_record(self) -> Iterator[None]:
        """Collect a ValueError of the block, which handles one record; reading continues after it."""
        try:
            yield
        except ValueError as error:
            self.count += 1
            if len(self.messages) < _MOST_FAULTS:
                self.messages.append(one_line(error, 1000))

    def refuse(self) -> None:
        """Raise ValueError if there was one problem, Problems if there were several."""
        if self.count == 1:
            raise ValueError(self.messages[0])
        if self.count:
            lines = [
                f"{self.source}: {counted(self.count, 'record')} cannot be used",
                *self.messages,
            ]
            if self.count > len(self.messages):
                lines.append(f"and {self.count - len(self.messages):,} more")
            raise Problems("\n  ".join(lines))


def plain_text(value: Any) -> bool:
    """Return True for a text that can be written as UTF-8; JSON can hold half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_label(value: Any) -> bool:
    """Return True for printable texts of at most 1,000 characters, numbers and booleans."""
    if isinstance(value, str):
        return plain_text(value) and value.isprintable() and len(value) <= _LONGEST_LABEL
    return isinstance(value, (bool, int, float))


def located(config: Config, data_dir: Optional[Path]) -> Config:
    """Return the configuration with the full paths of its files, which may be in ``data_dir``."""
    if data_dir is not None and not data_dir.is_dir():
        raise ValueError(
            f"--data-dir {data_dir}: no such directory; pass the directory of the data files"
        )
    paths: Dict[str, Any] = {}
    for name in ("training", "evaluation"):
        value = getattr(config.data, name)
        if value is not None:
            paths[name] = str(_locate(value, data_dir).resolve())
    return config.changed("data", **paths)


def _locate(name: str, data_dir: Optional[Path]) -> Path:
    candidates = [folder / name for folder in (data_dir, Path()) if folder is not None]
    for path in candidates:
        if path.is_file():
            return path
    paths = " or ".join(dict.fromkeys(map(str, candidates)))
    raise ValueError(
        f"{paths}: no such file; pass it with --set data.training=FILE or data.evaluation=FILE, or its directory with"
        " --data-dir"
    )


class TableRow(NamedTuple):
    """A record of a table and its place, for messages."""

    line: int  # its first; of Parquet, the number of the record
    values: Dict[str, Any]


_Example = TypeVar("_Example")


def read_records(
    source: ExampleSource,
    make: Callable[[TableRow, str], _Example],
    *,
    what: str,
    columns: Sequence[str] = (),
    hint: str = "",
) -> List[_Example]:
    """Make an example of each record of a CSV or TSV file with a header, or of JSONL.

    Args:
        source: The file.
        make: Makes an example of a record and its place, "FILE line 3"; may raise ValueError.
        what: A noun for a record.
        columns: The columns that each record must have.
        hint: How to choose other columns, for the message about a missing one.

    Returns:
        The examples, in file order.

    Raises:
        ValueError: Records are invalid (all of them are named), or there is none.
    """
    readers = {
        "csv": _delimited_lines,
        "tsv": _delimited_lines,
        "json": _json_lines,
        "jsonl": _json_lines,
        "parquet": _rows,
    }
    if source.format not in readers:
        raise ValueError(
            f"{source}: its name must end in .csv, .tsv, .jsonl (then .gz or .xz) or .parquet"
        )
    faults = Faults(source)
    has_header = source.format not in ("json", "jsonl")
    unit = "record" if source.format == "parquet" else "line"
    examples = []
    for record in readers[source.format](source, faults):
        where = f"{source} {unit} {record.line}"
        missing = [name for name in columns if name not in record.values]
        # A column missing in the header is missing in all records: report it once.
        with contextlib.nullcontext() if has_header and missing else faults.of_record():
            if missing:
                names = ", ".join(map(named, list(record.values)[:8]))
                raise ValueError(
                    f"{where}: no column {shown(missing[0])}, the columns are {names}{hint}"
                )
            examples.append(make(record, where))
    faults.refuse()
    if not examples:
        raise ValueError(f"{source}: has no {what}; pass a file with at least one")
    return examples


def _rows(source: ExampleSource, faults: Faults) -> Iterator[TableRow]:
    for row in read_rows(str(source.path), BadRecords()):
        yield TableRow(row.origin.record, row.fields)


def _delimited_lines(source: ExampleSource, faults: Faults) -> Iterator[TableRow]:
    options: Dict[str, Any] = {}
    if source.format == "tsv":
        # Quotes are ordinary characters, as in the GLUE files.
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    # In "text, label" the blank is not part of the name.
    reader = csv.reader(source.lines(newline=""), strict=True, skipinitialspace=True, **options)
    line = 1
    try:
        header = [name.strip() for name in next(reader, [])]
        line = reader.line_num + 1
        for row in reader:
            if len(row) == len(header):
                yield TableRow(line, dict(zip(header, row)))
            elif row:
                with faults.of_record():
                    raise ValueError(
                        f"{source} line {line}: {len(row)} columns, but the header has {len(header)}"
                    )
            line = reader.line_num + 1
    except csv.Error as error:
        with faults.of_record():
            raise ValueError(
                f"{source} line {line}: not a table, or a quote is not closed ({error})"
            ) from None


def _json_lines(source: ExampleSource, faults: Faults) -> Iterator[TableRow]:
    way_out = "JSONL has one object per line"
    for number, line in enumerate(source.lines(), 1):
        if not line.strip():
            continue
        where = f"{source} line {number}"
        values = None
        with faults.of_record():
            values = Fields.of(parse_json(line, where, way_out), where, way_out).tree
        if values is not None:
            yield TableRow(number, dict(values))
