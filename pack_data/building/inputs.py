"""The inputs of a build: a corpus of text, sequences made elsewhere, or lengths drawn from a histogram.

Each input names its files and gives the work on them to workers in numbered parts.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
import os
import random
from array import array
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np

from pack_data.building.account import ACCOUNT
from pack_data.building.held_out import HELD_OUT, position, split
from pack_data.building.options import BuildOptions
from pack_data.building.stretches import runs
from pack_data.building.tasks import (
    ExamplesTask,
    RunningTotals,
    SyntheticTask,
    TextFile,
    file_of,
    make_part,
    make_synthetic_part,
    other_vocabulary,
    read_notes,
    read_text,
    remove_and_build_again,
    save_examples,
    write_json,
)
from pack_data.building.work_folder import READY
from pack_data.cli.terminal import progress_bar
from pack_data.formats.source import Source, open_source
from pack_data.packing.histogram import LengthHistogram
from pack_data.reading.bad_records import BadRecords
from pack_data.reading.compressed import COMPRESSED
from pack_data.reading.durable import (
    naming,
    new_file,
    rename,
    sync_file,
    sync_folder,
    write_atomically,
)
from pack_data.reading.fields import Fields, read_object, said_of
from pack_data.reading.files import hashing_reads, sha256_of
from pack_data.reading.words import counted
from pack_data.store.data_set import MANIFEST
from pack_data.store.packs import BERT, SLOT, PackSchema, StoredColumn
from pack_data.store.sequences import Sequences, smallest_type
from pack_data.text.copies import hashed, without_copies
from pack_data.text.corpus import Document, content_digest, described, documents, is_one_text
from pack_data.text.corpus_files import corpus_files
from pack_data.text.vocabulary import TOKENIZER, VocabularyFiles, train_vocabulary

# Characters of text in one part: about 8 of the longest documents, thousands of ordinary ones.
PART_CHARACTERS = 8 << 20
# Characters that wait in memory until they are written to their parts.
_TEXT_IN_MEMORY = 64 << 20
# Sequences in one part.
SYNTHETIC_PART = 1 << 15
SOURCE_PART = 1 << 15
# Bytes of a source's files that one task reads, one file after another.
GROUP_BYTES = 1 << 26
# English text gives a token for about four characters; second segments sometimes come without reading further text.
_CHARACTERS_PER_TOKEN = 3.5
# A token takes 2.6 bytes sorted and about as many in its pack.
_BYTES_PER_TOKEN = 5.5
# Compressed files have about this many times their size of text; in Parquet, a column of several.
_EXPANSION = {**dict.fromkeys(COMPRESSED, 4), ".parquet": 2}
# A smaller share of copies among the documents is not remarked on.
_FEW_COPIES = 0.01
# Columns of token ids, which all have one type.
_ID_COLUMNS = ("input_ids", "masked_lm_ids")
# Columns of BERT packs whose types follow from the shape of the pack.
_COLUMNS_OF_FIXED_TYPE = ("first_segment_lengths", "next_sentence_labels", "masked_lm_positions")
# Columns that a build adds to the sequences; a source may have none of these names.
_RESERVED_COLUMNS = ("lengths", "prediction_counts", "pack_in_shard", "slot")

_Note = Dict[str, Any]
_Files = List[List[str]]  # name and sha256 of each
_Ranges = Mapping[str, Tuple[int, int]]  # smallest and largest value, by column


class BuildSide:
    """A data set of a build: the only one, or the training or the held-out side (held_out.py)."""

    def __init__(self, name: Optional[str], work: Path, out: Path) -> None:
        """name: TRAINING or HELD_OUT (held_out.py), None for the only data set."""
        self.name = name
        self.work = work
        self.out = out
        # The note of each part (tasks.save_examples); set when all parts are made.
        self.notes: List[_Note] = []

    @property
    def ready(self) -> Path:
        """The directory of finished files."""
        return self.work / READY

    @property
    def totals(self) -> List[RunningTotals]:
        """The totals of each part."""
        return [RunningTotals(*note["totals"]) for note in self.notes]

    @property
    def digest(self) -> int:
        """The digest of all sequences (store/sequences.py)."""
        return sum(note["digest"] for note in self.notes) % (1 << 64)


class BuildVocabulary(NamedTuple):
    """Tokens in the vocabulary, 0 if unknown; its files, None if there are none; and their digest."""

    size: int
    files: Optional[VocabularyFiles] = None
    sha256: str = ""


class _BuildInput(abc.ABC):
    """The source of a build's sequences."""

    # The work on one task, for `runner.map`; the kind of its note (tasks.file_of); the number of parts of all tasks, if
    # it is known.
    make: Callable[[Any], _Note]
    note = "examples"
    parts: Optional[int] = None

    def __init__(self, options: BuildOptions, sides: Sequence[BuildSide]) -> None:
        self.options = options
        self.sides = sides
        self.work = sides[0].work
        self.example_options = options.example_options()
        # Name and sha256 of each input file as planned: what is read must have this content.
        self.sources: _Files = []
        self.given: Mapping[str, str] = {}
        self.given_vocabulary = (
            options.vocabulary if options.tokenizer is None else options.tokenizer
        )

    @abc.abstractmethod
    def files(self) -> _Files:
        """Return name and sha256 of the input files."""

    def seen(self) -> Optional[List[List[Any]]]:
        """Return path, bytes and times of each input file; if they stay the same, a task need not call `files` again.

        None: call `files` always.
        """
        return None

    @abc.abstractmethod
    def need(self) -> float:
        """Estimate the bytes of the work directory."""

    @property
    def vocabulary_name(self) -> str:
        """The name of the vocabulary's file in the work directory and in the data set."""
        return "vocab.txt" if self.options.tokenizer is None else TOKENIZER

    @abc.abstractmethod
    def vocabulary(self) -> BuildVocabulary:
        """Load or train the vocabulary."""

    def _copy_vocabulary(self, path: Path) -> None:
        """Copy the user's vocabulary to the work directory, with the files that belong to it."""
        source = str(self.given_vocabulary)
        with hashing_reads() as read:
            files = VocabularyFiles.read(source)
        name = "vocabulary" if self.options.tokenizer is None else "tokenizer"
        check_unchanged([source], self.given[name], read)
        files.write(path)

    def _loaded(self, path: Path) -> BuildVocabulary:
        """Load a vocabulary of the work directory, or copy the user's there first.

        ValueError if it is not the one that the build began with.
        """
        if not path.exists():
            self._copy_vocabulary(path)
        way_out = remove_and_build_again(self.work)
        note_file = self.work / "vocabulary.json"
        files = VocabularyFiles.read(path)
        sha256 = files.sha256
        if not note_file.exists():
            write_json(note_file, {"sha256": sha256})
        if read_object(note_file, way_out=way_out).hex_digest("sha256", 64) != sha256:
            raise other_vocabulary(path)
        return BuildVocabulary(len(files.parse(self.options.lower_case)), files, sha256)

    def schema(self, vocabulary_size: int) -> PackSchema:
        """Return the columns of the parts."""
        return PackSchema.bert(
            self.options.max_sequence_length,
            1,
            self.example_options.max_predictions_per_sequence,
            vocabulary_size=vocabulary_size,
        )

    @abc.abstractmethod
    def tasks(self, schema: PackSchema, vocabulary: BuildVocabulary) -> Iterator[Any]:
        """Yield the work in numbered tasks, each with `work` and `part`. They depend on nothing but the input."""

    def made(self) -> int:
        """Return the number of finished parts."""
        notes = 0
        for side in self.sides:
            notes += len([*side.work.glob("examples-*.json"), *side.work.glob("read-*.json")])
        return notes

    def gathered(self) -> Dict[str, Any]:
        """Assign numbers to the parts after all tasks, and return what the manifest states about omitted input."""
        return {}

    def settled_vocabulary_size(self, notes: Sequence[_Note], size: int) -> int:
        """Return the vocabulary's size when all parts are made. ValueError if a token is not in the vocabulary."""
        return size

    def packed_schema(self, schema: PackSchema, notes: Sequence[_Note]) -> PackSchema:
        """Return the schema of the parts with the types that these parts, or packs of them, need."""
        return schema

    def remarks(self) -> Iterator[str]:
        """Yield lines for the user about what was read."""
        return iter(())


def open_input(options: BuildOptions, sides: Sequence[BuildSide]) -> _BuildInput:
    """Return the input that the options name."""
    if options.synthetic is not None:
        return _SyntheticInput(options, sides)
    if options.source is not None:
        return _SourceInput(options, sides)
    return _TextInput(options, sides)


class _TextInput(_BuildInput):
    """Documents, which are dealt out to sides by their text and to the parts of a side at random."""

    def __init__(self, options: BuildOptions, sides: Sequence[BuildSide]) -> None:
        super().__init__(options, sides)
        self.make = make_part
        self._files = corpus_files(options.corpus, options.split)
        # A single text, such as a book, is divided into stretches if a part of it is held out.
        is_one_document = options.document_separator == "file" and is_one_text(self._files)
        self._is_divided = options.held_out > 0 and is_one_document

    def files(self) -> _Files:
        with progress_bar(None, "checking the corpus", unit="B") as bar:
            digests = content_digest(self.options.corpus, self.options.split, bar.update)
        return [list(entry) for entry in digests]

    def need(self) -> float:
        characters = self._characters()
        tokens = characters / _CHARACTERS_PER_TOKEN * self.options.duplication_factor
        return characters + tokens * _BYTES_PER_TOKEN

    def vocabulary(self) -> BuildVocabulary:
        """Load the vocabulary, or train one on the training side."""
        options = self.options
        path = self.work / self.vocabulary_name
        if self.given_vocabulary is None and not path.exists():
            documents = self._training_documents()
            with said_of(str(options.corpus)), progress_bar(
                None, "learning a vocabulary", at_once=True
            ):
                vocabulary = train_vocabulary(
                    documents, options.vocabulary_size, options.lower_case
                )
            write_atomically(path, vocabulary.text)
        loaded = self._loaded(path)
        assert loaded.files is not None
        for side in self.sides[1:]:
            loaded.files.write(side.work / path.name)
        return loaded

    def tasks(self, schema: PackSchema, vocabulary: BuildVocabulary) -> Iterator[ExamplesTask]:
        lower_case = self.options.lower_case
        for side, texts in zip(self.sides, self._spread_text().texts):
            for part, text in enumerate(texts):
                yield ExamplesTask(
                    side.work,
                    part,
                    text,
                    lower_case,
                    self.vocabulary_name,
                    vocabulary.sha256,
                    self.example_options,
                    schema,
                )

    def gathered(self) -> Dict[str, Any]:
        spread = self._spread_text()
        omitted: Dict[str, Any] = {ACCOUNT: spread.account}
        if spread.skipped:
            omitted["skipped"] = spread.skipped
        return omitted

    def remarks(self) -> Iterator[str]:
        """Yield lines about what is read and left out, the division of a book, and copies."""
        options = self.options
        account = self._spread_text().account
        count = account["records"] - account["empty_records"]
        if self._files.read:
            words = described(self._files.read, options.json_field, options.columns)
            yield f"text from {words}; {counted(count, 'document')}"
        yield from self._files.remarks()
        if self._is_divided:
            yield (
                f"{options.corpus}: one text of {counted(account['paragraphs'], 'paragraph')}; --held-out takes "
                "stretches of them (between blank lines, or lines if there are none)"
            )
        share = account["copies"] / max(1, count)
        if share > _FEW_COPIES and not options.drop_copies:
            yield (
                f"{100 * share:.0f} % of the documents are copies (by hash); use --drop-copies to remove them"
            )

    def _training_documents(self) -> Iterator[Document]:
        """Yield the documents part by part; each part is a fair sample of them."""
        for part, text in enumerate(self._spread_text().texts[0]):
            yield from read_text(self.work, part, text)

    def _spread_text(self) -> _Spread:
        """Deal the documents out, unless that is done."""
        note_file = self.work / "text.json"
        if not note_file.exists():
            self._write_text(note_file)
        note = read_object(note_file, way_out=remove_and_build_again(self.work))
        counts = note.integers("parts", len(self.sides), least=1, most=1 << 24)
        sizes = note.integers("bytes", sum(counts), least=0, most=1 << 62)
        digests = note.list_of("sha256", Fields.hex_digest, 64)
        if len(digests) != len(sizes):
            raise note.error("sha256", f"has {len(digests)} entries for {len(sizes)} files")
        written = map(TextFile, sizes, digests)
        texts = [list(islice(written, count)) for count in counts]
        account = note.values_of(ACCOUNT, Fields.integer, least=0, most=1 << 62)
        return _Spread(texts, note.texts("skipped"), account)

    def _documents(self, bad: BadRecords, separator: str = "") -> Iterator[Document]:
        options = self.options
        return documents(
            options.corpus,
            json_field=options.json_field,
            columns=options.columns,
            split=options.split,
            separator=separator or options.document_separator,
            bad=bad,
        )

    def _characters(self) -> float:
        """Estimate the characters of text to read."""
        if not self._files.read:
            texts = documents(self.options.corpus)
            return sum(len(line) for document in texts for line in document.lines)
        return sum(
            path.stat().st_size * _EXPANSION.get(path.suffix.lower(), 1)
            for path in self._files.read
        )

    def _write_text(self, note_file: Path) -> None:
        """Deal the documents out, and write the note if the files that were read are those of the plan."""
        with hashing_reads() as read:
            note = self._deal_out()
        for path, (_, sha256) in zip(self._files.read, self.sources):
            check_unchanged([str(path)], sha256, read)
        write_json(note_file, note)

    def _deal_out(self) -> _Note:
        """Write every document to a part of its side drawn at random, and return the note.

        The second segment of an example comes from the same part, so a part must be a fair sample of the corpus, whose
        files are often sorted by kind or age.
        """
        options = self.options
        shares = [1 - options.held_out, options.held_out] if options.held_out else [1.0]
        characters = self._characters()
        paths: List[List[Path]] = []
        for side, share in zip(self.sides, shares):
            parts = max(1, round(share * characters / PART_CHARACTERS))
            paths.append([side.work / file_of("text", part, "jsonl") for part in range(parts)])
        writer = _TextWriter(chain.from_iterable(paths))
        # The 0 is part of the seed since data sets could be appended to; without it their bytes would change.
        draws = [random.Random(f"{options.seed} documents 0") for _ in self.sides]
        bad = BadRecords(options.skip_bad, options.max_record_bytes)
        hashes = array("Q")
        paragraphs = 0
        if self._is_divided:
            paragraphs, dealt = self._paragraphs(bad)
        else:
            corpus = hashed(self._documents(bad), hashes)
            if options.drop_copies:
                for _ in corpus:
                    pass
                bad = BadRecords(options.skip_bad, options.max_record_bytes)
                corpus = without_copies(self._documents(bad), hashes)
            dealt = split(corpus, options.held_out)
        counts = [0] * len(paths)
        with progress_bar(None, "reading", unit=" documents") as bar:
            for document, is_held_out in dealt:
                side_number = int(is_held_out)
                part = draws[side_number].randrange(len(paths[side_number]))
                writer.add(paths[side_number][part], document)
                counts[side_number] += not document.continues
                bar.update(1)
        if bad.found and not any(counts):
            raise bad.nothing_left(options.corpus)
        if any(counts) and not all(counts):
            texts = [text for text in self._documents(bad) if not text.continues]
            positions = [position(text.lines) for text in texts]
            raise one_sided(options, self.sides[counts.index(0)], sum(counts), positions)
        written = writer.complete()
        copies = len(hashes) - len(np.unique(hashes))
        records = 1 if paragraphs else bad.empty + len(hashes)
        return {
            "parts": list(map(len, paths)),
            "bytes": [text.size for text in written],
            "sha256": [text.sha256 for text in written],
            "skipped": list(map(str, bad.found)),
            ACCOUNT: {
                "files": len(self._files.names),
                "unreadable": bad.count - bad.lines,
                "unreadable_lines": bad.lines,
                "records": records,
                "empty_records": bad.empty,
                "copies": copies,
                "paragraphs": paragraphs,
                "documents": sum(counts),
            },
        }

    def _paragraphs(self, bad: BadRecords) -> Tuple[int, Iterator[Tuple[Document, bool]]]:
        """Return the paragraphs of a single text, and its runs of one side. ValueError if it is one line."""
        share = self.options.held_out
        for separator in ("blank-line", "line"):
            paragraphs = self._documents(BadRecords(bad.allowed, bad.longest), separator)
            count = sum(not paragraph.continues for paragraph in paragraphs)
            if count > 1:
                return count, runs(self._documents(bad, separator), count, share)
        raise ValueError(
            f"{self.options.corpus}: one text of one line, which --held-out {share:g} cannot divide; "
            "separate its paragraphs by line breaks or blank lines, or pass several files"
        )


class _Spread(NamedTuple):
    """The documents, dealt out to the parts of each side."""

    texts: List[List[TextFile]]  # of each side
    skipped: List[str]  # a line for each bad record
    account: Dict[str, int]  # of both sides (account.py)


class _SourceTask(NamedTuple):
    """Group `part` of a source's files. digests: the sha256 of each."""

    work: Path
    part: int
    source: Source
    digests: Tuple[str, ...]
    schema: PackSchema


def _make_source_parts(task: _SourceTask) -> _Note:
    """Read the files of a group and write their parts. The note has the number of parts and the omitted input."""
    parts = 0
    tokens = 0
    source = task.source
    with hashing_reads() as read:
        for block in source.blocks(SOURCE_PART, task.schema.max_sequence_length):
            tokens += int(block.lengths.sum())
            _save_part(task.work / file_of("read", task.part, "json", parts), block, task.schema)
            parts += 1
    for file, sha256 in zip(source.files, task.digests):
        check_unchanged(_paths_of(source, file), sha256, read)
    note = {
        "parts": parts,
        "skipped": [str(bad) for bad in task.source.bad.found],
        "bad": task.source.bad.count,
        "tokens": tokens,
        "left_out": sorted({*source.ignored, *source.foreign_lost}),
    }
    write_json(task.work / file_of("group", task.part, "json"), note)
    return note


def _paths_of(source: Source, file: str) -> List[str]:
    """Return the files whose content decides what one of a source's files holds."""
    if source.format == "store":
        return [os.path.join(file, MANIFEST)]
    return source.with_tokens(file)


def _digest_of(paths: Sequence[str], read: Mapping[str, Set[str]] = MappingProxyType({})) -> str:
    """Return the sha256 of a file, or of several that are read together. read: digests of files that were read."""
    digests = ["".join(read.get(path) or {sha256_of(path)}) for path in paths]
    # An index of Megatron names no tokens, so its hash includes that of the file with the tokens.
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def check_unchanged(
    paths: Sequence[str], sha256: str, read: Mapping[str, Set[str]] = MappingProxyType({})
) -> None:
    """Raise ValueError unless the content that was read is the content that was planned."""
    if _digest_of(paths, read) != sha256:
        raise ValueError(
            f"{paths[-1]}: was changed while the build read it; run the command again when nothing writes the file"
        )


def _save_part(note_file: Path, sequences: Sequences, wide: PackSchema) -> None:
    """Write a part, with the smallest and largest value of each column in its note."""
    columns = {**sequences.tokens, **sequences.scalars, **sequences.predictions}
    ranges = {}
    for column in wide.columns:
        values = columns[column.name]
        if len(values):
            ranges[column.name] = (int(values.min()), int(values.max()))
    save_examples(note_file, sequences, _narrowed(wide, ranges), documents=0, ranges=ranges)


class _SourceInput(_BuildInput):
    """Sequences made elsewhere, in one of the formats of pack_data.formats.

    The largest id is known only after the last record. Each part therefore has the smallest types that hold its values,
    and the packs have the types that hold all values.
    """

    def __init__(self, options: BuildOptions, sides: Sequence[BuildSide]) -> None:
        super().__init__(options, sides)
        _refuse_held_out(options, "--from")
        self.make = _make_source_parts
        self.note = "group"
        self._source = open_source(
            options.source,
            options.source_format,
            options.skip_bad,
            options.columns,
            options.max_record_bytes,
            options.split,
        )

    def files(self) -> _Files:
        entries = []
        for file in self._source.files:
            paths = _paths_of(self._source, file)
            entries.append([Path(paths[0]).name, _digest_of(paths)])
        return entries

    def _paths(self) -> List[Path]:
        """Return all files and directories that are read."""
        return [
            Path(path) for file in self._source.files for path in self._source.with_tokens(file)
        ]

    def seen(self) -> Optional[List[List[Any]]]:
        seen = []
        for path in self._paths():
            if path.is_dir():
                path = path / MANIFEST
            status = path.stat()
            # Times of a replaced file may be copied, all but the last.
            times = (status.st_mtime_ns, status.st_ctime_ns)
            seen.append([str(path), status.st_size, *times])
        return seen

    def need(self) -> float:
        """Estimate the bytes of the work directory, at one byte per token in foreign files."""
        return (
            sum(path.stat().st_size for path in self._paths() if path.is_file()) * _BYTES_PER_TOKEN
        )

    def remarks(self) -> Iterator[str]:
        yield from filter(None, [self._source.summary()])

    def vocabulary(self) -> BuildVocabulary:
        if self.given_vocabulary is None:
            return BuildVocabulary(0)
        return self._loaded(self.work / self.vocabulary_name)

    def schema(self, vocabulary_size: int) -> PackSchema:
        """Return the columns of the first record, with the widest types. ValueError if there is no record."""
        source = self._source
        S = self.options.max_sequence_length
        first = next(source.examples(), None)
        if first is None:
            raise source.bad.nothing_left(source.path)
        has_tokens = source.unpacked_kind == "tokens"
        tokens = list(first.value) if has_tokens else []
        for name in tokens:
            if name in _RESERVED_COLUMNS:
                raise ValueError(
                    f"{first.origin.path}: a column may not be called {name}, the build has one of that name; rename it"
                )
            if first.value[name].dtype.kind == "f":
                raise ValueError(
                    f"{first.origin.path}: {name} holds numbers that need not be whole, and packs hold whole ones; "
                    "choose the other columns with --columns, or pack the file with pack_data.pack_dataset"
                )
        if has_tokens:
            return PackSchema.of_tokens(S, 1, [StoredColumn(name, SLOT, "<i4") for name in tokens])
        predictions = self.example_options.max_predictions_per_sequence
        return PackSchema.bert(S, 1, predictions, vocabulary_size=1 << 31)

    def tasks(self, schema: PackSchema, vocabulary: BuildVocabulary) -> Iterator[_SourceTask]:
        planned = iter(self.sources)
        for group, source in enumerate(self._source.groups(GROUP_BYTES)):
            digests = tuple(sha256 for _, sha256 in islice(planned, len(source.files)))
            yield _SourceTask(self.work, group, source, digests, schema)

    def gathered(self) -> Dict[str, Any]:
        notes = read_notes(self.work, "group")
        skipped = [line for note in notes for line in note["skipped"]]
        bad = sum(note["bad"] for note in notes)
        if bad > self.options.skip_bad:
            raise ValueError(
                f"{self.options.source}: {bad} bad records, --skip-bad {self.options.skip_bad} allows fewer; the "
                f"first: {skipped[0]}"
            )
        part = 0
        for group, note in enumerate(notes):
            for number in range(note["parts"]):
                for suffix in ("bin", "json"):
                    path = self.work / file_of("read", group, suffix, number)
                    rename(path, self.work / file_of("examples", part, suffix))
                part += 1
        sync_folder(self.work)
        left_out = {name for note in notes for name in note["left_out"]}
        account = {
            "files": len(self._source.files),
            "unreadable": bad,
            "tokens": sum(note["tokens"] for note in notes),
        }
        return {"skipped": skipped, "left_out": sorted(left_out), ACCOUNT: account}

    def settled_vocabulary_size(self, notes: Sequence[_Note], size: int) -> int:
        """Return the largest token id + 1 if no vocabulary was given; 0 if no column is called input_ids."""
        ranges = _ranges(notes)
        if "input_ids" not in ranges:
            return size
        largest = _range_of_ids(ranges)[1]
        if size and largest >= size:
            raise ValueError(
                f"{self.options.source}: token id {largest} is not in the vocabulary of {size}; "
                "pass the one it was made with"
            )
        return size or largest + 1

    def packed_schema(self, schema: PackSchema, notes: Sequence[_Note]) -> PackSchema:
        return _narrowed(schema, _ranges(notes))


def _narrowed(schema: PackSchema, ranges: _Ranges) -> PackSchema:
    """Return the schema with the smallest types that hold values of these ranges; all token ids have one type."""
    columns = []
    for column in schema.columns:
        low, high = ranges.get(column.name, (0, 0))
        if schema.kind == BERT:
            if column.name in _COLUMNS_OF_FIXED_TYPE:
                columns.append(column)
                continue
            if column.name in _ID_COLUMNS:
                low, high = _range_of_ids(ranges)
        columns.append(replace(column, dtype=smallest_type(high, low)))
    return replace(schema, columns=tuple(columns))


def _ranges(notes: Sequence[_Note]) -> _Ranges:
    """Return the smallest and largest value of each column in all parts."""
    ranges: Dict[str, Tuple[int, int]] = {}
    for note in notes:
        for name, (low, high) in note["ranges"].items():
            lowest, highest = ranges.get(name, (low, high))
            ranges[name] = (min(lowest, low), max(highest, high))
    return ranges


def _range_of_ids(ranges: _Ranges) -> Tuple[int, int]:
    of_columns = [ranges[name] for name in _ID_COLUMNS if name in ranges]
    return min(low for low, _ in of_columns), max(high for _, high in of_columns)


class _SyntheticInput(_BuildInput):
    """Lengths drawn from a published histogram, with random tokens."""

    def __init__(self, options: BuildOptions, sides: Sequence[BuildSide]) -> None:
        super().__init__(options, sides)
        assert options.synthetic is not None
        _refuse_held_out(options, "--synthetic")
        self.make = make_synthetic_part
        self.parts = -(-options.sequences // SYNTHETIC_PART)
        self._histogram = LengthHistogram.published(options.synthetic)

    def files(self) -> _Files:
        return [[f"synthetic {self.options.synthetic}", ""]]

    def need(self) -> float:
        return self.options.sequences * self._histogram.mean_length * _BYTES_PER_TOKEN

    def vocabulary(self) -> BuildVocabulary:
        return BuildVocabulary(self.options.vocabulary_size)

    def tasks(self, schema: PackSchema, vocabulary: BuildVocabulary) -> Iterator[SyntheticTask]:
        histogram = self._histogram
        if histogram.longest > self.options.max_sequence_length:
            raise ValueError(
                f"--synthetic {histogram.name} has sequences of {histogram.longest} tokens; "
                f"use --max-sequence-length {histogram.max_sequence_length}"
            )
        weights = tuple(histogram.counts.tolist())
        total = self.options.sequences
        for part, first in enumerate(range(0, total, SYNTHETIC_PART)):
            count = min(SYNTHETIC_PART, total - first)
            yield SyntheticTask(
                self.work, part, count, weights, self.example_options, vocabulary.size, schema
            )


def one_sided(
    options: BuildOptions, side: BuildSide, count: int, positions: Sequence[float] = ()
) -> ValueError:
    """Return the error for a side that would have no documents.

    Args:
        options: of the build.
        side: the side without documents.
        count: documents with text.
        positions: of the documents, if known; the error then names the nearest share that works.
    """
    way_out = "choose another number"
    if positions and side.name == HELD_OUT:
        way_out = f"pass at least {math.floor(1000 * min(positions) + 1) / 1000}"
    elif positions:
        way_out = f"pass at most {math.floor(1000 * max(positions)) / 1000}"
    return ValueError(
        f"{options.corpus}: --held-out {options.held_out:g} puts none of its "
        f"{counted(count, 'document')} with text on the {side.name} side (a document is held out if the hash of its "
        f"text, as a fraction, is below that number); {way_out}, or add documents"
    )


def _refuse_held_out(options: BuildOptions, option: str) -> None:
    if options.held_out:
        raise ValueError(
            f"--held-out {options.held_out:g}: splits a corpus by documents, and {option} has none; "
            "build the held-out sequences from files of their own"
        )


class _TextWriter:
    """Writer of the text of all parts, which waits in memory and is appended to the files in large pieces."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._hashes = {path: hashlib.sha256() for path in paths}
        self._sizes = dict.fromkeys(self._hashes, 0)
        self._waiting: Dict[Path, List[bytes]] = {}
        self._waiting_bytes = 0
        for path in self._hashes:
            new_file(path)

    def add(self, path: Path, document: Document) -> None:
        """Write a document to the part at `path`."""
        line = json.dumps(document.lines).encode() + b"\n"
        self._waiting.setdefault(path, []).append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes > _TEXT_IN_MEMORY:
            self._write()

    def complete(self) -> List[TextFile]:
        """Write what waits, and sync all files and their directories. Return what each file holds."""
        self._write()
        for path in self._hashes:
            sync_file(path)
        for folder in {path.parent for path in self._hashes}:
            sync_folder(folder)
        return [
            TextFile(self._sizes[path], sha256.hexdigest()) for path, sha256 in self._hashes.items()
        ]

    def _write(self) -> None:
        for path, lines in self._waiting.items():
            data = b"".join(lines)
            with naming(path), open(path, "ab") as out:
                out.write(data)
            self._hashes[path].update(data)
            self._sizes[path] += len(data)
        self._waiting = {}
        self._waiting_bytes = 0
