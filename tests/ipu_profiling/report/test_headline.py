"""The three lines of the answer, and throughput and days of the run."""

import re

import pytest

from ipu_profiling.cycles import calibration
from ipu_profiling.report import command, headline, paper
from pack_data.cli.command import run_main

SMALL = ("batch.gradient_accumulation=96", "model.num_layers=4", "placement.layers_per_ipu=[1, 1, 1, 1]")


@pytest.fixture(scope="module")
def made(machine, load):
    config = load("packed_phase2_pod16.yml", *SMALL)
    comparison = paper.ModelledOverhead(machine, config, calibration.load())
    return comparison, config, headline.headline(comparison, config, 3, 1.995)


def test_ratios_and_throughputs_by_hand(made):
    comparison, config, answer = made
    parameters = comparison.calibration.parameters
    packed, unpacked = comparison.packed(3), comparison.unpacked
    over = comparison.overhead(3)
    overhead, graph, run = answer.tables[0].rows
    assert overhead["ours"] == pytest.approx(100 * over)
    assert graph["ours"] == pytest.approx(1.995 / (1 + over))
    # 96 micro-batches become 49 of packs; 8 more fill and drain, an update and the host come on top.
    accumulation, rates, _, days = answer.tables[1].rows
    assert (accumulation["packed"], accumulation["unpacked"]) == ("49", "96")
    seconds = [pipe.step(number, parameters).seconds for pipe, number in ((packed, 49), (unpacked, 96))]
    assert run["ours"] == pytest.approx(49 * 1.995 / seconds[0] / (96 / seconds[1]))
    assert run["ours"] < graph["ours"]  # short accumulation eats some of it
    assert rates["packed"] == f"{49 * 2 * 4 * 1.995 / seconds[0]:,.0f}"
    assert days["packed"] == pytest.approx(config.run.steps * seconds[0] / 86400)
    assert days["unpacked"] == pytest.approx(config.run.steps * seconds[1] / 86400)


def test_the_report_starts_with_three_lines_of_ours_and_the_papers_numbers(made, cycle_cache, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    assert run_main(command.main, []) == 0
    default = capsys.readouterr().out.splitlines()[:3]
    for lines in (made[2].lines, default):
        for line, paper_value in zip(lines, ("4.287 %", "1.913", "above 2")):
            # The spread of the fits is no error of a ratio: published ratios lie outside it.
            (value,) = re.findall(r"\d+\.\d{3}", line.partition("paper")[0])
            assert float(value) > 0 and line.endswith(f"paper {paper_value} (quoted)") and "computed" in line
    assert [line.partition("  ")[0] for line in default] == [
        "overhead of a packed row",
        "speed-up of the graph",
        "speed-up of the run",
    ]


def test_what_does_not_fit_gets_no_rate(made):
    comparison, config, _ = made
    answer = headline.headline(comparison, config, 3, 1.995, "IPU 1 is too full")
    (table,) = answer.tables
    assert "IPU 1 is too full" in table.notes and table.rows[2]["ours"] is None
    assert "does not fit" in answer.lines[2]
