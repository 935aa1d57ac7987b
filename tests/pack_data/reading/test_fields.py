"""Typed decoding: whatever a file holds, it is a value of the wanted type or one line that names file and field."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data.reading.fields import Fields, one_line, parse_json, said_of, shown

WAY_OUT = "write it again"

TAKES = {
    "integer": (lambda fields, key: fields.integer(key, least=0, most=9), int),
    "number": (lambda fields, key: fields.number(key, least=-1e300), float),
    "boolean": (lambda fields, key: fields.boolean(key), bool),
    "text": (lambda fields, key: fields.text(key, most=5), str),
    "one_of": (lambda fields, key: fields.one_of(key, ("a", 1)), (str, int)),
    "hex_digest": (lambda fields, key: fields.hex_digest(key, 4), str),
    "plain_name": (lambda fields, key: fields.plain_name(key), str),
    "object": (lambda fields, key: fields.object(key), Fields),
    "list_of": (lambda fields, key: fields.list_of(key, Fields.integer, least=0), list),
    "values_of": (lambda fields, key: fields.values_of(key, Fields.number), dict),
    "optional": (lambda fields, key: fields.optional(key, Fields.boolean), (bool, type(None))),
}
LEAVES = [
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.sampled_from(["../a", "00ff"]),
]


def nested(leaves):
    return st.recursive(
        st.one_of(leaves),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )


@pytest.mark.parametrize("take", TAKES)
@given(value=nested(LEAVES))
@settings(max_examples=20, deadline=None)
def test_any_value_is_of_the_type_or_one_line(take, value):
    method, kind = TAKES[take]
    fields = Fields.of({"outer": {"field": value}}, "file.json", WAY_OUT).object("outer")
    try:
        taken = method(fields, "field")
    except ValueError as error:
        text = str(error)
        assert text.startswith("file.json: outer.field")
        assert text.endswith(WAY_OUT)
        assert len(text.splitlines()) == 1
        assert text.isascii()
        assert len(text) < 600
    else:
        assert isinstance(taken, kind)
        assert take in ("boolean", "optional") or not isinstance(taken, bool)


def test_a_missing_field_is_named():
    empty = Fields("f.json", {}, WAY_OUT, "inner")
    for take, (method, _) in TAKES.items():
        if take != "optional":
            with pytest.raises(ValueError, match="f.json: inner.field is missing"):
                method(empty, "field")


# A value at each edge of a rule is returned; test_refused.py has the values beyond it.
EDGES = [
    (Fields.integer, {"least": 2, "most": 4}, [2, 4]),
    (Fields.integer, {"least": 2}, [2, 10**9]),
    (Fields.integer, {"most": 4}, [4, -(10**9)]),
    (Fields.number, {"least": 0.0, "most": 1.0}, [0, 0.0, 1.0]),
    (Fields.integers, {"least": 2, "most": 4}, [[2, 4], []]),
    (Fields.integers, {"length": 2}, [[2, 4]]),
    (Fields.text, {"most": 3}, ["", "abc"]),
    (Fields.text, {"empty": False}, ["a", "a b"]),
    (Fields.text, {"printable": False}, ["a\nb"]),
    (Fields.one_of, {"choices": ("a", 1)}, ["a", 1]),
    (Fields.hex_digest, {"digits": 4}, ["00ff"]),
    (Fields.list_of, {"take": Fields.integer, "length": 2, "longest": 2}, [[1, 2]]),
]


@pytest.mark.parametrize("take, rule, accepted", EDGES)
def test_a_value_at_the_edge_of_a_rule_is_returned(take, rule, accepted):
    for value in accepted:
        taken = take(Fields.of({"field": value}, "f.json", WAY_OUT), "field", **rule)
        assert taken == value
        assert type(taken) in (type(value), float)


@given(value=nested([st.none(), st.booleans(), st.integers(-(2**99), 2**99), st.floats(-1e300, 1e300), st.text()]))
@settings(max_examples=30, deadline=None)
def test_json_that_python_writes_is_read_as_it_was(value):
    assert parse_json(json.dumps(value), "f", WAY_OUT) == value


def test_a_value_in_a_message_is_short_and_printable():
    bomb: list = []
    for _ in range(60):
        bomb = [bomb, bomb]
    for value in (bomb, 10**9000, "x" * 10**6, {"a" * 1000: 1}, "\ud800\n", list(range(10**5)), np.zeros((9, 9))):
        text = shown(value)
        assert len(text) <= 200
        assert text.isprintable()
        assert text.isascii()
    assert shown([*range(99)]) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert shown({"a": {"x": [1]}, "b": 2, "c": 3, "d": 4}) == "{'a': {'x': [...]}, 'b': 2, 'c': 3, ...}"
    assert len(shown("x" * 99)) == 60
    assert len(shown(2**256 - 1)) == 40
    assert shown(2**256) == "a number of about 78 digits"
    assert one_line("a\nb\t\x1b[31m\x00 é") == "a b \\x1b[31m\\x00 \\xe9"
    assert len(one_line("x" * 1000, 20)) == 20


def test_an_error_names_its_file_once(tmp_path):
    for words in ("wrong", f"{tmp_path}: wrong"):
        with pytest.raises(ValueError) as raised, said_of(tmp_path):
            raise ValueError(words)
        assert str(raised.value) == f"{tmp_path}: wrong"
