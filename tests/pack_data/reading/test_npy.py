"""`.npy` files: what NumPy writes is read as NumPy reads it; damage of any kind is one line, and nothing is run."""

import itertools
import os
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data.reading.npy import map_array, read_array

WAY_OUT = "write it again"
RECORD = np.dtype([("lengths", "<u2", (3,)), ("ids", "|u1", (4, 2)), ("one", "<i4")])
VERSIONS = ((1, 0), (2, 0), (3, 0))
VALUES = (
    np.arange(6),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 4), np.uint8),
    np.array(7, np.float32),
    np.array([True, False]),
    np.ones(3, RECORD),
)
NOT_LATIN = np.ones(2, [("\u03bb 'x", "<u8")])  # a name that only version 3.0 can hold


@pytest.mark.parametrize(
    "values, version",
    [*itertools.product(VALUES, VERSIONS), (NOT_LATIN, (3, 0))],
    ids=lambda value: f"{value.dtype.str}{value.shape}" if isinstance(value, np.ndarray) else str(value),
)
def test_what_numpy_writes_is_read_as_numpy_reads_it(tmp_path, values, version):
    path = tmp_path / "a.npy"
    with open(path, "wb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.lib.format.write_array(file, values, version)
    found, expected = map_array(path, way_out=WAY_OUT), np.load(path)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def refused(path):
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        with pytest.raises(ValueError) as caught:
            map_array(path, way_out=WAY_OUT)
    assert not [each for each in noted if each.category is not ResourceWarning]
    text = str(caught.value)
    assert text.startswith(str(path)) and text.endswith(WAY_OUT) and len(text.splitlines()) == 1 and len(text) < 400
    return text


def with_header(path, text, version=b"\1\0", body=b""):
    content = text.encode("latin-1")
    length = len(content).to_bytes(2 if version == b"\1\0" else 4, "little")
    path.write_bytes(b"\x93NUMPY" + version + length + content + body)


HEADERS = {
    "an object": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "texts": "{'descr': '<U9', 'fortran_order': False, 'shape': (1,)}",
    "a time": "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,)}",
    "no type": "{'descr': 'i8, (9999999999,)f4', 'fortran_order': False, 'shape': (1,)}",
    "a record in a record": "{'descr': [('a', [('b', '<i4')])], 'fortran_order': False, 'shape': (1,)}",
    "a column twice": "{'descr': [('a', '<i4'), ('a', '<i4')], 'fortran_order': False, 'shape': (1,)}",
    "a wide column": "{'descr': [('a', '<i4', (9999999999,))], 'fortran_order': False, 'shape': (1,)}",
    "columns of 2^32 bytes and 8": "{'descr': ["
    + "".join(f"('{name}', '<i8', (134217728,)), " for name in "abcd")
    + "('e', '<i8')], 'fortran_order': False, 'shape': (1,)}",
    "too many dimensions": "{'descr': '<i8', 'fortran_order': False, 'shape': (" + "1, " * 33 + ")}",
    "no columns": "{'descr': [], 'fortran_order': False, 'shape': (1,)}",
    "huge": "{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999, 99999999999999999)}",
    "more than there is": "{'descr': '<i8', 'fortran_order': False, 'shape': (9000000000,)}",
    "negative": "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}",
    "a list for a shape": "{'descr': '<i8', 'fortran_order': False, 'shape': [1]}",
    "truth for a size": "{'descr': '<i8', 'fortran_order': False, 'shape': (True,)}",
    "an order of 1": "{'descr': '<i8', 'fortran_order': 1, 'shape': (1,)}",
    "a field more": "{'descr': '<i8', 'fortran_order': False, 'shape': (1,), 'x': 1}",
    "a field less": "{'descr': '<i8', 'shape': (1,)}",
    "a call": "{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (1,)}",
    "a power": "{'descr': '<i8', 'fortran_order': False, 'shape': (9**9**9**9,)}",
    "an escape": "{'descr': '\\d', 'fortran_order': False, 'shape': (1,)}",
    "deep": "(" * 60_000,
    "deep and closed": "(" * 9_000 + ")" * 9_000,
    "signs": "-" * 60_000,
    "digits": "{'descr': '<i8', 'fortran_order': False, 'shape': (" + "9" * 50_000 + ",)}",
    "unhashable": "{{}: 1}",
    "a set": "{1, 2}",
    "a NUL": "{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}\0",
    "empty": "",
}


@pytest.mark.parametrize("version", [b"\1\0", b"\2\0", b"\3\0"])
@pytest.mark.parametrize("text", HEADERS.values(), ids=HEADERS)
def test_a_header_of_another_form_is_one_line(tmp_path, text, version):
    with_header(tmp_path / "a.npy", text, version, bytes(8))
    refused(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUM",
        b"\x93NUMPY",
        b"\x93NUMPY\1\0\xff",
        b"\x93NUMPY\4\0\0\0",
        b"\x93NUMPY\2\0\xff\xff\xff\xff{",
        b"\x80\x04cos\nsystem\n",
        b"PK\3\4",
    ],
)
def test_a_file_that_ends_in_its_header_or_is_another_is_one_line(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    refused(tmp_path / "a.npy")


def test_no_ordinary_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in refused(tmp_path / "pipe") and "is a directory" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "none") and "is a device" in refused(tmp_path.__class__("/dev/zero"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, np.ones(4, RECORD))
    return path, path.read_bytes()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_to_a_header_is_one_line_or_another_array_of_the_same_bytes(file, data):
    path, content = file
    start, length = data.draw(st.integers(0, 190)), data.draw(st.integers(0, 12))
    insert = data.draw(
        st.binary(max_size=12) | st.text("0123456789,'()[]{}<>|-TrueFalsL:", max_size=12).map(str.encode)
    )
    damaged = content[:start] + insert + content[start + length :]
    path.write_bytes(damaged)
    try:
        values = map_array(path, way_out=WAY_OUT)
    except ValueError as error:
        assert str(error).startswith(str(path)) and len(str(error).splitlines()) == 1
    else:
        assert values.offset + values.size * values.itemsize == len(damaged)


def test_another_type_or_shape_than_asked(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 2), np.int32))
    for dtype, dimensions in ((np.int64, 2), (np.int32, 1)):
        with pytest.raises(ValueError, match="holds int32 in 2 dimensions, must be"):
            read_array(tmp_path / "a.npy", dtype=dtype, dimensions=dimensions, way_out=WAY_OUT)
    assert read_array(tmp_path / "a.npy", dtype=np.int32, dimensions=2, way_out=WAY_OUT).sum() == 4
