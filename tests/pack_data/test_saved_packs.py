"""Packs on disk: everything in one file, and the rows alone for other loaders."""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import PackedLengths, pack, pack_groups, pack_in_order, pack_with_capacity
from tests.refusals import refused

LENGTHS = np.random.default_rng(0).integers(1, 90, 200)
SHORT = LENGTHS % 30 + 1
PACKED = {
    "plain": pack(SHORT, max_sequence_length=64, max_sequences_per_pack=3),
    "split": pack(LENGTHS, max_sequence_length=64, longer="split", multiple_of=4),
    "drop": pack(LENGTHS, max_sequence_length=64, longer="drop"),
    "groups": pack_groups(SHORT, np.arange(200) // 2, max_sequence_length=64),
    "in order": pack_in_order(SHORT, max_sequence_length=64, max_sequences_per_pack=4),
    "capacity": pack_with_capacity(SHORT, LENGTHS, capacity=100, max_sequence_length=64),
    "empty": pack([], max_sequence_length=8),
}
every_kind = pytest.mark.parametrize("kind", PACKED)


@every_kind
def test_what_is_loaded_is_what_was_saved(kind, tmp_path):
    packed = PACKED[kind]
    packed.save(tmp_path / "packs.npz")
    loaded = PackedLengths.load(tmp_path / "packs.npz")
    for name in ("pack", "slot"):
        assert np.array_equal(getattr(loaded, name), getattr(packed, name))
    for name in ("lengths", "example", "start", "example_lengths"):
        assert np.array_equal(getattr(loaded.fitted, name), getattr(packed.fitted, name))
    assert loaded.packing == packed.packing and loaded.prove() == packed.prove()
    assert loaded.multiple_of == packed.multiple_of and loaded.fitted.longer == packed.fitted.longer


def changed(content, **values):
    """Return the content of a .npz file with some of its arrays replaced."""
    arrays = dict(np.load(io.BytesIO(content)))
    written = io.BytesIO()
    np.savez(written, **{**arrays, **values})
    return written.getvalue()


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "packs.npz"
    PACKED["plain"].save(path)
    whole = path.read_bytes()
    damages = {"header": np.frombuffer(b"{}", np.uint8), "slot": np.array([{}]), "pack": np.ones(3, int)}
    for content in (b"", whole[:-30], *(changed(whole, **{name: damages[name]}) for name in damages)):
        path.write_bytes(content)
        with refused(path, "PackedLengths.save"):
            PackedLengths.load(path)


def altered(array, index, value):
    array = array.copy()
    array[index] = value
    return array


@every_kind
@given(data=st.data())
def test_a_file_with_one_other_value_is_refused_or_has_the_same_packing(kind, data):
    """Four tokens were "proved" to need four packs of 8 slots, and packs deeper than the limit were loaded."""
    packed = PACKED[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "packs.npz")
        packed.save(path)
        arrays = dict(np.load(path))
        name = data.draw(st.sampled_from([name for name in arrays if arrays[name].size]), "array")
        index = data.draw(st.integers(0, arrays[name].size - 1), "index")
        old = int(arrays[name][index])
        numbers = [old + 1, old - 1, 0, int(arrays[name][-1 - index]), 1 << 40]
        value = data.draw(st.sampled_from([*b"0123456789-tn"] if name == "header" else numbers), "value")
        array = altered(arrays[name].astype(np.uint8 if name == "header" else np.int64), index, value)
        path.write_bytes(changed(path.read_bytes(), **{name: array}))
        try:
            loaded = PackedLengths.load(path)
            proof = loaded.prove()
        except ValueError as error:
            assert "\n" not in str(error)
            return
    assert proof.lower_bound == packed.packing.lower_bound
    for field in ("strategies", "repeats", "max_sequence_length", "max_sequences_per_pack"):
        assert getattr(loaded.packing, field) == getattr(packed.packing, field)
    for array in ("pack", "slot"):
        assert np.array_equal(getattr(loaded, array), getattr(packed, array))
    if kind == "capacity":
        assert np.bincount(loaded.pack, loaded.weights).max() <= 100


def rows_in(path):
    """Return {name: list of each row} of a file of rows."""
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pydict()
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ["indices"])}
    offsets = np.load(path.with_suffix(".offsets.npy"))
    names = {"indices": path, **{name: path.with_suffix(f".{name}.npy") for name in ("start", "stop")}}
    columns = {name: np.load(file) for name, file in names.items() if file.exists()}
    return {
        name: [values[start:end].tolist() for start, end in zip(offsets, offsets[1:])]
        for name, values in columns.items()
    }


@every_kind
@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".npy"])
def test_rows_are_the_bins_as_other_loaders_read_them(kind, ending, tmp_path):
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    packed = PACKED[kind]
    packed.save_rows(tmp_path / f"rows{ending}")
    expected = {"indices": [packed.fitted.example[members].tolist() for members in packed.bins]}
    if kind == "split":
        for name in ("start", "stop"):
            expected[name] = [getattr(packed.fitted, name)[members].tolist() for members in packed.bins]
    assert rows_in(tmp_path / f"rows{ending}") == expected
