"""Figures of the paper: lengths, the mask, and un-padding that waits for its slowest accelerator."""

import json

import numpy as np
import pytest

from ipu_profiling.report import command, figures
from pack_data.cli.command import run_main
from pack_data.packing.histogram import LengthHistogram


@pytest.fixture(scope="module")
def wikipedia():
    return LengthHistogram.published("wikipedia_512")


def test_one_accelerator_saves_what_the_mean_work_says(wikipedia):
    """Padded work over mean work, just above 2.001 since attention is quadratic."""
    lengths = np.flatnonzero(wikipedia.counts)
    work = 12 * 1024**2 * lengths + 2 * 1024 * lengths**2
    expected = (12 * 1024**2 * 512 + 2 * 1024 * 512**2) / np.average(work, weights=wikipedia.counts[lengths])
    speed_ups = figures._un_padding(wikipedia, 1024, accelerators=(1,), sequences=(256,), updates=40)
    assert speed_ups[256, 1] == pytest.approx(expected, rel=0.01) and expected > wikipedia.theoretical_speedup


def test_more_accelerators_never_help_and_more_sequences_do(wikipedia):
    numbers = (1, 8, 64, 512)
    speed_ups = figures._un_padding(wikipedia, 1024, accelerators=numbers, sequences=(1, 16), updates=20)
    for sequences in (1, 16):
        series = [speed_ups[sequences, number] for number in numbers]
        assert series == sorted(series, reverse=True) and series[-1] >= 1.0 - 1e-12
    assert all(speed_ups[16, number] > speed_ups[1, number] for number in (8, 64, 512))
    # A quarter of all sequences has full length: of 512 accelerators with one each, one surely has such a sequence.
    assert speed_ups[1, 512] == pytest.approx(1.0, abs=1e-6)


def test_equal_lengths_scale_perfectly_and_a_seed_determines_the_draws(wikipedia):
    counts = np.zeros(65, dtype=np.int64)
    counts[32] = 100
    equal = figures._un_padding(LengthHistogram(counts, "equal"), 64, accelerators=(1, 256), sequences=(4,), updates=3)
    ratio = (12 * 64**2 * 64 + 2 * 64 * 64**2) / (12 * 64**2 * 32 + 2 * 64 * 32**2)
    assert list(equal.values()) == pytest.approx([ratio, ratio])
    options = dict(accelerators=(1, 16), sequences=(4,), updates=3)
    drawn = figures._un_padding(wikipedia, 1024, **options)
    assert drawn == figures._un_padding(wikipedia, 1024, **options)
    assert drawn != figures._un_padding(wikipedia, 1024, seed=1, **options)


def test_figures_print_and_draw(cycle_cache, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    picture = tmp_path / "figure5.svg"
    wanted = ["--figure", "1", "--figure", "2", "--figure", "5"]
    assert run_main(command.main, [*wanted, "--json", "--plot", str(picture)]) == 0
    first, mask, scaling = json.loads(capsys.readouterr().out)["tables"]
    assert [row["data"] for row in first["rows"] if row["paper"]] == [
        "wikipedia_mixed_128",
        "wikipedia_mixed_384",
        "wikipedia_512",
        "squad_1_1_384",
        "librispeech_audio_40ms",
        "qm9_atoms",
    ]
    for row, here in zip(mask["rows"], "1112222330"):
        assert [row[str(slot)] for slot in range(10)] == [int(here == other) for other in "1112222330"]
    assert len({row["packing"] for row in scaling["rows"]}) == 1 and scaling["rows"][-1]["accelerators"] == 2048
    assert all(row["un_padding_64"] < row["packing"] for row in scaling["rows"][1:])
    assert "un-padding, 64 each" in picture.read_text(encoding="utf-8")
    assert run_main(command.main, ["--table", "points", "--plot", str(picture)]) == 2
    assert "--plot" in capsys.readouterr().err
