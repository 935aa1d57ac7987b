"""Documents of files and directories of text, JSONL, Parquet or Arrow, or of Python's own documentation.

One document is in memory at a time (of Parquet and Arrow, a block of rows), and one of more than a million characters
is split into several, so that memory does not grow with the corpus. A line or row that cannot be read is an error that
names it; or it is left out and counted (`BadRecords`).
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
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, groupby, islice
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
)

from pack_data.formats.columns import TOKENS
from pack_data.formats.rows import column_types, read_rows
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.compressed import open_unpacked
from pack_data.reading.encodings import HEAD_BYTES, check_encoding
from pack_data.reading.fields import shown
from pack_data.reading.files import sha256_of
from pack_data.text.corpus_files import (
    EMBEDDED,
    TABLES,
    Corpus,
    CorpusFiles,
    corpus_files,
    format_of,
)

# A document of more characters continues as another document, and a line of more as another line.
LONGEST_DOCUMENT = 1 << 20
# Lines at the beginning of a text that are tried as JSON.
_LINES_FOR_DETECTION = 3

# Columns that hold the text of published data sets; others are taken only if they are the only texts.
_TEXT_COLUMNS = ("text", "content")


class Document(NamedTuple):
    """A text in lines, each a paragraph or a sentence: no sentence continues on the next line."""

    name: str
    lines: List[str]
    continues: bool = False  # whether it continues the document before it, which was too long


def documents(
    source: Corpus,
    *,
    json_field: str = "text",
    columns: Sequence[str] = (),
    split: str = "",
    separator: str = "file",
    bad: Optional[BadRecords] = None,
) -> Iterator[Document]:
    """Yield the documents of the files of a corpus (`corpus_files`), or of the `embedded` corpus.

    Each row of Parquet or Arrow, and each object of JSONL (by its suffix or its lines), is a document. Any other file
    is UTF-8 text; each line is a paragraph or a sentence.

    Args:
        source: the corpus.
        json_field: the field of JSONL that holds the text, also a column unless it is `text`.
        columns: the column that holds the text; empty for `json_field` in JSONL, and for `text`, `content` or the only
            column of texts in Parquet and Arrow.
        split: the split of a published data set, such as "train".
        separator: "file" if a text file is a document, "blank-line" if blank lines separate its documents, as in the
            input of BERT's reference code, "line" if each line is one.
        bad: counts the lines and rows that are left out.

    Raises:
        ValueError: a file or a record cannot be read as text, and `bad` allows no more of them.
    """
    if str(source) == EMBEDDED:
        yield from _embedded_documents()
        return
    bad = BadRecords() if bad is None else bad
    for path in corpus_files(source, split).read:
        column = _column_of(path, json_field, columns)
        if column:
            yield from _row_documents(path, column, bad)
            continue
        with _open_text(path) as handle:
            yield from _text_documents(path, _lines(handle), separator, bad)


def is_one_text(files: CorpusFiles) -> bool:
    """Return True for a single file of text, such as a book."""
    return len(files.read) == 1 and not _column_of(files.read[0], "text", ())


@contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    """Open a text; bytes that are not UTF-8 become lone surrogates, so that only the line they are in is bad."""
    with open_unpacked(path) as file, io.TextIOWrapper(
        file, "utf-8-sig", "surrogateescape"
    ) as handle:
        yield handle


def described(files: Sequence[Path], json_field: str, columns: Sequence[str]) -> str:
    """Describe the files, the column or field that holds the text, and the columns that are ignored."""
    name = str(files[0])
    words = f"{len(files):,} files such as {name}" if len(files) > 1 else name
    column = _column_of(files[0], json_field, columns)
    if column:
        words += f", column {column}"
        ignored = [other for other in column_types(name) if other != column]
        if ignored:
            words += f"; ignored: {', '.join(ignored)[:150]}"
    return words


def _column_of(path: Path, json_field: str, columns: Sequence[str]) -> str:
    """Return the column or field with the text of a file of records, "" for a text file. ValueError if unclear."""
    format = format_of(path)
    if format not in TABLES:
        with open_unpacked(path) as file:
            check_encoding(path, file.read(HEAD_BYTES))
        if format == "jsonl" or _begins_with_json(path):
            return columns[0] if columns else json_field
        if columns:
            raise ValueError(f"{path}: text, which has no columns; leave --columns out")
        return ""
    types = column_types(str(path))
    texts = [name for name, type in types.items() if type == "text"]
    chosen = list(columns)
    if not columns and json_field not in _TEXT_COLUMNS:
        chosen = [json_field]
    candidates = chosen or [name for name in _TEXT_COLUMNS if name in texts]
    # A tokenised file may have texts beside its tokens, such as addresses.
    if not candidates and TOKENS not in types:
        candidates = texts
    if len(candidates) == 1 and candidates[0] in texts:
        return candidates[0]

    if chosen:
        problem = f"no text column {', '.join(chosen)}"
    elif candidates:
        problem = "several text columns"
    else:
        problem = "no text column is called text or content"
    listed = ", ".join(texts)[:150] or "none"
    raise ValueError(
        f"{path}: {problem}; its text columns are {listed}; choose one with --columns, or pass sequences of tokens "
        "with --from"
    )


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
            encoding = "a multi-byte encoding such as GB18030"
        return (
            f"not UTF-8 text (byte 0x{byte:02x} at offset {offset} of the line; {encoding}?); "
            "convert the file with iconv or take it out of the corpus"
        )
    return ""


def _row_documents(path: Path, column: str, bad: BadRecords) -> Iterator[Document]:
    """Yield the texts of a column of Parquet or Arrow, or of a field of JSONL."""
    # The fields of JSON cost nothing, and are named in the message.
    columns = [column] if format_of(path) in TABLES else []
    for row in read_rows(str(path), bad, columns):
        text = row.fields.get(column)
        if not isinstance(text, str):
            known = ", ".join(sorted(row.fields))[:200] or "none"
            problem = (
                f"no field {column!r} (there is: {known}); name it with --columns or --json-field"
            )
            if column in row.fields:
                problem = f"{column} is {shown(text)}, must be a text"
        else:
            problem = _not_text(text)
        if problem:
            bad.add(row.origin, problem)
            continue
        lines = (line for _, line in _lines(io.StringIO(text)))
        yield from cut_document(f"{path.name}:{row.origin.record}", lines, bad)


def _is_json_object(line: str) -> bool:
    if not (line.startswith("{") and line.endswith("}")):
        return False
    try:
        return isinstance(json.loads(line, parse_int=lambda digits: None), dict)
    except (ValueError, RecursionError):
        return False


def _begins_with_json(path: Path) -> bool:
    """Return True if the first lines of a text that are not blank are JSON objects."""
    with _open_text(path) as handle:
        texts = (line for _, line in _lines(handle) if line)
        head = list(islice(texts, _LINES_FOR_DETECTION))
    return bool(head) and all(map(_is_json_object, head))


def _text_documents(
    path: Path, lines: Iterable[Tuple[int, str]], separator: str, bad: BadRecords
) -> Iterator[Document]:
    def good_lines() -> Iterator[Tuple[int, str]]:
        for number, line in lines:
            problem = _not_text(line)
            if problem:
                bad.add_line(Origin(str(path), number, "line"), problem)
            else:
                yield number, line

    if separator == "file":
        yield from cut_document(path.name, (line for _, line in good_lines()), bad)
        return
    if separator == "line":
        for number, line in good_lines():
            if line:
                yield from cut_document(f"{path.name}:{number}", [line])
        return

    for is_text, paragraph in groupby(good_lines(), key=lambda numbered: bool(numbered[1])):
        if is_text:
            number, first = next(paragraph)
            rest = (line for _, line in paragraph)
            yield from cut_document(f"{path.name}:{number}", chain([first], rest))


def _lines(handle: IO[str]) -> Iterator[Tuple[int, str]]:
    """Yield (number from 1, line without white space around it); cut a line that is too long between words."""
    number = 1
    rest = ""
    while True:
        line = handle.readline(LONGEST_DOCUMENT)
        if not line:
            break
        # The last line may have no end.
        is_complete = line.endswith("\n") or len(line) < LONGEST_DOCUMENT
        if is_complete:
            yield number, (rest + line).strip()
            number += 1
            rest = ""
            continue
        words, space, rest = (rest + line).rpartition(" ")
        if space:
            yield number, words.strip()
        else:
            # No blank in a million characters: cut anywhere, nothing is dropped.
            yield number, rest
            rest = ""
    if rest.strip():
        yield number, rest.strip()


def cut_document(
    name: str, lines: Iterable[str], bad: Optional[BadRecords] = None
) -> Iterator[Document]:
    """Yield the document without empty lines, in parts of about LONGEST_DOCUMENT characters.

    If it has no text, count it in `bad`.
    """
    part: List[str] = []
    size = 0
    continues = False
    # Also U+0085, U+2028, U+2029 and form feeds end a line.
    for line in chain.from_iterable(map(str.splitlines, lines)):
        line = line.strip()
        if not line:
            continue
        part.append(line)
        size += len(line)
        if size >= LONGEST_DOCUMENT:
            yield Document(name, part, continues)
            part = []
            size = 0
            continues = True
    if part:
        yield Document(name, part, continues)
    elif bad and not continues:
        bad.empty += 1


@lru_cache(maxsize=1)
def _embedded_documents() -> Tuple[Document, ...]:
    """Return Python's own documentation, one document for each standard-library module and each topic of pydoc.

    About 1.9 MB of English on any machine with Python; the text differs a little between Python versions.
    """
    texts: List[Document] = []
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
        texts += cut_document(".".join(parts)[: -len(".py")], lines)

    from pydoc_data import topics

    for name in sorted(topics.topics):
        texts += cut_document(f"pydoc topic {name}", _paragraphs(topics.topics[name]))
    return tuple(texts)


def _modules(root: Path) -> Iterator[Path]:
    """Yield the files of the standard library; skip directories of installed packages, which are many."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, below, files in os.walk(str(root)):
        below[:] = [name for name in below if name not in skipped]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield documentation strings in the order of the source."""
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
# Marks of other scripts that end a sentence whatever follows (Unicode's Sentence_Terminal, without . ! ? of Latin
# scripts, and the shad of Tibetan): Greek, Armenian, Arabic, Syriac, N'Ko, Indic, Myanmar, Ethiopic, Khmer, Mongolian,
# and full-width ones.
_STOPS = (
    "\u037e\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0964\u0965\u0df4\u0f0d\u0f0e\u104a\u104b\u1362\u1367\u1368\u166e"
    "\u17d4\u17d5\u1803\u1809\u1944\u1945\u1b5a\u1b5b\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047-\u2049\u3002\ua4ff\ua60e"
    "\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61"
)
_CLOSING = "\"')\\]\u00bb\u201d\u2019\u3009\u300b\u300d\u300f\u3011\uff09\uff63"
_SENTENCE_END = re.compile(
    # . ! ? before white space and a capital, a digit, or a letter of a script without capitals
    rf"[.!?]+[{_CLOSING}]*(?P<gap>\s+)(?=[\"'(\[\u201c\u2018]*[^\Wa-z_])"
    # a stop of another script; the full-width full stop is also a decimal point
    rf"|(?:[{_STOPS}]|(?<=[\u0370-\u03ff\u1f00-\u1fff]);)[{_STOPS}.!?;]*(?<!\uff0e(?=\d))[{_CLOSING}]*(?=[^{_STOPS}.!?;{_CLOSING}])"
)
_LAST_WORD = re.compile(r"(?:\w|\.(?=\w))+$")


def split_sentences(line: str) -> List[str]:
    """Split a paragraph into sentences.

    A sentence ends after . ! ? and closing quotes if white space and a capital or a digit follow, but not after an
    abbreviation or an initial; and after each stop of another script, such as the danda or a full-width mark.
    """
    sentences = []
    start = 0
    for match in _SENTENCE_END.finditer(line):
        mark = match.start()
        gap = match["gap"] or ""
        if gap and line[mark : mark + 2].rstrip() == ".":
            last_word = _LAST_WORD.search(line[max(start, mark - 20) : mark])
            word = last_word[0] if last_word else ""
            if word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper()):
                continue
        sentences.append(line[start : match.end() - len(gap)])
        start = match.end()
    sentences.append(line[start:])
    return [*filter(None, map(str.strip, sentences))]


def content_digest(
    source: Corpus, split: str = "", seen: Callable[[int], Any] = lambda count: None
) -> List[Tuple[str, str]]:
    """Return (name, sha256) of every file of a corpus; the embedded corpus counts as one file.

    Args:
        source: the corpus.
        split: the split of a published data set.
        seen: called with the number of bytes read since its last call.
    """
    if str(source) == EMBEDDED:
        text = hashlib.sha256()
        for document in _embedded_documents():
            text.update(
                "\n".join((document.name, *document.lines, "")).encode("utf-8", "surrogatepass")
            )
        return [(EMBEDDED, text.hexdigest())]
    files = corpus_files(source, split)
    return [(name, sha256_of(path, seen=seen)) for path, name in zip(files.read, files.names)]
