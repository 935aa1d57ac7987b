"""The report: the paper's rows, sources beside every number, and what a user types."""

import json
import re
from dataclasses import replace

import pytest

from ipu_profiling.cycles import calibration
from ipu_profiling.cycles.lowering import SCORES
from ipu_profiling.cycles.parameters import Parameters
from ipu_profiling.cycles.tracing import POPART
from ipu_profiling.report import calibrate, command, paper
from ipu_profiling.report.breakdown import _overhead_shares, breakdown
from pack_data import sort
from pack_data.cli.command import run_main
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from tests.ipu_profiling.report.test_page import SMALL as SETTINGS

SOURCES = {"hardware", "profile", "predicted", "fitted", "paper", "computed", "published", "config"}
FAST = tuple(row for row in paper.ROWS if row[0] in ("none", "spfhp"))


@pytest.fixture(scope="module")
def comparison(machine, load):
    return paper.ModelledOverhead(machine, load("packed_phase2_pod16.yml"), calibration.load())


@pytest.fixture(scope="module")
def table1(comparison):
    histogram = LengthHistogram.published("wikipedia_512")
    found = {(packer, depth): get_packer(packer)(histogram, max_sequences_per_pack=depth) for packer, depth in FAST}
    return paper.table1(comparison, found, sort.batch(histogram, batch_size=256), histogram.name)


@pytest.fixture
def run(cycle_cache, monkeypatch, capsys):
    """run("--table", "2") -> what it printed; raises on any exit status but 0."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))

    def call(*argv):
        status = run_main(command.main, argv)
        out, error = capsys.readouterr()
        assert status == 0, error
        return out

    return call


SMALL = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture
def small(tmp_path):
    """A configuration of four small layers."""
    found = {}
    for setting in SMALL[1::2]:
        section, name, value = re.split("[.=]", setting, maxsplit=2)
        found.setdefault(section, {})[name] = json.loads(value)
    path = tmp_path / "small.yml"
    path.write_text(json.dumps({"extends": command.DEFAULT, **found}))
    return path


def test_efficiency_and_factor_to_the_papers_last_digit(table1):
    rows = {row["depth"]: row for row in table1.rows if row["algorithm"] == "SPFHP"}
    for depth in ("2", "3", "4", "8", "max (16)"):
        row = rows[depth]
        assert round(row["efficiency"], 1) == row["paper_efficiency"]
        assert round(row["packing_factor"], 2) == row["paper_packing_factor"]


def test_realised_speedup_is_p_over_one_plus_overhead(table1):
    checked = 0
    for row in table1.rows:
        if row["algorithm"] != "SPFHP":
            continue
        assert row["realised"] == pytest.approx(row["packing_factor"] / (1 + row["overhead"] / 100))
        # This project's graph is cheaper than the paper's, whatever the unknown layout costs.
        assert row["realised"] > row["paper_realised"]
        checked += 1
    assert checked == 5


def test_the_papers_graph_holds_the_papers_numbers(table1):
    """Its own graph, in every row that the paper has but SORT's, and in no other: within 1 %."""
    checked = 0
    for row in table1.rows:
        theirs = row.get("paper_realised") is not None and row["algorithm"] != "SORT"
        assert (row["papers_realised"] is not None) == theirs
        if row["algorithm"] == "SPFHP":
            assert row["papers_realised"] == pytest.approx(row["paper_realised"], rel=0.01)
            checked += 1
    assert checked == 5


def test_the_fitted_graph_is_marked_fitted_and_this_engines_predicted(table1):
    for table, source in zip(table1.printed(), ("fitted", "predicted")):
        assert {column.source for column in table.columns} - {"config", "computed", "paper"} == {source}


def test_table2_is_of_throughputs(machine, load):
    """128: the paper's range holds the paper's graph. 384: too high, which is known and said."""
    found = paper.table2(machine, load, calibration.load())
    rows = {(row["model"], row["length"]): row for row in found.rows}
    # (1.70 - 0.005) / (1.69 + 0.005) = 1.000 and (1.70 + 0.005) / (1.69 - 0.005) = 1.0119: both numbers are rounded.
    assert rows["large", 384]["paper_overhead"] == "0.0 to 1.2" and rows["base", 384]["paper_overhead"] == "0.6 to 1.8"
    assert rows["large", 128]["paper_overhead"] == rows["base", 128]["paper_overhead"] == "0.9 to 2.6"
    for row in found.rows:
        assert row["overhead"] < row["papers_overhead"] or row["length"] == 128
        assert row["realised"] == pytest.approx(row["packing_factor"] / (1 + row["overhead"] / 100))
    for model in ("base", "large"):
        assert 0.9 < rows[model, 128]["papers_overhead"] < 2.6


def test_the_throughput_of_an_update_by_hand(comparison):
    """2048 micro-batches and 8 to fill and drain, 1027 and 8 packed; an update and the host in each."""
    parameters = comparison.calibration.parameters
    packed, unpacked = comparison.packed(3), comparison.unpacked
    host = 4 * parameters.replica_seconds * 1.33e9  # four replicas, one process
    cycles = [
        (n + 8) * each.pipeline_cycle(parameters) + each.update_cost(parameters).device * 1.33e9 + host
        for n, each in ((1027, packed), (2048, unpacked))
    ]
    rates = [sequences / c for sequences, c in zip((1027 * 1.995, 2048), cycles)]
    found = comparison._training_overhead(3, 1.995)
    assert found == pytest.approx(1.995 / (rates[0] / rates[1]) - 1)


def test_values_are_at_the_fitted_parameters_and_no_table_of_ratios_has_intervals(comparison, table1, machine, load):
    (row,) = [row for row in table1.rows if (row["algorithm"], row["depth"]) == ("SPFHP", "3")]
    fitted = comparison.calibration
    for prefix, arrangement in (("", comparison.arrangement), ("papers_", POPART)):
        pipeline = machine.pipeline(comparison.config, arrangement=arrangement, depth=3)
        value = 100 * calibration.overhead(pipeline, comparison.unpacked, fitted.parameters)
        assert row[prefix + "overhead"] == pytest.approx(value)
    for table in (table1, paper.table2(machine, load, fitted), breakdown(comparison, 3, 2.0)):
        keys = {key for row in table.to_json()["rows"] for key in row}
        assert not [key for key in keys if key.endswith(("_lower", "_upper"))]


def test_sort_is_engines_and_no_percentage(table1):
    (row,) = [row for row in table1.rows if row["algorithm"] == "SORT"]
    assert row["overhead"] == "508 engines" and row.get("realised") is None
    assert row["paper_overhead"] == ">>100"


@pytest.mark.parametrize("mask", ["product", "additive"])
def test_decomposition_adds_up(machine, load, mask):
    comparison = paper.ModelledOverhead(
        machine, load("packed_phase2_pod16.yml", "engine.mask=" + mask), calibration.load()
    )
    over = comparison.overhead(3)
    parts = _overhead_shares(comparison, 3)
    assert parts.pop("sum: a micro-batch (OH)") == over
    assert parts.pop("a pipeline cycle") < over
    assert sum(parts.values()) == pytest.approx(over)
    assert parts["layout"] > 0
    if mask == "additive":
        assert parts[SCORES] == pytest.approx(0.0, abs=1e-9)


def test_every_column_has_a_source(table1, comparison):
    for table in (table1, breakdown(comparison, 3, 1.995)):
        assert all(column.source in SOURCES for column in table.columns)
        keys = {column["key"] for column in table.to_json()["columns"]}
        assert all(set(row) <= keys for row in table.rows)


def test_the_engines_mask_is_the_better_arrangement(machine, load, comparison):
    """In the query/key product it costs less than half of the additive one's."""
    product, additive = (
        comparison.overhead(3),
        paper.ModelledOverhead(
            machine, load("packed_phase2_pod16.yml", "engine.mask=additive"), calibration.load()
        ).overhead(3),
    )
    assert product < 0.5 * additive


def test_table1_of_a_small_histogram(run, tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n" + "".join(f"{length},{40 + length}\n" for length in range(5, 33)))
    out = run(
        "--table",
        "1",
        "--histogram",
        str(path),
        "--max-sequence-length",
        "32",
        *SMALL,
        "--set",
        "data.max_sequence_length=32",
        "--set",
        "data.max_predictions_per_sequence=5",
        "--set",
        "model.max_position_embeddings=32",
        "--json",
    )
    _, first, table = json.loads(out)["tables"]
    assert first["name"] == "headline" and any("sequences/s" in row["what"] for row in first["rows"])
    assert [row["algorithm"] for row in table["rows"]] == ["NONE", "SORT", "GREEDY"] + ["SPFHP"] * 2 + ["NNLSHP"] + [
        "SPFHP"
    ] * 3 + ["OPTIMAL"] * 5
    by = {(row["algorithm"], row["depth"]): row for row in table["rows"]}
    assert by["OPTIMAL", "3"]["packing_factor"] >= max(
        by["SPFHP", "3"]["packing_factor"], by["NNLSHP", "3"]["packing_factor"]
    )
    # The paper measured about 4.48 % and 1.5 for GREEDY on its own data: its graph has a modelled figure there, too.
    greedy = by["GREEDY", next(row["depth"] for row in table["rows"] if row["algorithm"] == "GREEDY")]
    assert greedy["papers_overhead"] > 0


def test_the_machine_of_a_configuration_is_its_target(run, small):
    """Cycles stay, seconds are those of the clock: a rate in the ratio of the clocks, less what links cost."""
    line = ["--config", str(small), "--packing-factor", "1.9", "--json"]
    rates = {}
    for name in ("mk2", "bow"):
        _, answer = json.loads(run(*line, "--set", f"placement.machine={name}"))["tables"]
        assert f"({name})" in answer["title"]
        rates[name] = float(answer["rows"][1]["packed"].replace(",", ""))
    assert 1.0 < rates["bow"] / rates["mk2"] < 1.85 / 1.33


def test_a_configuration_names_its_bottleneck_and_the_answer_comes_first(run, small):
    asked = ("--config", str(small), "--packing-factor", "1.996", "--synthetic", "uniform:max=512,n=500")
    out = run(*asked, "--table", "breakdown", "--table", "1")
    assert out.count("  slowest\n") == 1 and "Operators without an estimator, costed as elementwise work: none." in out
    answer = run(*asked)
    assert out.startswith(answer) and "\nWhat packing gains" in answer and "sequences/s" in answer
    tables = json.loads(run("--json", "--packing-factor", "1.996"))["tables"]  # nothing else is printed unasked
    assert [table["name"] for table in tables] == ["answer", "headline"]


def test_a_machine_is_named_after_its_configuration(run):
    """No POD16 where a configuration has 1 replica of 4 IPUs; the rate is that of its replicas."""
    found = {}
    for name, replicas in (("packed_phase2_pod16", 4), ("packed_phase2_pod4", 1)):
        _, table = json.loads(run("--config", name, "--packing-factor", "1.996", "--json"))["tables"]
        assert f"{name} on {4 * replicas} IPUs" in table["title"] and "POD16" not in table["title"]
        found[name] = float(table["rows"][1]["packed"].replace(",", ""))
    assert found["packed_phase2_pod16"] == pytest.approx(4 * found["packed_phase2_pod4"], rel=0.03)


def test_what_does_not_fit_gets_no_throughput(cycle_cache, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    too_large = ("--set", "batch.micro_batch=64", "--packing-factor", "1.996")
    assert run_main(command.main, (*too_large, "--json")) == 1
    out, error = capsys.readouterr()
    plain = json.loads(out)
    (answer,) = plain["tables"]
    assert "does not fit" in answer["notes"][0] and not any("sequences/s" in row["what"] for row in answer["rows"])
    assert plain["does_not_fit"] == [error.strip()] and error.startswith("packed_phase2_pod16: does not fit: ")
    # Tables that give no throughput say it, too; what is not of the configuration does not.
    assert run_main(command.main, ("--table", "breakdown", *too_large)) == 1
    assert capsys.readouterr().err == error
    assert run_main(command.main, ("--table", "points", *too_large)) == 0


def test_an_updates_parts_add_up_to_its_seconds(comparison, machine, load):
    config, fitted = load("packed_phase2_pod16.yml", *SMALL[1::2]), calibration.load()
    comparison = paper.ModelledOverhead(machine, config, fitted)
    table = breakdown(comparison, 3, 2.0)
    *parts, together = [row for row in table.rows if "packed" in row]
    works = {"packed": (comparison.packed(3), 1024), "unpacked": (comparison.unpacked, 2048)}
    for side, (pipeline, accumulation) in works.items():
        seconds = pipeline.step(accumulation, fitted.parameters).seconds
        assert sum(part[side] for part in parts) == pytest.approx(together[side]) == pytest.approx(1e3 * seconds)
    assert len(parts) == 7  # one pod has no gateways


def test_the_points_are_the_stored_fits():
    fitted = calibration.load()
    rows, stored = paper.points(fitted).rows, fitted.report["points"]
    assert [row["point"] for row in rows] == [point["point"] for point in stored]
    for row, point in zip(rows, stored):
        assert (row["error"], row["left_out"]) == (100 * point["fitted_error"], 100 * point["left_out_error"])


def test_all_has_the_tables_of_each_part(run):
    small = (*SMALL, "--packing-factor", "1.996", "--synthetic", "uniform:max=512,n=500", "--json")
    whole, points = (
        {table["name"]: table for table in json.loads(run(*part, *small))["tables"]}
        for part in (["--all"], ["--table", "points"])
    )
    tables = ["answer", "headline", "table1", "table2", "breakdown", "points"]
    assert list(whole) == [*tables, "figure1", "figure2", "figure5"]
    assert list(points) == ["points"] and whole["points"] == points["points"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--html", "nowhere/page.html"), "no directory nowhere"),
        (("--table", "update"), "breakdown"),
        (("--measured", "somewhere"), "log.jsonl"),
        (("--config", "missing.yml"), "missing.yml"),
        (("--histogram", "lengths.csv", "--table", "1"), "no such file"),
        (("--set", "model.hiden_size=3"), "hiden_size"),
        (("--table", "1", "--set", "data.max_sequence_length=256"), "matching --config"),
        (("--nonsense",), "--nonsense"),
        (("--packing-factor", "0"), "at least one"),
        (("--packing-factor", "-3"), "at least one"),
        (("--packing-factor", "nan"), "at least one"),
        (("--table", "breakdown", "--packing-factor", "3.1"), "at most 3 sequences"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys, monkeypatch, cycle_cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    assert run_main(command.main, argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_check_compares_with_what_is_stored_and_writes_nothing(monkeypatch, capsys, tmp_path):
    stored = calibration.load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "observe", lambda machine_of: None)
    monkeypatch.setattr(calibrate, "write_atomically", None)
    for found, status in ((stored, 0), (replace(stored, parameters=Parameters()), 1)):
        monkeypatch.setattr(calibration, "calibrate", lambda observations, found=found: found)
        assert run_main(calibrate.main, ["--check"]) == status
        assert ("bit for bit" in capsys.readouterr().err) == (status == 0)


def test_calibrate_refuses_what_it_does_not_know_in_one_line(capsys):
    assert run_main(calibrate.main, ["--nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "--nonsense" in error
