"""Reading what tasks learn from: JSON, JSONL and tables, plain, .gz or .xz; errors name file, line and field."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from ipu_packed_bert.tasks.settings import FinetuneConfig
from pack_data.decoding import Fields, parse_json
from pack_data.files import check_compressed

WAY_OUT = "get the file again"
_SUFFIXES = (".gz", ".xz")
MOST_BYTES = 1 << 29  # of one file, unpacked; it is read whole


def locate(name: str, data_dir: Optional[Path]) -> Path:
    """The file of this name, in `data_dir` first where one is given."""
    candidates = ([data_dir / name] if data_dir is not None else []) + [Path(name)]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(dict.fromkeys(str(path) for path in candidates))
    raise ValueError(
        f"{looked}: no such file; name it with --set data.training=FILE or data.evaluation=FILE, or give "
        "its folder with --data-dir"
    )


def read_text(path: Path) -> str:
    """The whole file, unpacked by its ending; a byte order mark is dropped."""
    openers: Dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(path.suffix, open)
    check_compressed(path)
    try:
        with opener(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"{path}: more than {MOST_BYTES:,} bytes, unpacked; cut it into smaller files")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); convert it") from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is cut or damaged ({error}); copy it again") from None


def read_json(path: Path) -> Any:
    return parse_json(read_text(path), path, WAY_OUT)


def plain_text(value: Any) -> bool:
    """Whether a value is a text that can be written as UTF-8; JSON can hold half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def located(config: FinetuneConfig, data_dir: Optional[Path]) -> FinetuneConfig:
    """The configuration with the places of its files, looked for in `data_dir` first."""
    names = {name: getattr(config.data, name) for name in ("training", "evaluation")}
    found: Dict[str, Any] = {
        name: str(locate(value, data_dir).resolve()) for name, value in names.items() if value is not None
    }
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **found))


class TableRow(NamedTuple):
    """One record of a table and the line it begins on, for messages."""

    line: int
    values: Dict[str, Any]


def read_table(path: Path) -> List[TableRow]:
    """CSV and TSV with a header, or JSONL, told apart by the name's ending (before .gz or .xz)."""
    kind = Path(path.stem).suffix if path.suffix in _SUFFIXES else path.suffix
    text = read_text(path)
    if kind in (".jsonl", ".json"):
        return _json_lines(path, text)
    if kind not in (".csv", ".tsv"):
        raise ValueError(f"{path}: its name must end in .csv, .tsv or .jsonl (then .gz or .xz)")
    # A quote in a TSV file is a character like any other, as in the GLUE files.
    options: Dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {}
    reader = csv.reader(io.StringIO(text, newline=""), **options)
    records: List[TableRow] = []
    try:
        header = next(reader, [])
        line = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(header):
                raise ValueError(f"{path} line {line}: {len(row)} columns, the header has {len(header)}")
            if row:
                records.append(TableRow(line, dict(zip(header, row))))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: not a table ({error})") from None
    return records


def _json_lines(path: Path, text: str) -> List[TableRow]:
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        source, way_out = f"{path} line {number}", "JSONL has one object a line"
        records.append(TableRow(number, dict(Fields.of(parse_json(line, source, way_out), source, way_out).values)))
    return records
