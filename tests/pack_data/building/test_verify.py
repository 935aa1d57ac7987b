"""Faults that a data set can have: each is one line that names the file, and the pack where there is one."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pack_data.building.verify import verify
from pack_data.inspection.verify_command import main
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.store.data_set import (
    CHECKSUM,
    MANIFEST,
    PackStore,
    StoreWriter,
    _checksum,
    _write_table,
    write_shard,
)
from pack_data.store.packs import SLOT, PackSchema, StoredColumn, assemble
from pack_data.store.sequences import Sequences
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refusal_of, refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    build_small(write_corpus(folder / "corpus"), folder / "data").close()
    return folder / "data"


@pytest.fixture
def data(whole, tmp_path):
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_every_changed_byte_is_found(data, capsys):
    """A bit flipped in any file of the data set, at random places."""
    rng = np.random.default_rng(0)
    verify(data)
    names = sorted(path.name for path in data.iterdir() if path.name != MANIFEST)
    assert len(names) == 4
    for name in names:
        content = (data / name).read_bytes()
        for place in rng.integers(0, len(content), 3):
            (data / name).write_bytes(
                content[:place] + bytes([content[place] ^ (1 << rng.integers(8))]) + content[place + 1 :]
            )
            assert name in refusal_of(main, [data], capsys)
        (data / name).write_bytes(content[:-1])
        assert name in refusal_of(main, [data], capsys)
        (data / name).write_bytes(content)
    verify(data)


def seal(data, manifest):
    """Writes a changed manifest with the checksum that it has now."""
    (data / MANIFEST).write_text(json.dumps({**manifest, CHECKSUM: _checksum(manifest)}))


def test_a_shard_has_the_sha256_of_the_manifest(data):
    """The checksums of blocks find changed bytes as well, but other programs compare the sha256."""
    manifest = json.loads((data / MANIFEST).read_text())
    shard = manifest["shards"][0]
    shard["sha256"] = shard["sha256"][::-1]
    seal(data, manifest)
    with pytest.raises(ValueError, match=rf"{shard['file']}.*sha256"):
        verify(data)


def forge(data, change):
    """Applies `change` to the records of the first shard and makes checksums, lengths and manifest fit again, except
    the digest."""
    manifest = json.loads((data / MANIFEST).read_text())
    records = np.load(data / manifest["shards"][0]["file"])
    with PackStore.open(data) as store:
        lengths = np.array(store.lengths())
    change(records)
    for name in lengths.dtype.names:
        lengths[name][: len(records)] = records[name]
    manifest["shards"][0] = write_shard(data, 0, records).to_json()
    table = _write_table(data, "lengths", lengths.dtype, [lengths], len(lengths))
    manifest["lengths"] = table.to_json()
    counts = np.bincount(lengths["lengths"].reshape(-1), minlength=65)[:65]
    counts[0] = 0
    manifest.update(
        sequences=int(counts.sum()),
        tokens=int(counts @ np.arange(65)),
        packs=len(lengths),
        histogram={str(length): int(count) for length, count in enumerate(counts) if count},
        packing_factor=int(counts.sum()) / len(lengths),
        efficiency=int(counts @ np.arange(65)) / (len(lengths) * 64),
    )
    seal(data, manifest)


def set_value(name, row, column, value):
    def change(records):
        records[name][row, column] = value

    return change


def has_padding(lengths):
    return lengths.sum(axis=1) < 64


def unused(name, column, packs_of):
    """A 1 where the first of the packs that `packs_of` finds by their lengths has no value."""

    def change(records):
        records[name][int(np.argmax(packs_of(records["lengths"]))), column] = 1

    return change


def gap(records):
    row = int(np.argmax((records["lengths"] > 0).sum(axis=1) == 2))
    records["lengths"][row] = [records["lengths"][row, 0], 0, records["lengths"][row, 1]]


def drop_sequence(records):
    """The last sequence of a pack with several, taken out without a trace in the pack."""
    row = int(np.argmax((records["lengths"] > 0).sum(axis=1) > 1))
    last = int((records["lengths"][row] > 0).sum()) - 1
    start = int(records["lengths"][row, :last].sum())
    masked = int(records["prediction_counts"][row, :last].sum())
    records["input_ids"][row, start:] = 0
    for name in ("masked_lm_positions", "masked_lm_ids"):
        records[name][row, masked:] = 0
    for name in (
        "lengths",
        "prediction_counts",
        "first_segment_lengths",
        "next_sentence_labels",
    ):
        records[name][row, last] = 0


def copy_pack(records):
    records[1] = records[0]


def before_its_sequence(records):
    """A masked token of the second sequence of a pack, at the first place of the pack."""
    row = int(np.argmax((records["prediction_counts"][:, :2] > 0).all(axis=1)))
    records["masked_lm_positions"][row, records["prediction_counts"][row, 0]] = 0


@pytest.mark.parametrize(
    "change, names",
    [
        (set_value("lengths", 3, 0, 65), ["pack 3: ", "lengths", "64"]),
        (set_value("lengths", 2, 0, 0), ["pack 2: ", "no sequence"]),
        (set_value("input_ids", 1, 5, 60000), ["pack 1: ", "input_ids", "vocabulary"]),
        (set_value("masked_lm_ids", 4, 0, 60000), ["pack 4: ", "masked_lm_ids", "vocabulary"]),
        (set_value("masked_lm_positions", 4, 0, 64), ["pack 4: ", "masked_lm_positions"]),
        (before_its_sequence, ["masked_lm_positions"]),
        (set_value("first_segment_lengths", 0, 0, 65), ["pack 0: ", "first_segment_lengths"]),
        (set_value("next_sentence_labels", 5, 0, 2), ["pack 5: ", "next_sentence_labels"]),
        (set_value("prediction_counts", 5, 0, 200), ["pack 5: ", "prediction_counts"]),
        (set_value("input_ids", 6, 1, 7), ["digest"]),
        (unused("input_ids", 63, has_padding), ["packs-00000", "input_ids", "outside"]),
        (unused("masked_lm_ids", -1, has_padding), ["packs-00000", "masked_lm_ids", "outside"]),
        (
            unused("next_sentence_labels", 2, lambda lengths: lengths[:, 2] == 0),
            ["next_sentence_labels", "outside"],
        ),
        (
            unused("prediction_counts", 2, lambda lengths: lengths[:, 2] == 0),
            ["prediction_counts"],
        ),
        (gap, ["lengths", "gap"]),
        (drop_sequence, ["digest"]),
        (copy_pack, ["digest"]),
    ],
)
def test_rules_that_checksums_do_not_see(data, capsys, change, names):
    forge(data, change)
    refusal_of(main, [data], capsys, *names, unchanged=data)


def renewed(data, manifest, name):
    """Renew the entry of a changed file in the manifest."""
    content = (data / name).read_bytes()
    entry = next(entry for entry in manifest["files"] if entry["file"] == name)
    entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def another_recipe(data, manifest):
    recipe = Packing.load(data / "recipe.json")
    get_packer("none")(LengthHistogram(recipe.placed()), max_sequences_per_pack=3).save(data / "recipe.json")
    renewed(data, manifest, "recipe.json")


def another_vocabulary(data, manifest):
    (data / "vocab.txt").write_text((data / "vocab.txt").read_text() + "zzz\n")
    renewed(data, manifest, "vocab.txt")


def another_bound(data, manifest):
    manifest["lower_bound"] = 1


def another_length(data, manifest):
    """One sequence of the longest length is a token shorter in the manifest."""
    longest = max(map(int, manifest["histogram"]))
    manifest["histogram"][str(longest)] -= 1
    manifest["histogram"][str(longest - 1)] = manifest["histogram"].get(str(longest - 1), 0) + 1
    manifest["histogram"] = {length: count for length, count in manifest["histogram"].items() if count}
    manifest["tokens"] -= 1
    manifest["efficiency"] = manifest["tokens"] / (manifest["packs"] * 64)


def lengths_of_others(data, manifest):
    with PackStore.open(data) as store:
        lengths = np.array(store.lengths())[::-1]
    manifest["lengths"] = _write_table(data, "lengths", lengths.dtype, [lengths], len(lengths)).to_json()


@pytest.mark.parametrize(
    "change, names",
    [
        (another_recipe, ["recipe.json", "packs"]),
        (another_bound, ["recipe.json", "lower bound"]),
        (another_vocabulary, ["vocab.txt", "manifest"]),
        (another_length, ["sequences of length", "manifest"]),
        (lengths_of_others, ["lengths-", "packs-00000"]),
    ],
)
def test_files_that_contradict_each_other(data, capsys, change, names):
    """Each has its right checksum."""
    manifest = json.loads((data / MANIFEST).read_text())
    change(data, manifest)
    seal(data, manifest)
    refusal_of(main, [data], capsys, data, *names)


def test_values_that_no_batch_can_hold(tmp_path):
    schema = PackSchema.of_tokens(4, 1, [StoredColumn("ids", SLOT, "<u4")])
    writer = StoreWriter(tmp_path, schema)
    ids = {"ids": np.array([1, 2**31 - 1, 2**31], np.uint32)}
    writer.add(assemble(schema, Sequences.of_tokens([2, 1], ids), np.arange(2), np.zeros(2, int), 2))
    writer.finish(algorithm="none").close()
    with refused("packs-00000", "pack 1: ", "ids", "int32"):
        verify(tmp_path)


def test_a_data_set_that_version_1_appended_to_is_verified(tmp_path):
    """Its two shards and its recipe are of two builds; `--append` is gone, such data sets are still read."""
    shutil.unpack_archive(Path(__file__).parents[2] / "data" / "appended_by_version_1.zip", tmp_path)
    manifest = verify(tmp_path / "data").manifest
    assert (len(manifest.shards), manifest.packs, manifest.sequences) == (2, 31, 31)
    with PackStore.open(tmp_path / "data") as store:
        assert (store.batch(np.arange(31))["next_sentence_weights"].sum(axis=1) == 1).all()
