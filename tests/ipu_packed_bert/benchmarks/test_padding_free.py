"""The benchmark's counts and its goal; how long things take is no matter here."""

from __future__ import annotations

import numpy as np
import pytest

from tests.padding_free_models import transformers  # noqa: F401, without it there is nothing to measure

from ipu_packed_bert.benchmarks import padding_free as benchmark  # isort: skip
from pack_data.batching.plans import BatchOptions
from pack_data.cli.command import run_main

SMALL = benchmark.Setup(1, "cpu", hidden_size=16, layers=1, vocabulary=40, batch_size=1, dense_up_to=64, longest=16)


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Calls of keep_buffers, which cannot be undone in the process of the tests."""
    calls = []
    monkeypatch.setattr(benchmark, "keep_buffers", lambda: calls.append(1) or True)
    return calls


def test_the_same_examples_on_every_side():
    line = benchmark.measure_rows("some", np.array([20, 9, 30, 50, 5, 7]), 64, SMALL._replace(batch_size=2))
    assert (line.examples, line.tokens) == (4, 20 + 9 + 30 + 5)
    assert line.padded_slots == 2 * 20 + 2 * 30 and line.goal == pytest.approx(64 / 100 / 0.95)
    assert list(line.seconds) == [benchmark.PADDED, benchmark.SORTED, benchmark.DENSE, benchmark.OURS]
    assert line.relative[benchmark.PADDED] == 1.0 and line._replace(slots=4096).goal == 1.0


def test_what_computes_something_else_is_not_timed(monkeypatch):
    class WithoutBoundaries(benchmark.PaddingFreeCollator):
        def __call__(self, examples):
            inputs = super().__call__(examples)
            kept = ("input_ids", "labels")
            return {name: inputs[name] for name in kept}

    monkeypatch.setattr(benchmark, "PaddingFreeCollator", WithoutBoundaries)
    with pytest.raises(RuntimeError, match="the losses differ"):
        benchmark.measure_rows("some", np.array([20, 9, 30]), 64, SMALL)


def test_the_slots_of_batches_padded_at_random():
    lengths = np.array([20, 9, 30, 50, 5, 7])
    assert benchmark.slots_a_token(lengths, BatchOptions(1, 50)) == 1.0
    assert benchmark.slots_a_token(lengths, BatchOptions(6, 50)) == pytest.approx(6 * 50 / lengths.sum())


def test_lengths_follow_the_quantiles():
    draw = np.random.default_rng(0)
    for name, quantiles in benchmark.QUANTILES.items():
        lengths = benchmark.lengths_of(name, 4000, draw)
        assert len(quantiles) == 21 and quantiles[0] <= lengths.min() and lengths.max() <= quantiles[-1]
        assert abs(np.median(lengths) - quantiles[10]) < 5
    assert benchmark.lengths_of(benchmark.LONG_TAILED, 4000, draw).max() > 2000


def test_the_command(capsys, monkeypatch, kept):
    monkeypatch.setattr(benchmark, "WAYS", (benchmark.WAYS[0], "MiniBatchPacking+PosID"))
    monkeypatch.setattr(benchmark, "Setup", lambda rounds, device: SMALL._replace(dense_up_to=16))
    sizes = "--rounds 1 --examples 5".split()
    assert benchmark.main(["--rows", "32", "--device", "cpu", *sizes]) == 0
    text = capsys.readouterr().out
    (cells,) = (line.split("|") for line in text.splitlines() if line.startswith("| GSM8K"))
    assert cells[2].strip() == "32" and "of 3 lines" in text
    assert "MiniBatchPacking+PosID, ours" in text
    assert len(kept) == 1 and "buffers kept" in text
    given = ["--rows", "8", "--device", "cpu", "--return-buffers", *sizes, "--examples", "0"]
    assert benchmark.main(given) == 0 and len(kept) == 1 and "buffers kept" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, words",
    [
        ("--rows 0", "whole number of at least 1"),
        ("--rows 64,1", "--rows 1: a row of one token"),
        ("--examples -1", "whole number of at least 0"),
        ("--device nope", "invalid choice: 'nope'"),
        ("--data-dir nowhere", "nowhere/gsm8k"),
    ],
)
def test_mistakes_are_one_line(options, words, capsys):
    assert run_main(benchmark.main, options.split()) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out
