"""Packs on disk: everything in one file, and the rows alone for other loaders."""

import io
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.__main__ import main
from pack_data import PackedLengths, pack, pack_groups, pack_in_order, pack_with_capacity
from tests.refusals import refusal_of, refused

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


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: b"",
        lambda content: content[:-30],
        lambda content: changed(content, pack=PACKED["plain"].pack[::-1]),
        lambda content: changed(content, pack=PACKED["plain"].pack * 0),
        lambda content: changed(content, slot=PACKED["plain"].slot + 1),
        lambda content: changed(content, pack=PACKED["plain"].pack[1:]),
        lambda content: changed(content, lengths=SHORT + 1),
        lambda content: changed(content, header=np.frombuffer(b"{}", np.uint8)),
        lambda content: changed(content, slot=np.array([{}])),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(damaged, tmp_path):
    path = tmp_path / "packs.npz"
    PACKED["plain"].save(path)
    path.write_bytes(damaged(path.read_bytes()))
    with refused(re.escape(str(path)), "PackedLengths.save"):
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


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("eights", lambda packed: {name: np.ones(4, np.int64) for name in ("lengths", "example_lengths")}),
        ("in order", lambda packed: {"slot": np.concatenate([members[::-1] - members[0] for members in packed.bins])}),
        ("capacity", lambda packed: {"weights": packed.weights * 9}),
        ("capacity", lambda packed: {"weights": packed.weights // 3}),
        ("split", lambda packed: {"start": packed.fitted.start - 1}),
        ("plain", lambda packed: {"pack": packed.pack.astype(float)}),
        ("plain", lambda packed: {"group": np.arange(200) // 2}),
        ("groups", lambda packed: {"group": np.arange(200)}),
    ],
)
def test_packs_that_are_not_those_of_their_sequences_are_refused(kind, changes, tmp_path):
    packed = {**PACKED, "eights": pack([8] * 4, max_sequence_length=8)}[kind]
    path = tmp_path / "packs.npz"
    packed.save(path)
    path.write_bytes(changed(path.read_bytes(), **changes(packed)))
    with refused(""):
        PackedLengths.load(path).prove()


def test_a_pack_deeper_than_the_limit_is_refused(tmp_path):
    packed = pack([2] * 4, max_sequence_length=8)
    recipe = packed.packing.recipe()
    accounting = {**recipe["accounting"], "max_sequences_per_pack": 2}
    header = {"packing": {**recipe, "accounting": accounting}, "longer": vars(packed.fitted.longer)}
    packed.save(tmp_path / "packs.npz")
    content = json.dumps({**header, "multiple_of": 1, "prices": None}).encode()
    path = tmp_path / "packs.npz"
    path.write_bytes(changed(path.read_bytes(), header=np.frombuffer(content, np.uint8)))
    with refused(path, "limit is 2"):
        PackedLengths.load(path)


def test_a_name_with_another_ending_is_refused(tmp_path):
    with refused("packs.pkl", ".npz", unchanged=tmp_path):
        PACKED["plain"].save(tmp_path / "packs.pkl")
    with refused("rows.csv", ".parquet", unchanged=tmp_path):
        PACKED["plain"].save_rows(tmp_path / "rows.csv")


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


def test_the_command_writes_the_rows_of_a_file_of_lengths(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    (tmp_path / "lengths.txt").write_text("length\n" + "\n".join(map(str, SHORT)))
    command = ["pack", str(tmp_path / "lengths.txt"), "--rows", str(tmp_path / "rows.parquet")]
    assert main([*command, "--max-sequence-length", "64", "--max-sequences-per-pack", "3"]) == 0
    expected = [members.tolist() for members in PACKED["plain"].bins]
    assert rows_in(tmp_path / "rows.parquet") == {"indices": expected}
    assert f"{len(expected)}" in capsys.readouterr().out

    assert main([*command, "--multiple-of", "8"]) == 0  # rows of the longest sequence
    assert "of 32 slots" in capsys.readouterr().out
    np.save(tmp_path / "long.npy", LENGTHS)
    options = ["--max-sequence-length", "64", "--longer", "split", "--multiple-of", "4"]
    assert main(["pack", str(tmp_path / "long.npy"), "--rows", str(tmp_path / "rows.jsonl"), *options]) == 0
    assert len(rows_in(tmp_path / "rows.jsonl")["stop"]) == PACKED["split"].packing.packs
    assert "split into" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["wikipedia_512", "--rows", "rows.jsonl"], ["wikipedia_512", "histogram"]),
        (["lengths.txt", "--rows", "rows.csv"], ["--rows rows.csv", ".npy"]),
        (["lengths.txt", "--rows", "rows.npy", "--max-sequence-length", "4"], ["sequence 0", "length 9"]),
        (["missing.txt", "--rows", "rows.npy"], ["missing.txt"]),
        (["--rows", "rows.npy"], ["SOURCE"]),
    ],
)
def test_refusals_of_the_command(arguments, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.txt").write_text("9\n3\n")
    refusal_of(main, ["pack", *arguments], capsys, *names, unchanged=tmp_path)
