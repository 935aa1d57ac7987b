"""The benchmark's sides compute the same; how long things take is no matter here."""

import numpy as np
import pytest

from evidence.benches import padding_free as benchmark
from pack_data.cli.command import run_main
from tests.padding_free_models import transformers  # noqa: F401, without it there is nothing to measure
from tests.refusals import refused

SMALL = benchmark.Setup(1, "cpu", hidden_size=16, layers=1, vocabulary=40, batch_size=1, dense_up_to=64)


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Calls of keep_buffers, which cannot be undone in the process of the tests."""
    calls = []
    monkeypatch.setattr(benchmark, "keep_buffers", lambda: calls.append(1) or True)
    return calls


def test_the_same_examples_on_every_side():
    row = benchmark._measure_row("some", np.array([20, 9, 30, 50, 5, 7]), 64, SMALL._replace(batch_size=2))
    assert row["examples"] == 4 and row["real"] == pytest.approx((20 + 9 + 30 + 5) / (2 * 20 + 2 * 30))
    assert row[benchmark.PADDED] == 1.0 and min(row[side] for side in ("sorted", "dense", "ours")) > 0
    assert row["rate"] == pytest.approx(row["padded_rate"] / row["ours"])
    assert benchmark.DENSE not in benchmark._measure_row("some", np.array([20, 9, 90]), 65, SMALL)


def test_what_computes_something_else_is_not_timed(monkeypatch):
    class Everywhere(benchmark.PaddingCollator):
        def __call__(self, examples):
            return {**super().__call__(examples), "labels": super().__call__(examples)["input_ids"] * 0 + 1}

    monkeypatch.setattr(benchmark, "PaddingCollator", Everywhere)
    with refused("padded, sorted, dense, ours", kind=RuntimeError):
        benchmark._measure_row("some", np.array([20, 9, 30]), 64, SMALL)


def test_lengths_follow_the_quantiles():
    draw = np.random.default_rng(0)
    for name, quantiles in benchmark.QUANTILES.items():
        lengths = benchmark._lengths_of(name, 4000, draw)
        assert len(quantiles) == 21 and quantiles[0] <= lengths.min() and lengths.max() <= quantiles[-1]
        assert abs(np.median(lengths) - quantiles[10]) < 5
    assert benchmark._lengths_of(benchmark.LONG_TAILED, 4000, draw).max() > 2000


def test_the_command(capsys, monkeypatch, kept):
    monkeypatch.setattr(benchmark, "Setup", lambda rounds, device: SMALL._replace(dense_up_to=16))
    assert benchmark.main(["--rows", "32", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    (cells,) = (line.split("|") for line in text.splitlines() if line.startswith("| GSM8K"))
    assert cells[2].strip() == "32" and "| in blocks " in text
    assert len(kept) == 1 and "buffers kept" in text


@pytest.mark.parametrize(
    "options, words",
    [
        ("--rows 0", "whole number of at least 1"),
        ("--rows 64,1", "--rows 1: a row of one token"),
        ("--data-dir nowhere", "nowhere/gsm8k"),
    ],
)
def test_mistakes_are_one_line(options, words, capsys):
    assert run_main(benchmark.main, options.split()) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out
