"""`python -m pack_data.verify DIR`: reads a whole data set again and proves that it is what its manifest says.

Checksums of files, and of the blocks that training checks as it reads; no pack overfull, no gap between its sequences,
nothing in its padding; every masked token inside its own sequence; every id in the vocabulary; and, by the digest over
all sequences that was taken before they were packed, every sequence exactly once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np

from pack_data.blocks import Blocks
from pack_data.building.sides import built_with
from pack_data.building.work_folder import without_builds
from pack_data.command import ArgumentParser, counted, progress_bar, run_main
from pack_data.files import file_in, open_regular, remove_stale
from pack_data.packing import Packing
from pack_data.packs import BERT, PREDICTION, SEQUENCE, SLOT, PackSchema, disassemble
from pack_data.proof import prove
from pack_data.sequences import digest
from pack_data.store import (
    MANIFEST,
    REBUILD,
    Manifest,
    PackStore,
    StoredFile,
    check_blocks,
    lengths_of,
    map_table,
    read_manifest,
    write_manifest,
)
from pack_data.text.tokenizer_file import TOKENIZER, load_either
from pack_data.text.wordpiece import VOCABULARY


@dataclass(frozen=True)
class Verified:
    """What was read and found right; added: whether checksums of blocks were written into the manifest."""

    manifest: Manifest
    bytes: int
    added: bool = False


def verify(folder: Union[str, Path], progress: Optional[bool] = None) -> Verified:
    """Reads every byte of the data set. ValueError with the first fault: which file, which pack, which rule."""
    return _verified(Path(folder), progress)


def add_checksums(folder: Union[str, Path], progress: Optional[bool] = None) -> Verified:
    """As `verify`, then writes checksums of blocks into a manifest that has none or wrong ones.

    Only the manifest is replaced, in one rename: at every moment the folder is the same data set. ValueError as
    `verify`, and while a build writes it.
    """
    folder = Path(folder) if Path(folder).name else Path(folder).resolve()
    before = read_manifest(folder)
    with without_builds(built_with(folder, before.made_with)):
        remove_stale(folder / MANIFEST)  # of one that was killed
        verified = _verified(folder, progress, add=True)
        if read_manifest(folder) != before:  # a program that takes no lock
            raise ValueError(f"{folder}: was replaced by another data set meanwhile; try again")
        if verified.manifest != before:
            write_manifest(folder, verified.manifest)
    return replace(verified, added=verified.manifest != before)


def _verified(folder: Path, progress: Optional[bool], add: bool = False) -> Verified:
    """add: the manifest returned has the blocks' checksums as the packs are; those it had are not looked at."""
    manifest = read_manifest(folder)
    schema = manifest.schema
    for entry in manifest.files:
        _check_sum(folder, entry)
    table, lengths = _table(folder, manifest.lengths, schema.lengths_dtype, 0, add)
    shards: List[StoredFile] = []
    histogram = np.zeros(schema.max_sequence_length + 1, dtype=np.int64)
    total, first = 0, 0
    patterns: dict = {}
    PackStore.open(folder).close()
    with progress_bar(manifest.packs, "verifying", shown=progress, unit=" packs") as bar:
        for entry in manifest.shards:
            records, stored = _table(folder, entry, schema.record_dtype, first, add)
            shards.append(stored)
            check_records(schema, records, f"{folder / entry.file}", first, manifest.vocabulary_size)
            if not np.array_equal(table[first : first + len(records)], lengths_of(schema, records)):
                raise ValueError(
                    f"{folder / manifest.lengths.file}: does not hold the lengths of the packs in {entry.file}; "
                    f"{REBUILD}"
                )
            sequences = disassemble(schema, records)
            histogram += np.bincount(sequences.lengths, minlength=len(histogram))
            total = (total + digest(sequences)) % (1 << 64)
            for row, count in zip(*np.unique(np.sort(records["lengths"], axis=1)[:, ::-1], axis=0, return_counts=True)):
                strategy = tuple(int(length) for length in row if length)
                patterns[strategy] = patterns.get(strategy, 0) + int(count)
            first += len(records)
            bar.update(len(records))
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
    manifest = replace(manifest, shards=tuple(shards), lengths=lengths)
    return Verified(manifest, sum(entry.bytes for entry in manifest.shards + manifest.files + (manifest.lengths,)))


def _table(folder: Path, entry: StoredFile, dtype: np.dtype, first: int, add: bool) -> Tuple[np.ndarray, StoredFile]:
    """A shard or the table of lengths, mapped, its checksums right; and its entry. first: its first pack."""
    records = np.asarray(map_table(folder, entry, dtype))
    if not add:  # before the sha256, because it says which packs
        check_blocks(folder, entry, records, first)
    _check_sum(folder, entry)
    return records, replace(entry, blocks=Blocks.of(records)) if add else entry


def _check_sum(folder: Path, entry: StoredFile) -> None:
    path = file_in(folder, entry.file, way_out=REBUILD)
    content = hashlib.sha256()
    size = 0
    with open_regular(path, way_out=REBUILD) as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            content.update(block)
            size += len(block)
    if size != entry.bytes:
        raise ValueError(
            f"{path}: {size} bytes where the manifest says {entry.bytes}; the file is cut or was replaced, {REBUILD}"
        )
    if content.hexdigest() != entry.sha256:
        raise ValueError(f"{path}: its sha256 is not the manifest's; a byte was changed, {REBUILD}")


def check_records(
    schema: PackSchema, records: np.ndarray, where: str, first: int = 0, vocabulary_size: int = 0
) -> None:
    """ValueError for the first pack that breaks a rule; `where` and `first`, its first pack, are for the message."""
    S = schema.max_sequence_length
    lengths = records["lengths"].astype(np.int64)
    used = lengths.sum(axis=1)

    def refuse(wrong: Any, rule: str) -> None:
        if wrong.any():
            raise ValueError(f"{where}: pack {first + int(np.argmax(wrong))}: {rule}; {REBUILD}")

    refuse(lengths[:, 0] == 0, "holds no sequence")
    refuse(((lengths[:, 1:] > 0) & (lengths[:, :-1] == 0)).any(axis=1), "lengths: a gap between its sequences")
    refuse(used > S, f"lengths: more than {S} tokens")
    padding = np.arange(S) >= used[:, None]
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
    ends = np.cumsum(lengths, axis=1)
    rest = (P - masked)[:, None]
    places = np.concatenate([counts, rest], axis=1).reshape(-1)
    low = np.repeat(np.concatenate([ends - lengths, np.zeros_like(rest)], axis=1).reshape(-1), places).reshape(-1, P)
    high = np.repeat(np.concatenate([ends, np.ones_like(rest)], axis=1).reshape(-1), places).reshape(-1, P)
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


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m pack_data.verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", metavar="DIR", help="a packed data set")
    parser.add_argument(
        "--progress", action="store_true", default=None, help="show a bar even where stderr is no terminal"
    )
    parser.add_argument(
        "--add-checksums",
        action="store_true",
        help="then write checksums of blocks of packs, by which training sees damage, into a manifest without them",
    )
    args = parser.parse_args(argv)
    verified = (add_checksums if args.add_checksums else verify)(args.folder, args.progress)
    manifest = verified.manifest
    bound = (
        ""
        if manifest.lower_bound is None
        else f", {manifest.packs - manifest.lower_bound:,} above the lower bound of {manifest.lower_bound:,}"
    )
    print(
        f"{args.folder}: whole. {manifest.sequences:,} sequences, each exactly once, in "
        f"{manifest.packs:,} packs{bound}; "
        f"{manifest.efficiency:.3%} of the slots used; {verified.bytes / 1e6:,.1f} MB in "
        f"{counted(len(manifest.shards), 'shard')} read"
    )
    if verified.added:
        blocks = sum(entry.blocks.count(entry.packs) for entry in manifest.shards if entry.blocks)
        print(
            f"{args.folder}: {counted(blocks, 'block')} of packs got checksums; no other file than {MANIFEST} changed"
        )
    if any(entry.blocks is None for entry in (*manifest.shards, manifest.lengths)):
        print("Training cannot see damage in it: it has no checksums of blocks of packs; --add-checksums adds them")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
