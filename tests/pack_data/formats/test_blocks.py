"""Checking many rows at once vouches only for what checking each alone accepts, with the same values; and for nearly
all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data.formats.mlperf_tfrecord import unpacked_examples
from pack_data.formats.packed_tfrecord import consecutive_packs
from pack_data.formats.records import RecordError, RowWidths, checked_pack, example_from_columns, pack_from_examples
from pack_data.store.packs import FIELDS
from tests.format_samples import mlperf_row, random_examples

S, P, D = 24, 4, 3
TYPES = {"masked_lm_weights": np.float32, "next_sentence_weights": np.float32}
ODD_VALUES = st.sampled_from([-1, 0, 1, 2, 3, 4, 7, S - 1, S, 30522, 2**31 - 1, 2**31])


def arrays(row):
    return {name: np.asarray(values).astype(TYPES.get(name, np.int64)) for name, values in row.items()}


def damaged(draw, rows):
    """Some values of some rows replaced, and now and then a field shortened."""
    for row in rows:
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(sorted(row)))
            if not len(row[name]):
                continue
            if draw(st.integers(0, 9)) == 0:
                row[name] = row[name][:-1]
            else:
                row[name] = row[name].copy()
                row[name][draw(st.integers(0, len(row[name]) - 1))] = draw(ODD_VALUES)
    return rows


def stacked(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def vouched(rows, values_of):
    """The value of each row looked at alone, which is that of all of one shape looked at together."""
    alone = [values_of(stacked([row]))[0] for row in rows]
    same = [n for n, row in enumerate(rows) if all(row[name].shape == rows[0][name].shape for name in row)]
    for number, value in zip(same, values_of(stacked([rows[number] for number in same]))):
        np.testing.assert_equal(value, alone[number])
    return alone


@settings(max_examples=80)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_examples(data, seed):
    rows = damaged(
        data.draw, [arrays(mlperf_row(each, S, P)) for each in random_examples(np.random.default_rng(seed), 4, S, P)]
    )
    for row, value in zip(rows, vouched(rows, unpacked_examples)):
        if value is not None:
            assert value == example_from_columns(row)
        else:
            with pytest.raises(RecordError):
                example_from_columns(row)


def packs_of(rng, count):
    return [
        arrays(pack_from_examples(random_examples(rng, 1 + number % D, S // D, P), RowWidths(S, P * D, D)))
        for number in range(count)
    ]


@settings(max_examples=80)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_packs(data, seed):
    rows = damaged(data.draw, packs_of(np.random.default_rng(seed), 4))
    for row, value in zip(rows, vouched(rows, consecutive_packs)):
        if value is not None:
            alone = checked_pack(row)[0]
            assert all(
                np.array_equal(value[name], alone[name]) and value[name].dtype == alone[name].dtype for name in FIELDS
            )


def test_good_rows_are_all_vouched_for():
    rng = np.random.default_rng(0)
    examples = random_examples(rng, 30, S, P)
    assert unpacked_examples(stacked([arrays(mlperf_row(each, S, P)) for each in examples])) == examples
    assert all(value is not None for value in consecutive_packs(stacked(packs_of(rng, 30))))
