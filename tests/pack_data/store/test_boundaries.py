"""Boundaries of rows: every way to state them is the same, and what contradicts itself is refused."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pack_data.store.boundaries import cumulative, positions_of, sequences_in

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
    span, sequences = sequences_in(row, "a row")
    assert (span.start, span.stop) == (0, tokens)
    assert sequences.tolist() == [length for length in (lengths.tolist() if names else [tokens]) if length]
