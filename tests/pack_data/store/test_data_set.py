import copy
import json
import os
import shutil

import numpy as np
import pytest

from pack_data.building.verify import verify
from pack_data.store.data_set import CHECKSUM, MANIFEST, PackStore, StoreWriter, checksum
from pack_data.store.packs import SLOT, PackSchema, StoredColumn, assemble
from pack_data.store.sequences import Example, Sequences
from tests.refusals import refused

SCHEMA = PackSchema.bert(8, 2, 4, vocabulary_size=50)


def records(packs, seed=0):
    """Packs with one or two random sequences each."""
    rng = np.random.default_rng(seed)
    chosen, pack, slot = [], [], []
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
        assert len(store) == 20 and [shard.packs for shard in store.manifest.shards] == [7, 7, 6]
        order = np.random.default_rng(1).permutation(20)
        assert np.array_equal(store.records(order), records(20)[order])
        batch = store.batch(np.array([19, 0, 7, 7]))
        for each in (store.records, store.batch, store.lengths):
            assert len(each([])) in (0, len(batch))
            with refused("asked for by their numbers; got bool"):
                each(order > 9)
        assert {values.shape[0] for values in batch.values()} == {4} and np.array_equal(
            batch["input_ids"][2], batch["input_ids"][3]
        )
        assert all(
            values.shape == (0, store.schema.width(SLOT))
            for name, values in store.batch(np.zeros(0, int)).items()
            if name == "positions"
        )
        manifest = store.manifest
    assert manifest.sequences == (records(20)["lengths"] > 0).sum() and manifest.seed == 4
    assert manifest.packing_factor == manifest.sequences / 20
    assert verify(folder).manifest == manifest


def test_the_manifest_accounts_for_its_slots(folder):
    with PackStore.open(folder) as store:
        lengths, manifest = store.lengths()["lengths"], store.manifest
        assert np.array_equal(lengths, records(20)["lengths"])
        assert manifest.tokens == lengths.sum() > 0 and manifest.sequences == (lengths > 0).sum()
        assert manifest.efficiency == lengths.sum() / (len(lengths) * SCHEMA.max_sequence_length)
        assert manifest.packing_factor == (lengths > 0).sum() / len(lengths)


@pytest.mark.parametrize("index", [20, -1])
def test_a_pack_that_is_not_there(folder, index):
    with PackStore.open(folder) as store, pytest.raises(ValueError, match="packs 0 to 19"):
        store.batch(np.array([0, index]))


def test_a_reader_keeps_its_data_set_while_another_takes_its_place(folder):
    with PackStore.open(folder) as old:
        writer = StoreWriter(folder, SCHEMA, packs_per_shard=7)
        writer.add(records(9, seed=1))
        with PackStore.open(folder) as still_old:
            assert len(still_old) == 20
        with writer.finish(algorithm="none") as new:
            assert len(new) == 9 and np.array_equal(new.records(np.arange(9)), records(9, seed=1))
        assert np.array_equal(old.records(np.arange(20)), records(20))
    assert len(list(folder.glob("packs-*.npy"))) == 2


def test_the_same_packs_give_the_same_bytes(folder, tmp_path):
    writer = StoreWriter(tmp_path / "other", SCHEMA, packs_per_shard=7)
    writer.add(records(20))
    writer.finish(algorithm="none", vocabulary_size=50, seed=4)
    content = [{path.name: path.read_bytes() for path in place.iterdir()} for place in (folder, tmp_path / "other")]
    assert content[0] == content[1]


def test_a_data_set_of_tokens(tmp_path):
    schema = PackSchema.of_tokens(6, 2, [StoredColumn("ids", SLOT, "<u2")])
    sequences = Sequences.of_tokens(np.array([6, 2, 3]), {"ids": np.arange(11)})
    writer = StoreWriter(tmp_path, schema)
    writer.add(assemble(schema, sequences, np.array([0, 1, 1]), np.array([0, 0, 1]), 2))
    with writer.finish(algorithm="none") as store:
        assert store.manifest.kind == "tokens"
        assert store.batch(np.array([1]))["ids"].tolist() == [[6, 7, 8, 9, 10, 0]]
    assert verify(tmp_path).manifest.sequences == 3


def test_no_packs_at_all(tmp_path):
    with StoreWriter(tmp_path, SCHEMA).finish(algorithm="none") as store:
        assert len(store) == 0 and store.manifest.packing_factor == 0.0 == store.manifest.efficiency
    verify(tmp_path)


def manifest_with(before, after):
    return MANIFEST, lambda data: data.replace(before, after, 1)


@pytest.mark.parametrize(
    "name, change, said",
    [
        (MANIFEST, None, "not a packed data set"),
        (MANIFEST, lambda data: data[:200], "not JSON"),
        (*manifest_with(b'"digest"', b'"other"'), "digest"),
        (*manifest_with(b'"version": 1', b'"version": 99'), "version 1"),
        (*manifest_with(b'"packs": 20', b'"packs": 21'), "packs is 21; histogram, shards and schema make it 20"),
        ("packs-00001-*.npy", None, "no such file"),
        ("packs-00001-*.npy", lambda data: data[:-10], "bytes where the manifest says"),
        ("packs-00001-*.npy", lambda data: bytes(20) + data[20:], "not a readable .npy"),
    ],
)
def test_a_broken_data_set_does_not_open(folder, name, change, said):
    (path,) = folder.glob(name)
    content = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(content))
    with pytest.raises(ValueError, match=said) as caught:
        PackStore.open(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_file_is_no_data_set(tmp_path):
    (tmp_path / "packs").write_text("")
    with pytest.raises(ValueError, match="packs: a file; a packed data set is a folder"):
        PackStore.open(tmp_path / "packs")


ODD = (None, True, -1, 7, 10**40, 0.5, "", "x", "../x", [], [[1]], {"a": 1})


def leaves(value, path=()):
    """The path of every value below `value`, also of those that hold others."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield path + (key,)
        yield from leaves(below, path + (key,))


def changed(manifest, path, value):
    """A copy of the manifest with another value there; the field is taken out where `value` is `...`."""
    manifest = copy.deepcopy(manifest)
    place = manifest
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return manifest


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
            now = changed(manifest, path, value)
            if json.dumps(now) == json.dumps(manifest):
                continue
            for sealed in (True, False) if value is ... else (True,):
                text = {**now, CHECKSUM: checksum(now if sealed else manifest)}
                (folder / MANIFEST).write_text(json.dumps(text))
                try:
                    PackStore.open(folder).close()
                    verify(folder)
                except ValueError as error:
                    refused += 1
                    assert str(error).startswith(str(folder)) and "\n" not in str(error) and len(str(error)) < 700
                else:
                    assert (
                        sealed and (path[0] in free or "blocks" in path and path[-1] != "crc32") or path == (CHECKSUM,)
                    ), (path, value)
    assert refused > 250


@pytest.mark.parametrize("kind", ["garbage", 1, ["tokens"], "TOKENS"])
def test_a_kind_of_packs_that_there_is_not(folder, kind):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["schema"]["kind"] = kind
    (folder / MANIFEST).write_text(json.dumps({**manifest, CHECKSUM: checksum(manifest)}))
    with pytest.raises(ValueError, match="manifest.json: schema.kind is .*; must be 'bert_pretraining' or 'tokens'"):
        verify(folder)


@pytest.mark.parametrize("place", ["shards", "lengths"])
def test_a_file_outside_the_folder_is_not_part_of_a_data_set(folder, place):
    """By its name, over a link, as a pipe and as a device: each one line at once."""
    manifest = json.loads((folder / MANIFEST).read_text())
    entry = manifest[place][0] if place == "shards" else manifest[place]
    inside, outside = folder / entry["file"], folder.parent / "outside.npy"
    shutil.copyfile(inside, outside)

    def name(text):
        entry["file"] = text
        (folder / MANIFEST).write_text(json.dumps({**manifest, CHECKSUM: checksum(manifest)}))

    for text in ("../outside.npy", str(outside), "/dev/zero", "", "..", "a\\b"):
        name(text)
        with pytest.raises(ValueError, match="plain name of a file in the same folder"):
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
        with pytest.raises(ValueError, match=r"npy: is (a link that leads out|a pipe|a folder)"):
            verify(folder)
    (folder / "moved.npy").symlink_to(inside.name)  # a link within the folder is one of its files
    name("moved.npy")
    verify(folder)
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")  # and so is all of it where the folder is reached over a link
    verify(folder)
