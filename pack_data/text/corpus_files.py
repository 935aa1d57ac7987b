"""The files of a corpus: texts, JSONL, Parquet and Arrow, found below directories or named by patterns."""

from __future__ import annotations

import codecs
import glob
import os
import zipfile
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Union

from pack_data.formats.data_files import METADATA, check_copies, data_files
from pack_data.formats.detect import content_format, suffix_format
from pack_data.reading.compressed import open_unpacked, without_compression
from pack_data.reading.durable import PathLike
from pack_data.reading.npy import refuse_sequences
from pack_data.reading.words import counted
from pack_data.store.data_set import MANIFEST
from pack_data.text import EMBEDDED as EMBEDDED

# Formats of tables, of which a column holds the texts.
TABLES = ("parquet", "arrow")
# Files of a directory that are read; a number as in part.0001 is no suffix.
_TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".rst")
_DELIMITED_SUFFIXES = (".csv", ".tsv")
# Formats of tokens: name of `content_format`.
_OF_TOKENS = ("hdf5", "megatron", "tfrecord")
# The first bytes, in lower case, of documents that are not plain text.
_DOCUMENTS = {
    b"%pdf-": "PDF",
    b"<!doctype html": "HTML",
    b"<html": "HTML",
    b"<?xml": "XML",
    b"<mediawiki": "XML",
    b"pk\x03\x04": "ZIP or a document of an office program",
}
# Bytes at the beginning of a file that are looked at: white space and comments may come first.
_HEAD_BYTES = 4096
# Lines with equally many tabs that make a table; a text may have one or two by chance.
_FEWEST_ROWS = 4
# Files beside the data of a published data set.
_ABOUT_THE_DATA = ("readme.md", "readme.txt", "readme", "license", "license.txt", "license.md")

# A file, a directory, a pattern, or several of these.
Corpus = Union[PathLike, Sequence[PathLike]]


class CorpusFiles(NamedTuple):
    """The files of a corpus, in a fixed order.

    read: the files with text, none for the embedded corpus. names: a name of each that does not depend on the place of
    the corpus. left_out: the files of its directories with other suffixes than those of texts.
    """

    read: List[Path]
    names: List[str]
    left_out: List[Path]

    def remarks(self) -> Iterator[str]:
        """Yield a line about the files that are left out, if there are any."""
        if self.left_out:
            suffixes = Counter(map(_suffix, self.left_out)).most_common()
            listed = ", ".join(f"{suffix} {count:,}" for suffix, count in suffixes)[:200]
            yield (
                f"left out of the corpus: {counted(len(self.left_out), 'file')} with other suffixes than text "
                f"({listed}); name them to read them, as in --corpus 'DIR/*{suffixes[0][0]}'"
            )


def corpus_files(source: Corpus, split: str = "") -> CorpusFiles:
    """Return the files of a corpus.

    A directory has files of texts and JSONL, all below it except hidden ones (the name starts with a dot), or it is a
    published data set of Parquet, Arrow or JSONL (`data_files`).

    Args:
        source: a file, a directory, a pattern such as `wiki/*.txt`, or several of these.
        split: the split of a published data set, such as "train".

    Raises:
        ValueError: there is no such file, a directory holds no text, or it holds data of another format.
    """
    if str(source) == EMBEDDED:
        return CorpusFiles([], [EMBEDDED], [])
    files = CorpusFiles([], [], [])
    sources = [source] if isinstance(source, (str, os.PathLike)) else source
    for path in chain.from_iterable(map(_matching, sources)):
        if path.is_dir():
            _add_directory(path, split, files)
        elif not path.exists():
            raise ValueError(
                f"{path}: no such file or directory; pass texts, JSONL, Parquet, a directory of them, or '{EMBEDDED}'"
            )
        elif split:
            raise ValueError(f"{path}: a file; --split {split} chooses among those of a directory")
        else:
            _refuse_delimited(path)
            files.read.append(path)
            files.names.append(path.name)
    if not files.read:
        remark = next(files.remarks(), "pass texts, JSONL, Parquet, or a directory of them")
        raise ValueError(f"{source}: holds no text file; {remark}")
    return files


def _matching(source: PathLike) -> List[Path]:
    """Return the paths that match a pattern, or the path itself."""
    name = os.fspath(source)
    matches = [] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    return [Path(path) for path in matches or [name]]


def _add_directory(folder: Path, split: str, files: CorpusFiles) -> None:
    """Add the files of a directory."""
    if (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: a packed data set; pass it with --from, or texts")
    kinds: Dict[str, List[Path]] = {"table": [], "jsonl": [], "text": [], "about": [], "other": []}
    for path in _visible_files(folder):
        kinds[_kind_of(path)].append(path)
    for path in kinds["other"]:
        _refuse_delimited(path)
        format_of(path)
    files.left_out.extend(kinds["other"])
    tables = kinds["table"]
    records = tables + kinds["jsonl"]
    if records and not kinds["text"]:
        read = _files_of_data_set(folder, records, split)
        # Another split is no surprise, but texts in .json beside .jsonl would be.
        unread = {path for path in kinds["jsonl"] if _suffix(path) == ".json"} - {*read}
        files.left_out.extend(path for path in unread if path.name not in METADATA)
    elif tables:
        raise ValueError(
            f"{tables[0]}: a table among texts; pass the tables alone, as in --corpus '{folder}/*{tables[0].suffix}', "
            "or move them"
        )
    elif split:
        raise ValueError(f"{folder}: texts, which have no splits; leave --split {split} out")
    else:
        read = sorted([*kinds["text"], *kinds["about"], *records])
    names = [path.relative_to(folder).as_posix() for path in read]
    check_copies(str(folder), names)
    files.read.extend(read)
    files.names.extend(names)


def _kind_of(path: Path) -> str:
    """Return the kind of a file of a directory by its name."""
    format = suffix_format(path.name)
    if format in TABLES:
        return "table"
    if format == "jsonl":
        return format
    if _suffix(path) not in _TEXT_SUFFIXES:
        return "other"
    return "about" if path.name.lower() in _ABOUT_THE_DATA else "text"


def _files_of_data_set(folder: Path, records: Sequence[Path], split: str) -> List[Path]:
    """Return the files of a published data set: those of its directory, or of each directory below it."""
    # Beside other data, a .json file holds settings.
    data = [path for path in records if _suffix(path) != ".json"] or records
    parents = sorted({path.parent for path in data})
    if folder not in parents:
        parents = [folder]
    files = [file for parent in parents for file in data_files(str(parent), split)]
    return sorted(map(Path, files))


def _visible_files(folder: Path) -> List[Path]:
    """Return the files below a directory, without hidden ones and those in hidden directories."""
    files = []
    for path in folder.rglob("*"):
        is_hidden = "/." in f"/{path.relative_to(folder).as_posix()}"
        if path.is_file() and not is_hidden:
            files.append(path)
    return sorted(files)


def _suffix(path: Path) -> str:
    """Return the suffix in lower case, without that of a compressed file."""
    suffix = os.path.splitext(without_compression(path.name))[1]
    return "" if suffix[1:].isdecimal() else suffix


def _refuse_delimited(path: Path) -> None:
    if _suffix(path) in _DELIMITED_SUFFIXES:
        raise ValueError(
            f'{path}: a table, which is not read as text; write JSONL, one text per line as {{"text": ...}}'
        )


def _name_in_archive(path: Path) -> str:
    """Return the name of the only file in a zip archive, or the name of any other file.

    Raises ValueError for several texts in an archive, which would become one document.
    """
    if path.suffix.lower() != ".zip" or not zipfile.is_zipfile(path):
        return path.name
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    names = [name for name in names if not name.startswith("__MACOSX/")]
    if names and all(
        suffix_format(name) == "jsonl" and not name.endswith(".json") for name in names
    ):
        return names[0]
    if len(names) != 1:
        raise ValueError(
            f"{path}: an archive of {len(names):,} files; unpack it, and pass the directory"
        )
    _refuse_delimited(path / names[0])
    return names[0]


def _columns_of_table(head: bytes) -> int:
    """Return the columns of a tab-separated table by the beginning of its file, 0 for other text and JSONL."""
    lines = head.split(b"\n")
    if len(head) == _HEAD_BYTES:
        lines.pop()
    rows = [line.lstrip() for line in lines if line.strip()]
    tabs = {row.count(b"\t") for row in rows}
    is_table = len(rows) >= _FEWEST_ROWS and len(tabs) == 1 and not rows[0].startswith(b"{")
    return tabs.pop() + 1 if is_table and 0 not in tabs else 0


def format_of(path: Path) -> str:
    """Return "parquet", "arrow" or "jsonl", "" for anything else. ValueError for formats that hold no plain text."""
    format = content_format(str(path))
    if format in TABLES:
        return format
    name = _name_in_archive(path)
    if format == "npy":
        refuse_sequences(path)
    if format in _OF_TOKENS:
        raise ValueError(f"{path}: {format}, not text; pass sequences of tokens with --from")
    with open_unpacked(path) as file:
        head = file.read(_HEAD_BYTES)
    beginning = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n").lower()
    for first_bytes, kind in _DOCUMENTS.items():
        if beginning.startswith(first_bytes):
            raise ValueError(
                f"{path}: {kind}, not text; extract its text, or move it out of the corpus"
            )
    # Content shows only that a text begins with a bracket.
    format = suffix_format(name)
    if format in (*TABLES, "jsonl"):
        return format
    columns = _columns_of_table(head)
    if columns:
        raise ValueError(
            f"{path}: a table of {columns} columns between tabs, which is not read as text; write JSONL, one text per "
            'line as {"text": ...}'
        )
    return ""
