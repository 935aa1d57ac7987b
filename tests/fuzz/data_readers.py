"""The readers of pack_data: data sets, recipes, histograms, vocabularies, corpora and foreign formats."""

import contextlib
import gzip
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from ipu_packed_bert.commands.look import main as look_main
from pack_data import optimal
from pack_data.building.verify import verify
from pack_data.formats.records import RowWidths
from pack_data.formats.source import open_source
from pack_data.inspection.verify_command import main as verify_main
from pack_data.lengths.counting import count
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from pack_data.store.data_set import CHECKSUM, MANIFEST, PackStore, _checksum, write_shard
from pack_data.store.packs import FIELDS
from pack_data.text.corpus import documents
from pack_data.text.vocabulary import load_vocabulary
from tests.format_samples import (
    frame,
    mlperf_row,
    pack_from_examples,
    random_examples,
    records,
    tf_example,
    unframe,
    write_hdf5,
)
from tests.fuzz.cases import Found, Reader, Target, typed
from tests.fuzz.mutators import (
    BYTES,
    FOREIGN_PLACES,
    JSON,
    JSON_LINES,
    NPY,
    PLACES,
    STRUCTURE,
    TEXT,
    Mutator,
    compressed,
    free,
    sealed_by,
    streams,
    tfrecord,
)
from tests.pack_data.text_corpus import build_small, write_corpus

S = 24
P = 4
D = 3


def _make_store(folder):
    build_small(write_corpus(folder / "corpus", documents=6), folder / "data").close()
    shutil.rmtree(folder / "corpus")


def _content(store):
    return [store.batch(np.arange(len(store))), np.array(store.lengths())]


def _verified(folder):
    manifest = typed(verify(folder / "data").manifest)
    with PackStore.open(folder / "data") as store:
        return Found(_content(store), manifest)


def _loaded(folder):
    """Read a data set as training does, without verify."""
    with PackStore.open(folder / "data") as store:
        return Found(_content(store), typed(store.manifest))


def _from_store(folder):
    return Found([record.value for record in open_source(str(folder / "data")).read()])


def _seal(path):
    """Makes the checksums of a changed file, or of the manifest itself, again; a table's blocks, too."""
    manifest = path.parent / MANIFEST
    tree = json.loads(manifest.read_text())
    data = path.read_bytes()
    if path != manifest:
        for entry in [*tree["shards"], *tree["files"], tree["lengths"]]:
            if entry["file"] == path.name:
                entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
                if "blocks" in entry:
                    with contextlib.suppress(Exception):  # no table any more: other checksums refuse it
                        table = write_shard(path.parent, 99, np.load(path))
                        entry["blocks"] = table.to_json()["blocks"]
                        (path.parent / table.file).unlink()
    if isinstance(tree, dict):
        manifest.write_text(json.dumps({**tree, CHECKSUM: _checksum(tree)}))


# What only the manifest says may be another valid value once its own checksum is made again.
_MANIFEST = (
    Target("data/manifest.json", (*JSON, *FOREIGN_PLACES)),
    Target("data/manifest.json", sealed_by(_seal, JSON[:2], remade=False), 2.0),
)


def _store_targets(*, sealed_too):
    tables = (
        Target("data/packs-*.npy", (*NPY, *FOREIGN_PLACES)),
        Target("data/lengths-*.npy", (*NPY, *FOREIGN_PLACES), 0.5),
    )
    whole = (
        # Another packing of the same sequences is no change that anything could find.
        Target("data/packs-*.npy", sealed_by(_seal, NPY, remade=True)),
        Target("data/lengths-*.npy", sealed_by(_seal, NPY, remade=True), 0.5),
    )
    return (*_MANIFEST, *tables, *(whole if sealed_too else ()))


_OF_FILES = (
    Target("data/recipe.json", (*JSON, *FOREIGN_PLACES), 0.5),
    Target("data/vocab.txt", (*TEXT, *FOREIGN_PLACES), 0.5),
    Target("data/recipe.json", sealed_by(_seal, JSON, remade=False), 0.5),
)


def _counted(name):
    def read(folder):
        return Found([], count([str(folder / name)]).counts)

    return read


STORES = (
    Reader(
        "store-verify",
        _make_store,
        _verified,
        (*_store_targets(sealed_too=True), *_OF_FILES),
        command=lambda folder: (verify_main, [str(folder / "data")]),
        weight=2.0,
    ),
    Reader("store-load", _make_store, _loaded, _store_targets(sealed_too=False), weight=2.0),
    Reader("store-source", _make_store, _from_store, _store_targets(sealed_too=False)),
    Reader(
        "store-histogram",
        _make_store,
        _counted("data"),
        (Target("data/manifest.json", (*JSON, *FOREIGN_PLACES)),),
        command=lambda folder: (look_main, [str(folder / "data")]),
    ),
)


def _make_recipe(folder):
    counts = np.zeros(33, np.int64)
    counts[[3, 5, 7, 11, 13, 17, 20, 31, 32]] = [40, 31, 22, 19, 15, 11, 9, 4, 6]
    optimal.pack(LengthHistogram(counts, "small"), max_sequences_per_pack=3).save(folder / "recipe.json")


def _recipe(folder):
    packing = Packing.load(folder / "recipe.json")
    typed(packing)
    if packing.certificate is not None:
        typed(packing.certificate)
        try:
            prove(packing)
        except ValueError as error:
            raise ValueError(f"{folder / 'recipe.json'}: {error}") from None
    return Found((packing.packs, packing.sequences, packing.tokens, packing.slots), packing)


def _make_histogram(folder):
    LengthHistogram.published("squad_1_1_384").to_csv(folder / "histogram.csv")
    text = (folder / "histogram.csv").read_text().split("\n")
    (folder / "histogram.csv").write_text("\n".join(text[:30]) + "\n")


def _make_lengths(suffix):
    def make(folder):
        lengths = np.random.default_rng(0).integers(1, 300, 200)
        path = folder / f"lengths{suffix}"
        if suffix == ".npy":
            np.save(path, lengths)
        else:
            path.write_text("".join(f"{length}\n" for length in lengths))
            if path.suffix != ".txt":
                compressed(path)

    return make


def _vocabulary(folder):
    vocabulary = load_vocabulary(folder / "vocab.txt")
    return Found([], (vocabulary.tokens, vocabulary.sha256, *vocabulary.encode(["The river ran on.", ""])))


def _make_vocabulary(folder):
    _make_store(folder)
    (folder / "data" / "vocab.txt").rename(folder / "vocab.txt")
    shutil.rmtree(folder / "data")


def _lengths_reader(suffix, mutators, weight=0.5):
    return Reader(
        "lengths" + suffix,
        _make_lengths(suffix),
        # A plain file of numbers holds each of them once; a compressed one has a checksum.
        lambda folder: Found(count([str(folder / f"lengths{suffix}")]).counts),
        (Target(f"lengths{suffix}", (*mutators, *PLACES)),),
        command=lambda folder: (look_main, [str(folder / f"lengths{suffix}")]),
        weight=weight,
    )


PLAIN = (
    Reader(
        "recipe",
        _make_recipe,
        _recipe,
        (Target("recipe.json", (*JSON, *PLACES)),),
        command=lambda folder: (verify_main, [str(folder / "recipe.json")]),
        weight=1.5,
    ),
    Reader(
        "histogram-csv",
        _make_histogram,
        _counted("histogram.csv"),
        (Target("histogram.csv", free((*TEXT, *PLACES))),),
        command=lambda folder: (look_main, [str(folder / "histogram.csv")]),
    ),
    _lengths_reader(".npy", free(NPY), 1.0),
    _lengths_reader(".txt", free(TEXT)),
    _lengths_reader(".txt.gz", streams(TEXT)),
    _lengths_reader(".txt.xz", streams(TEXT)),
    _lengths_reader(".txt.bz2", streams(TEXT)),
    Reader("vocabulary", _make_vocabulary, _vocabulary, (Target("vocab.txt", free((*TEXT, *PLACES))),)),
)


def _make_corpus(name):
    def make(folder):
        source = write_corpus(folder / "texts", documents=4)
        texts = [path.read_text() for path in sorted(source.iterdir())]
        shutil.rmtree(source)
        path = folder / name
        if ".jsonl" in name:
            path.write_text(
                "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts))
            )
        else:
            path.write_text("\n\n".join(texts))
        if path.suffix in (".gz", ".xz"):
            compressed(path)

    return make


def _corpus(name):
    within = JSON_LINES if ".jsonl" in name else TEXT
    packed = Path(name).suffix in (".gz", ".xz")
    return Reader(
        name,
        _make_corpus(name),
        lambda folder: Found([list(documents(folder / name)), list(documents(folder / name, separator="blank-line"))]),
        (Target(name, (*(streams(within) if packed else free(within)), *PLACES)),),
        weight=0.7,
    )


CORPORA = tuple(map(_corpus, ("corpus.txt", "corpus.jsonl", "corpus.txt.xz", "corpus.jsonl.gz")))


def _examples():
    return random_examples(np.random.default_rng(0), 6, S, P)


def _packs():
    rng = np.random.default_rng(0)
    return [pack_from_examples(random_examples(rng, 2, S // D, P), RowWidths(S, P * D, D)) for _ in range(4)]


def _records(name):
    def read(folder):
        source = open_source(str(folder / name))
        values = [record.value for record in source.read()]
        source.shape()
        return Found(values, source.kind)

    return read


def some_of(original, found):
    """A format that does not say how many records it has may lose some; none may change."""
    return set(found) <= set(original)


def _packed_features(pack):
    floats = ("masked_lm_weights", "next_sentence_weights")
    return {name: [float(value) if name in floats else int(value) for value in pack[name]] for name in FIELDS}


def _tfrecord(kind, zipped=False):
    name = "a.tfrecord" + (".gz" if zipped else "")

    def make(folder):
        rows = {
            "mlperf": lambda: [mlperf_row(example, S, P) for example in _examples()],
            "packed": lambda: list(map(_packed_features, _packs())),
        }[kind]()
        data = b"".join(frame(tf_example(row)) for row in rows)
        (folder / name).write_bytes(gzip.compress(data, mtime=0) if zipped else data)

    mutators = tfrecord(frame, unframe)
    return Reader(
        f"tfrecord-{kind}" + ("-gz" if zipped else ""),
        make,
        _records(name),
        (Target(name, (*(streams(mutators) if zipped else mutators), *PLACES)),),
        needs=("google.protobuf", "google_crc32c"),
        agrees=some_of,
        weight=1.0 if not zipped else 0.5,
    )


def _structure_of_hdf5(rng, path):
    """One data set of the file in another form."""
    import h5py

    with h5py.File(path, "r+") as file:
        name = rng.choice(sorted(file))
        data = file[name][()]
        what = rng.randrange(14)
        del file[name]
        if what == 0:
            return
        if what == 1:
            file.create_group(name)
        elif what == 2:
            file[name] = h5py.SoftLink("/" + rng.choice((name, "nothing")))
        elif what == 3:
            file[name] = h5py.ExternalLink("other.hdf5", "/a")
        elif what == 4:
            file[name] = rng.choice((1, -1, 2.5, "text", b"bytes", np.zeros(0), h5py.Empty("i4")))
        elif data.dtype.hasobject:
            file[name] = np.zeros((len(data), 3), rng.choice((np.int32, np.float64, "S3")))
        elif what < 8:
            kinds = ("i1", "u1", "i8", "u8", ">i4", "f2", "f4", "f8", "?", "S4", "c8", np.dtype([("a", "i4")]))
            with np.errstate(all="ignore"):
                file[name] = np.zeros(data.shape, kinds[-1]) if what == 7 else data.astype(rng.choice(kinds[:-1]))
        elif what == 8:
            shapes = (data.shape[::-1], (1, *data.shape), (*data.shape, 1), (data.size,))
            file[name] = data.reshape(rng.choice(shapes))
        elif what == 9:
            file[name] = rng.choice((data[:-1], data[:0], data[..., :-1], np.concatenate([data, data])))
        elif what < 13:
            changed = data.astype(np.float64) if rng.random() < 0.3 else data.astype(np.int64)
            values = (0, 1, 2, -1, 255, 2**31, 2**40, -(2**62), 25)
            changed.reshape(-1)[rng.randrange(changed.size)] = (
                rng.choice((0.5, float("nan"), float("inf"), 1e30)) if changed.dtype.kind == "f" else rng.choice(values)
            )
            file[name] = changed
        else:
            rows = file.create_dataset(name, (len(data),), h5py.vlen_dtype(np.int32))
            for number in range(len(data)):
                rows[number] = np.atleast_1d(data[number])[: rng.randrange(5)]


HDF5 = tuple([Mutator(STRUCTURE, _structure_of_hdf5, True)] * 10) + free(BYTES)


def _hdf5(kind):
    def make(folder):
        rows = [mlperf_row(example, S, P) for example in _examples()] if kind == "nvidia" else _examples()
        write_hdf5(folder / "a.hdf5", rows, kind)

    return Reader(
        f"hdf5-{kind}", make, _records("a.hdf5"), (Target("a.hdf5", (*HDF5, *PLACES)),), needs=("h5py",), weight=0.7
    )


def _array(values, kind):
    """The values as this type, or as the one that Arrow takes for them."""
    import pyarrow as pa

    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return pa.array(values)


def _structure_of_arrow(rng, path):
    """One column of the table in another form."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    is_arrow = path.suffix == ".arrow"
    table = pa.ipc.open_stream(str(path)).read_all() if is_arrow else pq.read_table(str(path))
    place = rng.randrange(table.num_columns)
    name = table.column_names[place]
    rows = table.num_rows
    values = table.column(place).to_pylist()
    what = rng.randrange(10)
    replacement = None
    if what == 0:
        table = table.remove_column(place)
    elif what == 1:
        table = table.slice(0, rng.choice((0, 1)))
    elif what == 2:
        names = list(table.column_names)
        names[place] = rng.choice(("a", "", "input_mask", "positions", names[0], "x" * 300))
        table = table.rename_columns(names)
    elif what == 3:
        replacement = pa.array([None] * rows, rng.choice((pa.int32(), pa.list_(pa.int32()), pa.null())))
    elif what == 4:
        replacement = pa.array(
            rng.choice(([1.5] * rows, ["a"] * rows, [True] * rows, [[["a"]]] * rows, [{"a": 1}] * rows))
        )
    elif what < 8 and isinstance(values[0], list):
        row = rng.randrange(rows)
        changed = [list(row) for row in values]
        options = (
            lambda: changed[row].append(1),
            lambda: changed[row].clear(),
            lambda: changed[row].__setitem__(0, -1),
            lambda: changed[row].__setitem__(0, 2**40),
            lambda: changed[row].__setitem__(0, None),
            lambda: changed[row].__setitem__(0, 2),
            lambda: changed.__setitem__(row, None),
            lambda: changed[row].reverse(),
        )
        rng.choice(options)()
        replacement = _array(
            changed, pa.list_(rng.choice((pa.int64(), pa.int64(), pa.float64(), pa.decimal128(20, 2))))
        )
    elif isinstance(values[0], list):
        kinds = (
            pa.list_(pa.int8()),
            pa.large_list(pa.int64()),
            pa.list_(pa.float32()),
            pa.list_(pa.string()),
            pa.list_(pa.bool_()),
        )
        bits = [[number % 2 if number is not None else None for number in value] for value in values]
        replacement = _array(bits, rng.choice(kinds[:3]))
    else:
        replacement = pa.array([rng.choice((0, 1, 2, -1, None, 2**31)) for _ in values], pa.int64())
    if replacement is not None:
        table = table.set_column(place, name, replacement)
    path.unlink()
    if is_arrow:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        pq.write_table(table, str(path))


def _arrow(name, to_format):
    def make(folder):
        from pack_data.formats import sequence_output

        tokens = [np.array(example.input_ids) for example in _examples()]
        rows = [{"input_ids": ids, "loss_mask": np.ones(len(ids))} for ids in tokens]
        if to_format == "packed_parquet":
            rows = [{**row, "seq_start_id": np.array([0, 2], np.int32)} for row in rows]
        sequence_output.write(str(folder / name), lambda: records(rows), to_format)

    mutators = tuple([Mutator(STRUCTURE, _structure_of_arrow, True)] * 10) + free(BYTES)
    return Reader(
        to_format,
        make,
        _records(name),
        (Target(name, (*mutators, *PLACES)),),
        needs=("pyarrow",),
        weight=0.7,
    )


def _json(name):
    def make(folder):
        rows = [{"input_ids": example.input_ids, "text": '"]}\\'} for example in _examples()]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(json.dumps(rows) if name.endswith(".json") else lines)
        if name.endswith(".gz"):
            compressed(folder / name)

    mutators = streams(JSON_LINES) if name.endswith(".gz") else free((*JSON_LINES, *BYTES))
    return Reader(name, make, _records(name), (Target(name, (*mutators, *PLACES)),), weight=0.4)


FORMATS = (
    *map(_tfrecord, ("mlperf", "packed")),
    _tfrecord("packed", zipped=True),
    *map(_hdf5, ("nvidia", "varlength")),
    _arrow("a.parquet", "parquet"),
    _arrow("b.parquet", "packed_parquet"),
    _arrow("a.arrow", "arrow"),
    *map(_json, ("tokens.json", "tokens.jsonl", "tokens.jsonl.gz")),
)

READERS = (*STORES, *PLAIN, *CORPORA, *FORMATS)
