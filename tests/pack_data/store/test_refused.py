"""Schemas, packs and data sets that cannot be: each is refused in one line that names the field and the value."""

# ruff: noqa: F401  names that the table uses

import numpy as np
import pytest

from pack_data.store.boundaries import sequences_in
from pack_data.store.data_set import MANIFEST, PackStore, StoreWriter
from pack_data.store.packs import SEQUENCE, SLOT, PackSchema, StoredColumn, assemble
from pack_data.store.sequences import Example, Sequences, smallest_type
from tests.pack_data.store.test_data_set import SCHEMA, records
from tests.refusals import faults_of_refusals, rows_of

A = StoredColumn("a", SLOT, "|u1")


def packed(lengths, pack, slot, masked=()):
    """Pack sequences of these lengths into packs of 6 tokens, 2 sequences and 1 masked token."""
    examples = [Example([1] * length, 1, list(masked), list(masked), 0) for length in lengths]
    schema = PackSchema.bert(6, 2, 1, vocabulary_size=10)
    return assemble(schema, Sequences.from_examples(examples), np.array(pack), np.array(slot), 1)


def sequences(**columns):
    return sequences_in({"input_ids": [5, 6, 7, 8, 9], **columns}, "example 7")


REFUSED = [
    *rows_of(
        r"""
StoredColumn('a\nb', SLOT, '|u1') => a column | quotes
StoredColumn(5, SLOT, '|u1') => a column | 5
StoredColumn('a' * 201, SLOT, '|u1') => a column | 200
StoredColumn('a', SLOT, '<f4') => column a | '<f4' | <i4
PackSchema(8, 2, 4, kind='images') => 'images' | bert_pretraining | tokens
PackSchema(0, 2, 4) => max_sequence_length | 0
PackSchema(8, 2, 4, multiple_of=3) => max_sequence_length = 8 | multiple_of | 3
PackSchema(8, 2, 4, columns=(A,)) => bert_pretraining | input_ids
PackSchema.of_tokens(4, 1, [A, A]) => column a | twice
PackSchema.of_tokens(4, 1, [A, StoredColumn('lengths', SLOT, '|u1')]) => column lengths | reserved
PackSchema.of_tokens(4, 1, [StoredColumn('a', SEQUENCE, '|u1')]) => tokens | each slot
PackSchema.of_tokens(1 << 24, 1, [StoredColumn(str(n), SLOT, '|u1') for n in range(65)]) => pack | bytes
smallest_type(2**31) => 2147483648 | int32
smallest_type(1, -(2**31) - 1) => -2147483649 | int32
# boundaries of a row of five tokens
sequences(attention_mask=[1, 1, 0, 1, 1]) => example 7: attention_mask | zeros
sequences(attention_mask=[[[[1] * 5] * 5]]) => attention_mask | 1, 1, 5, 5
sequences(seq_lengths=[2, 2]) => seq_lengths | 2, 4 | 5 tokens
sequences(seq_lengths=[-1, 6]) => seq_lengths | -1, 5
sequences(cu_seq_lens_q=[0, 9]) => cu_seq_lens_q | 9
sequences(cu_seq_lens_q=[0, 2, 5], cu_seq_lens_k=[0, 3, 5]) => cu_seq_lens_k | 3, 2 | cu_seq_lens_q
sequences(seq_lengths=[2, 3], position_ids=range(5)) => position_ids | 5 | seq_lengths | 2, 3
sequences(position_ids=[0, 1, 5, 6, 7]) => position_ids | from 1 to 5 | token 2
sequences(position_ids=[0, 1, 1, 2, 3]) => position_ids | from 1 to 1 | token 2
sequences(position_ids=[0, 1]) => position_ids | shape (2,) | 5 tokens
sequences(position_ids=[[0, 1, 0, 1, 2]] * 3) => position_ids | (3, 5) | seq_lengths
# packs
packed([4, 3], [0, 0], [0, 1]) => 7 tokens | at most 6
packed([1, 1, 1], [0, 0, 0], [0, 1, 2]) => 3 sequences | at most 2
packed([1, 1], [0, 0], [0, 0]) => two sequences | same place
packed([2, 2], [0, 0], [0, 1], [0]) => 2 masked tokens | at most 1
store.batch(np.array([0, 20])) => 20 | packs 0 to 19
store.batch(np.array([0, -1])) => -1 | packs 0 to 19
store.records(np.arange(20) > 9) => pack numbers | bool
PackStore(directory) => PackStore.open | data set => TypeError
"""
    ),
    ("StoredColumn('a', 'pixel', '|u1')", ["column a", "'pixel'", SEQUENCE]),
    ("PackStore.open(directory / 'file')", ["file", MANIFEST]),
    ("PackStore.open(directory)", ["not a packed data set", MANIFEST]),
]


def test_calls_are_refused(tmp_path):
    writer = StoreWriter(tmp_path / "data", SCHEMA)
    writer.add(records(20))
    (tmp_path / "file").write_text("")
    with writer.finish(algorithm="none") as store:
        names = {**globals(), "store": store, "directory": tmp_path}
        faults = faults_of_refusals(REFUSED, names, unchanged=tmp_path)
    assert not faults, "\n".join(faults)
