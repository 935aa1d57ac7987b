"""Where documents come from: files and folders of text or JSONL, plain or compressed, or Python's own documentation.

One document is in memory at a time, and one of more than a million characters is split into several, so that memory
does not grow with the corpus. A line that cannot be read is an error that names file and line; or it is left out and
counted (`BadRecords`).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import os
import re
import sysconfig
import warnings
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.reading.files import open_unpacked, sha256_of
from pack_data.reading.npy import refuse_sequences

EMBEDDED = "embedded"
# A document of more characters continues as another document, and a line of more as another line.
LONGEST_DOCUMENT = 1 << 20
_FIRST = 3  # lines of a text that are looked at: are they JSON?

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_COMPRESSED_SUFFIXES = (".gz", ".xz")


class Document(NamedTuple):
    """A text in lines, each a paragraph or a sentence: no sentence continues on the next line."""

    name: str
    lines: List[str]
    continues: bool = False  # whether it continues the document before it, which was too long


def documents(
    source: Union[str, Path],
    *,
    json_field: str = "text",
    separator: str = "file",
    bad: Optional[BadRecords] = None,
) -> Iterator[Document]:
    """Yield the documents of a file, a directory (all files below it, sorted by path) or the `embedded` corpus.

    JSONL (.json, .jsonl, .ndjson): each line is an object with a text in `json_field`. Any other file is UTF-8 text;
    each line is a paragraph or a sentence. separator: a document is a file ("file"), or what stands between blank lines
    ("blank-line", the input format of BERT's reference code). bad: how many lines may be left out; one more that cannot
    be read is a ValueError.
    """
    if str(source) == EMBEDDED:
        yield from _embedded_documents()
        return
    bad = BadRecords() if bad is None else bad
    for path in source_files(source):
        suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED_SUFFIXES]
        # Bytes that are not UTF-8 become lone surrogates, so that only the line they are in is bad.
        with open_unpacked(path) as file, io.TextIOWrapper(
            file, "utf-8", "surrogateescape"
        ) as handle:
            if suffixes and suffixes[-1] in _JSON_SUFFIXES:
                yield from _json_documents(path, handle, json_field, bad)
            else:
                yield from _text_documents(path, handle, separator, bad)


def source_files(source: Union[str, Path]) -> List[Path]:
    """Return the files of a corpus in a fixed order, without hidden ones (name starts with a dot)."""
    path = Path(source)
    if path.is_file():
        if path.suffix == ".npy":
            refuse_sequences(path)
        if {".csv", ".tsv"} & {*path.suffixes}:
            raise ValueError(
                f'{path}: a table, which would be read as plain text; write JSONL, a text a line as {{"text": ...}}'
            )
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"{source}: no such file or folder; give a text or JSONL file, a folder of them, or '{EMBEDDED}'"
        )
    files = sorted(
        item
        for item in path.rglob("*")
        if item.is_file() and not any(part.startswith(".") for part in item.relative_to(path).parts)
    )
    if not files:
        raise ValueError(f"{source}: the folder holds no files; a corpus needs at least one")
    return files


def relative_name(path: Path, source: Union[str, Path]) -> str:
    """Return a name of a corpus file that does not depend on the place of the corpus."""
    return path.name if path == Path(source) else path.relative_to(source).as_posix()


def _not_text(text: str) -> str:
    """Why a text cannot be used; "" where it can."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            return f"not UTF-8 text (byte 0x{code - 0xDC00:02x}); convert the file or take it out of the corpus"
        return f"the text holds \\u{code:04x}, half of a surrogate pair, which is no character"
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


def _lines_of_text(path: Path, handle: IO[str]) -> Iterator[Tuple[int, str]]:
    """As `_lines`.  ValueError where the first lines are JSON objects, whose braces and names are no text."""
    lines = _lines(handle)
    head: List[Tuple[int, str]] = []
    first: List[str] = []
    for number, line in lines:
        head.append((number, line))
        if line:
            first.append(line)
        if len(first) == _FIRST:
            break
    if first and all(map(_is_json_object, first)):
        raise ValueError(
            f"{path}: its lines are JSON objects, but its name says text; let the name end in .jsonl (or .jsonl.gz), "
            "or, if it is to be read as text, begin it with a line of text"
        )
    yield from chain(head, lines)


def _text_documents(
    path: Path, handle: IO[str], separator: str, bad: BadRecords
) -> Iterator[Document]:
    def good_lines() -> Iterator[Tuple[int, str]]:
        for number, line in _lines_of_text(path, handle):
            problem = _not_text(line)
            if problem:
                bad.add(Origin(str(path), number, "line"), problem)
            else:
                yield number, line

    if separator == "file":
        yield from _cut(path.name, (line for _, line in good_lines()))
        return

    for is_text, lines in groupby(good_lines(), key=lambda each: bool(each[1])):
        if is_text:
            number, first = next(lines)
            yield from _cut(f"{path.name}:{number}", chain([first], (line for _, line in lines)))


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
    source: Union[str, Path], seen: Callable[[int], Any] = lambda count: None
) -> List[Tuple[str, str]]:
    """(name, sha256) of every file of a corpus; the embedded corpus counts as one file.

    seen: called with the number of bytes read since its last call.
    """
    if str(source) == EMBEDDED:
        text = hashlib.sha256()
        for document in _embedded_documents():
            text.update(
                "\n".join((document.name, *document.lines, "")).encode("utf-8", "surrogatepass")
            )
        return [(EMBEDDED, text.hexdigest())]
    return [
        (relative_name(path, source), sha256_of(path, seen=seen)) for path in source_files(source)
    ]
