"""Figure 5: un-padding waits for its slowest device, packing doesn't."""

import numpy as np
import pytest

from ipu_packed_bert.report import scaling
from pack_data.histogram import LengthHistogram


@pytest.fixture(scope="module")
def wikipedia():
    return LengthHistogram.published("wikipedia_512").counts


def test_one_device_saves_what_the_mean_says(wikipedia):
    """One device, many sequences: padded work over mean work, just above 2.001 since attention is quadratic."""
    lengths = np.flatnonzero(wikipedia)
    mean = np.average(scaling.work(lengths, hidden_size=1024), weights=wikipedia[lengths])
    expected = scaling.work(np.array(512), hidden_size=1024) / mean
    (point,) = scaling.simulate(wikipedia, hidden_size=1024, devices=(1,), batches=(256,), steps=40)
    assert point.speedup == pytest.approx(expected, rel=0.01) and expected > 2.001


def test_more_devices_never_help_and_larger_batches_do(wikipedia):
    points = scaling.simulate(wikipedia, hidden_size=1024, devices=(1, 8, 64, 512), batches=(1, 16), steps=20)
    speedup = {(p.batch, p.devices): p.speedup for p in points}
    for batch in (1, 16):
        series = [speedup[batch, d] for d in (1, 8, 64, 512)]
        assert all(a >= b for a, b in zip(series, series[1:])) and series[-1] >= 1.0 - 1e-12
    assert all(speedup[16, d] > speedup[1, d] for d in (8, 64, 512))
    # A quarter of all sequences is of full length: among 512 devices with one each, somebody surely has one.
    assert speedup[1, 512] == pytest.approx(1.0, abs=1e-6)


def test_equal_lengths_scale_perfectly():
    counts = np.zeros(65, dtype=np.int64)
    counts[32] = 100
    points = scaling.simulate(counts, hidden_size=64, devices=(1, 256), batches=(4,), steps=3)
    ratio = scaling.work(np.array(64), hidden_size=64) / scaling.work(np.array(32), hidden_size=64)
    assert [p.speedup for p in points] == pytest.approx([ratio, ratio])


def test_the_same_seed_gives_the_same_points(wikipedia):
    options = dict(hidden_size=1024, devices=(1, 16), batches=(4,), steps=3)
    assert scaling.simulate(wikipedia, **options) == scaling.simulate(wikipedia, **options)
    assert scaling.simulate(wikipedia, **options) != scaling.simulate(wikipedia, seed=1, **options)
