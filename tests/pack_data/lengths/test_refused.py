"""Lengths that cannot be counted: each file, specification and option is refused in one line."""

# ruff: noqa: F401  (names of the calls)
import gzip
import io
import itertools
import json

import numpy as np

from pack_data.cli.command import ArgumentParser
from pack_data.lengths import packer_command
from pack_data.lengths.counting import count, lengths_in
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.lengths.overlong import RULES, Longer, fit
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import BUNDLED, PUBLISHED
from tests.refusals import faults_of_refusals, rows_of

RULES_THAT_GO_ON = [rule for rule in RULES if rule != "raise"]
TWO_LISTS = '{"chosen": [1, 2], "rejected": [1]}'

REFUSED = [
    *rows_of(
        r"""
# ---- files
text('3\n4\nfive\n') => x.txt | line 3 | 'five'
text('3\n0\n') => sequence 1 | length 0 | max_sequence_length = 10
text('3\n11\n') => sequence 1 | length 11
text('3\n99999999999999999999\n') => line 2 | '99999999999999999999'
text('3\n4.5\n') => line 2 | '4.5'
counted('x.txt', b'\xff\xfe\x00') => x.txt | UTF-16
counted('x.txt', b'\xff3\n') => x.txt | text
counted('x.txt', '3\n4\n'.encode('utf-16')) => x.txt | UTF-16
counted('x.csv', b'count,length\n3,1\n1,11\n') => x.csv | line 3 | length 11
counted('x.csv', b'length,count\n3\n') => x.csv | line 2
counted('x.txt.xz', b'nonsense') => x.txt.xz | text
counted('x.txt.bz2', b'nonsense') => x.txt.bz2 | text
counted('x.txt.gz', gzip.compress(b'3\n' * 1000, mtime=0)[:-9]) => x.txt.gz | copy it again
counted('x.npy', b'nonsense') => x.npy | .npy
counted('x.npy', array([1.5])) => x.npy | float64
counted('x.npy', array([[1, 2]] * 3)) => x.npy | (3, 2)
counted('x.npy', array([[1, 2, 3]])) => x.npy | (1, 3)
counted('x.npy', array([None], object)) => x.npy | not a readable
counted('x.npy', array([1 + 2j])) => x.npy | not a readable
count([file('manifest.json', b'{}').rpartition('/')[0]], 10) => manifest.json | version
count(['squad_1_1_384'], split='train') => squad_1_1_384 | --split train
count([file('x.txt', b'3\n')], 10, columns=('a',)) => x.txt | --columns
lengths_in(['squad_1_1_384']) => squad_1_1_384 | order
Longer('raise', 8).spans(0, 'example 3') => example 3 | length 0 | max_sequence_length = 8
lengths_in([file('x.csv', b'length,count\n3,1\n')]) => x.csv | order
# ---- options
histogram('--histogram', file('x.txt', b''), '--max-sequence-length', '8') => x.txt | no sequences
histogram('--histogram', file('x.csv', b'length,count\n'), '--max-sequence-length', '8') => no sequences
histogram('--histogram', file('x.csv', b'3,2\n'), '--max-sequence-length', '8') => line 1 | '3,2'
histogram('--histogram', file('x.bin', b'\0\1\xff'), '--max-sequence-length', '8') => x.bin | format
histogram('--histogram', file('x.txt', b'3\n')) => --histogram | x.txt | --max-sequence-length
histogram('--histogram', file('x.jsonl', TWO_LISTS), '--max-sequence-length', '8') => chosen | --columns
histogram('--synthetic', 'uniform:max=9,n=50', '--split', 'train') => --synthetic | --split
packer_command.main('spfhp', ['--histogram', 'squad_1_1_384', '--multiple-of', '5']) => multiple_of = 5
# ---- specifications
synthetic_histogram('normal:mean=3') => 'normal' | lognormal | uniform | sample
synthetic_histogram('uniform:max=5') => uniform:max=5 | n | max
synthetic_histogram('uniform:max=5,n=3,mean=4') => 'mean' | max, n, min, seed
synthetic_histogram('uniform:max=5,n=x') => 'n=x' | KEY=NUMBER
synthetic_histogram('uniform:max=5.5,n=3') => max=5.5 | 1
synthetic_histogram('uniform:max=inf,n=3') => max=inf | 1
synthetic_histogram('uniform:max=5,min=6,n=3') => min=6 | max=5
synthetic_histogram('lognormal:max=5,n=3') => mean | mode | median
synthetic_histogram('lognormal:max=5,n=3,mean=1,mode=1') => mean | mode | median
synthetic_histogram('lognormal:max=5,n=3,mean=-1') => mean | positive
synthetic_histogram('sample:n=3') => sample:n=3 | histogram
synthetic_histogram('sample:squad_1_1_384,n=99999999') => n=99999999 | 88641
# ---- rules of examples that are longer than a row
fit([20, 0], 8, 'split') => sequence 1 | length 0 | max_sequence_length = 8
fit([1.5], 8, 'drop') => lengths | float64
"""
    ),
    ("count(['nothing'], 10)", ["nothing", *BUNDLED]),
    ("histogram('--histogram', 'nothing.csv')", ["nothing.csv", *BUNDLED]),
    ("histogram('--columns', 'a')", [PUBLISHED[0], "--columns"]),
    ("histogram('--split', 'train')", [PUBLISHED[0], "--split"]),
    ("synthetic_histogram('sample:nothing,n=3')", ["'nothing'", *BUNDLED]),
    ("fit([3, 9], 8)", ["sequence 1", "length 9", *RULES_THAT_GO_ON]),
    ("fit([3], 8, 'cut')", ["longer = 'cut'", *RULES]),
]


def test_lengths_are_refused(tmp_path):
    fresh = itertools.count()

    def file(name, content):
        path = tmp_path / str(next(fresh)) / name
        path.parent.mkdir()
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def counted(name, content):
        return count([file(name, content)], 10)

    def text(content):
        return counted("x.txt", content)

    def array(values, dtype=None):
        stored = io.BytesIO()
        np.save(stored, np.array(values, dtype))
        return stored.getvalue()

    def histogram(*arguments):
        parser = ArgumentParser()
        add_histogram_arguments(parser)
        return histogram_from(parser.parse_args(arguments))

    scope = {**globals(), **locals()}
    faults = faults_of_refusals(REFUSED, scope)
    assert not faults, "\n".join(faults)
