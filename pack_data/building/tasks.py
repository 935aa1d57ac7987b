"""The three kinds of work that a build gives to workers. A task holds everything that the work needs, files by name.

    examples   text-00007.jsonl (or drawn lengths) -> examples-00007.bin   in the order of the text
    sort       examples-00007.bin + assignment     -> sorted-00007.bin     by shard, with pack and slot of each sequence
    shard      its slice of every sorted-*.bin     -> packs-00003-*.npy    whole packs

A task is done when its note exists, a small .json or .npy file that is renamed into place after the data.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from pack_data.building.account import ACCOUNT
from pack_data.building.work_folder import HELD_OUT_WORK, READY
from pack_data.reading.durable import naming, raw_bytes, replacing, write_array, write_atomically
from pack_data.reading.fields import Fields, parse_json, read_object
from pack_data.reading.files import open_regular
from pack_data.reading.npy import map_array
from pack_data.store.data_set import StoredFile, lengths_of, write_shard
from pack_data.store.packs import (
    PREDICTION,
    SEQUENCE,
    SLOT,
    PackSchema,
    StoredColumn,
    assemble,
)
from pack_data.store.sequences import Sequences, digest, smallest_type
from pack_data.text.corpus import Document
from pack_data.text.examples import ExampleOptions, make_examples, masked_count, tokenise
from pack_data.text.vocabulary import AnyVocabulary, VocabularyFiles


def remove_and_build_again(work: Path) -> str:
    """Return the instruction for a damaged file in the work directory of a build, or of its held-out side."""
    whole = work.parent if work.name == HELD_OUT_WORK else work
    return f"a file of the build was changed: remove the directory {whole} and build again"


def file_of(kind: str, number: int, suffix: str, within: Optional[int] = None) -> str:
    """Return the name of a file in the work directory.

    kind: "text", "examples" or "sorted", of a part; "shard"; "group", of a source's files, or "read", a part `within`
    such a group, until it has its number among all parts.
    """
    name = f"{kind}-{number:05d}"
    if within is not None:
        name += f"-{within:05d}"
    return f"{name}.{suffix}"


def places_names(group: int) -> Tuple[str, str]:
    """Return the names of the files with the packs and with the slots of the sequences of a group of parts."""
    return f"pack-{group:05d}.npy", f"slot-{group:05d}.npy"


class TextFile(NamedTuple):
    """The text of a part as it was written."""

    size: int  # bytes
    sha256: str


def read_text(work: Path, part: int, written: TextFile) -> Iterator[Document]:
    """Yield the documents of a part; each is a JSON list of paragraphs on a line.

    Raises ValueError, at the end at the latest, if the file is not the one that was written.
    """
    path = work / file_of("text", part, "jsonl")
    way_out = remove_and_build_again(work)
    sha256 = hashlib.sha256()
    size = 0
    with open_regular(path, way_out=way_out) as lines:
        for line in lines:
            sha256.update(line)
            size += len(line)
            fields = Fields(str(path), [parse_json(line, path, way_out)], way_out)
            yield Document("", fields.texts(0))
    if (size, sha256.hexdigest()) != written:
        raise ValueError(
            f"{path}: has {size:,} bytes that differ from the {written.size:,} written; {way_out}"
        )


def write_json(path: Path, value: Any) -> None:
    """Write the whole JSON file or none."""
    write_atomically(path, (json.dumps(value) + "\n").encode())


# ---- files of sequences ----------------------------------------------------------------------------------------------


class RunningTotals(NamedTuple):
    """Sequences, tokens and masked tokens, of a block or up to a place in it."""

    sequences: int
    tokens: int
    predictions: int


class SpilledRun(NamedTuple):
    """A run of sequences in a spilled file: totals of the file, and running totals at the run's start and end."""

    path: Path
    totals: RunningTotals
    start: RunningTotals
    end: RunningTotals

    @property
    def _sizes(self) -> RunningTotals:
        return RunningTotals(*(end - start for start, end in zip(self.start, self.end)))

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except FileNotFoundError:
            raise self._changed() from None

    def _changed(self) -> ValueError:
        return ValueError(
            f"{self.path}: lost, cut short or changed; {remove_and_build_again(self.path.parent)}"
        )

    def _check(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Raise ValueError unless these lengths and numbers of masked tokens are those of the run."""
        tokens = int(lengths.sum(dtype=np.int64))
        predictions = int(counts.sum(dtype=np.int64))
        if (tokens, predictions) != self._sizes[1:]:
            raise self._changed()


def _whole_file(path: Path, totals: RunningTotals) -> SpilledRun:
    return SpilledRun(path, totals, RunningTotals(0, 0, 0), totals)


class SpillFormat(NamedTuple):
    """The columns of a file of sequences, without a header; any run of sequences can be read alone.

    A file holds one block of sequences (`Sequences`), column after column, the lengths first. Three running totals
    determine where a run lies in each column, so a shard needs one contiguous read of each column of each file, however
    large the corpus is.
    """

    lengths_type: str
    columns: Tuple[StoredColumn, ...]

    @classmethod
    def of(cls, schema: PackSchema, *more: StoredColumn) -> SpillFormat:
        """Return the format for the columns of a schema and `more` columns."""
        return cls(smallest_type(schema.max_sequence_length), schema.columns + more)

    def _parts(self) -> Iterator[Tuple[str, str, int, np.dtype]]:
        """Yield (axis, name, index of the total that counts its values, type) of every column, in the file's order."""
        yield "", "lengths", 0, np.dtype(self.lengths_type)
        yield "", "prediction_counts", 0, np.dtype(self.lengths_type)
        for axis, total in ((SEQUENCE, 0), (SLOT, 1), (PREDICTION, 2)):
            for column in self.columns:
                if column.axis == axis:
                    yield axis, column.name, total, np.dtype(column.dtype)

    def write(self, path: Path, sequences: Sequences) -> None:
        """Write the whole file or none."""
        columns = {
            "": {"lengths": sequences.lengths, "prediction_counts": sequences.prediction_counts},
            SEQUENCE: sequences.scalars,
            SLOT: sequences.tokens,
            PREDICTION: sequences.predictions,
        }
        with replacing(path) as temporary, open(temporary, "wb") as out:
            for axis, name, _, dtype in self._parts():
                out.write(raw_bytes(columns[axis][name].astype(dtype, copy=False)))

    def read(self, runs: Sequence[SpilledRun]) -> Sequences:
        """Read the sequences of all runs, concatenated."""
        columns: Dict[str, Dict[str, np.ndarray]] = {"": {}, SEQUENCE: {}, SLOT: {}, PREDICTION: {}}
        ends = np.cumsum([(0, 0, 0), *(run._sizes for run in runs)], axis=0)
        for axis, name, total, dtype in self._parts():
            columns[axis][name] = np.empty(ends[-1, total], dtype)

        for run, begin, end in zip(runs, ends, ends[1:]):
            column_start = 0
            slices = []
            with naming(run.path), run._open() as file:
                for axis, name, total, dtype in self._parts():
                    values = columns[axis][name][begin[total] : end[total]]
                    slices.append(values)
                    file.seek(column_start + run.start[total] * dtype.itemsize)
                    if file.readinto(values.view(np.uint8)) != values.nbytes:  # type: ignore[attr-defined]
                        raise run._changed()
                    column_start += run.totals[total] * dtype.itemsize
            run._check(*slices[:2])

        lengths = columns[""]["lengths"].astype(np.int64)
        counts = columns[""]["prediction_counts"].astype(np.int64)
        return Sequences(lengths, columns[SLOT], counts, columns[PREDICTION], columns[SEQUENCE])


def lengths_of_part(
    work: Path, part: int, totals: RunningTotals, schema: PackSchema
) -> Tuple[np.ndarray, np.ndarray]:
    """Return slots and masked tokens of the sequences of a part that is not sorted yet, [sequences] both."""
    run = _whole_file(work / file_of("examples", part, "bin"), totals)
    with run._open() as file:
        values = np.fromfile(file, SpillFormat.of(schema).lengths_type, 2 * totals.sequences)
    if len(values) != 2 * totals.sequences:
        raise run._changed()
    lengths, counts = values.reshape(2, -1)
    run._check(lengths, counts)
    taken = schema.taken(lengths)
    if int(taken.max(initial=0)) > schema.max_sequence_length:
        raise run._changed()
    return taken, counts


# ---- examples --------------------------------------------------------------------------------------------------------


def save_examples(
    note_file: Path, sequences: Sequences, schema: PackSchema, **about: Any
) -> Dict[str, Any]:
    """Write a block of sequences, then its note, which includes `about`. Return the note."""
    SpillFormat.of(schema).write(note_file.with_suffix(".bin"), sequences)
    note = {
        "totals": [
            len(sequences),
            int(sequences.lengths.sum()),
            int(sequences.prediction_counts.sum()),
        ],
        "digest": digest(sequences),
        **about,
    }
    write_json(note_file, note)
    return note


class ExamplesTask(NamedTuple):
    """Part `part` of a corpus.

    vocabulary: the name of its file in the work directory; vocabulary_sha256: the digest of its files.
    """

    work: Path
    part: int
    text: TextFile
    lower_case: bool
    vocabulary: str
    vocabulary_sha256: str
    options: ExampleOptions
    schema: PackSchema


@lru_cache(maxsize=2)
def _parsed(files: VocabularyFiles, lower_case: bool) -> AnyVocabulary:
    return files.parse(lower_case)


def _vocabulary_of(task: ExamplesTask) -> AnyVocabulary:
    """Return the vocabulary of a build, parsed once for all parts. ValueError unless it is that of the task."""
    path = task.work / task.vocabulary
    files = VocabularyFiles.read(path)
    if files.sha256 != task.vocabulary_sha256:
        raise other_vocabulary(path)
    return _parsed(files, task.lower_case)


def other_vocabulary(path: Path) -> ValueError:
    """Return the error for a vocabulary that was changed in a work directory."""
    way_out = remove_and_build_again(path.parent)
    return ValueError(f"{path}: differs from the vocabulary that the build began with; {way_out}")


def make_part(task: ExamplesTask) -> Dict[str, Any]:
    """Make the examples of the documents and write them; then remove the text."""
    note = task.work / file_of("examples", task.part, "json")
    text = task.work / file_of("text", task.part, "jsonl")
    if not note.exists():  # a cluster may run a finished task again
        documents = list(read_text(task.work, task.part, task.text))
        vocabulary = _vocabulary_of(task)
        tokenised = tokenise(documents, vocabulary, task.options)
        sequences, used = make_examples(tokenised, vocabulary, task.options, task.part)
        account = {
            "characters": sum(len(line) for document in documents for line in document.lines),
            "tokens": len(tokenised.ids),
            "tokens_in_sequences": used,
            "random_second_segments": int(sequences.scalars["next_sentence_labels"].sum()),
        }
        save_examples(
            note,
            sequences,
            task.schema,
            documents=len(documents),
            spelling=list(tokenised.spelling),
            account=account,
        )
    if text.exists():
        text.unlink()
    return _read_note(note)


class SyntheticTask(NamedTuple):
    """`count` sequences with lengths drawn from `weights` (counts by length) and random content."""

    work: Path
    part: int
    count: int  # type: ignore[assignment]  # not tuple.count
    weights: Tuple[int, ...]
    options: ExampleOptions
    vocabulary_size: int
    schema: PackSchema


def make_synthetic_part(task: SyntheticTask) -> Dict[str, Any]:
    """Draw lengths, make sequences with as many masked tokens as text would have, and write them."""
    rng = np.random.default_rng([task.options.seed, task.part])
    weights = np.array(task.weights, dtype=np.float64)
    lengths = np.searchsorted(
        np.cumsum(weights / weights.sum()), rng.random(task.count), side="right"
    )
    lengths = np.minimum(lengths, len(weights) - 1)
    options = task.options
    counts = masked_count(
        lengths, options.max_predictions_per_sequence, options.masked_lm_probability
    )
    counts = np.minimum(counts, lengths)
    tokens = int(lengths.sum())
    masked = int(counts.sum())
    # Masked tokens stand at even distances: only their number matters.
    number_in_sequence = np.arange(masked) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = number_in_sequence * np.repeat(lengths, counts) // np.repeat(counts, counts)
    input_ids = rng.integers(1, task.vocabulary_size, tokens, dtype=np.uint32)
    masked_ids = rng.integers(1, task.vocabulary_size, masked, dtype=np.uint32)
    labels = rng.integers(0, 2, task.count)
    sequences = Sequences(
        lengths,
        {"input_ids": input_ids},
        counts,
        {"masked_lm_positions": positions, "masked_lm_ids": masked_ids},
        {"first_segment_lengths": (lengths + 1) // 2, "next_sentence_labels": labels},
    )
    return save_examples(
        task.work / file_of("examples", task.part, "json"), sequences, task.schema, documents=0
    )


# ---- sequences to shards ---------------------------------------------------------------------------------------------


class ShardLayout(NamedTuple):
    """The packs of a data set and their division into shards."""

    schema: PackSchema
    packs: int
    packs_per_shard: int

    @property
    def shards(self) -> int:
        """The number of shards; all but the last are full."""
        return -(-self.packs // self.packs_per_shard)

    def packs_of(self, number: int) -> int:
        """Return the number of packs in a shard."""
        return min(self.packs_per_shard, self.packs - number * self.packs_per_shard)

    def _sorted_format(self) -> SpillFormat:
        # A pack holds at most as many sequences as it has slots.
        return SpillFormat.of(
            self.schema,
            StoredColumn("pack_in_shard", SEQUENCE, smallest_type(self.packs_per_shard)),
            StoredColumn("slot", SEQUENCE, smallest_type(self.schema.max_sequence_length - 1)),
        )


class SortTask(NamedTuple):
    """A part whose sequences have their places.

    group: the number of the group of parts whose files hold the places; first: the part's first sequence in that group;
    part_schema: the schema of the part's file, with its own types.
    """

    work: Path
    part: int
    totals: RunningTotals
    group: int
    first: int
    part_schema: PackSchema
    layout: ShardLayout


def sort_part(task: SortTask) -> int:
    """Sort a part by shard. Its index, int64 [shards + 1, 3], has the running totals at the start of each shard."""
    source = task.work / file_of("examples", task.part, "bin")
    index_file = task.work / file_of("sorted", task.part, "npy")
    if index_file.exists():  # a cluster may run a finished task again
        return task.part
    try:
        sequences = SpillFormat.of(task.part_schema).read([_whole_file(source, task.totals)])
    except ValueError:
        if index_file.exists():  # another task has sorted it in the meantime
            return task.part
        raise
    layout = task.layout
    pack_file, slot_file = places_names(task.group)
    pack = _places_of(task, pack_file, layout.packs_per_shard * layout.shards)
    slot = _places_of(task, slot_file, layout.schema.max_sequence_length)

    shard = pack // layout.packs_per_shard
    # NumPy sorts numbers of 16 bits by radix, several times as fast as wider ones.
    order = np.argsort(shard.astype(np.uint16) if layout.shards < 1 << 16 else shard, kind="stable")
    sequences = sequences.take(order)
    sequences.scalars["pack_in_shard"] = (pack - shard * layout.packs_per_shard)[order]
    sequences.scalars["slot"] = slot[order]
    layout._sorted_format().write(task.work / file_of("sorted", task.part, "bin"), sequences)

    sizes = np.zeros((len(sequences) + 1, 3), np.int64)
    sizes[1:, 0] = 1
    sizes[1:, 1] = sequences.lengths
    sizes[1:, 2] = sequences.prediction_counts
    starts_of_shards = np.searchsorted(shard[order], np.arange(layout.shards + 1))
    write_array(index_file, np.cumsum(sizes, axis=0)[starts_of_shards])
    with suppress(FileNotFoundError):
        source.unlink()
    return task.part


def _places_of(task: SortTask, name: str, end: int) -> np.ndarray:
    """Return the packs, or the slots, of the sequences of a part, int64. ValueError unless all are in [0, end)."""
    way_out = remove_and_build_again(task.work)
    of_group = map_array(task.work / name, way_out=way_out)
    if of_group.dtype.kind not in "iu" or of_group.ndim != 1:
        raise ValueError(f"{task.work / name}: is not a row of whole numbers; {way_out}")
    count = task.totals.sequences
    places = of_group[task.first : task.first + count].astype(np.int64)
    if len(places) != count or (count and not 0 <= int(places.min()) <= int(places.max()) < end):
        raise ValueError(f"{task.work / name}: holds places that do not exist; {way_out}")
    return places


class ShardTask(NamedTuple):
    """A shard to be gathered from the runs of all parts that have sequences of it."""

    work: Path
    number: int
    runs: Tuple[SpilledRun, ...]
    layout: ShardLayout


def make_shard(task: ShardTask) -> Dict[str, Any]:
    """Gather the sequences of a shard, write its packs, then its note with the checksums."""
    schema = task.layout.schema
    packs = task.layout.packs_of(task.number)
    sequences = task.layout._sorted_format().read(task.runs)
    pack = sequences.scalars.pop("pack_in_shard")
    slot = sequences.scalars.pop("slot")
    if len(pack) and int(pack.max()) >= packs:
        raise ValueError(
            f"{task.work}: a sequence has a place that does not exist; {remove_and_build_again(task.work)}"
        )
    records = assemble(schema, sequences, pack, slot, packs)
    entry = write_shard(task.work / READY, task.number, records)
    write_array(task.work / file_of("shard", task.number, "npy"), lengths_of(schema, records))
    note = {
        "number": task.number,
        **entry.to_json(),
        "digest": digest(sequences),
        "sequences": len(sequences),
    }
    write_json(task.work / file_of("shard", task.number, "json"), note)
    return note


# ---- notes -----------------------------------------------------------------------------------------------------------


def read_notes(work: Path, kind: str) -> List[Dict[str, Any]]:
    """Return the notes of finished tasks in order of their numbers; kind: "examples", "group" or "shard"."""
    paths = sorted(work.glob(f"{kind}-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return list(map(_read_note, paths))


def _read_note(path: Path) -> Dict[str, Any]:
    """Read a note. ValueError unless it has the form that the stages rely on."""
    kind = path.name.partition("-")[0]
    if kind == "examples":  # whose sequences are gone when they are sorted
        way_out = remove_and_build_again(path.parent)
    else:
        way_out = (
            f"a file of the build was changed: remove {path} and run the build, or its task, again"
        )
    fields = read_object(path, way_out=way_out)
    count: Dict[str, Any] = {"least": 0, "most": 2**62}
    if kind == "group":
        fields.integer("parts", **count)
        fields.integer("bad", **count)
        fields.integer("tokens", **count)
        fields.texts("skipped")
        fields.texts("left_out")
        return fields.tree
    fields.integer("digest", least=0, most=2**64 - 1)
    if kind == "shard":
        fields.integer("number", **count)
        fields.integer("sequences", **count)
        StoredFile.from_json(fields)
    else:
        fields.integer("documents", **count)
        fields.integers("totals", 3, **count)
        fields.optional("spelling", Fields.integers, 3, **count)
        fields.optional(ACCOUNT, Fields.values_of, Fields.integer, **count)
        fields.optional(
            "ranges", Fields.values_of, Fields.integers, 2, least=-(2**31), most=2**31 - 1
        )
    return fields.tree
