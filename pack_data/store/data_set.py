"""A packed data set on disk: a directory of shards and a manifest; after a kill it is whole or not there at all.

    manifest.json             the description of the data set, with the checksum of every other file and of every block
                              of packs; written last, by atomic rename
    packs-00000-1f2e3d4c.npy  structured array, one record per pack (PackSchema.record_dtype), memory-mapped for reading
    lengths-1f2e3d4c.npy      the lengths (and masked counts) of every pack's sequences, read without the shards
    recipe.json               the packing: strategies, repeats, certificate
    vocab.txt                 the vocabulary, for data sets made from text (or tokenizer.json)

The hexadecimal digits are the start of the file's sha256. The files of a new build therefore differ in name from those
of the data set that is still being read, and renaming the manifest replaces one data set by the other.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
import re
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import numpy as np

from pack_data.reading.durable import (
    finish,
    naming,
    new_file,
    sync_folder,
    temporary_name,
    write_atomically,
)
from pack_data.reading.fields import Fields, read_object, shown
from pack_data.reading.files import file_in
from pack_data.reading.npy import map_array
from pack_data.store.packs import PackSchema, decode, disassemble
from pack_data.store.quantities import Filling
from pack_data.store.sequences import digest

MANIFEST = "manifest.json"
FORMAT = "packed sequences"
VERSION = 1
# The field of a manifest that holds the checksum of the other fields.
CHECKSUM = "manifest_sha256"
REBUILD = "build the data set again, with --overwrite"
# Packs in one shard of StoreWriter: 11 MB at 512 slots.
_PACKS_PER_SHARD = 8192
# The largest count in a manifest: sums of two counts still fit int64.
_MOST_COUNT = 2**62
# Bytes of records under one checksum, approximately: 750 packs at 512 slots.
BLOCK_BYTES = 1 << 20
# Hexadecimal digits of a crc32.
_CRC32_DIGITS = 8


@dataclass(frozen=True)
class _BlockChecksums:
    """The checksums of a shard: the crc32 of each `packs` records (the last block may be shorter).

    They show damage to a reader of few packs: a block is checked when its first pack is read, while the sha256 needs
    the whole file. crc32 detects what a disk or a copy changes, in less than a microsecond per pack; against deliberate
    changes only the sha256 helps. crc32: 8 hexadecimal digits per block, concatenated.
    """

    packs: int
    crc32: str

    @classmethod
    def from_json(cls, fields: Fields, records: int) -> _BlockChecksums:
        """Read the checksums of a shard of `records` packs. ValueError if their number does not fit."""
        fields.only("packs", "crc32")
        packs = fields.integer("packs", least=1, most=_MOST_COUNT)
        blocks = -(-records // packs)
        return cls(packs, fields.hex_digest("crc32", blocks * _CRC32_DIGITS))

    def is_damaged(self, records: np.ndarray, block: int) -> bool:
        """Return True if block number `block` of the shard's records differs from what was written."""
        first = block * self.packs
        data = np.ascontiguousarray(records[first : first + self.packs]).view(np.uint8).data
        stored = self.crc32[block * _CRC32_DIGITS : (block + 1) * _CRC32_DIGITS]
        return _hexadecimal(zlib.crc32(data)) != stored


def _hexadecimal(crc32: int) -> str:
    return f"{crc32:0{_CRC32_DIGITS}x}"


@dataclass(frozen=True)
class StoredFile:
    """A file of the data set: name in the directory, size in bytes, sha256, records it holds (0: not a table).

    blocks: the checksums of a table's records; None for other files.
    """

    file: str
    bytes: int
    sha256: str
    packs: int = 0
    blocks: Optional[_BlockChecksums] = None

    def to_json(self) -> Dict[str, Any]:
        """Return the entry in a manifest."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, fields: Fields, *, table: bool = True) -> StoredFile:
        """Read an entry of a manifest. ValueError if a field breaks its rule."""
        packs = fields.integer("packs", least=0, most=_MOST_COUNT)
        return cls(
            fields.plain_name("file"),
            fields.integer("bytes", least=0, most=_MOST_COUNT),
            fields.hex_digest("sha256", 64),
            packs,
            _BlockChecksums.from_json(fields.object("blocks"), packs) if table else None,
        )

    def path_in(self, folder: Path) -> Path:
        """Return the path of the file. ValueError if it has not the size of this entry."""
        path = file_in(folder, self.file, way_out=REBUILD)
        size = path.stat().st_size if path.is_file() else self.bytes
        if size != self.bytes:
            raise ValueError(
                f"{path}: {size} bytes, but {self.bytes} in the manifest; the file was cut or replaced, {REBUILD}"
            )
        return path


@dataclass(frozen=True)
class Manifest(Filling):
    """The description of a data set.

    histogram[l] is the number of sequences of l tokens; digest is that of all sequences (sequences.py).
    """

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
    # Other files of the data set: recipe.json, vocab.txt.
    files: Tuple[StoredFile, ...] = ()
    # The options that decide the bytes, and the sources.
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_sequence_length(self) -> int:
        """Slots of a pack."""
        return self.schema.max_sequence_length

    @property
    def kind(self) -> str:
        """The kind of packs, BERT or TOKENS (packs.py)."""
        return self.schema.kind

    @property
    def slots(self) -> int:
        """The token positions in all packs."""
        return self.packs * self.schema.max_sequence_length

    @property
    def rounding(self) -> int:
        """The slots of padding that round the sequences up to multiples of schema.multiple_of."""
        lengths = np.arange(len(self.histogram))
        added = self.schema.taken(lengths) - lengths
        return int(added @ np.array(self.histogram, np.int64))

    def to_json(self) -> Dict[str, Any]:
        """Return the content of manifest.json."""
        data: Dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "packing_factor": self.packing_factor,
            "efficiency": self.efficiency,
        }
        if self.schema.multiple_of > 1:
            data["rounding"] = self.rounding
        data.update((item.name, getattr(self, item.name)) for item in fields(self))
        data["schema"] = self.schema.to_json()
        data["histogram"] = {
            str(length): count for length, count in enumerate(self.histogram) if count
        }
        data["digest"] = f"{self.digest:016x}"
        data["shards"] = [shard.to_json() for shard in self.shards]
        data["lengths"] = self.lengths.to_json()
        data["files"] = [file.to_json() for file in self.files]
        data[CHECKSUM] = _checksum(data)
        return data

    @classmethod
    def from_json(cls, value: Union[Mapping[str, Any], Fields]) -> Manifest:
        """Read a manifest.

        Args:
            value: An object that `to_json` returned.

        Raises:
            ValueError: If a field is missing, breaks its rule or contradicts another field.
        """
        fields = Fields.of(value, "manifest", REBUILD)
        fields.one_of("format", (FORMAT,))
        schema = PackSchema.from_json(fields.object("schema"))
        count = dict(least=0, most=_MOST_COUNT)
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
            vocabulary_sha256=fields.text("vocabulary_sha256")
            and fields.hex_digest("vocabulary_sha256", 64),
            files=tuple(
                StoredFile.from_json(file, table=False)
                for file in fields.list_of("files", Fields.object)
            ),
            made_with=_made_with(fields.object("made_with")),
        )
        with fields.refusing():
            manifest._check(fields)
        return manifest

    def _derived(self) -> Dict[str, float]:
        """Return the stored values that follow from histogram, shards and schema."""
        derived: Dict[str, float] = {
            "sequences": sum(self.histogram),
            "tokens": sum(length * count for length, count in enumerate(self.histogram)),
            "packs": sum(shard.packs for shard in self.shards),
        }
        if self.packs:  # version 1.0 stored 0 for an empty data set
            derived["packing_factor"] = self.packing_factor
            derived["efficiency"] = self.efficiency
        if self.schema.multiple_of > 1:
            derived["rounding"] = self.rounding
        return derived

    def _check(self, fields: Fields) -> None:
        """Raise ValueError if two fields contradict each other."""
        for name, value in self._derived().items():
            if fields.number(name) != value:
                raise fields.error(name, f"histogram, shards and schema give {value!r}")
        if self.lengths.packs != self.packs:
            raise fields.object("lengths").error("packs", f"the data set has {self.packs} packs")
        places = self.packs * self.schema.max_sequences_per_pack
        if not (self.packs <= self.sequences <= places and self.tokens <= self.slots):
            raise fields.error(
                "packs",
                f"{self.sequences} sequences of {self.tokens} tokens do not fill {self.packs} packs",
            )
        if self.lower_bound is not None and self.lower_bound > self.packs:
            raise fields.error("lower_bound", f"the data set has only {self.packs} packs")
        names = {MANIFEST}
        for entry in (*self.shards, self.lengths, *self.files):
            if entry.file in names:
                raise fields.error(
                    "files" if self.files else "shards", f"{shown(entry.file)} names two files"
                )
            names.add(entry.file)
        if fields.hex_digest(CHECKSUM, 64) != _checksum(fields.tree):
            raise fields.error(CHECKSUM, "does not match the other fields: one was changed")


def _histogram(fields: Fields, longest: int) -> Tuple[int, ...]:
    """Read the number of sequences of each length from 0 to `longest`; a manifest has only the lengths that occur."""
    histogram = [0] * (longest + 1)
    counts = fields.object("histogram")
    for name in counts.names():
        length = int(name) if re.fullmatch("[1-9][0-9]{0,8}", name) else 0
        if not 1 <= length <= longest:
            raise counts.error(name, f"its name must be a length from 1 to {longest}")
        histogram[length] = counts.integer(name, least=1, most=_MOST_COUNT)
    return tuple(histogram)


def _made_with(fields: Fields) -> Mapping[str, Any]:
    """Check the record of a build: parts that are read again have their form, options are plain values."""
    count = dict(least=0, most=_MOST_COUNT)
    if "options" in fields:
        options = fields.object("options")
        for name in options.names():
            value = options.any(name)
            if isinstance(value, list):
                options.texts(name)
            elif not isinstance(value, (str, int, float, type(None))):
                raise options.error(
                    name, "must be a number, a text, true, false, null or a list of texts"
                )
        fields.list_of("sources", Fields.texts, 2)
        fields.integer("parts", **count)
        fields.integer("documents", **count)
    fields.optional("side", Fields.text)
    fields.optional("given", Fields.values_of, Fields.text)
    fields.optional("skipped", Fields.texts)
    fields.optional("left_out", Fields.texts)
    fields.optional("account", Fields.values_of, Fields.integer, **count)
    return fields.tree


def _checksum(data: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without its field CHECKSUM, independent of the order and form of its JSON."""
    others = {name: value for name, value in data.items() if name != CHECKSUM}
    return hashlib.sha256(
        json.dumps(others, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _write_table(
    folder: Path, stem: str, dtype: np.dtype, tables: Iterable[np.ndarray], records: int
) -> StoredFile:
    """Write tables of together `records` records as one structured .npy named by its hash: `stem-1f2e3d4c.npy`."""
    header = io.BytesIO()
    shape = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (records,),
    }
    np.lib.format.write_array_header_1_0(header, shape)
    sha256 = hashlib.sha256(header.getvalue())
    packs_per_block = max(1, BLOCK_BYTES // dtype.itemsize)
    checksums: List[int] = []
    written = 0
    temporary = temporary_name(folder / stem)
    new_file(temporary)
    with naming(temporary), open(temporary, "wb") as out:
        out.write(header.getvalue())
        for table in filter(len, tables):
            ends_of_blocks = np.arange(
                packs_per_block - written % packs_per_block, len(table), packs_per_block
            )
            for part in np.split(table, ends_of_blocks):
                data = np.ascontiguousarray(part).view(np.uint8).data
                out.write(data)
                sha256.update(data)
                if written % packs_per_block == 0:
                    checksums.append(0)
                checksums[-1] = zlib.crc32(data, checksums[-1])
                written += len(part)
        size = out.tell()
    assert written == records
    name = f"{stem}-{sha256.hexdigest()[:8]}.npy"
    finish(temporary, folder / name)
    blocks = _BlockChecksums(packs_per_block, "".join(map(_hexadecimal, checksums)))
    return StoredFile(name, size, sha256.hexdigest(), records, blocks)


def write_shard(folder: Path, number: int, records: np.ndarray) -> StoredFile:
    """Write shard `number` whole or not at all; it belongs to a data set once a manifest names it."""
    return _write_table(Path(folder), f"packs-{number:05d}", records.dtype, [records], len(records))


def finish_data_set(
    folder: Path,
    schema: PackSchema,
    shards: Sequence[StoredFile],
    tables: Iterable[np.ndarray],
    *,
    files: Iterable[str] = (),
    **about: Any,
) -> Manifest:
    """Write the table of lengths and, last, the manifest of a data set whose shards and other files are in `folder`.

    tables: the lengths of the packs, in order, as records of schema.lengths_dtype. files: names of other files that
    belong to the data set. about: the fields of Manifest that do not follow from these.
    """
    histogram = np.zeros(schema.max_sequence_length + 1, dtype=np.int64)

    def counted() -> Iterator[np.ndarray]:
        for table in tables:
            histogram[:] += np.bincount(table["lengths"].reshape(-1), minlength=len(histogram))
            yield table

    packs = sum(shard.packs for shard in shards)
    lengths = _write_table(folder, "lengths", schema.lengths_dtype, counted(), packs)
    histogram[0] = 0  # counted places without a sequence
    manifest = Manifest(
        schema=schema,
        sequences=int(histogram.sum()),
        packs=packs,
        tokens=int(histogram @ np.arange(len(histogram))),
        histogram=tuple(histogram.tolist()),
        shards=tuple(shards),
        lengths=lengths,
        files=tuple(_stored_file(folder, name) for name in files),
        **about,
    )
    sync_folder(folder)
    write_atomically(folder / MANIFEST, (json.dumps(manifest.to_json(), indent=1) + "\n").encode())
    return manifest


def _stored_file(folder: Path, name: str) -> StoredFile:
    content = (folder / name).read_bytes()
    return StoredFile(name, len(content), hashlib.sha256(content).hexdigest())


class StoreWriter:
    """Writes a data set of either kind from packs that arrive in order.

        writer = StoreWriter(folder, schema)
        writer.add(records)                   # any number of packs at a time, schema.record_dtype
        writer.finish(algorithm=..., ...)     # the manifest: from here on the directory is this data set

    Counts, histogram, digest and the table of lengths come from the packs. Until `finish`, a data set that was in the
    directory stays whole and readable; then its files are removed.
    """

    def __init__(
        self, folder: Path, schema: PackSchema, packs_per_shard: int = _PACKS_PER_SHARD
    ) -> None:
        self.folder = Path(folder)
        self.schema = schema
        self.packs_per_shard = packs_per_shard
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting = np.zeros(0, schema.record_dtype)
        self._shards: List[StoredFile] = []
        self._lengths: List[np.ndarray] = []
        self._digest = 0

    def add(self, records: np.ndarray) -> None:
        """Append packs [n]; shards are written as they fill."""
        self._digest = (self._digest + digest(disassemble(self.schema, records))) % (1 << 64)
        self._lengths.append(lengths_of(self.schema, records))
        self._waiting = np.concatenate([self._waiting, records])
        while len(self._waiting) >= self.packs_per_shard:
            self._write_shard()

    def _write_shard(self) -> None:
        records = self._waiting[: self.packs_per_shard]
        self._shards.append(write_shard(self.folder, len(self._shards), records))
        self._waiting = self._waiting[self.packs_per_shard :]

    def finish(self, *, algorithm: str, **about: Any) -> PackStore:
        """Write the remaining packs and the manifest, and open the data set. about: the optional fields of Manifest."""
        if len(self._waiting):
            self._write_shard()
        # One rename makes the directory this data set; then the files of the previous one go.
        previous_files = named_files(self.folder / MANIFEST)
        finish_data_set(
            self.folder,
            self.schema,
            self._shards,
            self._lengths,
            digest=self._digest,
            algorithm=algorithm,
            **about,
        )
        for name in previous_files - named_files(self.folder / MANIFEST):
            if (self.folder / name).exists():
                (self.folder / name).unlink()
        return PackStore.open(self.folder)


def _pack_numbers(indices: Any) -> np.ndarray:
    """Return pack numbers as int64 [n]. ValueError for a mask and for numbers that are not whole."""
    numbers = np.asarray(indices)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ValueError(
            f"pack numbers must be whole numbers, got {numbers.dtype}; for a mask use np.flatnonzero"
        )
    return numbers.astype(np.int64)


def lengths_of(schema: PackSchema, records: np.ndarray) -> np.ndarray:
    """Return the fields of the records that the table of lengths holds."""
    table = np.zeros(len(records), dtype=schema.lengths_dtype)
    for name in table.dtype.names:
        table[name] = records[name]
    return table


def named_files(path: Path) -> Set[str]:
    """Return the names of the files of the data set whose manifest is `path`; none if there is no readable manifest."""
    try:
        manifest = read_manifest(path.parent)
    except ValueError:
        return set()
    return {entry.file for entry in (*manifest.shards, manifest.lengths, *manifest.files)}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a data set and check every field. ValueError if there is none or it is damaged."""
    path = Path(folder) / MANIFEST
    if not os.path.lexists(path):
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise ValueError(
                f"{folder}: is a file; a packed data set is a directory with {MANIFEST}"
            )
        raise ValueError(
            f"{folder}: not a packed data set (no {MANIFEST}); run packed-bert build --corpus TEXTS --out DIR"
        )
    fields = read_object(path, way_out=REBUILD)
    if fields.integer("version") != VERSION:
        raise fields.error("version", f"this program reads version {VERSION} of the format")
    return Manifest.from_json(fields)


def map_table(folder: Path, entry: StoredFile, dtype: np.dtype) -> np.ndarray:
    """Map a table into memory. ValueError if its size or type is not the manifest's; `verify` checks its sha256."""
    path = entry.path_in(folder)
    records = map_array(path, way_out=REBUILD)
    if (records.dtype, records.shape) != (dtype, (entry.packs,)):
        raise ValueError(
            f"{path}: type or number of records ({records.shape}) differ from the manifest; {REBUILD}"
        )
    return records


class CheckedTable:
    """A shard, or the table of lengths, mapped into memory; each block of packs is checked when it is first read.

    Args:
        folder: directory of the data set.
        entry: the file and its checksums.
        dtype: type of its records.
        first: number of its first pack.

    Raises:
        ValueError: the size or the type differs from the entry's.
    """

    def __init__(self, folder: Path, entry: StoredFile, dtype: np.dtype, first: int = 0) -> None:
        assert entry.blocks is not None
        self.records = map_table(folder, entry, dtype)
        self.first = first
        self._file = folder / entry.file
        self._blocks = entry.blocks
        self._is_checked = np.zeros(len(entry.blocks.crc32) // _CRC32_DIGITS, dtype=bool)

    def check(self, rows: np.ndarray) -> None:
        """Check the blocks of these records, int64 [n], that have not been checked. ValueError if one is damaged."""
        packs = self._blocks.packs
        blocks = rows // packs
        unchecked = np.flatnonzero(~self._is_checked[blocks])
        for block, place in zip(*np.unique(blocks[unchecked], return_index=True)):
            if self._blocks.is_damaged(self.records, block):
                row = rows[unchecked[place]]
                end = min((block + 1) * packs, len(self.records)) - 1
                raise ValueError(
                    f"{self._file}: pack {self.first + row}: the checksum of its block {block} (packs "
                    f"{self.first + block * packs} to {self.first + end}) differs from the manifest; a byte was "
                    f"changed, {REBUILD}"
                )
            self._is_checked[block] = True

    def checked(self) -> np.ndarray:
        """Return all records after all checks."""
        self.check(np.arange(0, len(self.records), self._blocks.packs))
        return self.records


class PackStore:
    """A packed data set, open for reading. Its shards stay mapped while a new build replaces it.

    A block of packs is checked by its checksum in the manifest when its first pack is read. Threads may read
    concurrently: two of them may check the same block.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Optional[Manifest] = None,
        shards: Sequence[CheckedTable] = (),
    ) -> None:
        if manifest is None:
            raise TypeError(f"a data set is opened by PackStore.open({str(folder)!r})")
        self.folder = Path(folder)
        self.manifest = manifest
        self.schema = manifest.schema
        self._shards = list(shards)
        self._ends = np.array([shard.first + len(shard.records) for shard in shards], np.int64)
        self._lengths: Optional[CheckedTable] = None

    def _repr_html_(self) -> str:
        """Return name, size and shape of the data set for a notebook."""
        manifest = self.manifest
        schema = self.schema
        lines = (
            f"{self.folder}: {manifest.sequences:,} sequences in {manifest.packs:,} packs",
            f"{manifest.packing_factor:.3f} sequences per pack, {manifest.efficiency:.1%} of the slots are tokens",
            f"{schema.max_sequence_length:,} slots, at most {schema.max_sequences_per_pack} sequences in a pack",
        )
        text = "\n".join(lines)
        return f"<pre>{html.escape(text)}</pre>"

    @classmethod
    def open(cls, folder: Path) -> PackStore:
        """Open a data set.

        Args:
            folder: Its directory.

        Raises:
            ValueError: If there is no data set, or the size of a shard is not that in the manifest.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        shards: List[CheckedTable] = []
        first = 0
        for entry in manifest.shards:
            shards.append(CheckedTable(folder, entry, manifest.schema.record_dtype, first))
            first += entry.packs
        return cls(folder, manifest, shards)

    def __len__(self) -> int:
        return self.manifest.packs

    def __enter__(self) -> PackStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def records(self, indices: np.ndarray) -> np.ndarray:
        """Return copies of stored records, [n] of schema.record_dtype.

        Args:
            indices: Pack numbers, integers [n], in any order.

        Raises:
            ValueError: If a number is out of range, or a pack is damaged.
        """
        indices = _pack_numbers(indices)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise ValueError(
                f"pack numbers {indices.min()} to {indices.max()}: the data set has packs 0 to {len(self) - 1}"
            )
        shard_of = np.searchsorted(self._ends, indices, side="right")
        records = np.empty(len(indices), dtype=self.schema.record_dtype)
        for number in np.unique(shard_of):
            shard = self._shards[number]
            is_here = shard_of == number
            rows = indices[is_here] - shard.first
            shard.check(rows)
            records[is_here] = shard.records[rows]
        return records

    def batch(self, indices: np.ndarray) -> Dict[str, np.ndarray]:
        """Return the fields of packs: name -> int32 [n, S], [n, P] or [n, D] (`PackSchema.fields`).

        Args:
            indices: Pack numbers, integers [n], in any order.

        Raises:
            ValueError: If a number is out of range, or a pack is damaged.
        """
        return decode(self.schema, self.records(indices))

    def lengths(self, indices: Optional[np.ndarray] = None) -> np.ndarray:
        """Return lengths and masked counts of the sequences of packs, without reading the packs.

        Args:
            indices: Pack numbers, integers [n]; None for all packs, memory-mapped.

        Returns:
            Records [n] of schema.lengths_dtype.

        Raises:
            ValueError: If the table of lengths is damaged.
        """
        if self._lengths is None:
            self._lengths = CheckedTable(
                self.folder, self.manifest.lengths, self.schema.lengths_dtype
            )
        table = self._lengths
        if indices is None:
            return table.checked()
        rows = _pack_numbers(indices)
        table.check(rows)
        return table.records[rows]

    def shards(self) -> Iterator[np.ndarray]:
        """Yield the shards in order, memory-mapped, each checked as a whole."""
        for shard in self._shards:
            yield shard.checked()

    def close(self) -> None:
        """Close the memory maps; the store cannot be read afterwards."""
        self._shards = []
        self._lengths = None
