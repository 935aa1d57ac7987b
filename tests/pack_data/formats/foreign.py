"""Writers of files as other libraries write them. A writer takes a path, and skips its test without its library."""

import bz2
import gzip
import json
import lzma
import struct
import zipfile
from functools import partial

import numpy as np
import pytest

from pack_data.formats.source import open_source
from tests.format_samples import example, frame, mlperf_row, tf_example, write_hdf5

IDS = [[5, 6, 7], [8], [9, 4, 3, 2]]
COLUMNS = {"input_ids": IDS, "url": ["a", "b", "c"]}
LINES = "".join(json.dumps({"input_ids": ids, "url": url}) + "\n" for ids, url in zip(IDS, "abc")).encode()
RECORD = frame(tf_example(mlperf_row(example(), 24, 4)))

pa, pq, pd, pl, datasets, zstandard, h5py = (
    partial(pytest.importorskip, name)
    for name in ("pyarrow", "pyarrow.parquet", "pandas", "polars", "datasets", "zstandard", "h5py")
)


def content(values):
    """Return a writer of these bytes, or of JSON lines of these values."""
    if isinstance(values, list):
        values = "".join(json.dumps(value) + "\n" for value in values).encode()
    return lambda path: path.write_bytes(values)


def frames(columns=COLUMNS, **options):
    """Return a writer of pandas: the first option is the name of its method."""
    ((method, options),) = options.items()
    return lambda path: getattr(pd().DataFrame(columns), method)(path, **options)


def polars(method, columns=COLUMNS, **options):
    return lambda path: getattr(pl().DataFrame(columns), method)(path, **options)


def parquet(columns=COLUMNS, **options):
    return lambda path: pq().write_table(pa().table(columns), path, **options)


def arrow(columns=COLUMNS, kind="stream", **options):
    def write(path):
        table = pa().table(columns)
        with getattr(pa().ipc, f"new_{kind}")(str(path), table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=2)

    return write


def zipped(*parts):
    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for number, part in enumerate(parts):
                archive.writestr(f"part/{number}.jsonl", part)
            archive.writestr("__MACOSX/._0.jsonl", b"\0\5\26\7")

    return write


def zstd(*parts, level=3):
    return lambda path: path.write_bytes(b"".join(zstandard().ZstdCompressor(level).compress(part) for part in parts))


def compressed(data, suffix):
    """Return bytes compressed by the suffix of a file."""
    return {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}.get(suffix, bytes)(data)


def cut(write, size):
    """Return a writer of a file that lacks its last bytes."""

    def write_less(path):
        write(path)
        path.write_bytes(path.read_bytes()[:-size])

    return write_less


def views(kind):
    def write(path):
        if not hasattr(pa(), kind):
            pytest.skip("needs a newer pyarrow")
        arrow({"input_ids": pa().array(IDS, getattr(pa(), kind)(pa().int32()))})(path)

    return write


def hub(method):
    """Return a writer of datasets."""

    def write(path):
        types = {"input_ids": datasets().List(datasets().Value("int32")), "url": datasets().Value("string")}
        table = datasets().Dataset.from_dict(COLUMNS, datasets().Features(**types))
        getattr(table, method)(str(path))

    return write


def flipped(path):
    """Write Parquet with checksums, and a bit of its last page flipped."""
    parquet({"input_ids": [[number] for number in range(2000)]}, write_page_checksum=True, compression="none")(path)
    stored = bytearray(path.read_bytes())
    stored[stored.rindex(b"PAR1") // 3] ^= 1
    path.write_bytes(stored)


def moved(path):
    """Write an archive whose directory places its file before the beginning."""
    zipped(LINES)(path)
    stored = bytearray(path.read_bytes())
    end = stored.rindex(b"PK\5\6")
    stored[end + 16 : end + 20] = struct.pack("<I", 0xFFFFFF)
    path.write_bytes(stored)


def hdf5(change):
    """Return a writer of four examples in HDF5; change(file, h5py) replaces its columns."""

    def write(path):
        write_hdf5(path, [mlperf_row(example(seed=seed), 24, 4) for seed in range(4)])
        with h5py().File(path, "a") as file:
            change(file, h5py())

    return write


def with_column(name, **how):
    """Return a change of HDF5: another column of this name, or none."""

    def change(file, _):
        del file[name]
        if how:
            file.create_dataset(name, **how)

    return hdf5(change)


def filtered(code):
    """Return a change of HDF5: input_ids with a filter that HDF5 lacks here."""

    def change(file, library):
        del file["input_ids"]
        properties = library.h5p.create(library.h5p.DATASET_CREATE)
        properties.set_chunk((1, 24))
        properties.set_filter(code, library.h5z.FLAG_OPTIONAL, ())
        space = library.h5s.create_simple((4, 24))
        library.h5d.create(file.id, b"input_ids", library.h5t.NATIVE_INT32, space, properties)

    return hdf5(change)


def put(folder, *names):
    """Write a JSONL file of one sequence, the number of the file, for each name; return the directory."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressed(json.dumps({"input_ids": [number]}).encode() + b"\n", path.suffix))
    return folder


def saved(folder, state=(), files=1):
    """Write a directory as save_to_disk writes it, with the result of a map beside it; return it."""
    names = [f"data-{number:05}-of-{files:05}.arrow" for number in range(files)]
    for name in (*names, "cache-478a21f1dc2ad20e.arrow"):
        arrow({"input_ids": [[1], [2]]})(folder / name)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", **dict(state)}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def row_numbers(rows):
    """Return a writer of the rows that a saved data set selects."""
    return arrow({"indices": np.array(rows, np.uint64)})


def plain(source):
    """Return the token sequences of a source as lists."""
    return [{name: values.tolist() for name, values in record.value.items()} for record in source.read()]


def ids_of(source):
    """Return the token ids of each record of a source, as lists."""
    return [row["input_ids"] for row in plain(source)]


def numbers(folder, **options):
    return [ids[0] for ids in ids_of(open_source(folder, **options))]


def places(source):
    """Return the number of each record of a source in its file."""
    return [record.origin.record for record in source.read()]
