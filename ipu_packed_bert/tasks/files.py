"""Reading what tasks learn from and answer: JSON, JSONL and tables, plain, .gz or .xz, or standard input; errors name
file, line and field, those of several records together.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, TypeVar, Union

from ipu_packed_bert.settings.config import Config
from pack_data.cli.command import Problems
from pack_data.reading.fields import Fields, named, one_line, parse_json, shown
from pack_data.reading.files import open_unpacked

_WAY_OUT = "get the file again"
_SUFFIXES = (".gz", ".xz")
_MOST_CHARACTERS = 1 << 28  # of a file that is read whole, unpacked
_LONGEST_LINE = 1 << 24


def _locate(name: str, data_dir: Optional[Path]) -> Path:
    candidates = ([data_dir / name] if data_dir is not None else []) + [Path(name)]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(dict.fromkeys(str(path) for path in candidates))
    raise ValueError(
        f"{looked}: no such file; name it with --set data.training=FILE or data.evaluation=FILE, or give "
        "its folder with --data-dir"
    )


STANDARD_INPUT = "-"
# What a file holds, by its name's ending before .gz or .xz.
_FORMATS = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".tsv": "tsv", ".conll": "conll", ".txt": "conll"}


@dataclass(frozen=True)
class ExampleSource:
    """A file to read, or standard input; its text is its name for messages."""

    path: Path
    format: str = ""  # of _FORMATS' values; "" where the name's ending is none of them

    @classmethod
    def of(cls, name: Union[str, Path, ExampleSource], format: Optional[str] = None) -> ExampleSource:
        """format: what standard input holds, which has no name that says it."""
        if isinstance(name, ExampleSource):
            return name
        path = Path(name)
        ending = Path(path.stem).suffix if path.suffix in _SUFFIXES else path.suffix
        return cls(path, format or _FORMATS.get(ending, ""))

    def __str__(self) -> str:
        return "standard input" if str(self.path) == STANDARD_INPUT else str(self.path)

    @contextmanager
    def _opened(self, newline: str) -> Iterator[IO[str]]:
        """Its text, unpacked by the name's ending; a byte order mark is dropped."""
        with contextlib.ExitStack() as stack:
            given = str(self.path) == STANDARD_INPUT
            file = sys.stdin.buffer if given else stack.enter_context(open_unpacked(self.path, way_out=_WAY_OUT))
            text = io.TextIOWrapper(file, "utf-8-sig", newline=newline)
            try:
                yield text
            except UnicodeDecodeError as error:
                raise ValueError(f"{self}: not UTF-8 text ({error.reason}); convert it") from None
            finally:
                text.detach()

    def lines(self, newline: str = "\n") -> Iterator[str]:
        """One after another, so that one of them is in memory; newline: as Python's `open` takes it."""
        with self._opened(newline) as file:
            for number in itertools.count(1):
                line = file.readline(_LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > _LONGEST_LINE:
                    raise ValueError(f"{self} line {number}: more than {_LONGEST_LINE:,} characters; {_WAY_OUT}")
                yield line

    def json(self) -> Any:
        with self._opened("\n") as file:
            text = file.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"{self}: more than {_MOST_CHARACTERS:,} characters, unpacked; cut it into smaller files")
        return parse_json(text, str(self), _WAY_OUT)


_MOST_FAULTS = 20  # lines of one message


@dataclass
class Faults:
    """What is wrong with the records of a file, found all and told at once, a line each."""

    source: object  # the file's name for messages
    found: List[str] = field(default_factory=list)
    count: int = 0

    @contextmanager
    def of_record(self) -> Iterator[None]:
        """A ValueError in the block is one record's; reading goes on behind it."""
        try:
            yield
        except ValueError as error:
            self.count += 1
            if len(self.found) < _MOST_FAULTS:
                self.found.append(one_line(error, 1000))

    def refuse(self) -> None:
        """Raise ValueError where there was one, Problems where there were several."""
        if self.count == 1:
            raise ValueError(self.found[0])
        if self.count:
            more = [f"and {self.count - len(self.found):,} more"] if self.count > len(self.found) else []
            raise Problems("\n  ".join([f"{self.source}: {self.count:,} records cannot be used", *self.found, *more]))


def plain_text(value: Any) -> bool:
    """Whether a value is a text that can be written as UTF-8; JSON can hold half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_label(value: Any) -> bool:
    """Texts of at most 1,000 characters, numbers and truth values of JSON."""
    if isinstance(value, str):
        return plain_text(value) and value.isprintable() and len(value) <= 1000
    return isinstance(value, (bool, int, float))


def located(config: Config, data_dir: Optional[Path]) -> Config:
    """The configuration with the places of its files, looked for in `data_dir` first."""
    if data_dir is not None and not data_dir.is_dir():
        raise ValueError(f"--data-dir {data_dir}: no such folder; name the one in which the data files lie")
    names = {name: getattr(config.data, name) for name in ("training", "evaluation")}
    found: Dict[str, Any] = {
        name: str(_locate(value, data_dir).resolve()) for name, value in names.items() if value is not None
    }
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **found))


class TableRow(NamedTuple):
    """One record of a table and the line it begins on, for messages."""

    line: int
    values: Dict[str, Any]


_Made = TypeVar("_Made")


def read_records(
    source: ExampleSource,
    make: Callable[[TableRow, str], _Made],
    *,
    what: str,
    columns: Sequence[str] = (),
    hint: str = "",
) -> List[_Made]:
    """What is made of each record of a CSV or TSV with a header, or of JSONL, and of its place, "FILE line 3".

    what: a record in a word; columns: that each must have; hint: how others are named. Raises ValueError where records
    cannot be used, with all of them, and where there are none.
    """
    if source.format not in ("csv", "tsv", "json", "jsonl"):
        raise ValueError(f"{source}: its name must end in .csv, .tsv or .jsonl (then .gz or .xz)")
    faults = Faults(source)
    delimited = not source.format.startswith("json")
    made = []
    for record in (_delimited_lines if delimited else _json_lines)(source, faults):
        where = f"{source} line {record.line}"
        missing = [name for name in columns if name not in record.values]
        with contextlib.nullcontext() if delimited and missing else faults.of_record():  # one header for all records
            if missing:
                there = ", ".join(map(named, list(record.values)[:8]))
                raise ValueError(f"{where}: no column {shown(missing[0])}, there are {there}{hint}")
            made.append(make(record, where))
    faults.refuse()
    if not made:
        raise ValueError(f"{source}: holds no {what}")
    return made


def _delimited_lines(source: ExampleSource, faults: Faults) -> Iterator[TableRow]:
    # A quote in a TSV file is a character like any other, as in the GLUE files.
    options: Dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if source.format == "tsv" else {}
    reader, line = csv.reader(source.lines(newline=""), strict=True, **options), 1
    try:
        header = next(reader, [])
        line = reader.line_num + 1
        for row in reader:
            with faults.of_record():
                if row and len(row) != len(header):
                    raise ValueError(f"{source} line {line}: {len(row)} columns, the header has {len(header)}")
            if len(row) == len(header):
                yield TableRow(line, dict(zip(header, row)))
            line = reader.line_num + 1
    except csv.Error as error:
        with faults.of_record():
            raise ValueError(f"{source} line {line}: not a table, or a quote stays open ({error})") from None


def _json_lines(source: ExampleSource, faults: Faults) -> Iterator[TableRow]:
    for number, line in enumerate(source.lines(), 1):
        if not line.strip():
            continue
        where, way_out = f"{source} line {number}", "JSONL has one object a line"
        values = None
        with faults.of_record():
            values = Fields.of(parse_json(line, where, way_out), where, way_out).tree
        if values is not None:
            yield TableRow(number, dict(values))
