"""What a build starts from: a corpus of text, sequences made elsewhere, or lengths drawn from a histogram.

Each input names the files that go in, and hands the work on them to workers in numbered parts.
"""

from __future__ import annotations

import abc
import json
import random
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Union

from pack_data.building import sides, source_parts
from pack_data.building.options import BuildOptions
from pack_data.building.side import BuildSide
from pack_data.building.tasks import (
    ExamplesTask,
    SyntheticTask,
    make_part,
    make_synthetic_part,
    read_text,
    remove_and_build_again,
    text_name,
    write_json,
)
from pack_data.cli.bad_records import BadRecords
from pack_data.cli.command import progress_bar
from pack_data.formats.detect import open_source
from pack_data.formats.megatron import tokens_file
from pack_data.histogram import LengthHistogram
from pack_data.reading.fields import read_object, said_of
from pack_data.reading.files import write_atomically
from pack_data.store.packs import PackSchema
from pack_data.text.corpus import (
    EMBEDDED,
    Document,
    content_digest,
    documents,
    file_documents,
    relative_name,
    source_files,
)
from pack_data.text.tokenizer_file import TOKENIZER, load_either
from pack_data.text.wordpiece import train_vocabulary

# Characters of text in one part (some 8 of the longest documents, thousands of ordinary ones), and characters that wait
# in memory until they are written to their parts.
PART_CHARACTERS, TEXT_IN_MEMORY = 8 << 20, 64 << 20
SYNTHETIC_PART = 1 << 15
# English text gives a token for about four characters, and a second segment now and then comes for nothing.
_CHARACTERS_PER_TOKEN = 3.5

_Note = Dict[str, Any]
Files = List[List[str]]  # name and sha256 of each


class _DiskNeed(NamedTuple):
    """About how much the work folder will hold: bytes of text, and tokens."""

    text: float
    tokens: float


class VocabularyFile(NamedTuple):
    """Tokens in the vocabulary, 0 where nobody knows yet; its file in the work folder, None where there is none."""

    size: int
    path: Optional[Path]


class _BuildInput(abc.ABC):
    """Where the sequences of a build come from."""

    # The work on one task, for `runner.map`, and how many sequences will come out of all of them, if that is known.
    make: Callable[[Any], _Note]
    count: Optional[int] = None

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide], progress: Optional[bool]) -> None:
        self.options, self.sides, self.progress = options, sides_, progress
        self.work = sides_[0].work
        self.example_options = options.example_options()

    @abc.abstractmethod
    def files(self) -> Files:
        """What goes in."""

    @abc.abstractmethod
    def leave_out(self, names: Set[str]) -> None:
        """Files of these names are in the data set already."""

    @abc.abstractmethod
    def need(self) -> _DiskNeed:
        """For the check of the disk before the build."""

    @property
    def vocabulary_name(self) -> str:
        """Name of the vocabulary's file in the work folder and in the data set."""
        return "vocab.txt" if self.options.tokenizer is None else TOKENIZER

    @abc.abstractmethod
    def vocabulary(self) -> VocabularyFile:
        """Loads or trains it."""

    def schema(self, vocabulary_size: int) -> PackSchema:
        """The columns of the parts."""
        return PackSchema.bert(
            self.options.max_sequence_length,
            1,
            self.example_options.max_predictions_per_sequence,
            vocabulary_size=vocabulary_size,
        )

    @abc.abstractmethod
    def tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[Any]:
        """The work on those parts that are not made yet."""

    def account(self) -> Dict[str, Any]:
        """What the manifest says of what was left out; to be asked when all tasks have been drawn."""
        return {}

    def settled_vocabulary_size(self, notes: Sequence[_Note], size: int) -> int:
        """The vocabulary's size when all parts are made. ValueError where a token is not in the vocabulary."""
        return size

    def packed_schema(self, schema: PackSchema, notes: Sequence[_Note]) -> PackSchema:
        """The schema of the parts with the types that the packs need."""
        return schema


def open_input(options: BuildOptions, sides_: Sequence[BuildSide], progress: Optional[bool]) -> _BuildInput:
    """The input that the options name."""
    if options.synthetic is not None:
        return _SyntheticInput(options, sides_, progress)
    if options.source is not None:
        return _SourceInput(options, sides_, progress)
    return _TextInput(options, sides_, progress)


class _TextInput(_BuildInput):
    """Documents. They are dealt out to sides by their text and to the parts of a side at random."""

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide], progress: Optional[bool]) -> None:
        super().__init__(options, sides_, progress)
        self.make = make_part
        self._left_out: Set[str] = set()

    def files(self) -> Files:
        with progress_bar(None, "checking the corpus", shown=self.progress, unit="B") as bar:
            return [list(entry) for entry in content_digest(self.options.corpus, bar.update)]

    def leave_out(self, names: Set[str]) -> None:
        self._left_out = names

    def need(self) -> _DiskNeed:
        text = _characters(self.options.corpus)
        return _DiskNeed(text, text / _CHARACTERS_PER_TOKEN * self.options.duplication_factor)

    def vocabulary(self) -> VocabularyFile:
        """Trained on the training side."""
        options, path = self.options, self.work / self.vocabulary_name
        if not path.exists():
            given = options.vocabulary if options.tokenizer is None else options.tokenizer
            if given is not None:
                content = Path(given).read_bytes()
            else:
                documents = self._training_documents()
                with said_of(options.corpus):
                    content = train_vocabulary(documents, options.vocabulary_size, options.lower_case).text
            write_atomically(path, content)
        for side in self.sides[1:]:
            write_atomically(side.work / path.name, path.read_bytes())
        return VocabularyFile(len(load_either(path, options.lower_case)), path)

    def tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[ExamplesTask]:
        for side, count in zip(self.sides, self._spread_text()["parts"]):
            for part in range(count):
                if side.is_missing(part):
                    yield ExamplesTask(
                        str(side.work.resolve()),
                        part,
                        side.first_stream + part,
                        self.options.lower_case,
                        self.vocabulary_name,
                        self.example_options,
                        schema,
                    )

    def account(self) -> Dict[str, Any]:
        skipped = self._spread_text()["skipped"]
        return {"skipped": skipped} if skipped else {}

    def _documents(self, bad: BadRecords) -> Iterator[Document]:
        how: Dict[str, Any] = {
            "json_field": self.options.json_field,
            "separator": self.options.document_separator,
            "bad": bad,
        }
        if not self._left_out:
            return documents(self.options.corpus, **how)
        files = (
            path
            for path in source_files(self.options.corpus)
            if relative_name(path, self.options.corpus) not in self._left_out
        )
        return chain.from_iterable(file_documents(path, **how) for path in files)

    def _training_documents(self) -> Iterator[Document]:
        """Part by part, each part a fair sample of them."""
        for part in range(self._spread_text()["parts"][0]):
            yield from read_text(self.work, part)

    def _spread_text(self) -> Mapping[str, Any]:
        """Deals the documents out, unless that is done. Returns "parts", how many each side has, and "skipped" lines.

        The second segment of an example comes from the same part. So a part must be a fair sample of the corpus, whose
        files are often sorted by kind or age.
        """
        done = self.work / "text.json"
        if not done.exists():
            bad = BadRecords(self.options.skip_bad, self.options.max_record_bytes)
            size, held_out = _characters(self.options.corpus), self.options.held_out
            shares = [1 - held_out, held_out] if held_out else [1.0]
            counts = [max(1, round(share * size / PART_CHARACTERS)) for share in shares]
            paths = [[side.work / text_name(part) for part in range(count)] for side, count in zip(self.sides, counts)]
            for path in chain.from_iterable(paths):
                path.write_bytes(b"")
            draws = [random.Random(f"{self.options.seed} documents {side.first_stream}") for side in self.sides]
            waiting: Dict[Path, List[str]] = {}
            characters, found = 0, [0] * len(counts)
            with progress_bar(None, "reading", shown=self.progress, unit=" documents") as bar:
                for document, is_held_out in sides.split(self._documents(bad), held_out):
                    line, number = json.dumps(document.lines), int(is_held_out)
                    path = paths[number][draws[number].randrange(counts[number])]
                    waiting.setdefault(path, []).append(line)
                    found[number] += 1
                    characters += len(line)
                    bar.update(1)
                    if characters > TEXT_IN_MEMORY:
                        _append_lines(waiting)
                        waiting, characters = {}, 0
            if not self.options.append and any(found) and not all(found):
                whole = (
                    document
                    for document in self._documents(BadRecords(self.options.skip_bad, self.options.max_record_bytes))
                    if not document.continues
                )
                places = [sides.place(document.lines) for document in whole]
                raise ValueError(one_sided(self.options, self.sides[found.index(0)], sum(found), places))
            _append_lines(waiting)
            write_json(done, {"parts": counts, "skipped": [str(line) for line in bad.found]})
        note = read_object(done, way_out=remove_and_build_again(self.work))
        return {
            "parts": note.integers("parts", len(self.sides), least=1, most=1 << 24),
            "skipped": note.texts("skipped"),
        }


class _SourceInput(_BuildInput):
    """Sequences made elsewhere, in one of the formats of pack_data.formats."""

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide], progress: Optional[bool]) -> None:
        super().__init__(options, sides_, progress)
        assert options.source is not None
        _refuse_held_out(options, "--from")
        self.make = source_parts.make_source_part
        self._source = open_source(
            options.source, options.source_format, options.skip_bad, options.columns, options.max_record_bytes
        )

    def files(self) -> Files:
        return [list(entry) for entry in source_parts.content_digest(self._source)]

    def leave_out(self, names: Set[str]) -> None:
        self._source.files = [file for file in self._source.files if Path(file).name not in names]

    def need(self) -> _DiskNeed:
        """Foreign files take about a byte for a token."""
        files = [
            *self._source.files,
            *(map(tokens_file, self._source.files) if self._source.format == "megatron" else ()),
        ]
        sizes = [Path(path).stat().st_size for path in files if Path(path).is_file()]
        return _DiskNeed(0.0, float(sum(sizes)))

    def vocabulary(self) -> VocabularyFile:
        given = self.options.vocabulary if self.options.tokenizer is None else self.options.tokenizer
        if given is None:
            return VocabularyFile(0, None)
        path = self.work / self.vocabulary_name
        if not path.exists():
            write_atomically(path, Path(given).read_bytes())
        return VocabularyFile(len(load_either(path, self.options.lower_case)), path)

    def schema(self, vocabulary_size: int) -> PackSchema:
        return source_parts.parts_schema(
            self._source, self.options.max_sequence_length, self.example_options.max_predictions_per_sequence
        )

    def tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[source_parts.SourceTask]:
        return source_parts.tasks(self._source, self.work, schema, self.sides[0].is_missing)

    def account(self) -> Dict[str, Any]:
        return {"skipped": [str(bad) for bad in self._source.bad.found], "left_out": list(self._source.foreign_lost)}

    def settled_vocabulary_size(self, notes: Sequence[_Note], size: int) -> int:
        ids = source_parts.vocabulary_size(notes)
        if size and ids > size:
            raise ValueError(
                f"{self.options.source}: token id {ids - 1} is not in the vocabulary of {size}; "
                "give the one it was made with"
            )
        return size or ids

    def packed_schema(self, schema: PackSchema, notes: Sequence[_Note]) -> PackSchema:
        return source_parts.narrowed(schema, notes)


class _SyntheticInput(_BuildInput):
    """Lengths drawn from a published histogram, random tokens."""

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide], progress: Optional[bool]) -> None:
        super().__init__(options, sides_, progress)
        assert options.synthetic is not None
        _refuse_held_out(options, "--synthetic")
        self.make, self.count = make_synthetic_part, options.sequences
        self._histogram = LengthHistogram.published(options.synthetic)

    def files(self) -> Files:
        return [[f"synthetic {self.options.synthetic}", ""]]

    def leave_out(self, names: Set[str]) -> None:
        assert not names, "there are no files"

    def need(self) -> _DiskNeed:
        return _DiskNeed(0.0, self.options.sequences * self._histogram.mean_length)

    def vocabulary(self) -> VocabularyFile:
        return VocabularyFile(self.options.vocabulary_size, None)

    def tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[SyntheticTask]:
        histogram, side, total = self._histogram, self.sides[0], self.options.sequences
        if histogram.longest > self.options.max_sequence_length:
            raise ValueError(
                f"--synthetic {histogram.name} has sequences of {histogram.longest} tokens; "
                f"take --max-sequence-length {histogram.max_sequence_length}"
            )
        weights = tuple(histogram.counts.tolist())
        for part, first in enumerate(range(0, total, SYNTHETIC_PART)):
            if side.is_missing(part):
                yield SyntheticTask(
                    str(side.work.resolve()),
                    part,
                    side.first_stream + part,
                    min(SYNTHETIC_PART, total - first),
                    weights,
                    self.example_options,
                    vocabulary_size,
                    schema,
                )


def one_sided(options: BuildOptions, side: BuildSide, count: int, places: Sequence[float] = ()) -> str:
    """The words of the refusal where a side would have no documents; places: those of all, where that is the reason."""
    nearest = sides.nearest_share(places, options.held_out) if places else None
    another = "choose another number" if nearest is None else f"--held-out {nearest!r} is the nearest that does"
    return (
        f"{options.corpus}: --held-out {options.held_out:g} puts none of its {count:,} documents with text on the "
        f"{side.name} side (a document is held out where the hash of its text, as a fraction, is below that "
        f"number); {another}, or give more documents"
    )


def _refuse_held_out(options: BuildOptions, option: str) -> None:
    if options.held_out:
        raise ValueError(
            f"--held-out {options.held_out:g}: splits a corpus by documents, and {option} has none; "
            "build the held-out sequences from files of their own"
        )


def _append_lines(waiting: Mapping[Path, Sequence[str]]) -> None:
    for path, lines in waiting.items():
        with open(path, "a", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")


def _characters(corpus: Union[str, Path]) -> float:
    """About how much text there is; compressed text unpacks to about four times its size."""
    if str(corpus) == EMBEDDED:
        return sum(len(line) for document in documents(corpus) for line in document.lines)
    return sum(path.stat().st_size * (4 if path.suffix in (".gz", ".xz") else 1) for path in source_files(corpus))
