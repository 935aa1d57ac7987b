"""Figures of the paper: lengths, the mask, and un-padding that waits for its slowest accelerator."""

import numpy as np
import pytest

from ipu_profiling.report import figures
from pack_data.packing.histogram import LengthHistogram


@pytest.fixture(scope="module")
def wikipedia():
    return LengthHistogram.published("wikipedia_512")


HIDDEN = 1024


def work(length):
    """Multiply-adds of a layer."""
    dense = 12 * HIDDEN**2 * length
    attention = 2 * HIDDEN * length**2
    return dense + attention


def un_padding(histogram, **options):
    return figures._un_padding(histogram, HIDDEN, **options)


def test_one_accelerator_saves_what_the_mean_work_says(wikipedia):
    """Padded work over mean work, just above 2.001 since attention is quadratic."""
    lengths = np.flatnonzero(wikipedia.counts)
    counts = wikipedia.counts[lengths]
    mean_work = np.average(work(lengths), weights=counts)
    expected = work(512) / mean_work
    speed_ups = un_padding(wikipedia, accelerators=(1,), sequences=(256,), updates=40)
    assert speed_ups[256, 1] == pytest.approx(expected, rel=0.01)
    assert expected > wikipedia.theoretical_speedup


def test_more_accelerators_never_help_and_more_sequences_do(wikipedia):
    numbers = (1, 8, 64, 512)
    options = {"accelerators": numbers, "sequences": (1, 16), "updates": 20}
    speed_ups = un_padding(wikipedia, **options)
    for sequences in (1, 16):
        series = [speed_ups[sequences, number] for number in numbers]
        assert series == sorted(series, reverse=True)
        assert series[-1] >= 1.0 - 1e-12
    for number in numbers[1:]:
        assert speed_ups[16, number] > speed_ups[1, number]
    assert un_padding(wikipedia, **options) == speed_ups


def test_equal_lengths_scale_perfectly():
    counts = np.zeros(65, dtype=np.int64)
    counts[32] = 100
    equal = LengthHistogram(counts, "equal")
    speed_ups = un_padding(equal, accelerators=(1, 256), sequences=(4,), updates=3)
    assert list(speed_ups.values()) == pytest.approx([work(64) / work(32)] * 2)
