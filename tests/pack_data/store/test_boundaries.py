"""Boundaries of rows: every way to state them is the same, and what contradicts itself is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.store.boundaries import cumulative, positions_of, sequences_in
from tests.refusals import refused

STATEMENTS = {
    "seq_lengths": np.asarray,
    "cu_seq_lens_q": cumulative,
    "cu_seq_lens_k": cumulative,
    "position_ids": positions_of,
    "positions": lambda lengths: positions_of(lengths) + 2 * (lengths.sum() > 0),  # RoBERTa's begin at 2
}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3), st.sets(st.sampled_from([*STATEMENTS])))
def test_sequences_are_those_of_any_statements_without_padding_and_empty_ones(lengths, padding, names):
    lengths = np.array(lengths)
    tokens = int(lengths.sum())
    row = {"input_ids": list(range(tokens)), "attention_mask": [1] * tokens + [0] * padding}
    row["input_ids"] += [0] * padding
    for name in names:
        row[name] = STATEMENTS[name](lengths)
        if "positions" in name or name == "position_ids":
            row[name] = np.append(row[name], np.zeros(padding, np.int64))
    span, found = sequences_in(row, "a row")
    assert (span.start, span.stop) == (0, tokens)
    assert found.tolist() == [length for length in (lengths.tolist() if names else [tokens]) if length]


@pytest.mark.parametrize(
    "columns, names",
    [
        ({"attention_mask": [1, 1, 0, 1, 1]}, "attention_mask zeros"),
        ({"attention_mask": [[[[1] * 5] * 5]]}, "attention_mask 1, 1, 5, 5"),
        ({"seq_lengths": [2, 2]}, "seq_lengths 2, 4 5"),
        ({"seq_lengths": [-1, 6]}, "seq_lengths -1, 5"),
        ({"cu_seq_lens_q": [0, 9]}, "cu_seq_lens_q 9"),
        ({"cu_seq_lens_q": [0, 2, 5], "cu_seq_lens_k": [0, 3, 5]}, "cu_seq_lens_k 3, 2 cu_seq_lens_q"),
        ({"seq_lengths": [2, 3], "position_ids": range(5)}, "position_ids 5 seq_lengths 2, 3"),
        ({"position_ids": [0, 1, 5, 6, 7]}, "position_ids 1 5"),
        ({"position_ids": [0, 1, 1, 2, 3]}, "position_ids 1 1"),
        ({"position_ids": [0, 1]}, "position_ids 2, 5"),
        ({"position_ids": [[0, 1, 0, 1, 2]] * 3}, "position_ids 3, 5 seq_lengths"),
    ],
)
def test_contradictions_are_refused(columns, names):
    with refused("example 7", *names.split(" ")):
        sequences_in({"input_ids": [5, 6, 7, 8, 9], **columns}, "example 7")
