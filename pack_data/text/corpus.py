"""Documents of files and directories of text or JSONL, plain or compressed, or of Python's own documentation.

One document is in memory at a time, and one of more than a million characters is split into several, so that memory
does not grow with the corpus. A line that cannot be read is an error that names file and line; or it is left out and
counted (`BadRecords`).
"""

from __future__ import annotations

import ast
import codecs
import glob
import hashlib
import inspect
import io
import json
import os
import re
import sysconfig
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import (
    IO,
    Any,
    Callable,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.cli.command import counted
from pack_data.reading.encodings import HEAD_BYTES, check_encoding
from pack_data.reading.files import COMPRESSED, open_regular, open_unpacked, sha256_of
from pack_data.reading.npy import refuse_sequences
from pack_data.store.data_set import MANIFEST

EMBEDDED = "embedded"
# A document of more characters continues as another document, and a line of more as another line.
LONGEST_DOCUMENT = 1 << 20
# Lines at the beginning of a text that are tried as JSON.
_LINES_FOR_DETECTION = 3

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
# Files of a directory that are read; a number as in part.0001 is no suffix.
_TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".rst")
_TABLE_SUFFIXES = (".csv", ".tsv")
_AS_JSONL = 'write JSONL, a text a line as {"text": ...}'
_AS_SEQUENCES = "pass sequences of tokens with --from"
_EXTRACTED = "extract its text, or move it out of the corpus"
# The first bytes of formats that are no text, in lower case.
_DATA_FORMATS = (
    (b"par1", "Parquet", _AS_SEQUENCES),
    (b"arrow1", "Arrow", _AS_SEQUENCES),
    (b"\xff\xff\xff\xff", "Arrow", _AS_SEQUENCES),
    (b"\x89hdf\r\n", "HDF5", _AS_SEQUENCES),
    (b"%pdf-", "PDF", _EXTRACTED),
    (b"<!doctype html", "HTML", _EXTRACTED),
    (b"<html", "HTML", _EXTRACTED),
    (b"<?xml", "XML", _EXTRACTED),
    (b"<mediawiki", "XML", _EXTRACTED),
    (b"{\\rtf", "RTF", _EXTRACTED),
    (b"pk\x03\x04", "ZIP", "unpack it"),
)

# A file, a directory, a pattern, or several of these.
Corpus = Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]]]


class Document(NamedTuple):
    """A text in lines, each a paragraph or a sentence: no sentence continues on the next line."""

    name: str
    lines: List[str]
    continues: bool = False  # whether it continues the document before it, which was too long


def documents(
    source: Corpus,
    *,
    json_field: str = "text",
    separator: str = "file",
    bad: Optional[BadRecords] = None,
) -> Iterator[Document]:
    """Yield the documents of the files of a corpus (`corpus_files`), or of the `embedded` corpus.

    JSONL (.json, .jsonl, .ndjson, or lines of JSON under any name): each line is an object with a text in `json_field`.
    Any other file is UTF-8 text; each line is a paragraph or a sentence.

    Args:
        source: the corpus.
        json_field: the field of JSONL that holds the text.
        separator: "file" if a text file is a document, "blank-line" if blank lines separate its documents, as in the
            input of BERT's reference code.
        bad: counts the lines that are left out.

    Raises:
        ValueError: a file or a line cannot be read as text, and `bad` allows no more such lines.
    """
    if str(source) == EMBEDDED:
        yield from _embedded_documents()
        return
    bad = BadRecords() if bad is None else bad
    for path in corpus_files(source).read:
        with _opened(path) as handle:
            lines = _lines(handle)
            head: List[Tuple[int, str]] = []
            is_json = _suffix(path) in _JSON_SUFFIXES
            if not is_json:
                head = _first_lines(lines)
                texts = [line for _, line in head if line]
                is_json = bool(texts) and all(map(_is_json_object, texts))
            if not is_json:
                yield from _text_documents(path, chain(head, lines), separator, bad)
        if is_json:
            with _opened(path) as handle:
                yield from _json_documents(path, handle, json_field, bad)


class CorpusFiles(NamedTuple):
    """The files of a corpus, in a fixed order.

    read: the files with text. names: a name of each that does not depend on the place of the corpus. left_out: the
    files of its directories with other suffixes than those of texts.
    """

    read: List[Path]
    names: List[str]
    left_out: List[Path]

    @property
    def is_one_text(self) -> bool:
        """Whether the corpus is a single file of text, such as a book."""
        return len(self.read) == 1 and _suffix(self.read[0]) not in _JSON_SUFFIXES

    def remarks(self) -> Iterator[str]:
        """Yield a line about the files that are left out, if there are any."""
        if self.left_out:
            suffixes = Counter(map(_suffix, self.left_out)).most_common()
            listed = ", ".join(f"{suffix} {count:,}" for suffix, count in suffixes)[:200]
            yield (
                f"left out of the corpus: {counted(len(self.left_out), 'file')} with other suffixes than text "
                f"({listed}); name them to read them, as in --corpus 'DIR/*{suffixes[0][0]}'"
            )


def corpus_files(source: Corpus) -> CorpusFiles:
    """Return the files of a corpus.

    All files below a directory belong to it, except hidden ones, whose names start with a dot.

    Args:
        source: a file, a directory, a pattern such as `wiki/*.txt`, or several of these.

    Raises:
        ValueError: there is no such file, a directory holds no text, or it holds data of another format.
    """
    sources = [source] if isinstance(source, (str, os.PathLike)) else source
    read: List[Path] = []
    left_out: List[Path] = []
    roots: List[str] = []
    for path in chain.from_iterable(map(_matching, sources)):
        roots.append(os.path.abspath(path if path.is_dir() else path.parent))
        if not path.is_dir():
            if not path.exists():
                raise ValueError(
                    f"{path}: no such file or directory; pass texts, JSONL, a directory of them, or '{EMBEDDED}'"
                )
            _refuse_table(path)
            read.append(path)
            continue
        if (path / MANIFEST).is_file():
            raise ValueError(f"{path}: a packed data set; pass it with --from, or texts")
        for file in _visible_files(path):
            if _suffix(file) in (*_TEXT_SUFFIXES, *_JSON_SUFFIXES):
                read.append(file)
            else:
                _refuse_table(file)
                with open_regular(file) as content:
                    _check_head(file, content.read(HEAD_BYTES))
                left_out.append(file)
    root = os.path.commonpath(roots) if roots else ""
    names = [Path(os.path.relpath(os.path.abspath(path), root)).as_posix() for path in read]
    files = CorpusFiles(read, names, left_out)
    if not read:
        raise ValueError(f"{source}: the directory holds no text file; " + "".join(files.remarks()))
    return files


def _matching(source: Union[str, os.PathLike[str]]) -> List[Path]:
    """Return the paths that match a pattern, or the path itself."""
    name = os.fspath(source)
    matches = [] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    return [Path(path) for path in matches or [name]]


def _visible_files(folder: Path) -> List[Path]:
    files = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            files.append(path)
    return sorted(files)


def _suffix(path: Path) -> str:
    """Return the suffix in lower case, without that of a compressed file."""
    name, suffix = os.path.splitext(path.name.lower())
    if suffix in COMPRESSED:
        suffix = os.path.splitext(name)[1]
    return "" if suffix[1:].isdecimal() else suffix


def _refuse_table(path: Path) -> None:
    if _suffix(path) in _TABLE_SUFFIXES:
        raise ValueError(f"{path}: a table, which is not read as text; {_AS_JSONL}")


def _check_head(path: Path, head: bytes) -> None:
    """Raise ValueError if the first bytes of a file are those of another encoding or of a data format."""
    if head.startswith(b"\x93NUMPY"):
        refuse_sequences(path)
    beginning = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n").lower()
    for first_bytes, kind, way_out in _DATA_FORMATS:
        if beginning.startswith(first_bytes):
            raise ValueError(f"{path}: {kind}, which is not read as text; {way_out}")
    check_encoding(path, head)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """Open a text file. ValueError if it is in another encoding or of a data format."""
    with open_unpacked(path) as file:
        buffered: Any = file
        _check_head(path, buffered.peek(HEAD_BYTES)[:HEAD_BYTES])
        # Bytes that are not UTF-8 become lone surrogates, so that only the line they are in is bad.
        with io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape") as handle:
            yield handle


def _not_text(text: str) -> str:
    """Return the reason why a text cannot be used, "" if it can."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if not 0xDC80 <= code <= 0xDCFF:
            return f"the text holds \\u{code:04x}, half of a surrogate pair, which is no character"
        byte = code - 0xDC00
        offset = len(text[: error.start].encode())
        encoding = "Latin-1" if byte >= 0xA0 else "Windows-1252"
        following = text[error.start + 1 : error.start + 2]
        if "\udc80" <= following <= "\udcff":
            encoding = "another encoding of many bytes a character, such as GB18030"
        return (
            f"not UTF-8 text (byte 0x{byte:02x} at offset {offset} of the line; {encoding}?); "
            "convert the file with iconv or take it out of the corpus"
        )
    return ""


def _json_documents(
    path: Path, handle: IO[str], json_field: str, bad: BadRecords
) -> Iterator[Document]:
    for origin, line in bad.short_lines(handle, str(path), ", or cut it into several documents"):
        try:
            text = _json_text(line, json_field)
        except ValueError as error:
            bad.add(origin, str(error))
            continue
        yield from _cut(
            f"{path.name}:{origin.record}", (part for _, part in _lines(io.StringIO(text)))
        )


def _json_text(line: str, json_field: str) -> str:
    """Return the text in a line of JSONL; raise ValueError if there is none."""
    problem = _not_text(line)
    if problem:
        raise ValueError(problem)
    try:
        # No number is wanted here. Python 3.8 takes hours for one of millions of digits, and 3.11 refuses it.
        record = json.loads(line, parse_int=lambda digits: None)
    except RecursionError:
        raise ValueError("the JSON in it is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"not a JSON object a line ({error}); JSONL is needed") from None
    text = record.get(json_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        known = (
            ", ".join(sorted(record))[:200] if isinstance(record, dict) else type(record).__name__
        )
        raise ValueError(
            f"no text in field {json_field!r} (there is: {known}); name it with --json-field"
        )
    problem = _not_text(text)
    if problem:
        raise ValueError(problem)
    return text


def _is_json_object(line: str) -> bool:
    if not (line.startswith("{") and line.endswith("}")):
        return False
    try:
        return isinstance(json.loads(line, parse_int=lambda digits: None), dict)
    except (ValueError, RecursionError):
        return False


def _first_lines(lines: Iterator[Tuple[int, str]]) -> List[Tuple[int, str]]:
    """Take lines up to the third that is not blank."""
    head: List[Tuple[int, str]] = []
    texts = 0
    for number, line in lines:
        head.append((number, line))
        texts += bool(line)
        if texts == _LINES_FOR_DETECTION:
            break
    return head


def _text_documents(
    path: Path, lines: Iterable[Tuple[int, str]], separator: str, bad: BadRecords
) -> Iterator[Document]:
    def good_lines() -> Iterator[Tuple[int, str]]:
        for number, line in lines:
            problem = _not_text(line)
            if problem:
                bad.add(Origin(str(path), number, "line"), problem)
            else:
                yield number, line

    if separator == "file":
        yield from _cut(path.name, (line for _, line in good_lines()))
        return

    for is_text, paragraph in groupby(good_lines(), key=lambda numbered: bool(numbered[1])):
        if is_text:
            number, first = next(paragraph)
            rest = (line for _, line in paragraph)
            yield from _cut(f"{path.name}:{number}", chain([first], rest))


def _lines(handle: IO[str]) -> Iterator[Tuple[int, str]]:
    """Yield (number from 1, line without white space around it); cut a line that is too long between words."""
    number, rest = 1, ""
    while True:
        line = handle.readline(LONGEST_DOCUMENT)
        if not line:
            break
        if (
            line.endswith("\n") or len(line) < LONGEST_DOCUMENT
        ):  # a whole line; the last may have no line end
            yield number, (rest + line).strip()
            number, rest = number + 1, ""
            continue
        whole, space, begun = (rest + line).rpartition(" ")
        if space:
            yield number, whole.strip()
            rest = begun
        else:
            # No blank in a million characters: cut anywhere, nothing is dropped.
            yield number, begun
            rest = ""
    if rest.strip():
        yield number, rest.strip()


def _cut(name: str, lines: Iterable[str]) -> Iterator[Document]:
    """Yield the document without empty lines, in parts of about LONGEST_DOCUMENT characters; none without text."""
    part: List[str] = []
    size, continues = 0, False
    for line in lines:
        line = line.strip()
        if not line:
            continue
        part.append(line)
        size += len(line)
        if size >= LONGEST_DOCUMENT:
            yield Document(name, part, continues)
            part, size, continues = [], 0, True
    if part:
        yield Document(name, part, continues)


@lru_cache(maxsize=1)
def _embedded_documents() -> Tuple[Document, ...]:
    """Python's own documentation: one document for each standard-library module and for each topic of pydoc.

    About 1.9 MB of English on any machine with Python; the text differs a little between Python versions.
    """
    found: List[Document] = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_modules(root)):
        parts = path.relative_to(root).parts
        # Files that do not parse are left out: they are test data for parsers.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
        lines = [line for text in _docstrings(tree) for line in _paragraphs(text)]
        found += _cut(".".join(parts)[: -len(".py")], lines)

    from pydoc_data import topics

    for name in sorted(topics.topics):
        found += _cut(f"pydoc topic {name}", _paragraphs(topics.topics[name]))
    return tuple(found)


def _modules(root: Path) -> Iterator[Path]:
    """Yield the files of the standard library; skip directories of installed packages, which are many."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, below, files in os.walk(str(root)):
        below[:] = [name for name in below if name not in skipped]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Documentation strings in the order of the source."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _docstrings(child)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield wrapped text as one line per paragraph."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        line = " ".join(block.split())
        if line:
            yield line


# A full stop after one of these, or after a single capital, ends no sentence.
_ABBREVIATIONS = frozenset(
    (
        "mr mrs ms dr prof rev hon st sr jr vs cf no nos fig figs eq sec vol vols pp ed eds al inc ltd co "
        "corp gen col lt sgt capt maj rep sen gov pres jan feb mar apr jun jul aug sep sept oct nov dec "
        "approx dept est e.g i.e viz u.s u.k"
    ).split()
)
_SENTENCE_END = re.compile(
    r"[.!?]+[\"')\]\u201d\u2019]*(?P<gap>\s+)(?=[\"'(\[\u201c\u2018]*[^\Wa-z_])|(?<=[\u3002\uff01\uff1f])(?P<none>)(?=.)"
)
_LAST_WORD = re.compile(r"(?:\w|\.(?=\w))+$")


def split_sentences(line: str) -> List[str]:
    """Split a paragraph into sentences.

    One ends after . ! ? and closing quotes, where white space and a capital or a digit follow, but not after an
    abbreviation or an initial; and after each full-width mark.
    """
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(line):
        if (
            match.group("gap") is not None
            and line[match.start() : match.start() + 2].rstrip() == "."
        ):
            word = _LAST_WORD.search(line[max(start, match.start() - 20) : match.start()])
            if word and (
                word.group().lower() in _ABBREVIATIONS
                or (len(word.group()) == 1 and word.group().isupper())
            ):
                continue
        end = match.start("gap") if match.group("gap") is not None else match.start("none")
        sentences.append(line[start:end])
        start = match.end()
    sentences.append(line[start:])
    return [sentence for sentence in (item.strip() for item in sentences) if sentence]


def content_digest(
    source: Corpus, seen: Callable[[int], Any] = lambda count: None
) -> List[Tuple[str, str]]:
    """Return (name, sha256) of every file of a corpus; the embedded corpus counts as one file.

    Args:
        source: the corpus.
        seen: called with the number of bytes read since its last call.
    """
    if str(source) == EMBEDDED:
        text = hashlib.sha256()
        for document in _embedded_documents():
            text.update(
                "\n".join((document.name, *document.lines, "")).encode("utf-8", "surrogatepass")
            )
        return [(EMBEDDED, text.hexdigest())]
    files = corpus_files(source)
    return [(name, sha256_of(path, seen=seen)) for path, name in zip(files.read, files.names)]
