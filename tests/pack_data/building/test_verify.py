"""Faults that a data set can have: each is one line that names the file, and the pack where there is one."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pack_data.building import stages
from pack_data.building.verify import verify
from pack_data.inspection.verify_command import main
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.store.data_set import CHECKSUM, MANIFEST, PackStore, checksum, write_shard, write_table
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refusal_of


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
    (data / MANIFEST).write_text(json.dumps({**manifest, CHECKSUM: checksum(manifest)}))


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
    table = write_table(data, "lengths", lengths.dtype, iter([lengths]), len(lengths))
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
    for name in ("lengths", "prediction_counts", "first_segment_lengths", "next_sentence_labels"):
        records[name][row, last] = 0


def copy_pack(records):
    records[1] = records[0]


@pytest.mark.parametrize(
    "change, said",
    [
        (set_value("lengths", 3, 0, 65), "pack 3: lengths: more than 64"),
        (set_value("lengths", 2, 0, 0), "pack 2: holds no sequence"),
        (set_value("input_ids", 1, 5, 60000), "pack 1: input_ids: an id outside the vocabulary"),
        (set_value("masked_lm_ids", 4, 0, 60000), "pack 4: masked_lm_ids: an id outside"),
        (set_value("masked_lm_positions", 4, 0, 64), "pack 4: masked_lm_positions: outside the sequence"),
        (set_value("first_segment_lengths", 0, 0, 65), "pack 0: first_segment_lengths"),
        (set_value("next_sentence_labels", 5, 0, 2), "pack 5: next_sentence_labels: neither"),
        (set_value("prediction_counts", 5, 0, 200), "pack 5: prediction_counts: more than"),
        (set_value("input_ids", 6, 1, 7), "digest"),
        (unused("input_ids", 63, has_padding), "input_ids: a value in the padding"),
        (unused("masked_lm_ids", -1, has_padding), "masked_lm_ids: a value in an unused place"),
        (unused("next_sentence_labels", 2, lambda lengths: lengths[:, 2] == 0), "labels: a value where no sequence"),
        (gap, "lengths: a gap between its sequences"),
        (drop_sequence, "digest"),
        (copy_pack, "digest"),
    ],
)
def test_rules_that_checksums_do_not_see(data, capsys, change, said):
    forge(data, change)
    assert said in refusal_of(main, [data], capsys)


def test_packs_of_another_recipe(data, capsys):
    """A recipe that places the same sequences in other packs, its checksum right."""
    recipe = Packing.load(data / "recipe.json")
    get_packer("none")(LengthHistogram(recipe.placed()), max_sequences_per_pack=3).save(data / "recipe.json")
    content = (data / "recipe.json").read_bytes()
    manifest = json.loads((data / MANIFEST).read_text())
    entry = next(entry for entry in manifest["files"] if entry["file"] == "recipe.json")
    entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    seal(data, manifest)
    assert "not the ones of this recipe" in refusal_of(main, [data], capsys)


def test_several_processes_read_the_same_and_find_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stages, "SLOTS_PER_SHARD", 64 * 8)
    build_small(write_corpus(tmp_path / "corpus"), tmp_path / "data").close()
    found = verify(tmp_path / "data", workers=2)
    assert found == verify(tmp_path / "data") and len(found.manifest.shards) > 3
    path = tmp_path / "data" / found.manifest.shards[2].file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = {refusal_of(main, [tmp_path / "data", "--workers", workers], capsys) for workers in ("1", "2")}
    assert len(said) == 1 and path.name in said.pop()


def test_a_data_set_that_version_1_appended_to_is_verified(tmp_path):
    """Its two shards and its recipe are of two builds; `--append` is gone, such data sets are still read."""
    shutil.unpack_archive(Path(__file__).parents[2] / "data" / "appended_by_version_1.zip", tmp_path)
    manifest = verify(tmp_path / "data").manifest
    assert (len(manifest.shards), manifest.packs, manifest.sequences) == (2, 31, 31)
    with PackStore.open(tmp_path / "data") as store:
        assert (store.batch(np.arange(31))["next_sentence_weights"].sum(axis=1) == 1).all()
