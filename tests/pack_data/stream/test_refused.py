"""Options, lengths, examples and states that a stream refuses, each in one line that names field and value."""

# ruff: noqa: F401  names that the table uses

import json

import numpy as np

from pack_data import LengthHistogram
from pack_data.stream import PackStream
from pack_data.stream.rows import PackRows, packed_rows
from tests.refusals import faults_of_refusals, rows_of

LONG = {"input_ids": list(range(10))}


def begun(**options):
    """A stream in which a sequence waits."""
    stream = PackStream(10, buffer_sequences=4, **options)
    stream.put("a", 7)
    return stream


STREAM = begun()


def loaded(**changed):
    """Load the state of a stream with some values changed, also inside of its dictionaries."""
    state = STREAM.state_dict()
    for name, value in changed.items():
        state[name] = {**state[name], **value} if isinstance(value, dict) else value
    STREAM.load_state_dict(state)


STATE = "state of the stream"
REFUSED = [
    *rows_of(
        """
PackStream(10, flush_after=0) => flush_after
PackStream(10, flush_after=float('nan')) => flush_after
PackStream(10, flush_after='1') => flush_after
PackStream(10, buffer_sequences=0) => buffer_sequences | 0
PackStream(10, buffer_sequences=8, longest_wait=7) => longest_wait | 7 | 8
PackStream(10, buffer_tokens=9) => buffer_tokens | 9 | 10
PackStream(10, rank=1) => rank | 1
PackStream(10, max_sequences_per_pack=0) => max_sequences_per_pack | 0
PackStream(10, multiple_of=3) => multiple_of | 3 | 10
PackStream(10, histogram=LengthHistogram(np.zeros(11, np.int64))) => histogram
begun().put('b', 0) => sequence 1 | 0
begun().put('b', 11) => sequence 1 | 11 | 10
begun().put('b', 3.0) => sequence 1 | 3.0
PackRows(4)({'input_ids': [LONG['input_ids']]}) => example 0 of the batch | 10
list(packed_rows([LONG], 4)) => example 0 of the stream | 10
# States.
PackStream(10, buffer_sequences=5).load_state_dict(STREAM.state_dict()) => buffer_sequences | 4 | 5
begun(source='3f0a').load_state_dict(STREAM.state_dict()) => source | None | 3f0a
begun(multiple_of=2).load_state_dict(STREAM.state_dict()) => multiple_of | 1 | 2
"""
    ),
    ("STREAM.load_state_dict({})", [STATE]),
    ("loaded(format='pack_data stream 4')", [STATE, "format", "stream 4"]),
    ("loaded(waiting=[3])", [STATE, "waiting"]),
    ("loaded(waiting=[['a', 0, 3, 'x']])", [STATE, "waiting"]),
    ("loaded(waiting=[[0, 0, 11, 'x']])", [STATE, "waiting", 11]),
    ("loaded(waiting=[[0, 0, 3, 'x'], [0, 0, 3, 'y']])", [STATE, "waiting"]),
    ("loaded(ready=[3])", [STATE, "ready"]),
    ("loaded(ready=[[[], []]])", [STATE, "ready"]),
    ("loaded(ready=[[['b', 'c'], [6, 6]]])", [STATE, "ready"]),
    ("loaded(ready=[[['b'], [6, 2]]])", [STATE, "ready"]),
    ("loaded(ready=[[['b'], ['6']]])", [STATE, "ready"]),
    ("loaded(taken=-1)", [STATE, "taken", -1]),
    ("loaded(taken=2)", [STATE, "digest"]),
    ("loaded(rounding=-1)", [STATE, "rounding", -1]),
    ("loaded(lengths=[1.0])", [STATE, "lengths"]),
    ("loaded(lengths={'arrived': [11]})", [STATE, "arrived", 11]),
    ("loaded(lengths={'arrived': [3] * 64})", [STATE, "arrived", 64]),
    ("loaded(lengths={'seen': [[11], [1]]})", [STATE, "seen", 10]),
    ("loaded(lengths={'seen': [[3], [1, 2]]})", [STATE, "seen"]),
    ("loaded(lengths={'seen': [[5, 3], [1, 2]]})", [STATE, "seen", "ascending"]),
    ("loaded(lengths={'calm': 9})", [STATE, "calm", 9]),
    ("loaded(lengths={'prices': [[3, 2], [0.5, 0.5]]})", [STATE, "prices"]),
]


def test_a_stream_refuses_what_it_cannot_pack_and_stays_as_it_was():
    before = json.dumps(STREAM.state_dict())
    faults = faults_of_refusals(REFUSED, globals())
    assert not faults, "\n".join(faults)
    assert json.dumps(STREAM.state_dict()) == before
