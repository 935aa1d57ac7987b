"""`packed-bert verify DIR`: read a whole data set again and prove that it is what its manifest says.

It checks the checksums of files, and of the blocks that training checks as it reads; that no pack is overfull, with no
gap between its sequences and no value in its padding; that masked tokens are inside their own sequences and ids in the
vocabulary; and, by the digest of all sequences that was taken before they were packed, that every sequence is there
exactly once.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Counter, NamedTuple, Optional, Tuple, Union

import numpy as np

from pack_data.building.runner import open_runner
from pack_data.cli.command import available_cores
from pack_data.cli.terminal import progress_bar
from pack_data.packing.packing import Packing, prove
from pack_data.reading.files import sha256_of
from pack_data.store.data_set import (
    REBUILD,
    CheckedTable,
    Manifest,
    StoredFile,
    lengths_of,
    map_table,
    read_manifest,
)
from pack_data.store.packs import BERT, PREDICTION, PackSchema, assemble, disassemble
from pack_data.store.sequences import Sequences, digest
from pack_data.text.vocabulary import TOKENIZER, VOCABULARY, load_either


@dataclass(frozen=True)
class Verified:
    """A data set that was read and found right: its manifest and its bytes."""

    manifest: Manifest
    bytes: int


def verify(folder: Union[str, Path], workers: Optional[int] = 1) -> Verified:
    """Read every byte of the data set and check it.

    Args:
        folder: The directory of the data set.
        workers: Processes, None for one per core; with more than one, a script calls this function under
            `if __name__ == "__main__":`.

    Returns:
        The manifest and the number of bytes read.

    Raises:
        ValueError: If there is a fault; the message names the file, the pack and the rule.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    schema = manifest.schema
    for entry in manifest.files:
        _check_sha256(folder, entry)
    _checked_table(folder, manifest.lengths, schema.lengths_dtype, 0)

    firsts = accumulate([0, *(entry.packs for entry in manifest.shards)])
    tasks = [
        _ShardTask(folder, entry, first, manifest.lengths, schema, manifest.vocabulary_size)
        for entry, first in zip(manifest.shards, firsts)
    ]
    histogram = np.zeros(schema.max_sequence_length + 1, dtype=np.int64)
    total_digest = 0
    patterns: Counter[Tuple[int, ...]] = Counter()
    workers = min(available_cores() if workers is None else workers, max(1, len(tasks)))
    with closing(open_runner(workers)) as runner, progress_bar(
        manifest.packs, "verifying", unit=" packs"
    ) as bar:
        for shard in runner.map(_verify_shard, tasks):
            histogram += shard.histogram
            total_digest = (total_digest + shard.digest) % (1 << 64)
            patterns.update(shard.patterns)
            bar.update(sum(shard.patterns.values()))

    differs = np.flatnonzero(histogram != manifest.histogram)
    if len(differs):
        length = int(differs[0])
        raise ValueError(
            f"{folder}: the packs hold {int(histogram[length])} sequences of length {length}, the manifest says "
            f"{manifest.histogram[length]}; {REBUILD}"
        )
    if total_digest != manifest.digest:
        raise ValueError(
            f"{folder}: the packs do not hold exactly the sequences that were packed (digest {total_digest:016x}, "
            f"manifest {manifest.digest:016x}): one is lost, repeated or changed; {REBUILD}"
        )
    _check_recipe(folder, manifest, patterns)
    _check_vocabulary(folder, manifest)
    return Verified(
        manifest,
        sum(entry.bytes for entry in (*manifest.shards, *manifest.files, manifest.lengths)),
    )


class _ShardTask(NamedTuple):
    """A shard to be read; first: the number of its first pack."""

    folder: Path
    entry: StoredFile
    first: int
    lengths: StoredFile
    schema: PackSchema
    vocabulary_size: int


class _VerifiedShard(NamedTuple):
    """A shard that is right: its sequences by length, their digest, and its packs by their lengths."""

    histogram: np.ndarray
    digest: int
    patterns: Counter[Tuple[int, ...]]


def _verify_shard(task: _ShardTask) -> _VerifiedShard:
    schema = task.schema
    records = _checked_table(task.folder, task.entry, schema.record_dtype, task.first)
    where = str(task.folder / task.entry.file)
    sequences = _checked_sequences(schema, records, where, task.first, task.vocabulary_size)
    table = map_table(task.folder, task.lengths, schema.lengths_dtype)
    if not np.array_equal(
        table[task.first : task.first + len(records)], lengths_of(schema, records)
    ):
        raise ValueError(
            f"{task.folder / task.lengths.file}: does not hold the lengths of the packs in {task.entry.file}; {REBUILD}"
        )
    patterns: Counter[Tuple[int, ...]] = Counter()
    taken = np.sort(schema.taken(records["lengths"]), axis=1)[:, ::-1]
    for row, count in zip(*np.unique(taken, axis=0, return_counts=True)):
        patterns[tuple(int(length) for length in row if length)] += int(count)
    histogram = np.bincount(sequences.lengths, minlength=schema.max_sequence_length + 1)
    return _VerifiedShard(histogram, digest(sequences), patterns)


def _checked_table(folder: Path, entry: StoredFile, dtype: np.dtype, first: int) -> np.ndarray:
    """Map a shard or the table of lengths and check its checksums. first: its first pack."""
    # Before the sha256, because it names the packs.
    records = np.asarray(CheckedTable(folder, entry, dtype, first).checked())
    _check_sha256(folder, entry)
    return records


def _check_sha256(folder: Path, entry: StoredFile) -> None:
    path = entry.path_in(folder)
    if sha256_of(path, way_out=REBUILD) != entry.sha256:
        raise ValueError(f"{path}: its sha256 is not the manifest's; a byte was changed, {REBUILD}")


def _checked_sequences(
    schema: PackSchema, records: np.ndarray, where: str, first: int, vocabulary_size: int
) -> Sequences:
    """Return the sequences of the packs. ValueError for the first pack that breaks a rule.

    where, first: the file and the number of its first pack, for the message.
    """

    def refuse(is_wrong: np.ndarray, rule: str) -> None:
        """Refuse the first pack with a wrong value; is_wrong: bool [packs] or [packs, values]."""
        wrong_packs = np.flatnonzero(is_wrong.reshape(len(records), -1).any(axis=1))
        if len(wrong_packs):
            raise ValueError(f"{where}: pack {first + int(wrong_packs[0])}: {rule}; {REBUILD}")

    S = schema.max_sequence_length
    P = schema.max_predictions_per_pack
    lengths = records["lengths"].astype(np.int64)
    is_absent = lengths == 0
    refuse(is_absent[:, 0], "holds no sequence")
    refuse(is_absent[:, :-1] & ~is_absent[:, 1:], "lengths: a gap between its sequences")
    refuse(schema.taken(lengths).sum(axis=1) > S, f"lengths: more than {S} tokens")
    if schema.on(PREDICTION):
        counts = records["prediction_counts"].astype(np.int64)
        refuse(
            (counts > 0) & is_absent,
            "prediction_counts: masked tokens of a sequence that is not there",
        )
        refuse(counts.sum(axis=1) > P, f"prediction_counts: more than {P} masked tokens")
    for column in schema.columns:
        if column.dtype == "<u4":
            refuse(
                records[column.name] >= 1 << 31, f"{column.name}: a value that does not fit int32"
            )

    # Values outside the sequences (in the padding, for instance) are lost when the packs are taken apart.
    sequences = disassemble(schema, records)
    pack, slot = np.nonzero(~is_absent)
    reassembled = assemble(schema, sequences, pack, slot, len(records))
    for column in schema.columns:
        differs = records[column.name] != reassembled[column.name]
        refuse(differs, f"{column.name}: a value outside the sequences, where it must be 0")
    if schema.kind == BERT:
        for name in ("input_ids", "masked_lm_ids"):
            if vocabulary_size:
                is_outside = records[name] >= vocabulary_size
                refuse(is_outside, f"{name}: an id outside the vocabulary of {vocabulary_size}")
        first_segments = records["first_segment_lengths"]
        is_wrong = (first_segments > lengths) | ((first_segments == 0) & ~is_absent)
        refuse(is_wrong, "first_segment_lengths: not between 1 and the sequence's length")
        refuse(records["next_sentence_labels"] > 1, "next_sentence_labels: neither 0 nor 1")
        # Positions within the sequence; one before its start has wrapped around to a large number.
        is_outside = sequences.predictions["masked_lm_positions"] >= np.repeat(
            sequences.lengths, counts[~is_absent]
        )
        wrong_packs = np.repeat(pack, counts[~is_absent])[is_outside]
        rule = "masked_lm_positions: outside the sequence that it is counted for"
        refuse(np.isin(np.arange(len(records)), wrong_packs), rule)
    return sequences


def _check_recipe(folder: Path, manifest: Manifest, patterns: Counter[Tuple[int, ...]]) -> None:
    """Check that the packs are the recipe's; prove its lower bound again if it has a certificate."""
    if "recipe.json" not in [entry.file for entry in manifest.files]:
        return
    recipe = folder / "recipe.json"
    packing = Packing.load(recipe)
    if dict(zip(packing.strategies, packing.repeats)) != patterns:
        raise ValueError(f"{recipe}: the packs are not the ones of this recipe; {REBUILD}")
    if (packing.lower_bound, packing.algorithm) != (manifest.lower_bound, manifest.algorithm):
        raise ValueError(
            f"{recipe}: lower bound or algorithm differ from the manifest's; {REBUILD}"
        )
    if packing.certificate is not None:
        prove(packing)


def _check_vocabulary(folder: Path, manifest: Manifest) -> None:
    """Check that the vocabulary is the one that the manifest names."""
    for name in {VOCABULARY, TOKENIZER}.intersection(entry.file for entry in manifest.files):
        vocabulary = load_either(folder / name)
        if (len(vocabulary), vocabulary.sha256) != (
            manifest.vocabulary_size,
            manifest.vocabulary_sha256,
        ):
            raise ValueError(
                f"{folder / name}: is not the vocabulary that the manifest names; {REBUILD}"
            )
