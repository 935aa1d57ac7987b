"""The report's page holds the numbers of its tables, and what an operator costs adds up to what the pipeline costs."""

import dataclasses
import json

import numpy as np
import pytest

from ipu_packed_bert.cycles import calibration, uncertainty
from ipu_packed_bert.cycles.arrangement import UNPACKED
from ipu_packed_bert.cycles.layout import stacked
from ipu_packed_bert.report import command, operators
from ipu_packed_bert.report.pictures import page_of, pictures
from pack_data.cli.command import run_main
from pack_data.display.picture import Bars
from pack_data.display.table import COUNTED, MODEL, Column, Part, Table
from tests.pages import check_page

SMALL = (
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.intermediate_size=128",
    "model.vocabulary_size=512",
    "data.vocabulary_size=512",
    "model.num_layers=4",
    "placement.layers_per_ipu=[1, 1, 1, 1]",
)


@pytest.fixture(scope="module")
def pipelines(machine, load):
    config = load("packed_phase2_pod16.yml", *SMALL)
    return machine.pipeline(config, depth=3), machine.pipeline(config, arrangement=UNPACKED, depth=1)


@pytest.fixture(scope="module")
def found():
    return calibration.load()


def test_the_page_holds_the_tables_as_json_has_them(cycle_cache, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))
    options = [part for setting in SMALL for part in ("--set", setting)]
    options += [word for name in ("schedule", "operators", "scaling") for word in ("--table", name)]
    options += ["--packing-factor", "1.996", "--json"]
    assert run_main(command.main, [*options, "--html", str(tmp_path / "page.html")]) == 0
    printed = json.loads(capsys.readouterr().out)["tables"]
    page = check_page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(printed) == len(page.tables) == 7 and len(page.pictures) == 6
    for (name, rows), table in zip(page.tables.items(), printed):
        assert name.startswith(table["name"]) and len(rows) == len(table["rows"]) > 0
        for row, other in zip(rows, table["rows"]):
            assert row.items() <= other.items() and len(row) >= 3


def test_parts_of_a_table_are_tables_of_the_page():
    columns = tuple(Column(key, key, MODEL, ".1f") for key in "abc")
    parts = (Part("first", ("a", "b")), Part("second", ("a", "c")))
    table = Table("t", "T: 1", columns, [dict(a=1.0, b=2.0, c=3.0)], ("note",), parts)
    page = check_page(page_of("page", "lead", [table, table._replace(name="u", title="U: 2")], ["words"]).html())
    assert page.tables["t_1-1"] == [dict(a=1.0, b=2.0)] and page.tables["t_2-1"] == [dict(a=1.0, c=3.0)]
    assert len(page.tables) == 4 and page.shown["t_1-1"] == [dict(a="1.0", b="2.0")]


def test_what_the_ipus_hold_adds_up_to_what_they_cost(pipelines, found):
    parameters = found.parameters
    for pipeline in pipelines:
        whole = sum(pipeline.ipu_cycles(ipu, parameters) for ipu in pipeline.ipus)
        assert sum(map(parameters.cycles, operators.class_costs(pipeline).values())) == pytest.approx(whole)
    packed, unpacked = (sum(pipe.ipu_cycles(ipu, parameters) for ipu in pipe.ipus) for pipe in pipelines)
    for table in (operators.classes("x", *pipelines, found), operators.operators("x", *pipelines, found)):
        assert sum(row["packed"] for row in table.rows) == pytest.approx(packed)
        assert sum(row["unpacked"] for row in table.rows) == pytest.approx(unpacked)
        assert sum(row["difference"] for row in table.rows) == pytest.approx(packed - unpacked)
    rows = operators.operators("x", *pipelines, found).rows
    assert sum(row["share"] for row in rows) == pytest.approx(100.0)
    # Four layers, forward and once more for the backward pass: 6 products with weights, 2 of attention.
    layer = {(row["operator"], row["phase"]): 0 for row in rows if row["block"] == "layer"}
    for row in rows:
        if row["block"] == "layer":
            layer[row["operator"], row["phase"]] += row["calls"]
    assert layer["addmm", "forward"] == 4 * 2 * 6 and layer["bmm", "forward"] == 4 * 2 * 2
    assert layer["mm", "backward"] == 4 * 2 * 6 and layer["bmm", "backward"] == 4 * 4


def test_operators_draws_add_up_to_the_totals_draws(pipelines, found):
    drawn = found.draws.parameters
    for pipeline in pipelines:
        whole = sum(pipeline.ipu_cycles(ipu, drawn) for ipu in pipeline.ipus)
        listed = stacked([cost for _, cost in operators.operator_costs(pipeline).values()])
        assert whole.shape == (uncertainty.KEPT,)
        assert drawn.cycles(listed).sum(axis=0) == pytest.approx(whole)
        assert sum(map(drawn.cycles, operators.class_costs(pipeline).values())) == pytest.approx(whole)
    low = np.quantile(drawn.cycles(listed)[3], 0.05)
    row = operators.operators("x", *pipelines, found)
    keys = [tuple(each[key] for key in ("block", "phase", "operator", "part")) for each in row.rows]
    third = list(operators.operator_costs(pipelines[1]))[3]
    assert row.rows[keys.index(third)]["unpacked_lower"] == pytest.approx(low)


def test_intervals_hold_their_values_and_are_exact_where_no_parameter_enters(pipelines, found):
    def made(calibrated):
        return (
            operators.classes("x", *pipelines, calibrated),
            operators.operators("x", *pipelines, calibrated),
            operators.products("x", pipelines[0], calibrated),
            operators.update("x", (pipelines[0], 100), (pipelines[1], 200), calibrated),
        )

    moved = {key: 1.3 * getattr(found.parameters, key) for key in ("factor", "layout", "replica_seconds", "products")}
    moved.update(batched=0.9, exchange=1.1, sync=1.2, wide=1.1, links=1.2, streaming=1.4)
    others = made(dataclasses.replace(found, parameters=dataclasses.replace(found.parameters, **moved)))
    counted = exact = 0
    for table, other in zip(made(found), others):
        for column in table.columns:
            for row, changed in zip(table.rows, other.rows):
                value, low, high = (row.get(key) for key in (column.key, *(column.interval or (column.key,) * 2)))
                if column.interval:
                    assert low <= value <= high, (row, column)
                    assert (low == high) == (column.shown(row).endswith(" exact"))
                    exact += low == high
                    if low == high and table.name in ("classes", "update"):  # whose rows keep their order
                        assert changed[column.key] == value
                if column.source == COUNTED and table.name == "update":
                    assert changed[column.key] == value
                    counted += 1
        assert {c.key for c in table.columns if c.form and not c.interval} == {
            "classes": set(),
            "operators": {"calls", "share", "unpacked"},
            "products": {"calls", "intensity", "roof"},
            "update": {"accumulation", "bubble_share"},
        }[table.name]
    assert counted > 0 and exact > 20


def test_products_stay_below_their_roof_and_have_the_graphs_sizes(pipelines, found):
    packed, _ = pipelines
    listed = operators.planned_products(packed, found.parameters)
    peak = packed.target.peak_macs_per_cycle
    rates = [each.macs / found.parameters.cycles(each.cost) for each in listed]
    assert all(0 < rate < peak for rate in rates) and len(listed) > 10
    rows = operators.products("x", packed, found).rows
    assert [row["rate"] for row in rows] == pytest.approx(rates)
    assert all(row["rate_lower"] <= row["rate"] <= row["rate_upper"] for row in rows)
    # Feed-forward layer up: [2 x 512, 64] x [64, 128]; 4 layers, twice.
    (up,) = [each for each in listed if each.name == "layer, forward" and each.product.columns == 128]
    assert (up.product.rows, up.product.inner, up.calls) == (1024, 64, 8)
    assert up.bytes == 2 * (1024 * 64 + 64 * 128 + 1024 * 128)
    assert up.intensity == 1024 * 64 * 128 / up.bytes


def test_an_updates_parts_add_up_to_its_seconds(pipelines, found):
    table = operators.update("x", (pipelines[0], 100), (pipelines[1], 200), found)
    for row, pipeline, accumulation in zip(table.rows, pipelines, (100, 200)):
        parts = sum(row[key] for key in ("steady", "bubble", "update", "host"))
        assert parts == pytest.approx(row["seconds"])
        assert row["seconds"] == pytest.approx(pipeline.step(accumulation, found.parameters).seconds)
    once = operators.beyond("x", (pipelines[0], 100), (pipelines[1], 200), found)
    for row, side in zip(table.rows, ("packed", "unpacked")):
        assert sum(part[side] for part in once.rows) == pytest.approx(1e3 * (row["update"] + row["host"]))
    (drawn,) = pictures(table)
    assert [sum(values) for values in zip(*(series.values for series in drawn.series))] == pytest.approx(
        [row["seconds"] for row in table.rows]
    )


def test_pictures_hold_the_tables_numbers(pipelines, found):
    table = operators.classes("x", *pipelines, found)
    layers, others = pictures(table)
    assert isinstance(layers, Bars) and layers.title != others.title
    drawn = sum(value or 0.0 for bars in (layers, others) for series in bars.series for value in series.values)
    assert drawn == pytest.approx(sum(row["packed"] + row["unpacked"] for row in table.rows) / 1e6)
