"""Lengths, groups, options and file names that `pack`, its siblings and the packers refuse, each in one line."""

# ruff: noqa: F401  names that the table uses

from dataclasses import replace

import numpy as np

import pack_data
from pack_data import greedy, nnlshp, optimal, pack, pack_groups, pack_in_order, pack_with_capacity, sort
from pack_data.packers import PACKERS, get_packer
from pack_data.packing.histogram import LengthHistogram
from tests.refusals import faults_of_refusals, rows_of

ONE = LengthHistogram.from_lengths([3], 8)
PACKED = pack([5, 3], max_sequence_length=8)
IN_ORDER = pack_in_order([5, 3, 2, 7], max_sequence_length=8)
ALONE = pack_in_order([5, 3], max_sequence_length=8, max_sequences_per_pack=1)


def packed(*lengths, **options):
    return pack(lengths, **{"max_sequence_length": 8, **options})


def grouped(*groups):
    return pack_groups([8, 5, 3], groups, max_sequence_length=8)


REFUSED = [
    *rows_of(
        r"""
packed(3, 9) => 1 of 2 | max_sequence_length = 8 | sequence 1 | length 9
packed(0) => sequence 0 | length 0
packed(1.5) => whole numbers
packed([1, 2]) => 2 dimensions
packed([1, 2], [3]) => lengths | each sequence
packed(1, max_sequences_per_pack=0) => max_sequences_per_pack | 1
packed(1, max_sequence_length=0) => max_sequence_length | 1
packed(1, seed=-1) => seed | -1
packed(1, longer='cut') => longer | 'cut' | split
packed(1, multiple_of=3) => multiple_of = 3 | 8
packed(1, multiple_of=0) => multiple_of | 0
packed(1, bugdet=1) => bugdet => TypeError
pack_in_order([1], max_sequence_length=8, budget=1) => budget => TypeError
pack_with_capacity([1], [1], capacity=1, max_sequence_length=8, budget=1) => budget => TypeError
pack_data.PackStore(files) => PackStore\.open\( => TypeError
pack_data.build('x') => build\(BuildOptions\( => TypeError
grouped(1, 1) => 2 groups | 3 lengths
grouped(1, np.nan, np.nan) => groups | float64
grouped(1, 1, 2) => group of sequence 0 | 13 tokens
replace(IN_ORDER, pack=np.array([0, 1, 1, 2])).prove() => in order
replace(IN_ORDER, packing=replace(IN_ORDER.packing, lower_bound=1)).prove() => 3 packs | lower_bound is 1
replace(ALONE, packing=replace(ALONE.packing, max_sequences_per_pack=None)).prove() => in order | next sequence
replace(PACKED, packing=packed(5, 2).packing).prove() => packing | strategies | lengths
PACKED.save(files / 'packs.pkl') => packs.pkl | .npz
PACKED.save_rows(files / 'rows.csv') => rows.csv | .parquet | .npy
# The packers.
nnlshp.pack(ONE, max_sequences_per_pack=4) => 3 sequences | not 4 | optimal
nnlshp.pack(ONE, max_sequences_per_pack=None) => any number | optimal
nnlshp.pack(ONE, max_sequences_per_pack=3, rounds=0) => rounds = 0 | 1
nnlshp.pack(ONE.with_max_sequence_length(16384), max_sequences_per_pack=3) => max_sequence_length 16384 | 8192
greedy.pack(ONE, max_sequences_per_pack=2, order=[1]) => order | histogram
sort.batch(ONE, batch_size=0) => batch_size = 0 | 1
sort.batch(ONE, batch_size=1, seed=-1) => seed = -1 | 0
"""
    ),
    ("get_packer('fastest')", ["'fastest'", *PACKERS]),
    *(
        (f"optimal.pack(ONE, max_sequences_per_pack=None, budget={budget})", ["budget = ", 0])
        for budget in ("0", "-1.0", "float('nan')", "'1'")
    ),
]


def test_what_packers_cannot_pack_is_refused(tmp_path):
    scope = {**globals(), "files": tmp_path}
    faults = faults_of_refusals(REFUSED, scope, unchanged=tmp_path)
    assert not faults, "\n".join(faults)
