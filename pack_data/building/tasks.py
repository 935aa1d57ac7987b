"""The three kinds of work that a build hands to workers. A task holds all that the work needs, files by name.

    examples   text-00007.jsonl (or drawn lengths) -> examples-00007.bin   in the order of the text
    sort       examples-00007.bin + assignment     -> sorted-00007.bin     by shard, with pack and slot of each sequence
    shard      its slice of every sorted-*.bin     -> packs-00003-*.npy    whole packs

A task is done when its note exists, a small .json or .npy file, which is written by rename after the data.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from pack_data.reading.fields import Fields, parse_json, read_object
from pack_data.reading.files import replacing, write_atomically
from pack_data.reading.npy import map_array
from pack_data.store.data_set import StoredFile, lengths_of, write_shard
from pack_data.store.packs import PREDICTION, SEQUENCE, SLOT, PackSchema, StoredColumn, assemble, smallest_type
from pack_data.store.sequences import Sequences, digest
from pack_data.text.corpus import Document
from pack_data.text.examples import ExampleOptions, make_examples, masked_count, tokenise
from pack_data.text.vocabulary import AnyVocabulary, load_either


def remove_and_build_again(work: Path) -> str:
    """The way out where a file of a work folder is not as a build left it."""
    return f"a file of the build was changed: remove the folder {work} and build again"


def file_of(kind: str, number: int, suffix: str, within: Optional[int] = None) -> str:
    """Name of a file in the work folder.

    kind: "text", "examples" or "sorted", of a part; "shard"; "group", of a source's files, or "read", a part `within`
    such a group, until it has its number among all parts.
    """
    return f"{kind}-{number:05d}{'' if within is None else f'-{within:05d}'}.{suffix}"


def read_text(work: Path, part: int) -> Iterator[Document]:
    """The documents of a part; each is a JSON list of paragraphs on a line."""
    path, way_out = work / file_of("text", part, "jsonl"), remove_and_build_again(work)
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield Document("", Fields(str(path), [parse_json(line, path, way_out)], way_out).texts(0))


def places_names(group: int) -> Tuple[str, str]:
    """Files of the packs and of the slots of the sequences of a group of parts."""
    return f"pack-{group:05d}.npy", f"slot-{group:05d}.npy"


class PartsGroup(NamedTuple):
    """Parts, one after another, whose sequences get their places together."""

    number: int
    parts: range


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value) + "\n").encode())


def save_array(path: Path, values: np.ndarray) -> None:
    """The whole .npy file or none."""
    with replacing(path) as temporary, open(temporary, "wb") as out:
        np.save(out, values)


class RunningTotals(NamedTuple):
    """Sequences, tokens and masked tokens, of a block or up to a place in it."""

    sequences: int
    tokens: int
    predictions: int


class SpilledRun(NamedTuple):
    """Sequences of a spilled file: the totals of the file, and the running totals where the run begins and ends."""

    path: Path
    totals: RunningTotals
    start: RunningTotals
    end: RunningTotals

    @classmethod
    def whole(cls, path: Path, totals: RunningTotals) -> SpilledRun:
        return cls(path, totals, RunningTotals(0, 0, 0), totals)

    @property
    def _sizes(self) -> RunningTotals:
        return RunningTotals(*(end - start for start, end in zip(self.start, self.end)))

    def _changed(self) -> ValueError:
        return ValueError(f"{self.path}: cut short or changed; remove the folder {self.path.parent} and build again")

    def _check(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """ValueError unless these lengths and numbers of masked tokens are those of the run."""
        if (int(lengths.sum(dtype=np.int64)), int(counts.sum(dtype=np.int64))) != self._sizes[1:]:
            raise self._changed()


@dataclass(frozen=True)
class SpillFormat:
    """The columns of a file of sequences, without a header; any run of them can be read alone.

    A file holds one block of sequences (`Sequences`), column after column, the lengths first. Where a
    run lies in each column follows from three running totals. So a shard takes one contiguous read of each column of
    each file, however large the corpus is.
    """

    lengths_type: str
    columns: Tuple[StoredColumn, ...]

    @classmethod
    def of(cls, schema: PackSchema, *more: StoredColumn) -> SpillFormat:
        return cls(smallest_type(schema.max_sequence_length), schema.columns + more)

    def _parts(self) -> Iterator[Tuple[str, str, int, np.dtype]]:
        """(axis, name, which of the totals counts its values, type) of every column in the order of the file."""
        yield "", "lengths", 0, np.dtype(self.lengths_type)
        yield "", "prediction_counts", 0, np.dtype(self.lengths_type)
        for axis, total in ((SEQUENCE, 0), (SLOT, 1), (PREDICTION, 2)):
            for column in self.columns:
                if column.axis == axis:
                    yield axis, column.name, total, np.dtype(column.dtype)

    def write(self, path: Path, sequences: Sequences) -> None:
        """The whole file under its name, or none."""
        columns = {
            "": {"lengths": sequences.lengths, "prediction_counts": sequences.prediction_counts},
            SEQUENCE: sequences.scalars,
            SLOT: sequences.tokens,
            PREDICTION: sequences.predictions,
        }
        with replacing(path) as temporary, open(temporary, "wb") as out:
            for axis, name, _, dtype in self._parts():
                out.write(np.ascontiguousarray(columns[axis][name].astype(dtype, copy=False)).data)

    def read(self, runs: Sequence[SpilledRun]) -> Sequences:
        """The sequences of all runs, one after another."""
        columns: Dict[str, Dict[str, np.ndarray]] = {"": {}, SEQUENCE: {}, SLOT: {}, PREDICTION: {}}
        ends = np.cumsum([(0, 0, 0), *(run._sizes for run in runs)], axis=0)
        for axis, name, counted, dtype in self._parts():
            columns[axis][name] = np.empty(ends[-1, counted], dtype)
        for run, begin, end in zip(runs, ends, ends[1:]):
            offset, own = 0, []
            with open(run.path, "rb") as file:
                for axis, name, counted, dtype in self._parts():
                    own.append(columns[axis][name][begin[counted] : end[counted]])
                    file.seek(offset + run.start[counted] * dtype.itemsize)
                    if file.readinto(own[-1].view(np.uint8)) != own[-1].nbytes:  # type: ignore[arg-type]
                        raise run._changed()
                    offset += run.totals[counted] * dtype.itemsize
            run._check(*own[:2])
        lengths, counts = (columns[""][name].astype(np.int64) for name in ("lengths", "prediction_counts"))
        return Sequences(lengths, columns[SLOT], counts, columns[PREDICTION], columns[SEQUENCE])


def lengths_of_part(work: Path, part: int, totals: RunningTotals, schema: PackSchema) -> Tuple[np.ndarray, np.ndarray]:
    """Slots and masked tokens of the sequences of a part that is not sorted yet, [sequences] both."""
    run = SpilledRun.whole(work / file_of("examples", part, "bin"), totals)
    found = np.fromfile(run.path, SpillFormat.of(schema).lengths_type, 2 * totals.sequences)
    if len(found) != 2 * totals.sequences:
        raise run._changed()
    lengths, counts = found.reshape(2, -1)
    run._check(lengths, counts)
    taken = schema.taken(lengths)
    if int(taken.max(initial=0)) > schema.max_sequence_length:
        raise run._changed()
    return taken, counts


def save_examples(note_file: Path, sequences: Sequences, schema: PackSchema, **about: Any) -> Dict[str, Any]:
    """Writes a block of sequences beside its note, which it writes then. Returns the note, with `about` in it."""
    SpillFormat.of(schema).write(note_file.with_suffix(".bin"), sequences)
    note = {
        "totals": [len(sequences), int(sequences.lengths.sum()), int(sequences.prediction_counts.sum())],
        "digest": digest(sequences),
        **about,
    }
    write_json(note_file, note)
    return note


@dataclass(frozen=True)
class ExamplesTask:
    """Part `part` of a corpus."""

    work: str
    part: int
    lower_case: bool
    vocabulary: str  # name of its file in the work folder
    options: ExampleOptions
    schema: PackSchema


@lru_cache(maxsize=2)
def _vocabulary(path: str, lower_case: bool) -> AnyVocabulary:
    return load_either(path, lower_case)


def make_part(task: ExamplesTask) -> Dict[str, Any]:
    """Makes the examples of the documents and writes them; then removes the text."""
    work, note = Path(task.work), Path(task.work) / file_of("examples", task.part, "json")
    text = work / file_of("text", task.part, "jsonl")
    if not note.exists():  # a cluster may run a finished task again
        documents = list(read_text(work, task.part))
        vocabulary = _vocabulary(str(work / task.vocabulary), task.lower_case)
        tokenised = tokenise(documents, vocabulary)
        sequences = make_examples(tokenised, vocabulary, task.options, task.part)
        unknown = 0 if vocabulary.unknown is None else int((tokenised.ids == vocabulary.unknown).sum())
        about = {"documents": len(documents), "unknown": [unknown, len(tokenised.ids)]}
        save_examples(note, sequences, task.schema, **about)
    if text.exists():
        text.unlink()
    return _read_note(note)


@dataclass(frozen=True)
class SyntheticTask:
    """`count` sequences with lengths drawn from `weights` (counts by length) and random content."""

    work: str
    part: int
    count: int
    weights: Tuple[int, ...]
    options: ExampleOptions
    vocabulary_size: int
    schema: PackSchema


def make_synthetic_part(task: SyntheticTask) -> Dict[str, Any]:
    """Draws lengths and makes sequences of them, with as many masked tokens as text would have; writes them."""
    rng = np.random.default_rng([task.options.seed, task.part])
    weights = np.array(task.weights, dtype=np.float64)
    lengths = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(task.count), side="right")
    lengths = np.minimum(lengths, len(weights) - 1)
    options = task.options
    counts = masked_count(lengths, options.max_predictions_per_sequence, options.masked_lm_probability)
    counts = np.minimum(counts, lengths)
    tokens, masked = int(lengths.sum()), int(counts.sum())
    # Masked tokens stand at even distances: only their number matters.
    place = np.arange(masked) - np.repeat(np.cumsum(counts) - counts, counts)
    sequences = Sequences(
        lengths,
        {"input_ids": rng.integers(1, task.vocabulary_size, tokens, dtype=np.uint32)},
        counts,
        {
            "masked_lm_positions": place * np.repeat(lengths, counts) // np.repeat(counts, counts),
            "masked_lm_ids": rng.integers(1, task.vocabulary_size, masked, dtype=np.uint32),
        },
        {"first_segment_lengths": (lengths + 1) // 2, "next_sentence_labels": rng.integers(0, 2, task.count)},
    )
    return save_examples(Path(task.work) / file_of("examples", task.part, "json"), sequences, task.schema, documents=0)


@dataclass(frozen=True)
class SortTask:
    """A part whose sequences have their places."""

    work: str
    part: int
    totals: RunningTotals
    group: int  # of parts, whose files hold the places
    first: int  # number of the part's first sequence in that group
    part_schema: PackSchema  # of the part's file, with its own types
    schema: PackSchema  # of the packs, with types for the values of all parts
    packs_per_shard: int
    shards: int


def _sorted_format(schema: PackSchema, packs_per_shard: int) -> SpillFormat:
    # A pack holds at most as many sequences as it has slots.
    return SpillFormat.of(
        schema,
        StoredColumn("pack_in_shard", SEQUENCE, smallest_type(packs_per_shard)),
        StoredColumn("slot", SEQUENCE, smallest_type(schema.max_sequence_length - 1)),
    )


def sort_part(task: SortTask) -> int:
    """Sorts a part by shard. Its index, int64 [shards + 1, 3], has the running totals where each shard begins."""
    work = Path(task.work)
    source, index_file = work / file_of("examples", task.part, "bin"), work / file_of("sorted", task.part, "npy")
    if index_file.exists():  # a cluster may run a finished task again
        return task.part
    try:
        sequences = SpillFormat.of(task.part_schema).read([SpilledRun.whole(source, task.totals)])
    except FileNotFoundError:
        if index_file.exists():  # another task has sorted it meanwhile
            return task.part
        raise
    own = slice(task.first, task.first + task.totals.sequences)
    names = places_names(task.group)
    pack, slots = (_places(work, name)[own].astype(np.int64) for name in names)
    most = task.packs_per_shard * task.shards, task.schema.max_sequence_length
    for name, values, end in zip(names, (pack, slots), most):
        if len(values) != len(sequences) or (len(values) and not 0 <= int(values.min()) <= int(values.max()) < end):
            raise ValueError(f"{work / name}: holds places that there are not; {remove_and_build_again(work)}")
    shard = pack // task.packs_per_shard
    order = np.argsort(shard.astype(np.uint16) if task.shards < 1 << 16 else shard, kind="stable")
    sequences = sequences.take(order)
    sequences.scalars["pack_in_shard"] = (pack - shard * task.packs_per_shard)[order]
    sequences.scalars["slot"] = slots[order]
    _sorted_format(task.schema, task.packs_per_shard).write(work / file_of("sorted", task.part, "bin"), sequences)
    runs = np.searchsorted(shard[order], np.arange(task.shards + 1))
    index = np.stack(
        [
            np.concatenate([[0], np.cumsum(values)])[runs]
            for values in (np.ones(len(sequences), np.int64), sequences.lengths, sequences.prediction_counts)
        ],
        axis=1,
    )
    save_array(index_file, index)
    with suppress(FileNotFoundError):
        source.unlink()
    return task.part


def _places(work: Path, name: str) -> np.ndarray:
    """The packs, or the slots, of the sequences of a group, mapped."""
    found = map_array(work / name, way_out=remove_and_build_again(work))
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise ValueError(f"{work / name}: holds no row of whole numbers; {remove_and_build_again(work)}")
    return found


@dataclass(frozen=True)
class ShardTask:
    """A shard to be gathered from all parts."""

    work: str
    folder: str  # where the packs are written
    number: int
    packs: int
    runs: Tuple[SpilledRun, ...]  # of the parts that it takes from
    schema: PackSchema  # of the packs
    packs_per_shard: int


def make_shard(task: ShardTask) -> Dict[str, Any]:
    """Gathers the sequences of a shard, writes its packs, then its note with the checksums."""
    work = Path(task.work)
    spill = _sorted_format(task.schema, task.packs_per_shard)
    sequences = spill.read(task.runs)
    pack, slot = sequences.scalars.pop("pack_in_shard"), sequences.scalars.pop("slot")
    if len(pack) and int(pack.max()) >= task.packs:
        raise ValueError(f"{work}: a sequence has a place that there is not; {remove_and_build_again(work)}")
    records = assemble(task.schema, sequences, pack, slot, task.packs)
    entry = write_shard(Path(task.folder), task.number, records)
    save_array(work / file_of("shard", task.number, "npy"), lengths_of(task.schema, records))
    note = {"number": task.number, **entry.to_json(), "digest": digest(sequences), "sequences": len(sequences)}
    write_json(work / file_of("shard", task.number, "json"), note)
    return note


def read_notes(work: Path, pattern: str) -> List[Dict[str, Any]]:
    """The notes of finished tasks, in order of their names: "examples-*.json", "group-*.json" or "shard-*.json"."""
    paths = sorted(work.glob(pattern), key=lambda path: int(path.stem.rpartition("-")[2]))
    return list(map(_read_note, paths))


def _read_note(path: Path) -> Dict[str, Any]:
    """One of them. ValueError where it has not the form that the stages count on."""
    way_out = f"a file of the build was changed: remove {path} and run the build, or its task, again"
    if path.name.startswith("examples-"):  # whose sequences are gone when they are sorted
        way_out = remove_and_build_again(path.parent)
    fields = read_object(path, way_out=way_out)
    count: Dict[str, Any] = {"least": 0, "most": 2**62}
    if path.name.startswith("group-"):
        for name in ("parts", "bad"):
            fields.integer(name, **count)
        for name in ("skipped", "left_out"):
            fields.texts(name)
        return fields.tree
    fields.integer("digest", least=0, most=2**64 - 1)
    if path.name.startswith("shard-"):
        fields.integer("number", **count)
        fields.integer("sequences", **count)
        StoredFile.from_json(fields)
    else:
        fields.integer("documents", **count)
        fields.integers("totals", 3, **count)
        fields.optional("unknown", Fields.integers, 2, **count)
        fields.optional("ranges", Fields.values_of, Fields.integers, 2, least=-(2**31), most=2**31 - 1)
    return fields.tree
