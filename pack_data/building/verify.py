"""`packed-bert verify DIR`: reads a whole data set again and proves that it is what its manifest says.

Checksums of files, and of the blocks that training checks as it reads; no pack overfull, no gap between its sequences,
nothing in its padding; every masked token inside its own sequence; every id in the vocabulary; and, by the digest over
all sequences that was taken before they were packed, every sequence exactly once.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Counter, List, Optional, Tuple, Union

import numpy as np

from pack_data.building.runner import open_runner
from pack_data.cli.command import available_cores, progress_bar
from pack_data.packing.packing import Packing, prove
from pack_data.reading.files import file_in, sha256_of
from pack_data.store.data_set import (
    REBUILD,
    Manifest,
    PackStore,
    StoredFile,
    check_blocks,
    lengths_of,
    map_table,
    read_manifest,
)
from pack_data.store.packs import BERT, PREDICTION, SEQUENCE, SLOT, PackSchema, disassemble
from pack_data.store.sequences import digest
from pack_data.text.vocabulary import TOKENIZER, VOCABULARY, load_either


@dataclass(frozen=True)
class Verified:
    """What was read and found right."""

    manifest: Manifest
    bytes: int


def verify(folder: Union[str, Path], workers: Optional[int] = 1) -> Verified:
    """Reads every byte of the data set. ValueError with a fault: which file, which pack, which rule.

    workers: processes, None for one a core; with more than one, a script calls it under `if __name__ == "__main__":`.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    schema = manifest.schema
    for entry in manifest.files:
        _check_sum(folder, entry)
    _table(folder, manifest.lengths, schema.lengths_dtype, 0)
    histogram = np.zeros(schema.max_sequence_length + 1, dtype=np.int64)
    total = 0
    patterns: Counter = Counter()
    PackStore.open(folder).close()
    firsts = np.cumsum([0] + [entry.packs for entry in manifest.shards]).tolist()
    tasks = [
        _ShardTask(folder, entry, first, manifest.lengths, schema, manifest.vocabulary_size)
        for entry, first in zip(manifest.shards, firsts)
    ]
    workers = min(available_cores() if workers is None else workers, max(1, len(tasks)))
    with closing(open_runner(workers)) as runner, progress_bar(manifest.packs, "verifying", unit=" packs") as bar:
        for counts, own, strategies in runner.map(_verify_shard, tasks):
            histogram += counts
            total = (total + own) % (1 << 64)
            patterns.update(strategies)
            bar.update(sum(strategies.values()))
    if histogram.tolist() != list(manifest.histogram):
        length = int(np.flatnonzero(histogram != manifest.histogram)[0])
        raise ValueError(
            f"{folder}: {int(histogram[length])} sequences of length {length} in the packs, "
            f"{manifest.histogram[length]} in the manifest; {REBUILD}"
        )
    found = (int(histogram.sum()), int(histogram @ np.arange(len(histogram))))
    if found != (manifest.sequences, manifest.tokens):
        raise ValueError(
            f"{folder}: {found[0]} sequences and {found[1]} tokens in the packs, {manifest.sequences} and "
            f"{manifest.tokens} in the manifest; {REBUILD}"
        )
    if total != manifest.digest:
        raise ValueError(
            f"{folder}: the packs do not hold exactly the sequences that were packed (digest {total:016x}, "
            f"manifest {manifest.digest:016x}): "
            f"one is lost, repeated or changed; {REBUILD}"
        )
    _check_recipe(folder, manifest, patterns)
    _check_vocabulary(folder, manifest)
    return Verified(manifest, sum(entry.bytes for entry in manifest.shards + manifest.files + (manifest.lengths,)))


@dataclass(frozen=True)
class _ShardTask:
    """A shard to be read; first: the number of its first pack."""

    folder: Path
    entry: StoredFile
    first: int
    lengths: StoredFile
    schema: PackSchema
    vocabulary_size: int


def _verify_shard(task: _ShardTask) -> Tuple[np.ndarray, int, Counter]:
    """Sequences of a shard by length, their digest, and how many of its packs have which lengths."""
    schema, first = task.schema, task.first
    records = _table(task.folder, task.entry, schema.record_dtype, first)
    _check_records(schema, records, f"{task.folder / task.entry.file}", first, task.vocabulary_size)
    table = map_table(task.folder, task.lengths, schema.lengths_dtype)
    if not np.array_equal(table[first : first + len(records)], lengths_of(schema, records)):
        raise ValueError(
            f"{task.folder / task.lengths.file}: does not hold the lengths of the packs in {task.entry.file}; {REBUILD}"
        )
    sequences = disassemble(schema, records)
    patterns: Counter = Counter()
    taken = np.sort(schema.taken(records["lengths"]), axis=1)[:, ::-1]
    for row, count in zip(*np.unique(taken, axis=0, return_counts=True)):
        patterns[tuple(int(length) for length in row if length)] += int(count)
    return np.bincount(sequences.lengths, minlength=schema.max_sequence_length + 1), digest(sequences), patterns


def _table(folder: Path, entry: StoredFile, dtype: np.dtype, first: int) -> np.ndarray:
    """A shard or the table of lengths, mapped, its checksums right. first: its first pack."""
    records = np.asarray(map_table(folder, entry, dtype))
    check_blocks(folder, entry, records, first)  # before the sha256, because it says which packs
    _check_sum(folder, entry)
    return records


def _check_sum(folder: Path, entry: StoredFile) -> None:
    path = file_in(folder, entry.file, way_out=REBUILD)
    sizes: List[int] = []
    found = sha256_of(path, way_out=REBUILD, seen=sizes.append)
    size = sum(sizes)
    if size != entry.bytes:
        raise ValueError(
            f"{path}: {size} bytes where the manifest says {entry.bytes}; the file is cut or was replaced, {REBUILD}"
        )
    if found != entry.sha256:
        raise ValueError(f"{path}: its sha256 is not the manifest's; a byte was changed, {REBUILD}")


def _check_records(schema: PackSchema, records: np.ndarray, where: str, first: int, vocabulary_size: int) -> None:
    """ValueError for the first pack that breaks a rule; `where` and `first`, its first pack, are for the message."""
    S = schema.max_sequence_length
    lengths = records["lengths"].astype(np.int64)
    taken = schema.taken(lengths)

    def refuse(wrong: Any, rule: str) -> None:
        if wrong.any():
            raise ValueError(f"{where}: pack {first + int(np.argmax(wrong))}: {rule}; {REBUILD}")

    refuse(lengths[:, 0] == 0, "holds no sequence")
    refuse(((lengths[:, 1:] > 0) & (lengths[:, :-1] == 0)).any(axis=1), "lengths: a gap between its sequences")
    refuse(taken.sum(axis=1) > S, f"lengths: more than {S} tokens")
    padding = ~schema.real_slots(lengths)
    absent = lengths == 0
    for column in schema.on(SLOT):
        refuse(((records[column.name] != 0) & padding).any(axis=1), f"{column.name}: a value in the padding")
    for column in schema.on(SEQUENCE):
        refuse(((records[column.name] != 0) & absent).any(axis=1), f"{column.name}: a value where no sequence stands")
    for column in schema.columns:
        if column.dtype == "<u4":
            refuse((records[column.name] >= 1 << 31).any(axis=1), f"{column.name}: a value that does not fit int32")
    if schema.kind != BERT:
        return
    if vocabulary_size:
        for name in ("input_ids", "masked_lm_ids"):
            refuse(
                (records[name] >= vocabulary_size).any(axis=1),
                f"{name}: an id outside the vocabulary of {vocabulary_size}",
            )
    segments = records["first_segment_lengths"].astype(np.int64)
    refuse(
        ((segments > lengths) | ((segments == 0) & ~absent)).any(axis=1),
        "first_segment_lengths: not between 1 and the sequence's length",
    )
    refuse((records["next_sentence_labels"] > 1).any(axis=1), "next_sentence_labels: neither 0 nor 1")

    P = schema.max_predictions_per_pack
    counts = records["prediction_counts"].astype(np.int64)
    masked = counts.sum(axis=1)
    refuse(((counts > 0) & absent).any(axis=1), "prediction_counts: masked tokens where no sequence stands")
    refuse(masked > P, f"prediction_counts: more than {P} masked tokens")
    unused = np.arange(P) >= masked[:, None]
    for column in schema.on(PREDICTION):
        refuse(((records[column.name] != 0) & unused).any(axis=1), f"{column.name}: a value in an unused place")
    # Each masked token lies between the start and the end of the sequence it is counted for.
    starts = np.cumsum(taken, axis=1) - taken
    rest = (P - masked)[:, None]
    places = np.concatenate([counts, rest], axis=1).reshape(-1)
    low = np.repeat(np.concatenate([starts, np.zeros_like(rest)], axis=1).reshape(-1), places).reshape(-1, P)
    high = np.repeat(np.concatenate([starts + lengths, np.ones_like(rest)], axis=1).reshape(-1), places).reshape(-1, P)
    positions = records["masked_lm_positions"].astype(np.int64)
    refuse(
        ((positions < low) | (positions >= high)).any(axis=1),
        "masked_lm_positions: outside the sequence it is counted for",
    )


def _check_recipe(folder: Path, manifest: Manifest, patterns: dict) -> None:
    """The packs are the recipe's, and its lower bound is proved again where it comes with a certificate."""
    if "recipe.json" not in [entry.file for entry in manifest.files]:
        return
    packing = Packing.load(folder / "recipe.json")
    if dict(zip(packing.strategies, packing.repeats)) != patterns:
        raise ValueError(f"{folder / 'recipe.json'}: the packs are not the ones of this recipe; {REBUILD}")
    if (packing.lower_bound, packing.algorithm) != (manifest.lower_bound, manifest.algorithm):
        raise ValueError(f"{folder / 'recipe.json'}: lower bound or algorithm differ from the manifest's; {REBUILD}")
    if packing.certificate is not None:
        prove(packing)


def _check_vocabulary(folder: Path, manifest: Manifest) -> None:
    """The vocabulary is the one that the manifest names."""
    for name in {VOCABULARY, TOKENIZER}.intersection(entry.file for entry in manifest.files):
        vocabulary = load_either(folder / name)
        if (len(vocabulary), vocabulary.sha256) != (manifest.vocabulary_size, manifest.vocabulary_sha256):
            raise ValueError(f"{folder / name}: is not the vocabulary that the manifest names; {REBUILD}")
