"""`.npy` files: what NumPy writes is read as NumPy reads it; damage of any kind is one line, and nothing is run."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data.reading.durable import write_array
from pack_data.reading.npy import map_array

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


def test_arrays_are_written_and_read_as_numpy_does(tmp_path):
    path = tmp_path / "a.npy"
    for values, version in [*itertools.product(VALUES, VERSIONS), (NOT_LATIN, (3, 0))]:
        with open(path, "wb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.lib.format.write_array(file, values, version)
        mapped = map_array(path, way_out=WAY_OUT)
        expected = np.load(path)
        assert (mapped.dtype, mapped.shape) == (expected.dtype, expected.shape)
        assert mapped.tobytes() == expected.tobytes()
    for values in VALUES:
        contiguous = np.array(values, order="C")
        write_array(path, contiguous)
        np.save(tmp_path / "numpy.npy", contiguous)
        assert path.read_bytes() == (tmp_path / "numpy.npy").read_bytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, np.ones(4, RECORD))
    return path, path.read_bytes()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_damage_to_a_header_is_one_line_or_another_array_of_the_same_bytes(file, data):
    path, content = file
    start = data.draw(st.integers(0, 190))
    length = data.draw(st.integers(0, 12))
    letters = st.text("0123456789,'()[]{}<>|-TrueFalsL:", max_size=12).map(str.encode)
    insert = data.draw(st.binary(max_size=12) | letters)
    damaged = content[:start] + insert + content[start + length :]
    path.write_bytes(damaged)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            values = map_array(path, way_out=WAY_OUT)
    except ValueError as error:
        assert str(error).startswith(str(path))
        assert len(str(error).splitlines()) == 1
    else:
        assert values.offset + values.size * values.itemsize == len(damaged)
