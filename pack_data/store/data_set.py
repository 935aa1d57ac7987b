"""Packs on disk: a folder of shards and a manifest. A kill at any moment leaves a whole data set or none.

    manifest.json             what the data set is, and the checksum of every other file and of every block of packs;
                              written last, by atomic rename
    packs-00000-1f2e3d4c.npy  structured array, one record a pack (PackSchema.record_dtype), memory-mapped for reading
    lengths-1f2e3d4c.npy      the lengths (and masked counts) of every pack's sequences, read without the shards
    recipe.json               the packing: strategies, repeats, certificate
    vocab.txt                 the vocabulary, for data sets made from text (or tokenizer.json)

The hexadecimal digits are the start of the file's sha256. So the files of a new build have other names than those of
the data set that is still being read, and renaming the manifest replaces the one by the other.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np

from pack_data.reading.fields import Fields, read_object, shown
from pack_data.reading.files import file_in, remove_stale, sync_folder, temporary_name, write_atomically
from pack_data.reading.npy import map_array
from pack_data.store.packs import PackSchema, decode, disassemble
from pack_data.store.sequences import digest

MANIFEST = "manifest.json"
FORMAT, VERSION = "packed sequences", 1
# The field of a manifest with the checksum of the others.
CHECKSUM = "manifest_sha256"
# Packs in one shard: 11 MB at 512.
_PACKS_PER_SHARD = 8192

REBUILD = "build the data set again, with --overwrite"
# Slots are counted in int64.
_MOST = 2**62
# Bytes of records under one checksum, about: 750 packs at 512.
BLOCK_BYTES = 1 << 20
_DIGITS = 8  # of a checksum, hexadecimal


@dataclass(frozen=True)
class _ChecksumBlocks:
    """The checksums of a shard: the crc32 of each `packs` records, the last of those that are left.

    A reader of few packs sees damage in them: a block is checked when its first pack is asked for, while the sha256
    needs the whole file. crc32 finds what a disk or a copy changes, in less than a microsecond a pack; against somebody
    who changes packs on purpose only the sha256 helps. crc32: 8 hexadecimal digits for each block, one behind another.
    """

    packs: int
    crc32: str

    @classmethod
    def from_json(cls, fields: Fields, records: int) -> _ChecksumBlocks:
        """ValueError where these are not checksums of a shard of `records` packs."""
        fields.only("packs", "crc32")
        packs = fields.integer("packs", least=1, most=2**62)
        return cls(packs, fields.hex_digest("crc32", -(-records // packs) * _DIGITS))

    def count(self, records: int) -> int:
        """Blocks of a shard of `records` packs."""
        return -(-records // self.packs)

    def damaged(self, records: np.ndarray, block: int) -> bool:
        """Whether the records of a block are not those that were written; `records`: of the whole shard."""
        first = block * self.packs
        return (
            _digits(crc32(records[first : first + self.packs])) != self.crc32[block * _DIGITS : (block + 1) * _DIGITS]
        )


def crc32(records: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(records).view(np.uint8).data)


def _digits(value: int) -> str:
    return f"{value:0{_DIGITS}x}"


@dataclass(frozen=True)
class StoredFile:
    """A file of the data set: name in the folder, size in bytes, sha256, records it holds (0: not a table).

    blocks: the checksums of a table's records; None for other files.
    """

    file: str
    bytes: int
    sha256: str
    packs: int = 0
    blocks: Optional[_ChecksumBlocks] = None

    def to_json(self) -> Dict[str, Any]:
        data = asdict(self)
        if self.blocks is None:
            del data["blocks"]
        return data

    @classmethod
    def from_json(cls, fields: Fields, *, table: bool = True) -> StoredFile:
        packs = fields.integer("packs", least=0, most=_MOST)
        return cls(
            fields.plain_name("file"),
            fields.integer("bytes", least=0, most=_MOST),
            fields.hex_digest("sha256", 64),
            packs,
            _ChecksumBlocks.from_json(fields.object("blocks"), packs) if table else None,
        )


@dataclass(frozen=True)
class Manifest:
    """What a data set is. `histogram[l]`: sequences of l tokens; `digest`: that of all of them (sequences.py)."""

    schema: PackSchema
    sequences: int
    packs: int
    tokens: int
    histogram: Tuple[int, ...]
    digest: int
    shards: Tuple[StoredFile, ...]
    lengths: StoredFile
    algorithm: str
    lower_bound: Optional[int] = None
    lp_bound: Optional[float] = None
    seed: int = 0
    max_predictions_per_sequence: int = 0
    vocabulary_size: int = 0
    vocabulary_sha256: str = ""
    # Other files that belong to it: recipe.json, vocab.txt.
    files: Tuple[StoredFile, ...] = ()
    # How it was made: the options that decide the bytes, and what went in.
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Of the sequences, as the schema names it."""
        return self.schema.kind

    @property
    def packing_factor(self) -> float:
        """Mean sequences per pack."""
        return self.sequences / self.packs if self.packs else 0.0

    @property
    def efficiency(self) -> float:
        """Real tokens / slots."""
        return self.tokens / (self.packs * self.schema.max_sequence_length) if self.packs else 0.0

    @property
    def rounding(self) -> int:
        """Slots of padding that follow sequences, so that each takes a multiple of schema.multiple_of."""
        lengths = np.arange(len(self.histogram))
        return int((self.schema.taken(lengths) - lengths) @ np.array(self.histogram, np.int64))

    def to_json(self) -> Dict[str, Any]:
        """Plain values, as manifest.json holds them."""
        data: Dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "packing_factor": self.packing_factor,
            "efficiency": self.efficiency,
        }
        if self.schema.multiple_of > 1:
            data["rounding"] = self.rounding
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if name == "schema":
                value = value.to_json()
            elif name == "histogram":
                value = {str(length): count for length, count in enumerate(value) if count}
            elif name == "digest":
                value = f"{value:016x}"
            elif name == "lengths":
                value = value.to_json()
            elif name in ("shards", "files"):
                value = [entry.to_json() for entry in value]
            data[name] = value
        data[CHECKSUM] = checksum(data)
        return data

    @classmethod
    def from_json(cls, value: Union[Mapping[str, Any], Fields]) -> Manifest:
        """Inverse of `to_json`. ValueError where a field breaks its rule or does not fit the other fields."""
        fields = Fields.of(value, "manifest", REBUILD)
        fields.one_of("format", (FORMAT,))
        schema = PackSchema.from_json(fields.object("schema"))
        count = dict(least=0, most=_MOST)
        manifest = cls(
            schema=schema,
            sequences=fields.integer("sequences", **count),
            packs=fields.integer("packs", **count),
            tokens=fields.integer("tokens", **count),
            histogram=_histogram(fields, schema.max_sequence_length),
            digest=int(fields.hex_digest("digest", 16), 16),
            shards=tuple(map(StoredFile.from_json, fields.list_of("shards", Fields.object))),
            lengths=StoredFile.from_json(fields.object("lengths")),
            algorithm=fields.text("algorithm", most=200, empty=False),
            lower_bound=fields.optional("lower_bound", Fields.integer, **count),
            lp_bound=fields.optional("lp_bound", Fields.number, **count),
            seed=fields.integer("seed"),
            max_predictions_per_sequence=fields.integer("max_predictions_per_sequence", **count),
            vocabulary_size=fields.integer("vocabulary_size", least=0, most=2**31),
            vocabulary_sha256=fields.text("vocabulary_sha256") and fields.hex_digest("vocabulary_sha256", 64),
            files=tuple(StoredFile.from_json(file, table=False) for file in fields.list_of("files", Fields.object)),
            made_with=_made_with(fields.object("made_with")),
        )
        with fields.refusing():
            manifest._check(fields)
        return manifest

    def _check(self, fields: Fields) -> None:
        """ValueError where two fields contradict each other."""
        S, D = self.schema.max_sequence_length, self.schema.max_sequences_per_pack
        derived = {
            "sequences": sum(self.histogram),
            "tokens": sum(length * count for length, count in enumerate(self.histogram)),
            "packs": sum(shard.packs for shard in self.shards),
            "packing_factor": self.packing_factor,
            "efficiency": self.efficiency,
            **({"rounding": self.rounding} if self.schema.multiple_of > 1 else {}),
        }
        for name, value in derived.items():
            if fields.number(name) != value:
                raise fields.error(name, f"histogram, shards and schema make it {value!r}")
        if self.lengths.packs != self.packs:
            raise fields.object("lengths").error("packs", f"the data set has {self.packs} packs")
        if not (self.packs <= self.sequences <= self.packs * D and self.tokens <= self.packs * S):
            raise fields.error("packs", f"{self.sequences} sequences of {self.tokens} tokens do not fill so many packs")
        if self.lower_bound is not None and self.lower_bound > self.packs:
            raise fields.error("lower_bound", f"the data set has only {self.packs} packs")
        names = {MANIFEST}
        for entry in (*self.shards, self.lengths, *self.files):
            if entry.file in names:
                raise fields.error("files" if self.files else "shards", f"{shown(entry.file)} stands for two files")
            names.add(entry.file)
        if fields.hex_digest(CHECKSUM, 64) != checksum(fields.tree):
            raise fields.error(CHECKSUM, "is not that of the other fields: one was changed")


def _histogram(fields: Fields, longest: int) -> Tuple[int, ...]:
    """Sequences of each length from 0 to `longest`; a manifest has only the lengths that occur."""
    histogram, given = [0] * (longest + 1), fields.object("histogram")
    for name in given.names():
        length = int(name) if name.isdecimal() and name.isascii() and len(name) < 10 else 0
        if not 1 <= length <= longest or str(length) != name:
            raise given.error(name, f"its name must be a length from 1 to {longest}")
        histogram[length] = given.integer(name, least=1, most=_MOST)
    return tuple(histogram)


def _made_with(fields: Fields) -> Mapping[str, Any]:
    """What a build says of itself: the parts that are read again have their form, the options are plain values."""
    count = dict(least=0, most=_MOST)
    if "options" in fields:
        options = fields.object("options")
        for name in options.names():
            if isinstance(options.any(name), list):
                options.texts(name)
            elif not isinstance(options.any(name), (str, int, float, type(None))):
                raise options.error(name, "must be a number, a text, true, false, null or a list of texts")
        fields.list_of("sources", Fields.texts, 2)
        fields.integer("parts", **count)
        fields.integer("documents", **count)
    fields.optional("side", Fields.text)
    fields.optional("given", Fields.values_of, Fields.text)
    for name in ("skipped", "left_out"):
        fields.optional(name, Fields.texts)
    return fields.tree


def checksum(data: Mapping[str, Any]) -> str:
    """sha256 of a manifest without this very field, whatever the order and the form of its JSON."""
    others = {name: value for name, value in data.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_table(folder: Path, stem: str, dtype: np.dtype, blocks: Iterator[np.ndarray], records: int) -> StoredFile:
    """A structured .npy of `records` records, given in blocks, under a name with its own hash: `stem-1f2e3d4c.npy`.

    Hash and checksums are computed while the bytes are written.
    """
    temporary, header = temporary_name(folder / stem), io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (records,)}
    np.lib.format.write_array_header_1_0(header, fields)
    sha256, packs, written = hashlib.sha256(header.getvalue()), max(1, BLOCK_BYTES // dtype.itemsize), 0
    sums: List[int] = []  # of each block under one checksum, the last of which may be begun
    with open(temporary, "wb") as out:
        out.write(header.getvalue())
        for block in blocks:
            while len(block):
                begun = written % packs
                part, block = block[: packs - begun], block[packs - begun :]
                data = np.ascontiguousarray(part).view(np.uint8).data
                out.write(data)
                sha256.update(data)
                if not begun:
                    sums.append(0)
                sums[-1] = zlib.crc32(data, sums[-1])
                written += len(part)
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    assert written == records
    name = f"{stem}-{sha256.hexdigest()[:8]}.npy"
    os.replace(temporary, folder / name)
    return StoredFile(name, size, sha256.hexdigest(), records, _ChecksumBlocks(packs, "".join(map(_digits, sums))))


def write_shard(folder: Path, number: int, records: np.ndarray) -> StoredFile:
    """Writes shard `number` whole or not at all; it belongs to a data set once a manifest names it."""
    return write_table(Path(folder), f"packs-{number:05d}", records.dtype, iter([records]), len(records))


def stored_file(folder: Path, name: str) -> StoredFile:
    """The entry of a file that is already in the folder."""
    data = (Path(folder) / name).read_bytes()
    return StoredFile(name, len(data), hashlib.sha256(data).hexdigest())


class StoreWriter:
    """Writes a data set of either kind from packs that come in order.

        writer = StoreWriter(folder, schema)
        writer.add(records)                   # any number of packs at a time, schema.record_dtype
        writer.finish(algorithm=..., ...)     # the manifest: from here on the folder is this data set

    Counts, histogram, digest and the table of lengths come from the packs themselves. Until `finish`, a data set that
    was in the folder stays whole and readable; then its files are removed.
    """

    def __init__(self, folder: Path, schema: PackSchema, packs_per_shard: int = _PACKS_PER_SHARD) -> None:
        self.folder, self.schema, self.packs_per_shard = Path(folder), schema, packs_per_shard
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting: List[np.ndarray] = []
        self._shards: List[StoredFile] = []
        self._lengths: List[np.ndarray] = []
        self._digest = 0
        self._histogram = np.zeros(schema.max_sequence_length + 1, dtype=np.int64)

    def add(self, records: np.ndarray) -> None:
        """Appends packs [n]; shards are written as they fill."""
        sequences = disassemble(self.schema, records)
        self._digest = (self._digest + digest(sequences)) % (1 << 64)
        self._histogram += np.bincount(sequences.lengths, minlength=len(self._histogram))
        self._lengths.append(lengths_of(self.schema, records))
        self._waiting.append(records)
        while sum(map(len, self._waiting)) >= self.packs_per_shard:
            joined = np.concatenate(self._waiting)
            self._shards.append(write_shard(self.folder, len(self._shards), joined[: self.packs_per_shard]))
            self._waiting = [joined[self.packs_per_shard :]]

    def finish(self, *, algorithm: str, **about: Any) -> PackStore:
        """Writes what waits and the manifest. about: the optional fields of Manifest."""
        rest = np.concatenate(self._waiting) if self._waiting else np.zeros(0, self.schema.record_dtype)
        if len(rest):
            self._shards.append(write_shard(self.folder, len(self._shards), rest))
        self._waiting = []
        packs = sum(shard.packs for shard in self._shards)
        manifest = Manifest(
            schema=self.schema,
            sequences=int(self._histogram.sum()),
            packs=packs,
            tokens=int(self._histogram @ np.arange(len(self._histogram))),
            histogram=tuple(self._histogram.tolist()),
            digest=self._digest,
            shards=tuple(self._shards),
            lengths=write_table(self.folder, "lengths", self.schema.lengths_dtype, iter(self._lengths), packs),
            algorithm=algorithm,
            **about,
        )
        # One rename makes the folder this data set; then files of the former one go.
        former = named_files(self.folder / MANIFEST)
        sync_folder(self.folder)
        write_manifest(self.folder, manifest)
        for name in former - named_files(self.folder / MANIFEST):
            if (self.folder / name).exists():
                (self.folder / name).unlink()
        return PackStore.open(self.folder)


def _numbers(indices: Any) -> np.ndarray:
    """int64 [n]. ValueError for a mask, and for what is no whole number."""
    found = np.asarray(indices)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"packs are asked for by their numbers; got {found.dtype}, take np.flatnonzero of a mask")
    return found.astype(np.int64)


def lengths_of(schema: PackSchema, records: np.ndarray) -> np.ndarray:
    """The part of the records that the table of lengths holds."""
    table = np.zeros(len(records), dtype=schema.lengths_dtype)
    for name in table.dtype.names:
        table[name] = records[name]
    return table


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed writer has left in the folder: shards and tables that no manifest names, unfinished files.

    For who knows that nobody else writes there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    remove_stale(folder / MANIFEST, every_name=True)
    named = named_files(folder / MANIFEST)
    if (folder / MANIFEST).exists() and not named:
        return  # a damaged manifest: its files are not known
    for item in folder.iterdir():
        if re.fullmatch(r"(packs-\d{5,}|lengths)-[0-9a-f]{8}\.npy", item.name) and item.name not in named:
            item.unlink()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomically(Path(folder) / MANIFEST, (json.dumps(manifest.to_json(), indent=1) + "\n").encode())


def named_files(path: Path) -> Set[str]:
    """The files of the data set whose manifest is `path`; none where that is not there or not a manifest."""
    try:
        manifest = read_manifest(path.parent)
    except ValueError:
        return set()
    return {entry.file for entry in manifest.shards + manifest.files + (manifest.lengths,)}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a data set, every field checked. ValueError, one line, where there is none or it is damaged."""
    path = Path(folder) / MANIFEST
    if not os.path.lexists(path):
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise ValueError(f"{folder}: a file; a packed data set is a folder with {MANIFEST}")
        raise ValueError(
            f"{folder}: not a packed data set (no {MANIFEST}); run packed-bert build --corpus TEXTS --out DIR"
        )
    fields = read_object(path, way_out=REBUILD)
    if fields.integer("version") != VERSION:
        raise fields.error("version", f"this program reads version {VERSION} of the format")
    return Manifest.from_json(fields)


def map_table(folder: Path, entry: StoredFile, dtype: np.dtype) -> np.ndarray:
    """A memory map of a table; ValueError where its size or type is not the manifest's. `verify` checks its sha256."""
    path = file_in(folder, entry.file, way_out=REBUILD)
    size = path.stat().st_size if path.is_file() else entry.bytes
    if size != entry.bytes:
        raise ValueError(
            f"{path}: {size} bytes where the manifest says {entry.bytes}; the file is cut or was replaced, {REBUILD}"
        )
    records = map_array(path, way_out=REBUILD)
    if (records.dtype, records.shape) != (dtype, (entry.packs,)):
        raise ValueError(f"{path}: holds {records.shape} records of another type than the manifest says; {REBUILD}")
    return records


class PackStore:
    """A packed data set, open for reading. Its shards stay mapped, also while a new build replaces it.

    A block of packs is checked when the first of them is read, by its checksum in the manifest. Threads may
    read together: two of them may check the same block.
    """

    def __init__(self, folder: Path, manifest: Optional[Manifest] = None, shards: Sequence[np.ndarray] = ()) -> None:
        if manifest is None:
            raise TypeError(f"a data set is opened by PackStore.open({str(folder)!r})")
        self.folder, self.manifest, self.schema = Path(folder), manifest, manifest.schema
        self._shards = list(shards)
        self._lengths: Optional[np.ndarray] = None
        sizes = np.array([len(shard) for shard in shards], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        # Of each shard, and of the table of lengths behind them: records in a block, and the number of its first block.
        tables = [(entry.packs, entry.blocks) for entry in (*manifest.shards, manifest.lengths) if entry.blocks]
        counts = np.array([blocks.count(packs) for packs, blocks in tables], dtype=np.int64)
        self._packs_per_block = np.array([blocks.packs for _, blocks in tables], dtype=np.int64)
        self._first_block = np.cumsum(counts) - counts
        # Of each block: whether it was read and found right.
        self._right = np.zeros(counts.sum(), dtype=bool)

    @classmethod
    def open(cls, folder: Path) -> PackStore:
        """ValueError, one line, where the folder holds no data set or a shard has not the size the manifest says."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        shards = [map_table(folder, entry, manifest.schema.record_dtype) for entry in manifest.shards]
        if sum(map(len, shards)) != manifest.packs:
            raise ValueError(
                f"{folder}: shards hold {sum(map(len, shards))} packs, the manifest says {manifest.packs}; build "
                "the data set again"
            )
        return cls(folder, manifest, shards)

    def __len__(self) -> int:
        return self.manifest.packs

    def __enter__(self) -> PackStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def records(self, indices: np.ndarray) -> np.ndarray:
        """The stored records of packs `indices` int64 [n], copied. ValueError where one of them was damaged."""
        indices = _numbers(indices)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise ValueError(
                f"pack {int(indices.max())} (or {int(indices.min())}) was asked for; the data set has packs 0 to "
                f"{len(self) - 1}"
            )
        shard_of = np.searchsorted(self._ends, indices, side="right")
        rows = indices - self._starts[shard_of]
        self._check(shard_of, rows)
        records = np.empty(len(indices), dtype=self.schema.record_dtype)
        for number in np.unique(shard_of):
            chosen = shard_of == number
            records[chosen] = self._shards[number][rows[chosen]]
        return records

    def _check(self, table_of: np.ndarray, rows: np.ndarray) -> None:
        """Checks the blocks of these records that have not been read before.

        rows: int64 [n], of shards `table_of` int64 [n]; the table of lengths has the number behind the last shard's.
        """
        blocks = rows // self._packs_per_block[table_of] + self._first_block[table_of]
        unknown = np.flatnonzero(~self._right[blocks])
        if not len(unknown):
            return
        for block, at in zip(*np.unique(blocks[unknown], return_index=True)):
            number, row = int(table_of[unknown[at]]), int(rows[unknown[at]])
            if number < len(self.manifest.shards):
                entry, records, first = self.manifest.shards[number], self._shards[number], int(self._starts[number])
            else:
                entry, records, first = self.manifest.lengths, self._table_of_lengths(), 0
            _check_block(self.folder, entry, records, int(block - self._first_block[number]), row, first)
            self._right[block] = True

    def batch(self, indices: np.ndarray) -> Dict[str, np.ndarray]:
        """The fields of packs `indices` int64 [n]: name -> int32 [n, S | P | D] (schema.fields; see packs.py)."""
        return decode(self.schema, self.records(indices))

    def lengths(self, indices: Optional[np.ndarray] = None) -> np.ndarray:
        """Lengths and masked counts of the sequences of packs `indices` int64 [n], without reading the packs.

        Records [n] of schema.lengths_dtype. None: of all packs, mapped. ValueError where the table was damaged.
        """
        table, number = self._table_of_lengths(), len(self.manifest.shards)
        rows = np.arange(0, len(table), self._packs_per_block[number]) if indices is None else _numbers(indices)
        self._check(np.full(len(rows), number), rows)
        return table if indices is None else table[rows]

    def _table_of_lengths(self) -> np.ndarray:
        if self._lengths is None:
            self._lengths = map_table(self.folder, self.manifest.lengths, self.schema.lengths_dtype)
        return self._lengths

    def shards(self) -> Iterator[np.ndarray]:
        """The shards in order, memory-mapped, each checked whole when it is given."""
        for number, shard in enumerate(self._shards):
            rows = np.arange(0, len(shard), self._packs_per_block[number])
            self._check(np.full(len(rows), number), rows)
            yield shard

    def close(self) -> None:
        """Closes the memory maps; the store cannot be read afterwards."""
        self._shards, self._lengths = [], None


def check_blocks(folder: Path, entry: StoredFile, records: np.ndarray, first: int) -> None:
    """ValueError for the first block of a shard that is not as it was written; `first`: the shard's first pack."""
    if entry.blocks is not None:
        for block in range(entry.blocks.count(len(records))):
            _check_block(folder, entry, records, block, block * entry.blocks.packs, first)


def _check_block(folder: Path, entry: StoredFile, records: np.ndarray, block: int, row: int, first: int) -> None:
    """ValueError where a block of a shard is not as it was written. row: of the pack that is wanted, in the shard."""
    assert entry.blocks is not None
    if entry.blocks.damaged(records, block):
        start = first + block * entry.blocks.packs
        end = min(start + entry.blocks.packs, first + len(records)) - 1
        raise ValueError(
            f"{folder / entry.file}: pack {first + row}: the checksum of its block {block} (packs {start} to {end}) is "
            f"not the manifest's; a byte was changed, {REBUILD}"
        )
