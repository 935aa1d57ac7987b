"""The report: the paper's rows, sources beside every number, and what a user types."""

import csv
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from ipu_packed_bert.cycles import calibration, uncertainty
from ipu_packed_bert.cycles.lowering import SCORES
from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.report import calibrate, command, packings, paper, pictures
from ipu_packed_bert.settings.shipped import FOLDER
from pack_data import sort
from pack_data.cli.command import run_main
from pack_data.display.table import as_csv
from pack_data.histogram import LengthHistogram

SOURCES = {"hardware", "profile", "predicted", "fitted", "host", "paper", "computed", "published", "config"}
FAST = tuple(row for row in paper.ROWS if row[0] in ("none", "spfhp"))


@pytest.fixture(scope="module")
def comparison(machine, load):
    return paper.ModelledOverhead(machine, load("packed_phase2_pod16.yml"), calibration.load())


@pytest.fixture(scope="module")
def table1(comparison, cycle_cache):
    histogram = LengthHistogram.published("wikipedia_512")
    found = packings.Packings(histogram, cycle_cache, FAST)
    try:
        return paper.table1(comparison, found, FAST, sort.batch(histogram, batch_size=256), histogram.name)
    finally:
        found.close()


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


SMALL = (
    "--set",
    "model.hidden_size=64",
    "--set",
    "model.num_heads=4",
    "--set",
    "model.intermediate_size=128",
    "--set",
    "model.vocabulary_size=512",
    "--set",
    "data.vocabulary_size=512",
    "--set",
    "model.num_layers=4",
    "--set",
    "placement.layers_per_ipu=[1, 1, 1, 1]",
)


@pytest.fixture
def small(tmp_path):
    """A configuration of four small layers."""
    found = {}
    for setting in SMALL[1::2]:
        section, name, value = re.split("[.=]", setting, maxsplit=2)
        found.setdefault(section, {})[name] = json.loads(value)
    path = tmp_path / "small.yml"
    path.write_text(json.dumps({"extends": command.DEFAULT.stem, **found}))
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
        assert row["overhead_lower"] < row["overhead"] < row["overhead_upper"]
        # This project's graph is cheaper than the paper's, whatever the unknown layout costs.
        assert row["realised_lower"] > row["paper_realised"]
        checked += 1
    assert checked == 5


def test_the_papers_graph_holds_the_papers_numbers(table1):
    """Its own graph, in every row that the paper has but SORT's, and in no other: inside the interval, within 1 %."""
    checked = 0
    for row in table1.rows:
        theirs = row.get("paper_realised") is not None and row["algorithm"] != "SORT"
        assert ("papers_realised" in row) == theirs
        if row["algorithm"] == "SPFHP":
            assert row["papers_realised"] == pytest.approx(row["paper_realised"], rel=0.01)
            assert row["papers_realised_lower"] < row["paper_realised"] < row["papers_realised_upper"]
            checked += 1
    assert checked == 5


def test_pictures_draw_the_papers_graph_beside_the_paper_and_ours_apart(table1, machine, load):
    table2 = paper.table2(machine, load, calibration.load())
    for table, model, measured in (
        (table1, "realised", "paper_realised"),
        (table2, "realised", "paper_realised"),
    ):
        ours, theirs = pictures.pictures(table)
        beside, apart = "papers_" + model, model
        their_rows = [row for row in table.rows if isinstance(row.get(beside), float)]
        our_rows = [row for row in table.rows if isinstance(row.get(apart), float)]
        modelled, published = theirs.series
        assert modelled.values == tuple(row[beside] for row in their_rows) and len(their_rows) > 3
        assert published.values == tuple(row[measured] for row in their_rows)
        (alone,) = ours.series
        assert alone.values == tuple(row[apart] for row in our_rows)
        assert all(low <= high for low, high in zip(alone.lower, alone.upper))
        assert theirs.title != ours.title


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
        assert row["overhead_lower"] < row["overhead"] < row["overhead_upper"]
        assert row["overhead"] < row["papers_overhead"] or row["length"] == 128
        assert row["realised"] == pytest.approx(row["packing_factor"] / (1 + row["overhead"] / 100))
    for model in ("base", "large"):
        assert 0.9 < rows[model, 128]["papers_overhead"] < 2.6


def test_the_throughput_of_an_update_by_hand(comparison):
    """2048 micro-batches and 8 to fill and drain, 1027 and 8 packed; an update and the host in each; of each draw."""
    parameters = comparison.calibration.draws.parameters
    packed, unpacked = comparison.packed(3), comparison.unpacked
    host = 4 * parameters.replica_seconds * 1.33e9  # four replicas, one process
    cycles = [
        (n + 8) * each.pipeline_cycle(parameters) + each.update_cycles(parameters) + host
        for n, each in ((1027, packed), (2048, unpacked))
    ]
    rates = [sequences / c for sequences, c in zip((1027 * 1.995, 2048), cycles)]
    found = comparison.training_overhead(3, 1.995).value
    assert found == pytest.approx(np.median(1.995 / (rates[0] / rates[1]) - 1))


def test_the_median_is_printed_and_the_fitted_value_where_it_says_fitted(comparison, table1, machine):
    """Of this project's graph the median of the draws, with half of them on either side; of the paper's the fit."""
    unpacked, checked = comparison.unpacked, 0
    for row in table1.rows:
        if row["depth"] != "3" or row["algorithm"] == "OPTIMAL":
            continue
        for prefix, arrangement in (("", comparison.arrangement), ("papers_", paper.POPART)):
            if row.get(prefix + "overhead") is None:
                continue
            pipeline = machine.pipeline(comparison.config, arrangement=arrangement, depth=3)
            drawn = calibration.overhead(pipeline, unpacked, comparison.calibration.draws.parameters)
            fitted = calibration.overhead(pipeline, unpacked, comparison.calibration.parameters)
            assert row[prefix + "overhead"] == pytest.approx(100 * (fitted if prefix else np.median(drawn)))
            checked += 1
    assert checked == 2


def test_sort_is_engines_and_no_percentage(table1):
    (row,) = [row for row in table1.rows if row["algorithm"] == "SORT"]
    assert row["overhead"] == "508 engines" and row.get("realised") is None and row.get("overhead_lower") is None
    assert row["paper_overhead"] == ">>100"


@pytest.mark.parametrize("mask", ["product", "additive"])
def test_decomposition_adds_up(machine, load, mask):
    comparison = paper.ModelledOverhead(
        machine, load("packed_phase2_pod16.yml", "engine.mask=" + mask), calibration.load()
    )
    parts, over = comparison.decomposition(3), comparison.overhead(3)
    layout = parts["layout"]
    assert layout.lower < layout.value < layout.upper
    # In each draw the parts add up; in one draw alone they are all medians.
    drawn = comparison.calibration.draws
    first = {field: getattr(drawn.parameters, field)[:1] for field in uncertainty.FIELDS}
    alone = replace(comparison.calibration, draws=replace(drawn, parameters=Parameters(**first)))
    one = paper.ModelledOverhead(machine, comparison.config, alone)
    assert sum(part.value for part in one.decomposition(3).values()) == pytest.approx(one.overhead(3).value)
    if mask == "additive":
        # The mask's layout is most of the interval.
        assert over.upper - over.lower == pytest.approx(layout.upper - layout.lower, rel=0.25)
        assert parts[SCORES].value == pytest.approx(0.0, abs=1e-9)
    else:
        # Joining query and key is a copy: less than a point is left open, most of it other rearrangements.
        assert over.upper - over.lower < 0.01 and layout.upper - layout.lower > 0.6 * (over.upper - over.lower)


def test_every_column_has_a_source(table1, comparison):
    for table in (table1, paper.decomposition(comparison, 3)):
        assert all(column.source in SOURCES for column in table.columns)
        keys = {column["key"] for column in table.to_json()["columns"]}
        assert all(set(row) <= keys for row in table.rows)


def test_csv_and_json_hold_the_same_numbers(table1):
    read = list(csv.reader(io.StringIO(as_csv([table1]))))
    plain = table1.to_json()
    assert (
        read[0] == ["# table1"]
        and read[1] == [c["key"] for c in plain["columns"]]
        and read[2] == [c["source"] for c in plain["columns"]]
    )
    first = plain["rows"][0]
    assert float(read[3][read[1].index("packing_factor")]) == first["packing_factor"] == 1.0
    json.dumps(plain)


def test_the_engines_mask_is_the_better_arrangement(machine, load, comparison):
    """In the query/key product it costs less than half of the additive one's, whatever the unknown layout costs."""
    product, additive = (
        comparison.overhead(3),
        paper.ModelledOverhead(
            machine, load("packed_phase2_pod16.yml", "engine.mask=additive"), calibration.load()
        ).overhead(3),
    )
    assert product.upper < additive.lower and product.value < 0.5 * additive.value


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
    (first, table) = json.loads(out)["tables"]
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
    assert greedy["papers_overhead_lower"] < greedy["papers_overhead"] < greedy["papers_overhead_upper"]


def test_what_if(run):
    config = str(command.DEFAULT)
    depth, bow = ["--set", "data.max_sequences_per_pack=2"], ["--set", "placement.machine=bow"]
    out = run("--config", config, *SMALL, *depth, *bow, "--packing-factor", "1.9", "--csv")
    assert out.startswith("# what_if") and out.count("# breakdown") == 2
    header, sources, first, second = [next(csv.reader([line])) for line in out.splitlines()[1:5]]
    rate, ratio = header.index("rate"), header.index("rate_ratio")
    assert sources[rate] == "predicted" and float(first[ratio]) == 1.0
    assert float(second[rate]) > float(first[rate]) and first[:2] == ["packed_phase2_pod16", "mk2"]
    assert "max_sequences_per_pack=2" in second[0] and "model.hidden_size=64" in second[0] and second[1] == "bow"
    # Two configurations: --set is for the last one only, which stands there as written, too.
    out = run("--config", config, "--config", config, *SMALL, "--packing-factor", "1.9", "--json")
    names = [row["name"] for row in json.loads(out)["tables"][0]["rows"]]
    assert len(names) == 3 and names[0] == names[1] and "hidden_size" in names[2]


def test_the_machine_of_a_configuration_is_its_target(run):
    """Cycles stay, seconds are those of the clock: a rate in the ratio of the clocks, less what links cost."""
    line = ["--config", str(command.DEFAULT), *SMALL, "--packing-factor", "1.9", "--json"]
    mk2, bow = (
        json.loads(run(*line, "--set", f"placement.machine={name}"))["tables"][0]["rows"][-1] for name in ("mk2", "bow")
    )
    assert (mk2["target"], bow["target"]) == ("mk2", "bow")
    assert 1.0 < bow["rate"] / mk2["rate"] < 1.85 / 1.33 and bow["pipeline_cycle"] >= mk2["pipeline_cycle"]


def test_a_configuration_names_its_bottleneck(run, small):
    out = run("--config", str(small), "--packing-factor", "1.996")
    assert out.count("slowest") == 1 and "sequences/s" in out and "Cache of plans" in out
    assert "Operators without an estimator, costed as elementwise work: none." in out


def test_a_machine_is_named_after_its_configuration(run):
    """No POD16 where a configuration has 1 replica of 4 IPUs; the rate is that of its replicas."""
    found = {}
    for name, replicas in (("packed_phase2_pod16", 4), ("packed_phase2_pod4", 1)):
        config = str(FOLDER / (name + ".yml"))
        (table,) = json.loads(
            run(
                "--config",
                config,
                "--packing-factor",
                "1.996",
                "--json",
            )
        )["tables"]
        note = table["notes"][1]
        assert f"x 4 IPUs = {4 * replicas} IPUs" in note and "POD16" not in note
        found[name] = float(note.split(": ")[1].split(" ")[0].replace(",", ""))
    assert found["packed_phase2_pod16"] == pytest.approx(4 * found["packed_phase2_pod4"], rel=0.03)


def test_what_does_not_fit_gets_no_throughput(cycle_cache, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    too_large = ("--set", "batch.micro_batch=64", "--packing-factor", "1.996")
    assert run_main(command.main, (*too_large, "--json")) == 1
    out, error = capsys.readouterr()
    plain = json.loads(out)
    what_if, fitting, large = plain["tables"]
    assert "does not fit" in large["notes"][1]
    first, second = what_if["rows"]
    assert (
        first["rate"] > 0
        and all(second[key] is None for key in ("rate", "rate_lower", "rate_upper", "rate_ratio"))
        and second["cycles_ratio"] > 0
    )
    assert any("sequences/s" in note for note in fitting["notes"]) and not any(
        "sequences/s" in note for note in large["notes"]
    )
    assert plain["does_not_fit"] == [error.strip()] and error.startswith(
        "packed_phase2_pod16 batch.micro_batch=64: does not fit: "
    )
    # Tables that give no throughput say it below them.
    assert run_main(command.main, ("--table", "scaling", *too_large)) == 1
    out, error = capsys.readouterr()
    assert error and " ".join(error.split()) in " ".join(out.split())  # wrapped to the width of a page


def test_runs_that_happened(run, tmp_path):
    for name, packs, seconds in (("packed", 8, 1.0), ("unpacked", 16, 1.9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(
            "\n".join(
                json.dumps({"step": i, "packs": packs, "sequences": 16, "seconds": seconds, "cycles": None})
                for i in range(3)
            )
        )
    (table,) = json.loads(
        run("--packed", str(tmp_path / "packed"), "--unpacked", str(tmp_path / "unpacked"), "--json")
    )["tables"]
    assert table["rows"][0]["overhead"] == pytest.approx(100 * (1 / 8 / (1.9 / 16) - 1))
    assert {c["source"] for c in table["columns"]} == {"config", "host", "paper"}
    assert table["rows"][0].get("paper_overhead") is None
    # BERT at 512, depth 3: the paper has its own values for that.
    (tmp_path / "packed" / "config.yml").write_text("data:\n  max_sequence_length: 512\n  max_sequences_per_pack: 3\n")
    (table,) = json.loads(
        run("--packed", str(tmp_path / "packed"), "--unpacked", str(tmp_path / "unpacked"), "--json")
    )["tables"]
    assert (table["rows"][0]["paper_overhead"], table["rows"][0]["paper_realised"]) == (4.287, 1.913)


def test_all_has_the_tables_of_each_part(run):
    small = (*SMALL, "--packing-factor", "1.996", "--synthetic", "uniform:max=512,n=500", "--json")
    whole, points = (
        {table["name"]: table for table in json.loads(run(*part, *small))["tables"]}
        for part in (["--all"], ["--table", "points"])
    )
    assert {"headline", "table1", "table2", "decomposition", "breakdown", "scaling", "schedule"} <= set(whole)
    assert {"classes", "operators", "products", "update", "beyond"} <= set(whole)
    assert next(iter(whole)) == "headline"  # the answer is first
    assert list(points) == ["points"] and whole["points"] == points["points"]


def test_plot_writes_a_file_a_picture(run, tmp_path):
    options = ("--packing-factor", "1.996", *SMALL)
    run("--table", "scaling", *options, "--plot", str(tmp_path / "one.svg"))
    assert "un-padding, 64/device" in (tmp_path / "one.svg").read_text()
    run("--table", "scaling", "--table", "schedule", *options, "--plot", str(tmp_path / "many.svg"))
    written = sorted(path.name for path in tmp_path.glob("many*.svg"))
    assert len(written) == 2 and all(name.startswith("many_") for name in written)
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    run("--table", "scaling", *options, "--plot", str(tmp_path / "one.png"))
    assert (tmp_path / "one.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--json", "--csv"), "exclude each other"),
        (("--plot", "figure.jpg"), ".pdf or .svg"),
        (("--html", "nowhere/page.html"), "no folder nowhere"),
        (("--packed", "somewhere"), "--unpacked belong together"),
        (("--config", "missing.yml"), "missing.yml"),
        (("--histogram", "lengths.csv", "--table", "1"), "neither a file"),
        (("--set", "model.hiden_size=3"), "hiden_size"),
        (("--packed", "a", "--unpacked", "b"), "log.jsonl"),
        (("--table", "1", "--set", "data.max_sequence_length=256"), "matching --config"),
        (("--nonsense",), "--nonsense"),
        (("--packing-factor", "0"), "at least one"),
        (("--packing-factor", "-3"), "at least one"),
        (("--packing-factor", "nan"), "at least one"),
        (("--table", "schedule", "--packing-factor", "3.1"), "at most 3 sequences"),
        (("--plot", "nowhere/figure.png"), "no folder nowhere"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys, monkeypatch, cycle_cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    assert run_main(command.main, argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    "argv, message",
    [(["--nonsense"], "--nonsense"), (["--check", "--with", "x.json"], "--with"), (["--config", "x.yml"], "--with")],
)
def test_calibrate_refuses_options_that_it_would_not_follow_in_one_line(argv, message, capsys):
    assert run_main(calibrate.main, argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
