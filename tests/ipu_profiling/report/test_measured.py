"""Measured cycles beside predicted ones: every kind of source, and the settings that must be equal."""

import json
import sys

import pytest
import yaml

from ipu_profiling.cycles import calibration
from ipu_profiling.measured import bundle as ipu_bundle
from ipu_profiling.measured import runs as measured
from ipu_profiling.measured.popvision import Work
from ipu_profiling.report import command
from pack_data.cli.command import run_main
from pack_data.display.facts import as_json
from tests.fakes import pva
from tests.ipu_profiling.measured_sources import run_folder, write_profile
from tests.refusals import refusal_of, refused

SMALL = (
    "model.hidden_size=64 model.num_heads=4 model.intermediate_size=128 model.vocabulary_size=512 model.num_layers=4 "
    "data.vocabulary_size=512 data.max_sequence_length=128 data.max_predictions_per_sequence=20 "
    "placement.layers_per_ipu=[1,1,1,1] batch.gradient_accumulation=32"
).split()
NUMBER = 40  # micro-batches of an update


@pytest.fixture(scope="module")
def config(load):
    """Four IPUs, so small that it is traced in a second."""
    return load("packed_phase2_pod4.yml", *SMALL)


@pytest.fixture(scope="module")
def pipeline(machine, config):
    return machine.pipeline(config)


@pytest.fixture(scope="module")
def cycles(pipeline):
    return pipeline.step(NUMBER, calibration.load().parameters).cycles


@pytest.fixture
def bundle_of(tmp_path, config, pipeline, cycles):
    """bundle_of(times) -> a bundle of cycles, ``times`` those that the model predicts"""

    def write(times=1.0, name="bundle.json"):
        parameters = calibration.load().parameters
        work = []
        for ipu in pipeline.ipus:
            ipus_cycles = times * pipeline.work_cycles(ipu, NUMBER, parameters)
            work.append({"ipu": ipu.number, "cycles": ipus_cycles})
        bundle = ipu_bundle.Bundle(
            configuration={"micro_batches": NUMBER, "settings": ipu_bundle.public_settings(config)},
            device={},
            versions={},
            measured={"update_cycles": times * cycles, "work": work},
        )
        ipu_bundle.write_bundle(tmp_path / name, bundle)
        return tmp_path / name

    return write


@pytest.fixture
def rows_beside(machine, pipeline):
    """rows_beside(path, named=None) -> rows of the table by what they are of"""

    def rows(path, named=None):
        source = measured.with_micro_batches(measured.read(path, ipus=4), NUMBER)
        used = measured.configuration(source, named)
        assert machine.pipeline(used) is pipeline
        table = measured.beside(source, used, pipeline, calibration.load())
        return {row["what"]: row for row in as_json(table)}

    return rows


def test_a_bundle_of_predicted_cycles_differs_by_nothing(bundle_of, rows_beside):
    rows = rows_beside(bundle_of())
    assert list(rows) == ["update", "IPU 0", "IPU 1", "IPU 2", "IPU 3"]
    for row in rows.values():
        assert row["measured"] == pytest.approx(row["model"])
        assert row["lower"] <= row["model"] <= row["upper"]
        assert row["difference"] == pytest.approx(0.0, abs=1e-6)
    assert rows_beside(bundle_of(2.0))["update"]["difference"] == pytest.approx(100.0)


def test_a_run_is_the_median_of_its_steps_without_the_first(tmp_path, config, cycles, rows_beside):
    packs = NUMBER * config.batch.micro_batch
    folder = run_folder(tmp_path / "run", packs=packs, cycles=int(cycles))
    sections = {name: values for name, values in config.as_dict().items() if name != "without_ipus"}
    (folder / "config.yml").write_text(yaml.safe_dump(sections))
    rows = rows_beside(folder)
    assert list(rows) == ["update"]
    assert rows["update"]["difference"] == pytest.approx(0.0, abs=0.01)

    shorter = run_folder(tmp_path / "shorter", cycles=8344, steps=4, changed={2: {"packs": 4, "cycles": 4344}})
    source = measured.read(shorter)
    assert (source.cycles, source.quartiles, source.micro_batches) == (8344, (8344, 8688), None)
    (shorter / "config.yml").write_text("data: {}\nbatch: {micro_batch: 2}\nplacement: {replicas: 3}\n")
    assert measured.read(shorter).micro_batches == 2  # 8 packs are 4 micro-batches, of 3 replicas


def test_a_profile_has_the_work_of_each_ipu(tmp_path, config, pipeline, rows_beside, monkeypatch):
    monkeypatch.setitem(sys.modules, "pva", pva)
    path = write_profile(tmp_path, [400, 300, 200, 100], [4, 3, 2, 1])
    rows = rows_beside(tmp_path, config)
    assert rows["update"]["measured"] == 404
    assert [rows[f"IPU {ipu}"]["measured"] for ipu in range(4)] == [404, 303, 202, 101]
    with refused(path.name, "--config"):
        measured.configuration(measured.read(path), None)
    with refused(path.name, "4 IPUs", "8"):
        measured.read(path, ipus=8)
    source = measured.with_micro_batches(measured.read(path), NUMBER)
    with refused(source.detail, "IPU 9", "4 IPUs"):
        measured.beside(source._replace(work=(Work(9, 1.0),)), config, pipeline, calibration.load())


OTHER_SETTINGS = [
    "data.max_sequence_length=64",
    "model.num_heads=2",
    "batch.micro_batch=4",
    "placement.layers_per_ipu=[0,1,1,2]",
    "placement.machine=bow",
    "engine.mask=additive",
    "data.max_sequences_per_pack=2",
]


def test_settings_that_differ_are_refused_by_name(bundle_of, load):
    source = measured.read(bundle_of())
    for setting in OTHER_SETTINGS:
        with refused(source.detail, setting.partition("=")[0]):
            measured.configuration(source, load("packed_phase2_pod4.yml", *SMALL, setting))


def test_the_command_compares_with_the_micro_batches_that_a_source_states(
    tmp_path, bundle_of, pipeline, cached_cycles, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "pva", pva)
    bundle = bundle_of()
    page = tmp_path / "page.html"
    assert run_main(command.main, ["--measured", str(bundle), "--json", "--html", str(page)]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["rows"][0]["difference"] == pytest.approx(0.0, abs=1e-6)
    # The title names the configuration of the file, not the default one.
    assert "bundle</title>" in page.read_text()
    assert command.DEFAULT not in page.read_text()
    other_number = ["--measured", bundle, "--micro-batches", NUMBER + 1]
    refusal_of(command.main, other_number, capsys, NUMBER, NUMBER + 1, "--micro-batches")

    predicted = pipeline.step(9, calibration.load().parameters).cycles
    profile = write_profile(tmp_path / "profiled", [predicted, 1, 1, 1])
    options = ["--measured", profile, "--config", "packed_phase2_pod4"]
    for setting in SMALL:
        options += ["--set", setting]
    assert run_main(command.main, [*map(str, options), "--micro-batches", "9", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["rows"][0]["difference"] == pytest.approx(0.0, abs=1e-6)
    refusal_of(command.main, options, capsys, profile.name, "--micro-batches")
