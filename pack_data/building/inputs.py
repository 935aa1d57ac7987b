"""What a build starts from: a corpus of text, sequences made elsewhere, or lengths drawn from a histogram.

Each input names the files that go in, and hands the work on them to workers in numbered parts.
"""

from __future__ import annotations

import abc
import hashlib
import json
import os
import random
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from pack_data.building.held_out import split
from pack_data.building.options import BuildOptions
from pack_data.building.tasks import (
    ExamplesTask,
    SyntheticTask,
    file_of,
    make_part,
    make_synthetic_part,
    read_notes,
    read_text,
    remove_and_build_again,
    save_examples,
    write_json,
)
from pack_data.building.work_folder import READY
from pack_data.cli.bad_records import BadRecords
from pack_data.cli.command import progress_bar
from pack_data.formats.detect import Source, integer_columns, open_source
from pack_data.packing.histogram import LengthHistogram
from pack_data.reading.fields import read_object, said_of
from pack_data.reading.files import sha256_of, sync_folder, write_atomically
from pack_data.store.data_set import MANIFEST
from pack_data.store.packs import BERT, PREDICTION, SEQUENCE, SLOT, PackSchema, StoredColumn, smallest_type
from pack_data.store.sequences import Sequences
from pack_data.text.corpus import EMBEDDED, Document, content_digest, documents, source_files
from pack_data.text.vocabulary import TOKENIZER, load_either, train_vocabulary

# Characters of text in one part (some 8 of the longest documents, thousands of ordinary ones), and characters that wait
# in memory until they are written to their parts.
PART_CHARACTERS, TEXT_IN_MEMORY = 8 << 20, 64 << 20
SYNTHETIC_PART = SOURCE_PART = 1 << 15  # sequences
# Files of a source that one task reads, one after another.
GROUP_BYTES = 1 << 26
# English text gives a token for about four characters, and a second segment now and then comes for nothing.
_CHARACTERS_PER_TOKEN = 3.5
# A token takes 2.6 bytes sorted and about as many in its pack.
_BYTES_PER_TOKEN = 5.5
_IDS = ("input_ids", "masked_lm_ids")
_TAKEN = ("lengths", "prediction_counts", "pack_in_shard", "slot")  # names of the build's own columns

_Note = Dict[str, Any]
Files = List[List[str]]  # name and sha256 of each


class BuildSide:
    """A data set of a build: the only one, or the training or the held-out side (held_out.py)."""

    def __init__(self, name: Optional[str], work: Path, out: Path) -> None:
        """name: TRAINING or HELD_OUT (held_out.py), None for the only data set."""
        self.name = name
        self.work = work
        self.out = out
        # The note of each part (tasks.save_examples); known when all parts are made.
        self.notes: List[Dict[str, Any]] = []

    @property
    def ready(self) -> Path:
        """The folder of finished files."""
        return self.work / READY

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return sum(note["totals"][0] for note in self.notes)

    @property
    def digest(self) -> int:
        """Digest of all sequences (store/sequences.py)."""
        return sum(note["digest"] for note in self.notes) % (1 << 64)


class VocabularyFile(NamedTuple):
    """Tokens in the vocabulary, 0 where nobody knows yet; its file in the work folder, None where there is none."""

    size: int
    path: Optional[Path]


class _BuildInput(abc.ABC):
    """Where the sequences of a build come from."""

    # The work on one task, for `runner.map`, the kind of its note (tasks.file_of), and how many parts will come out of
    # all tasks, if that is known.
    make: Callable[[Any], _Note]
    note = "examples"
    parts: Optional[int] = None

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide]) -> None:
        self.options, self.sides = options, sides_
        self.work = sides_[0].work
        self.example_options = options.example_options()
        self.given_vocabulary = options.vocabulary if options.tokenizer is None else options.tokenizer

    @abc.abstractmethod
    def files(self) -> Files:
        """What goes in."""

    def seen(self) -> Optional[List[List[Any]]]:
        """Name, bytes and time of each of `files`, which need not be read again where these are the same; None: do."""
        return None

    @abc.abstractmethod
    def need(self) -> float:
        """About how many bytes the work folder will hold."""

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
        """The work in numbered tasks, each `part` of it in a folder `work`. They depend on nothing but the input."""

    def made(self) -> int:
        """How many parts there are."""
        names = ("examples-*.json", "read-*.json")
        return sum(1 for side in self.sides for name in names for _ in side.work.glob(name))

    def gathered(self) -> Dict[str, Any]:
        """To be called when all tasks are done: numbers the parts; what the manifest says of what was left out."""
        return {}

    def settled_vocabulary_size(self, notes: Sequence[_Note], size: int) -> int:
        """The vocabulary's size when all parts are made. ValueError where a token is not in the vocabulary."""
        return size

    def packed_schema(self, schema: PackSchema, notes: Sequence[_Note]) -> PackSchema:
        """The schema of the parts with the types that these parts, or packs of them, need."""
        return schema


def open_input(options: BuildOptions, sides_: Sequence[BuildSide]) -> _BuildInput:
    """The input that the options name."""
    if options.synthetic is not None:
        return _SyntheticInput(options, sides_)
    if options.source is not None:
        return _SourceInput(options, sides_)
    return _TextInput(options, sides_)


class _TextInput(_BuildInput):
    """Documents. They are dealt out to sides by their text and to the parts of a side at random."""

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide]) -> None:
        super().__init__(options, sides_)
        self.make = make_part

    def files(self) -> Files:
        with progress_bar(None, "checking the corpus", unit="B") as bar:
            return [list(entry) for entry in content_digest(self.options.corpus, bar.update)]

    def need(self) -> float:
        text = _characters(self.options.corpus)
        return text + text / _CHARACTERS_PER_TOKEN * self.options.duplication_factor * _BYTES_PER_TOKEN

    def vocabulary(self) -> VocabularyFile:
        """Trained on the training side."""
        options, path = self.options, self.work / self.vocabulary_name
        if not path.exists():
            if self.given_vocabulary is not None:
                content = Path(self.given_vocabulary).read_bytes()
            else:
                documents = self._training_documents()
                with said_of(options.corpus), progress_bar(None, "learning a vocabulary", at_once=True):
                    content = train_vocabulary(documents, options.vocabulary_size, options.lower_case).text
            write_atomically(path, content)
        for side in self.sides[1:]:
            write_atomically(side.work / path.name, path.read_bytes())
        return VocabularyFile(len(load_either(path, options.lower_case)), path)

    def tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[ExamplesTask]:
        for side, count in zip(self.sides, self._spread_text()["parts"]):
            for part in range(count):
                yield ExamplesTask(
                    str(side.work.resolve()),
                    part,
                    self.options.lower_case,
                    self.vocabulary_name,
                    self.example_options,
                    schema,
                )

    def gathered(self) -> Dict[str, Any]:
        skipped = self._spread_text()["skipped"]
        return {"skipped": skipped} if skipped else {}

    def _documents(self, bad: BadRecords) -> Iterator[Document]:
        options = self.options
        return documents(options.corpus, json_field=options.json_field, separator=options.document_separator, bad=bad)

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
            size = _characters(self.options.corpus)
            held_out = self.options.held_out
            shares = [1 - held_out, held_out] if held_out else [1.0]
            counts = [max(1, round(share * size / PART_CHARACTERS)) for share in shares]
            paths = [
                [side.work / file_of("text", part, "jsonl") for part in range(count)]
                for side, count in zip(self.sides, counts)
            ]
            for path in chain.from_iterable(paths):
                path.write_bytes(b"")
            # The 0 is part of the seed since data sets could be appended to; without it their bytes would change.
            draws = [random.Random(f"{self.options.seed} documents 0") for _ in self.sides]
            waiting: Dict[Path, List[str]] = {}
            characters, found = 0, [0] * len(counts)
            with progress_bar(None, "reading", unit=" documents") as bar:
                for document, is_held_out in split(self._documents(bad), held_out):
                    line, number = json.dumps(document.lines), int(is_held_out)
                    path = paths[number][draws[number].randrange(counts[number])]
                    waiting.setdefault(path, []).append(line)
                    found[number] += 1
                    characters += len(line)
                    bar.update(1)
                    if characters > TEXT_IN_MEMORY:
                        _append_lines(waiting)
                        waiting, characters = {}, 0
            if any(found) and not all(found):
                raise ValueError(one_sided(self.options, self.sides[found.index(0)], sum(found)))
            _append_lines(waiting)
            write_json(done, {"parts": counts, "skipped": [str(line) for line in bad.found]})
        note = read_object(done, way_out=remove_and_build_again(self.work))
        return {
            "parts": note.integers("parts", len(self.sides), least=1, most=1 << 24),
            "skipped": note.texts("skipped"),
        }


@dataclass(frozen=True)
class _SourceTask:
    """Group `part` of a source's files."""

    work: str
    part: int
    source: Source
    schema: PackSchema


def _make_source_parts(task: _SourceTask) -> _Note:
    """Reads the files of a group and writes the parts of them. Its note says how many, and what was left out."""
    work, parts = Path(task.work), 0
    for parts, block in enumerate(task.source.blocks(SOURCE_PART, task.schema.max_sequence_length), 1):
        _save_part(work / file_of("read", task.part, "json", parts - 1), block, task.schema)
    note = {
        "parts": parts,
        "skipped": [str(bad) for bad in task.source.bad.found],
        "bad": task.source.bad.count,
        "left_out": list(task.source.foreign_lost),
    }
    write_json(work / file_of("group", task.part, "json"), note)
    return note


def _save_part(note_file: Path, sequences: Sequences, wide: PackSchema) -> None:
    """Writes a part and notes the smallest and largest value of each column."""
    columns = {SLOT: sequences.tokens, SEQUENCE: sequences.scalars, PREDICTION: sequences.predictions}
    ranges = {}
    for column in wide.columns:
        values = columns[column.axis][column.name]
        if len(values):
            ranges[column.name] = (int(values.min()), int(values.max()))
    save_examples(note_file, sequences, _narrowed(wide, ranges), documents=0, ranges=ranges)


class _SourceInput(_BuildInput):
    """Sequences made elsewhere, in one of the formats of pack_data.formats.

    The largest id is known only after the last record. So each part has the smallest types that hold its values, and
    the packs those that hold all.
    """

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide]) -> None:
        super().__init__(options, sides_)
        assert options.source is not None
        _refuse_held_out(options, "--from")
        self.make, self.note = _make_source_parts, "group"
        self._source = open_source(
            options.source, options.source_format, options.skip_bad, options.columns, options.max_record_bytes
        )

    def files(self) -> Files:
        source = self._source
        files = source.files if source.format != "store" else [str(Path(source.path) / MANIFEST)]
        # The same index of Megatron may belong to other tokens.
        sums = {file: [sha256_of(path) for path in source.with_tokens(file)] for file in files}
        return [
            [Path(file).name, own[0] if len(own) == 1 else hashlib.sha256("".join(own).encode()).hexdigest()]
            for file, own in sums.items()
        ]

    def seen(self) -> Optional[List[List[Any]]]:
        paths = [Path(path) for file in self._source.files for path in self._source.with_tokens(file)]
        paths = [path / MANIFEST if path.is_dir() else path for path in paths]
        return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]

    def need(self) -> float:
        """Foreign files take about a byte for a token."""
        files = chain.from_iterable(map(self._source.with_tokens, self._source.files))
        sizes = [Path(path).stat().st_size for path in files if Path(path).is_file()]
        return sum(sizes) * _BYTES_PER_TOKEN

    def vocabulary(self) -> VocabularyFile:
        path = self.work / self.vocabulary_name
        if self.given_vocabulary is None:
            return VocabularyFile(0, None)
        if not path.exists():
            write_atomically(path, Path(self.given_vocabulary).read_bytes())
        return VocabularyFile(len(load_either(path, self.options.lower_case)), path)

    def schema(self, vocabulary_size: int) -> PackSchema:
        """The columns of the first record, with the widest types. ValueError where there is no record."""
        source, S = self._source, self.options.max_sequence_length
        first = next(source.examples(), None)
        if first is None:
            raise ValueError(f"{source.path}: has no record; nothing to pack")
        tokens = list(first.value) if source.unpacked_kind == "tokens" else []
        extra = [StoredColumn(name, SEQUENCE, "<i4") for name in integer_columns(first)]
        for name in [column.name for column in extra] + tokens:
            if name in _TAKEN:
                raise ValueError(
                    f"{first.origin.path}: a column may not be called {name}, the build has one of that name; rename it"
                )
        if source.unpacked_kind == "tokens":
            return PackSchema.of_tokens(S, 1, [StoredColumn(name, SLOT, "<i4") for name in tokens] + extra)
        predictions = self.example_options.max_predictions_per_sequence
        return PackSchema.bert(S, 1, predictions, vocabulary_size=1 << 31, extra=extra)

    def tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[_SourceTask]:
        for group, source in enumerate(self._source.groups(GROUP_BYTES)):
            yield _SourceTask(str(self.work.resolve()), group, source, schema)

    def gathered(self) -> Dict[str, Any]:
        notes, part = read_notes(self.work, "group-*.json"), 0
        bad = sum(note["bad"] for note in notes)
        if bad > self.options.skip_bad:
            raise ValueError(
                f"{self.options.source}: {bad} bad records, --skip-bad {self.options.skip_bad} allows fewer; the "
                f"first: {next(line for note in notes for line in note['skipped'])}"
            )
        for group, note in enumerate(notes):
            for number in range(note["parts"]):
                for suffix in ("bin", "json"):
                    own = self.work / file_of("read", group, suffix, number)
                    if own.exists():
                        os.replace(own, self.work / file_of("examples", part, suffix))
                part += 1
        sync_folder(self.work)
        left_out = {name for note in notes for name in note["left_out"]}
        return {"skipped": [line for note in notes for line in note["skipped"]], "left_out": sorted(left_out)}

    def settled_vocabulary_size(self, notes: Sequence[_Note], size: int) -> int:
        """Largest token id + 1 where no vocabulary was given; 0 where no column is called input_ids."""
        ranges = _ranges(notes)
        ids = _range_of_ids(ranges)[1] + 1 if "input_ids" in ranges else 0
        if size and ids > size:
            raise ValueError(
                f"{self.options.source}: token id {ids - 1} is not in the vocabulary of {size}; "
                "give the one it was made with"
            )
        return size or ids

    def packed_schema(self, schema: PackSchema, notes: Sequence[_Note]) -> PackSchema:
        return _narrowed(schema, _ranges(notes))


def _narrowed(schema: PackSchema, ranges: Mapping[str, Tuple[int, int]]) -> PackSchema:
    """The smallest types that hold the values. All token ids have one type."""
    # The types of positions and labels follow from the shape of the pack.
    own = {"first_segment_lengths", "next_sentence_labels", "masked_lm_positions"} if schema.kind == BERT else set()

    def narrowed(column: StoredColumn) -> StoredColumn:
        if column.name in own:
            return column
        of_ids = schema.kind == BERT and column.name in _IDS
        low, high = _range_of_ids(ranges) if of_ids else ranges.get(column.name, (0, 0))
        signed = (("|i1", 7), ("<i2", 15), ("<i4", 31))
        fitting = (name for name, bits in signed if low >= -(1 << bits) and high < 1 << bits)
        return replace(column, dtype=smallest_type(high) if low >= 0 else next(fitting))

    return replace(schema, columns=tuple(map(narrowed, schema.columns)))


def _ranges(notes: Sequence[_Note]) -> Dict[str, Tuple[int, int]]:
    """The smallest and largest value of each column, of all parts."""
    ranges: Dict[str, Tuple[int, int]] = {}
    for note in notes:
        for name, (low, high) in note["ranges"].items():
            before = ranges.get(name, (low, high))
            ranges[name] = (min(before[0], low), max(before[1], high))
    return ranges


def _range_of_ids(ranges: Mapping[str, Tuple[int, int]]) -> Tuple[int, int]:
    found = [ranges[name] for name in _IDS if name in ranges]
    return min(low for low, _ in found), max(high for _, high in found)


class _SyntheticInput(_BuildInput):
    """Lengths drawn from a published histogram, random tokens."""

    def __init__(self, options: BuildOptions, sides_: Sequence[BuildSide]) -> None:
        super().__init__(options, sides_)
        assert options.synthetic is not None
        _refuse_held_out(options, "--synthetic")
        self.make, self.parts = make_synthetic_part, -(-options.sequences // SYNTHETIC_PART)
        self._histogram = LengthHistogram.published(options.synthetic)

    def files(self) -> Files:
        return [[f"synthetic {self.options.synthetic}", ""]]

    def need(self) -> float:
        return self.options.sequences * self._histogram.mean_length * _BYTES_PER_TOKEN

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
            yield SyntheticTask(
                str(side.work.resolve()),
                part,
                min(SYNTHETIC_PART, total - first),
                weights,
                self.example_options,
                vocabulary_size,
                schema,
            )


def one_sided(options: BuildOptions, side: BuildSide, count: int) -> str:
    """The words of the refusal where a side would have no documents."""
    return (
        f"{options.corpus}: --held-out {options.held_out:g} puts none of its {count:,} documents with text on the "
        f"{side.name} side (a document is held out where the hash of its text, as a fraction, is below that "
        "number); choose another number, or give more documents"
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
    """About how much text there is to read; compressed text unpacks to about four times its size."""
    if str(corpus) == EMBEDDED:
        return sum(len(line) for document in documents(corpus) for line in document.lines)
    return sum(path.stat().st_size * (4 if path.suffix in (".gz", ".xz") else 1) for path in source_files(corpus))
