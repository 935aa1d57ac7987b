"""Throughputs of whole runs and the ratio of kernel cycles."""

import pytest

from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.report import headline, paper

SMALL = ("batch.gradient_accumulation=96", "model.num_layers=4", "placement.layers_per_ipu=[1, 1, 1, 1]")


@pytest.fixture(scope="module")
def made(machine, load):
    config = load("packed_phase2_pod16.yml", *SMALL)
    comparison = paper.ModelledOverhead(machine, config, calibration.load())
    return comparison, config, headline.headline(comparison, config, 3, 1.995)


def rows(table):
    return {row["what"].strip(): row for row in table.rows}


def test_ratios_and_throughputs_by_hand(made):
    comparison, config, table = made
    found, parameters = rows(table), comparison.calibration.parameters
    packed, unpacked = comparison.packed(3), comparison.unpacked
    over = comparison.overhead(3)
    kernel = found["kernel: sequences a million cycles"]
    assert kernel["ratio"] == pytest.approx(1.995 / (1 + over.value), rel=1e-5)
    assert kernel["packed"] / kernel["unpacked"] == pytest.approx(kernel["ratio"])
    assert kernel["lower"] == pytest.approx(1.995 / (1 + over.upper))
    # 96 micro-batches become 49 of packs; 8 more fill and drain, an update and the host come on top.
    assert f"A packed row takes {100 * over.value:.2f} % longer" in table.notes[0]
    assert "has 49 micro-batches in place of 96" in table.notes[0]
    seconds = [pipe.step(number, parameters).seconds for pipe, number in ((packed, 49), (unpacked, 96))]
    run = found["sequences/s of all replicas"]
    assert run["ratio"] == pytest.approx(49 * 1.995 / seconds[0] / (96 / seconds[1]))
    assert run["packed"] == f"{49 * 2 * 4 * 1.995 / seconds[0]:,.0f}"
    assert run["lower"] < run["ratio"] < run["upper"]
    days = found[f"days of the run, {config.run.steps:,} updates"]
    assert days["packed"] == pytest.approx(config.run.steps * seconds[0] / 86400)
    assert days["unpacked"] == pytest.approx(config.run.steps * seconds[1] / 86400)
    assert run["ratio"] < kernel["ratio"]  # short accumulation eats some of it


def test_the_answer_has_ten_lines_with_interval_and_source(made):
    lines = made[2].text().splitlines()
    assert len(lines) <= 10 and any("Source: predicted" in line for line in lines) and "range of fits" in lines[2]


def test_what_does_not_fit_gets_no_rate(made):
    comparison, config, _ = made
    table = headline.headline(comparison, config, 3, 1.995, "IPU 1 is too full")
    assert "IPU 1 is too full" in table.notes and not any("sequences/s" in row["what"] for row in table.rows)
    assert not any("days" in row["what"] for row in table.rows)
