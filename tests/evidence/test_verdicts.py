"""What exactness and the nine ways say of their cells: a control that does not fail shows nothing."""

from __future__ import annotations

import json
import math

import pytest

from evidence import exactness, position_ids
from evidence.position_ids import PADDED, SIZES, VARIANTS
from evidence.runner import FACTS, Cell, Runner
from evidence.statistics import students


def distances(folder, apart, seeds=2):
    """Cells whose models are so far apart after 5 and 10 updates, by variant."""
    runner = Runner(folder, dict(corpus="topics", updates=10, packs=8, micro_batch=2, max_sequence_length=64))
    runner.write(FACTS, json.dumps(dict(packing_factor=3.0, machine="none")))
    rows = {name: [{"update": 5, "distance": far / 2}, {"update": 10, "distance": far}] for name, far in apart.items()}
    runner.run([Cell(name, seed) for seed in range(seeds) for name in apart], lambda cell: rows[cell.variant])
    return exactness.shown(folder)


@pytest.mark.parametrize(
    "claim, control, shows, same",
    [(1e-15, 0.1, True, True), (1e-15, 1e-5, False, False), (1e-5, 0.1, True, False), (1e-5, 1e-7, False, False)],
)
def test_weights_are_the_same_only_where_means_over_micro_batches_part_them(tmp_path, claim, control, shows, same):
    found = distances(tmp_path, {exactness.CLAIM: claim, exactness.CONTROL: control})
    assert found.verdict()[:2] == (shows, same)
    assert found.verdict().why in found.text()


def test_distances_of_an_unfinished_run(tmp_path):
    found = distances(tmp_path / "one", {exactness.CLAIM: 1e-15})
    assert found.verdict()[:2] == (False, False) and "shows nothing yet" in found.text()
    assert "5.0e-16" not in found.text() and "1.0e-15" in found.text()  # after all updates
    none = distances(tmp_path / "none", {})
    assert none.verdict()[:2] == (False, False) and none.text() and none.draw(tmp_path) == []


def ways(folder, losses):
    """Cells of ways with these held-out losses, seed by seed."""
    settings = dict(size=list(SIZES["quick"]), attention="sdpa")
    facts = dict(
        examples=9, mean_tokens=8.0, longest=9, unigram_loss=6.5, properties={way: [True] * 5 for way in VARIANTS}
    )
    runner = Runner(folder, settings)
    runner.write(FACTS, json.dumps(dict(data={"texts": facts}, machine="none")))

    def measure(cell):
        way = cell.variant.split(": ")[1]
        row = dict(updates=3, seconds=1.0, tokens=72, tokens_per_second=72.0, peak_memory_mib=None, training_loss=5.0)
        return [dict(row, data="texts", way=way, held_out_loss=losses[way][cell.seed - 1])]

    seeds = range(1, 1 + len(next(iter(losses.values()), [])))
    runner.run([Cell(f"texts: {way}", seed) for seed in seeds for way in losses], measure)
    return position_ids.shown(folder)


@pytest.mark.parametrize(
    "claim, control, shows, same",
    [
        ([0.9, -0.001], [0.03, -0.02], True, True),  # the first seed does not count
        ([0.001, -0.008], [0.03, -0.02], True, False),  # a quarter of the first seed's is the limit
        ([0.0, 0.0], [0.03, 0.007], False, False),  # the control passes on the seed that counts
        ([0.0, 0.0], [0.0009, -0.02], False, False),  # a limit as small as rounding
    ],
)
def test_ways_are_the_same_only_where_attention_across_examples_parts_them(tmp_path, claim, control, shows, same):
    (first, second), (third, fourth) = position_ids.CLAIM, position_ids.CONTROL
    losses = {first: [5 + each for each in claim], second: [5.0, 5.0]}
    losses.update({third: [5 + each for each in control], fourth: [5.0, 5.0]})
    found = ways(tmp_path, losses)
    assert found.verdict()[:2] == (shows, same)
    text = found.text()
    if not shows:
        assert f"parts by only {min(map(abs, control)):.1e} nats" in text
    assert "2 seeds, 1 process" in text
    assert found.verdict().why in text and "nothing" in text  # two seeds on both sides of 0, or at it


def test_ways_of_an_unfinished_run(tmp_path):
    found = ways(tmp_path / "one", {PADDED: [5.0]})
    assert found.verdict()[:2] == (False, False)
    assert "shows nothing yet" in found.text() and f"| {PADDED} " in found.text()
    none = ways(tmp_path / "none", {})
    assert none.verdict()[:2] == (False, False) and none.text() and none.draw(tmp_path) == []


def test_the_interval_of_some_values_is_students():
    found = students([0.0, 1.0, 2.0])
    assert found.mean == 1.0 and found.high - 1 == pytest.approx(1 - found.low)
    assert found.high - 1 == pytest.approx(2.9200 / math.sqrt(3), abs=1e-4)  # 95 % of Student's t, 2 degrees
    assert students([0.5]) == (0.5, -math.inf, math.inf, 1)
