# ruff: noqa: F401  (names of the calls)
"""Files and fields that are not what they must be: each is refused in one line that names file, field and rule."""

import gzip
import io
import itertools
import os
import types

import numpy as np
import pytest

from pack_data.lengths.counting import count
from pack_data.reading import compressed, files
from pack_data.reading.bad_records import BadRecords
from pack_data.reading.durable import check_new_folder, not_through_links
from pack_data.reading.encodings import check_encoding, lines_of_numbers
from pack_data.reading.fields import Fields, packing_depth, parse_json, read_json, read_object, whole_number
from pack_data.reading.files import check_regular, file_in, locked, read_regular, sha256_of
from pack_data.reading.hugging_face import lengths_of
from pack_data.reading.npy import map_array, read_array
from pack_data.reading.packages import load_package, require
from pack_data.text.corpus import documents
from pack_data.text.vocabulary import load_tokenizer
from tests.refusals import faults_of_refusals, rows_of

WAY_OUT = "write it again"
ITEMS = {"shards": [{"bytes": 1}, {"bytes": "x"}]}
HEADER = "{'descr': %s, 'fortran_order': False, 'shape': %s}"

FIELDS = [
    *rows_of(
        r"""
whole_number('max_sequence_length', 10**9000, least=1, most=99) => about 9001 digits | 1 to 99
whole_number('n', np.bool_(True)) => n = | whole number
[s.integer('bytes', least=0) for s in of(ITEMS).list_of('shards', Fields.object)] => f.json | shards[1].bytes
of({'a': 1, 'b': 2}).only('a', 'c') => f.json | b | a, c
of([1]) => f.json | object
# A rule holds exactly at its edge.
take('integer', 1, least=2) => field | at least 2
take('integer', 5, most=4) => field | at most 4
take('text', 'abcd', most=3) => field | 0 to 3
take('text', '', empty=False) => field | 1 to 65536
take('text', 'a\nb') => field | printable
take('text', 1, printable=False) => field | text
take('list_of', [1, 2, 3], take=Fields.integer, longest=2) => field | at most 2
"""
    ),
    *(
        (f"packing_depth({depth})", ["max_sequences_per_pack = ", "at least 1"])
        for depth in ("0", "2.5", "True", "'3'")
    ),
    *((f"take('integer', {value}, least=2, most=4)", ["field", "from 2 to 4"]) for value in (1, 5)),
    *((f"take('integer', {value})", ["field", "whole number"]) for value in (0.0, True)),
    *((f"take('number', {value}, least=0.0, most=1.0)", ["field", "finite"]) for value in (-0.1, 1.1, 2.0**1023, True)),
    *((f"take('integers', {value}, least=2, most=4)", ["from 2 to 4"]) for value in ([1], [5], [2, 4, 5], [True])),
    *((f"take('integers', {value}, length=2)", ["field", "2 items"]) for value in ([2], [2, 3, 4])),
    *((f"take('one_of', {value}, choices=('a', 1))", ["field", "'a' or 1"]) for value in ("'b'", True, 1.0)),
    *((f"take('hex_digest', {value!r}, digits=4)", ["field", "4 hex"]) for value in ("00FF", "00ff0", "00f")),
    *((f"take('list_of', {value}, take=Fields.integer, length=2)", ["2 items"]) for value in ([1], [1, 2, 3])),
    *(
        (f"take('plain_name', {name!r})", ["field", "plain name"])
        for name in ("", ".", "..", "a/b", "/a", "..\\a", "c:a", "a\0b", "a\nb", "\udc80", "x" * 256)
    ),
]
JSON = [
    b'{"a": "\xff"}',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": 1, "a": 2}',
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b"[" + b"9" * 2_000_000 + b"]",
    b'{"a": [1, 2',
    b"",
    b"{} {}",
    b"[1]",
]
HEADERS = [
    HEADER % ("'|O'", "(1,)"),
    HEADER % ("'<U9'", "(1,)"),
    HEADER % ("'<M8[s]'", "(1,)"),
    HEADER % ("'i8, (9999999999,)f4'", "(1,)"),
    HEADER % ("[('a', [('b', '<i4')])]", "(1,)"),
    HEADER % ("[('a', '<i4'), ('a', '<i4')]", "(1,)"),
    HEADER % ("[('a', '<i4', (9999999999,))]", "(1,)"),
    # Columns of 2^32 bytes and 8.
    HEADER % ("[" + "".join(f"('{name}', '<i8', (134217728,)), " for name in "abcd") + "('e', '<i8')]", "(1,)"),
    HEADER % ("'<i8'", "(" + "1, " * 33 + ")"),
    HEADER % ("[]", "(1,)"),
    *(HEADER % ("'<i8'", shape) for shape in ("(99999999999999999, 99999999999999999)", "(9000000000,)", "(-1,)")),
    *(HEADER % ("'<i8'", shape) for shape in ("[1]", "(True,)", "(9**9**9**9,)", "(" + "9" * 50_000 + ",)")),
    "{'descr': '<i8', 'fortran_order': 1, 'shape': (1,)}",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (1,), 'x': 1}",
    "{'descr': '<i8', 'shape': (1,)}",
    HEADER % ("__import__('os').getcwd()", "(1,)"),
    HEADER % ("'\\d'", "(1,)"),
    "(" * 60_000,
    "(" * 9_000 + ")" * 9_000,
    "-" * 60_000,
    "{{}: 1}",
    "{1, 2}",
    HEADER % ("'<i8'", "(1,)") + "\0",
    "",
]
ENDS = [b"", b"\x93NUM", b"\x93NUMPY", b"\x93NUMPY\1\0\xff", b"\x93NUMPY\4\0\0\0", b"\x93NUMPY\2\0" + b"\xff" * 4]
FILES = [
    *rows_of(
        r"""
read_array(two, dtype=np.int64, dimensions=2, way_out=WAY_OUT) => two.npy | int32 in 2 | int64 in 2
read_array(two, dtype=np.int32, dimensions=1, way_out=WAY_OUT) => two.npy | int32 in 2 | int32 in 1
# What is no ordinary file is refused before it is opened.
read_regular(file('large', b' ' * 101), way_out=WAY_OUT, most_bytes=100) => large | more than 100 bytes
file_in(outside, 'link', way_out=WAY_OUT) => link | out of its directory
not_through_links(str(link), os.O_RDWR) => link | remove it
check_new_folder(tmp_path, '--out') => --out | not an empty directory
load_tokenizer(none) => none | tokenizer.json
lengths_of(data_set(text=['a'])) => datasets.Dataset | text | input_ids
lengths_of(data_set(length=[1, None])) => datasets.Dataset | length | empty
lengths_of(data_set(length=[1.5])) => datasets.Dataset | length | double|float64
check_encoding('a.txt', b'abc\0' * 10 + b'\0') => a.txt | UTF-16
load_package('no_such_module.part', 'a thing') => a thing | no_such_module
require('a thing', 'no_such_module', 'numpy', 'no_such_other') => a thing | no_such_module and no_such_other
check_regular(f"{file('plain', b'')}/below") => plain/below | Not a directory
list(lines_of_numbers(file('a.csv', b'1\n' + b'2' * 1001), way_out=WAY_OUT)) => a.csv line 2: | 1000 | write it again
list(lines_of_numbers(file('a.csv', b'1\n\xff'), way_out=WAY_OUT)) => a.csv | not a text table
records_of(b'{}\n\n' + b'3' * 9 + b'\n', longest=8) => a.jsonl: line 3: | 8 bytes
records_of(b'{}\n' + b'3' * 9, longest=8, first=7) => a.jsonl: line 8: | 8 bytes
"""
    ),
    *((f"read_object(file('a.json', JSON[{number}]), way_out=WAY_OUT)", ["a.json", WAY_OUT]) for number in range(14)),
    *(
        (f"map_array(file('a.npy', header(HEADERS[{number}], {version})), way_out=WAY_OUT)", ["a.npy", WAY_OUT])
        for number in range(len(HEADERS))
        for version in (1, 3)
    ),
    *((f"map_array(file('a.npy', {end!r}), way_out=WAY_OUT)", ["a.npy", WAY_OUT]) for end in ENDS),
    ("map_array(file('a.npy', b'\\x80\\x04cos\\nsystem\\n'), way_out=WAY_OUT)", ["a.npy", WAY_OUT]),
    *(
        (f"{reader}({path}, way_out=WAY_OUT)", [WAY_OUT, name])
        for reader in ("read_json", "map_array", "sha256_of")
        for path, name in (
            ("pipe", "a pipe"),
            ("'/dev/zero'", "a device"),
            ("tmp_path", "a directory"),
            ("none", "no such"),
        )
    ),
    ("read_json('a\\0b', way_out=WAY_OUT)", ["a", "null|NUL", WAY_OUT]),
    ("read_json(device_link, way_out=WAY_OUT)", ["a device", WAY_OUT]),
    # A lost compressed file is not an empty one.
    *(
        (f"{reader}(file('a.txt{suffix}', {content!r}))", [f"a.txt{suffix}", "copy it again"])
        for suffix in (".gz", ".xz", ".bz2")
        for content in (b"", bytes(50), b"text")
        for reader in ("count_one", "texts_of")
    ),
]


def of(values):
    return Fields.of(values, "f.json", WAY_OUT)


def take(method, value, **rule):
    fields = of({"field": value})
    if method == "list_of":
        return fields.list_of("field", rule.pop("take"), **rule)
    return getattr(fields, method)("field", **rule)


def header(text, version):
    content = text.encode("latin-1")
    length = len(content).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + content + bytes(8)


def data_set(**columns):
    table = pytest.importorskip("pyarrow").table(columns)
    given = types.SimpleNamespace(column_names=list(columns), iter=lambda rows: [table])
    given.select_columns = given.with_format = lambda _: given
    return given


def records_of(content, longest, first=1):
    return list(BadRecords(longest=longest).short_lines(io.BytesIO(content), "a.jsonl", first))


def count_one(path):
    return count([str(path)])


def texts_of(path):
    return list(documents(path))


def test_fields_are_refused():
    faults = faults_of_refusals(FIELDS, globals())
    assert not faults, "\n".join(faults)


def test_files_are_refused(tmp_path):
    fresh = itertools.count()

    def file(name, content):
        path = tmp_path / str(next(fresh)) / name
        path.parent.mkdir()
        path.write_bytes(content)
        return path

    two = tmp_path / "two.npy"
    np.save(two, np.ones((2, 2), np.int32))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    device_link = tmp_path / "device"
    device_link.symlink_to("/dev/zero")
    outside = tmp_path / "outside"
    outside.mkdir()
    link = outside / "link"
    link.symlink_to(two)
    none = tmp_path / "none"
    faults = faults_of_refusals(FILES, {**globals(), **locals()})
    assert not faults, "\n".join(faults)
    assert map_array(two, way_out=WAY_OUT).sum() == 4


def test_an_error_of_the_system_names_the_file(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "a.txt"
    path.write_text("")
    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(ValueError, match=r"a\.txt.*Permission denied"), files.open_regular(path):
        pass


def test_the_limit_of_decompression(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "ALWAYS_UNPACKED", 1000)
    monkeypatch.setattr(compressed, "MOST_TIMES", 1)
    path = tmp_path / "a.txt.gz"
    for more in (0, 1):
        path.write_bytes(gzip.compress(bytes(1000 + more)))
        with compressed.open_unpacked(path) as file:
            if not more:
                assert len(file.read()) == 1000
                continue
            with pytest.raises(ValueError, match=r"a\.txt\.gz.*1 times"):
                file.read()
