"""Typed decoding: whatever a file holds, it is a value of the asked type or one line that names file and field."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data.reading.fields import (
    Fields,
    one_line,
    packing_depth,
    parse_json,
    read_json,
    read_object,
    said_of,
    shown,
    whole_number,
)
from pack_data.reading.files import read_regular
from tests.refusals import refused

WAY_OUT = "write it again"

TAKES = {
    "integer": (lambda f, k: f.integer(k, least=0, most=9), int),
    "number": (lambda f, k: f.number(k, least=-1e300), float),
    "boolean": (lambda f, k: f.boolean(k), bool),
    "text": (lambda f, k: f.text(k, most=5), str),
    "one_of": (lambda f, k: f.one_of(k, ("a", 1)), (str, int)),
    "hex_digest": (lambda f, k: f.hex_digest(k, 4), str),
    "plain_name": (lambda f, k: f.plain_name(k), str),
    "object": (lambda f, k: f.object(k), Fields),
    "list_of": (lambda f, k: f.list_of(k, Fields.integer, least=0), list),
    "values_of": (lambda f, k: f.values_of(k, Fields.number), dict),
    "optional": (lambda f, k: f.optional(k, Fields.boolean), (bool, type(None))),
}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.just("../a")
    | st.just("00ff"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("take", TAKES)
@given(value=values)
@settings(max_examples=20, deadline=None)
def test_any_value_is_of_the_type_or_one_line(take, value):
    method, kind = TAKES[take]
    fields = Fields.of({"outer": {"field": value}}, "file.json", WAY_OUT).object("outer")
    try:
        taken = method(fields, "field")
    except ValueError as error:
        assert str(error).startswith("file.json: outer.field") and str(error).endswith(WAY_OUT)
        assert len(str(error).splitlines()) == 1 and str(error).isascii() and len(str(error)) < 600
    else:
        assert isinstance(taken, kind) and (take == "boolean" or take == "optional" or not isinstance(taken, bool))


@pytest.mark.parametrize("take", sorted(set(TAKES) - {"optional"}))
def test_a_missing_field_is_named(take):
    with pytest.raises(ValueError, match="f.json: inner.field is missing; write"):
        TAKES[take][0](Fields("f.json", {}, WAY_OUT, "inner"), "field")


@pytest.mark.parametrize("depth", [0, -1, 2.5, True, "3"])
def test_a_depth_is_refused_by_the_name_of_its_argument(depth):
    with refused("max_sequences_per_pack = ", "at least 1"):
        packing_depth(depth)


def test_an_item_is_named_by_its_number():
    fields = Fields.of({"shards": [{"bytes": 1}, {"bytes": "x"}]}, "m.json", WAY_OUT)
    with pytest.raises(
        ValueError, match=r"m.json: shards\[1\].bytes is 'x'; must be a whole number of at least 0; wri"
    ):
        [shard.integer("bytes", least=0) for shard in fields.list_of("shards", Fields.object)]


def _two_items(fields, key, **rule):
    return fields.list_of(key, Fields.integer, **rule)


# Method, its rule, values at the edge that it returns, values beyond the edge, and the words of the refusal.
EDGES = [
    (Fields.integer, {"least": 2, "most": 4}, [2, 4], [1, 5], "a whole number from 2 to 4"),
    (Fields.integer, {"least": 2}, [2, 10**9], [1], "a whole number of at least 2"),
    (Fields.integer, {"most": 4}, [4, -(10**9)], [5], "a whole number of at most 4"),
    (Fields.integer, {}, [0], [0.0, True], "a whole number;"),
    (Fields.number, {"least": 0.0, "most": 1.0}, [0, 0.0, 1.0], [-0.1, 1.1, 2.0**1023, True], "a finite number from"),
    (Fields.integers, {"least": 2, "most": 4}, [[2, 4], []], [[1], [5], [2, 4, 5], [True]], "from 2 to 4"),
    (Fields.integers, {"length": 2}, [[2, 4]], [[2], [2, 3, 4]], "must have 2 items"),
    (Fields.text, {"most": 3}, ["", "abc"], ["abcd"], "0 to 3 characters"),
    (Fields.text, {"empty": False}, ["a"], [""], "1 to 65536 characters"),
    (Fields.text, {}, ["a b"], ["a\nb"], "printable"),
    (Fields.text, {"printable": False}, ["a\nb"], [1], "a text of"),
    (Fields.one_of, {"choices": ("a", 1)}, ["a", 1], ["b", True, 1.0], "'a' or 1"),
    (Fields.hex_digest, {"digits": 4}, ["00ff"], ["00FF", "00ff0", "00f"], "4 hexadecimal digits"),
    (_two_items, {"length": 2}, [[1, 2]], [[1], [1, 2, 3]], "must have 2 items"),
    (_two_items, {"longest": 2}, [[], [1, 2]], [[1, 2, 3]], "at most 2 items"),
]


@pytest.mark.parametrize("take, rule, accepted, beyond, words", EDGES)
def test_a_rule_holds_exactly_at_its_edge(take, rule, accepted, beyond, words):
    for value in accepted:
        taken = take(Fields.of({"field": value}, "f.json", WAY_OUT), "field", **rule)
        assert taken == value and type(taken) in (type(value), float)
    for value in beyond:
        with refused("f.json", "field", words):
            take(Fields.of({"field": value}, "f.json", WAY_OUT), "field", **rule)


def test_only_the_known_names_are_allowed():
    fields = Fields.of({"a": 1, "b": 2}, "f.json", WAY_OUT)
    fields.only("a", "b", "c")
    with refused("f.json", "b", "a, c"):
        fields.only("a", "c")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "..\\a", "c:a", "a\0b", "a\nb", "\udc80", "x" * 256])
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(ValueError, match="plain name"):
        Fields.of({"file": name}, "m.json", WAY_OUT).plain_name("file")


BAD_JSON = {
    "no UTF-8": b'{"a": "\xff"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": "{}".encode("utf-16"),
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "beyond a float": b'{"a": 1e999}',
    "twice": b'{"a": 1, "a": 2}',
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "digits": b"[" + b"9" * 2_000_000 + b"]",
    "cut": b'{"a": [1, 2',
    "empty": b"",
    "more behind it": b"{} {}",
    "no object": b"[1]",
}


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
def test_a_file_that_is_no_object_is_one_line(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_object(path, way_out=WAY_OUT)
    text = str(caught.value)
    assert text.startswith(str(path)) and text.endswith(WAY_OUT) and len(text.splitlines()) == 1 and len(text) < 600


def test_what_is_no_ordinary_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, "/dev/zero", tmp_path / "none", "a\0b"):
        with pytest.raises(ValueError, match=WAY_OUT):
            read_json(path, way_out=WAY_OUT)
    (tmp_path / "large").write_bytes(b" " * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_regular(tmp_path / "large", way_out=WAY_OUT, most_bytes=100)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**99), 2**99)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(value=JSON_VALUES)
@settings(max_examples=30, deadline=None)
def test_json_that_python_writes_is_read_as_it_was(value):
    assert parse_json(json.dumps(value), "f", WAY_OUT) == value


def test_shown_is_short_for_anything():
    bomb: list = []
    for _ in range(60):
        bomb = [bomb, bomb]
    for value in (bomb, 10**9000, "x" * 10**6, {"a" * 1000: 1}, "\ud800\n", list(range(10**5)), np.zeros((9, 9))):
        assert len(shown(value)) <= 200 and shown(value).isprintable() and shown(value).isascii()


def test_a_number_of_thousands_of_digits_is_one_line():
    with pytest.raises(ValueError, match="a number of about 9001 digits; must be"):
        whole_number("max_sequence_length", 10**9000, least=1, most=99)


def test_words_of_others_become_one_printable_line():
    assert one_line("a\nb\t\x1b[31m\x00 é") == "a b \\x1b[31m\\x00 \\xe9" and len(one_line("x" * 1000, 20)) == 20


def test_an_error_is_said_of_a_file_once(tmp_path):
    for words in ("wrong", f"{tmp_path}: wrong"):
        with pytest.raises(ValueError) as raised, said_of(tmp_path):
            raise ValueError(words)
        assert str(raised.value) == f"{tmp_path}: wrong"
