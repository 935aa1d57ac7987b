import copy
import json
import os
import shutil

import numpy as np
import pytest

from pack_data.building.verify import verify
from pack_data.store.data_set import CHECKSUM, MANIFEST, PackStore, StoreWriter, _checksum
from pack_data.store.packs import SLOT, PackSchema, assemble
from pack_data.store.sequences import Example, Sequences
from tests.refusals import refused

SCHEMA = PackSchema.bert(8, 2, 4, vocabulary_size=50)


def records(packs, seed=0):
    """Packs with one or two random sequences each."""
    rng = np.random.default_rng(seed)
    chosen = []
    pack = []
    slot = []
    for number in range(packs):
        for place in range(rng.integers(1, 3)):
            length = int(rng.integers(2, 5))
            chosen.append(
                Example(rng.integers(1, 50, length).tolist(), 1, [1], [int(rng.integers(50))], int(rng.integers(2)))
            )
            pack.append(number)
            slot.append(place)
    return assemble(SCHEMA, Sequences.from_examples(chosen), np.array(pack), np.array(slot), packs)


@pytest.fixture
def folder(tmp_path):
    writer = StoreWriter(tmp_path / "data", SCHEMA, packs_per_shard=7)
    whole = records(20)
    for start in range(0, 20, 3):
        writer.add(whole[start : start + 3])
    writer.finish(algorithm="none", vocabulary_size=50, seed=4).close()
    return tmp_path / "data"


def test_what_was_written_is_read_in_any_order(folder):
    with PackStore.open(folder) as store:
        assert len(store) == 20
        assert [shard.packs for shard in store.manifest.shards] == [7, 7, 6]
        order = np.random.default_rng(1).permutation(20)
        assert np.array_equal(store.records(order), records(20)[order])
        batch = store.batch(np.array([19, 0, 7, 7]))
        for read in (store.records, store.batch, store.lengths):
            assert len(read([])) in (0, len(batch))
            with refused("pack numbers", "bool"):
                read(order > 9)
        assert {values.shape[0] for values in batch.values()} == {4}
        assert np.array_equal(batch["input_ids"][2], batch["input_ids"][3])
        assert all(
            values.shape == (0, store.schema.width(SLOT))
            for name, values in store.batch(np.zeros(0, int)).items()
            if name == "positions"
        )
        manifest = store.manifest
    assert manifest.sequences == (records(20)["lengths"] > 0).sum()
    assert manifest.seed == 4
    assert manifest.packing_factor == manifest.sequences / 20
    assert verify(folder).manifest == manifest


def test_a_reader_keeps_its_data_set_while_another_takes_its_place(folder):
    with PackStore.open(folder) as old:
        writer = StoreWriter(folder, SCHEMA, packs_per_shard=7)
        writer.add(records(9, seed=1))
        with PackStore.open(folder) as still_old:
            assert len(still_old) == 20
        with writer.finish(algorithm="none") as new:
            assert len(new) == 9
            assert np.array_equal(new.records(np.arange(9)), records(9, seed=1))
        assert np.array_equal(old.records(np.arange(20)), records(20))
    assert len(list(folder.glob("packs-*.npy"))) == 2


def edited(manifest, **values):
    """Change fields of the manifest in place; "a__0__b" is field b of the first item of a, and `...` removes it."""
    for path, value in values.items():
        *outer, last = path.split("__")
        place = manifest
        for key in outer:
            place = place[int(key) if isinstance(place, list) else key]
        last = int(last) if isinstance(place, list) else last
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return manifest


def write_manifest(folder, manifest):
    """Write the manifest with the checksum that it has now."""
    (folder / MANIFEST).write_text(json.dumps({**manifest, CHECKSUM: _checksum(manifest)}))


CROWDED = dict(histogram={"1": 100}, sequences=100, tokens=100, packing_factor=5.0, efficiency=100 / 160)


@pytest.mark.parametrize(
    "change, names",
    [
        (dict(digest=...), ["digest"]),
        (dict(version=99), ["version", "version 1"]),
        (dict(packs=21), ["packs is 21", "20"]),
        (dict(sequences=1), ["sequences"]),
        (dict(lengths__packs=19), ["lengths.packs", "20 packs"]),
        (CROWDED, ["packs", "100 sequences"]),
        (dict(lower_bound=21), ["lower_bound", "20 packs"]),
        (dict(shards__1__file="manifest.json"), ["shards", "'manifest.json'"]),
        (dict(files=[dict(file="manifest.json", bytes=1, sha256="0" * 64, packs=0)]), ["files", "'manifest.json'"]),
        (dict(histogram__1=0), ["histogram.1 is 0", "from 1 to"]),
        (dict(histogram__9=1), ["histogram.9", "1 to 8"]),
        (dict(histogram__02=1), ["histogram.02", "1 to 8"]),
        (dict(made_with__options={"seed": {}}), ["made_with.options.seed", "a list of texts"]),
        (dict(made_with__options={"columns": [1]}), ["made_with.options.columns", "a list of texts|text"]),
        (dict(made_with={"options": {}, "sources": [["a"]]}), ["made_with.sources", "2"]),
        (dict(made_with={"options": {}, "sources": [], "parts": -1}), ["made_with.parts", "-1"]),
        (dict(made_with={"account": {"tokens": -1}}), ["made_with.account.tokens", "-1"]),
        (dict(made_with={"skipped": [1]}), ["made_with.skipped", "text"]),
        (dict(schema__columns=[]), ["schema.columns"]),
        (dict(schema__columns__0__dtype="<i4"), ["schema", "input_ids"]),
        (dict(schema__kind="garbage"), ["schema.kind", "bert_pretraining", "tokens"]),
        (dict(schema__kind=["tokens"]), ["schema.kind", "bert_pretraining", "tokens"]),
        (dict(shards__0__blocks=...), ["shards", "blocks"]),
        (dict(shards__0__blocks__more=1), ["shards", "blocks.more"]),
    ],
)
def test_a_manifest_that_contradicts_itself_does_not_open(folder, change, names):
    """Its checksum is right: each field has a rule of its own."""
    manifest = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, edited(manifest, **change))
    with refused(folder / MANIFEST, *names, unchanged=folder):
        PackStore.open(folder)


@pytest.mark.parametrize(
    "name, change, names",
    [
        (MANIFEST, None, ["not a packed data set"]),
        (MANIFEST, lambda data: data[:200], ["not JSON"]),
        (MANIFEST, lambda data: data.replace(b'"seed": 4', b'"seed": 5'), [CHECKSUM]),
        ("packs-00001-*.npy", None, ["no such file"]),
        ("packs-00001-*.npy", lambda data: data[:-10], ["packs-00001", "bytes"]),
        ("packs-00001-*.npy", lambda data: bytes(20) + data[20:], ["packs-00001", "npy"]),
        ("packs-00001-*.npy", lambda data: data.replace(b"<u2", b"<i2"), ["packs-00001", "type"]),
    ],
)
def test_a_broken_data_set_does_not_open(folder, name, change, names):
    (path,) = folder.glob(name)
    content = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(content))
    with refused(folder, *names):
        PackStore.open(folder)


ODD = (None, True, -1, 7, 10**40, 0.5, "", "x", "../x", [], [[1]], {"a": 1})


def leaves(value, path=()):
    """The path of every value below `value`, also of those that hold others."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield path + (key,)
        yield from leaves(below, path + (key,))


def test_every_changed_field_of_a_manifest_is_refused(folder):
    """Any field, replaced by any odd value or taken out, with the checksum right again: one line, or nothing depends on
    it. With the checksum as it was, every change is seen."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["made_with"] = {
        "options": {"seed": 1, "columns": []},
        "sources": [["a.txt", "00"]],
        "parts": 1,
        "documents": 1,
    }
    free = set("algorithm seed max_predictions_per_sequence vocabulary_size lower_bound lp_bound made_with".split())
    refused = 0
    rng = np.random.default_rng(0)
    for path in leaves(manifest):
        for value in (*(ODD[place] for place in rng.choice(len(ODD), 4, replace=False)), ...):
            now = edited(copy.deepcopy(manifest), **{"__".join(map(str, path)): value})
            if json.dumps(now) == json.dumps(manifest):
                continue
            for sealed in (True, False) if value is ... else (True,):
                text = {**now, CHECKSUM: _checksum(now if sealed else manifest)}
                (folder / MANIFEST).write_text(json.dumps(text))
                try:
                    PackStore.open(folder).close()
                    verify(folder)
                except ValueError as error:
                    refused += 1
                    assert str(error).startswith(str(folder))
                    assert "\n" not in str(error)
                    assert len(str(error)) < 700
                else:
                    assert (
                        sealed and (path[0] in free or "blocks" in path and path[-1] != "crc32") or path == (CHECKSUM,)
                    ), (path, value)
    assert refused > 250


@pytest.mark.parametrize("place", ["shards", "lengths"])
def test_a_file_outside_the_folder_is_not_part_of_a_data_set(folder, place):
    """By its name, over a link, as a pipe and as a device: each one line at once."""
    manifest = json.loads((folder / MANIFEST).read_text())
    entry = manifest[place][0] if place == "shards" else manifest[place]
    inside = folder / entry["file"]
    outside = folder.parent / "outside.npy"
    shutil.copyfile(inside, outside)

    def name(text):
        entry["file"] = text
        write_manifest(folder, manifest)

    for text in ("../outside.npy", str(outside), "/dev/zero", "", "..", "a\\b"):
        name(text)
        with refused(MANIFEST, place, "file", "plain name"):
            verify(folder)
    for number, make in enumerate(
        (
            lambda path: path.symlink_to("../outside.npy"),
            lambda path: path.symlink_to("/dev/zero"),
            os.mkfifo,
            lambda path: path.mkdir(),
        )
    ):
        make(folder / f"{number}.npy")
        name(f"{number}.npy")
        with refused(f"{number}.npy", "a link that leads out|a pipe|a folder|a directory"):
            verify(folder)
    (folder / "moved.npy").symlink_to(inside.name)  # a link within the folder is one of its files
    name("moved.npy")
    verify(folder)
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")  # and so is all of it where the folder is reached over a link
    verify(folder)
