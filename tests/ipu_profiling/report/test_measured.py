"""Measured beside predicted: every kind of source, like set beside like, and what differs refused by its name."""

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
from tests.fakes import pva
from tests.ipu_profiling.report.test_measured_runs import run_folder

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
def work(pipeline):
    parameters = calibration.load().parameters
    return [Work(ipu.number, pipeline.work_cycles(ipu, NUMBER, parameters)) for ipu in pipeline.ipus]


@pytest.fixture(scope="module")
def cycles(pipeline):
    return pipeline.step(NUMBER, calibration.load().parameters).cycles


@pytest.fixture
def beside(machine, config, pipeline):
    """beside(path, given=None) -> rows of the table by what they are of"""

    def rows(path, given=None):
        found = measured.with_micro_batches(measured.read(path, ipus=4), NUMBER)
        used = measured.configuration(found, given)
        assert machine.pipeline(used) is pipeline
        table = measured.beside(found, used, pipeline, calibration.load())
        return {row["what"]: row for row in table.rows}

    return rows


def tree(config):
    return {name: values for name, values in config.as_dict().items() if name != "without_ipus"}


def as_bundle(path, config, work, cycles, *, times=1.0):
    """Write a bundle of cycles, ``times`` what the model predicts."""
    checked = ipu_bundle.Checked(
        name="small",
        micro_batches=NUMBER,
        micro_batch=config.batch.micro_batch,
        replicas=1,
        ipus_per_replica=4,
        packs=NUMBER * config.batch.micro_batch,
        settings=ipu_bundle.public_settings(config),
    )
    measured = ipu_bundle.MeasuredUpdates(
        update_cycles=times * cycles, work=[Work(each.ipu, times * each.cycles) for each in work]
    )
    bundle = ipu_bundle.Bundle(
        stages=[],
        configuration=checked,
        device=ipu_bundle.CheckedDevice(None, 638976),
        versions=ipu_bundle.Versions(*[None] * 6),
        predicted=ipu_bundle.Predicted(),
        measured=measured,
        verdict=ipu_bundle.Verdict(0, [], []),
    )
    ipu_bundle.write_bundle(path, bundle)
    return path


def as_run(folder, config, cycles, **changes):
    packs = NUMBER * config.batch.micro_batch
    run_folder(folder, packs=packs, sequences=2 * packs, seconds=1.0, cycles=cycles, steps=5)
    settings = tree(config)
    for key, value in changes.items():
        section, name = key.split("__")
        settings[section][name] = value
    (folder / "config.yml").write_text(yaml.safe_dump(settings))
    return folder


def test_what_the_model_says_itself_differs_by_nothing(tmp_path, config, work, cycles, beside):
    rows = beside(as_bundle(tmp_path / "x.json", config, work, cycles))
    assert list(rows) == ["update", "IPU 0", "IPU 1", "IPU 2", "IPU 3"]
    for row in rows.values():
        assert row["measured"] == pytest.approx(row["model"]) and row["lower"] <= row["model"] <= row["upper"]
        assert row["difference"] == pytest.approx(0.0, abs=1e-6)
    twice = as_bundle(tmp_path / "twice.json", config, work, cycles, times=2.0)
    assert beside(twice)["update"]["difference"] == pytest.approx(100.0)


def test_a_run(tmp_path, config, cycles, beside):
    rows = beside(as_run(tmp_path / "run", config, int(cycles)))
    assert list(rows) == ["update"] and rows["update"]["difference"] == pytest.approx(0.0, abs=0.01)


def test_a_profile_on_the_stand_in(tmp_path, config, beside, monkeypatch):
    monkeypatch.setitem(sys.modules, "pva", pva)
    steps = [
        {"type": "OnTileExecute", "name": "/MatMul", "cycles": [400, 300, 200, 100]},
        {"type": "DoExchange", "name": "/x", "cycles": [4, 3, 2, 1]},
    ]
    stored = {"ipus": 4, "tiles": [], "runs": [{"name": "step", "steps": steps}]}
    (tmp_path / "profile.pop").write_text(json.dumps(stored))
    rows = beside(tmp_path, config)
    assert rows["update"]["measured"] == 404
    assert [rows[f"IPU {ipu}"]["measured"] for ipu in range(4)] == [404, 303, 202, 101]
    with pytest.raises(ValueError, match="name the configuration with --config"):
        measured.configuration(measured.read(tmp_path / "profile.pop"), None)
    with pytest.raises(ValueError, match="profile.pop: a program for 4 IPUs, fewer than the 8 "):
        measured.read(tmp_path / "profile.pop", ipus=8)


@pytest.mark.parametrize(
    "override, words",
    [
        ("data.max_sequence_length=64", "data.max_sequence_length is 128"),
        ("model.num_heads=2", "model.num_heads is 4"),
        ("batch.micro_batch=4", "batch.micro_batch is 2"),
        ("placement.layers_per_ipu=[0,1,1,2]", "placement.layers_per_ipu"),
        ("placement.machine=bow", "placement.machine is 'mk2'"),
        ("engine.mask=additive", "engine.mask is 'product'"),
        ("data.max_sequences_per_pack=2", "data.max_sequences_per_pack is 3"),
    ],
)
def test_what_differs_is_refused_by_its_name(override, words, tmp_path, config, work, cycles, load):
    found = measured.read(as_bundle(tmp_path / "x.json", config, work, cycles))
    with pytest.raises(ValueError) as refused:
        measured.configuration(found, load("packed_phase2_pod4.yml", *SMALL, override))
    assert words in str(refused.value) and "compare runs of the same" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("x.json", "{}", "not a bundle of packed-bert ipu-check"),
        ("x.json", '{"update_cycles": 3}', "not a bundle of packed-bert ipu-check"),
        ("x.csv", "ipu,class,cycles\n,,2\n", "log.jsonl"),
        ("x.txt", "3", "log.jsonl"),
    ],
)
def test_what_is_no_source_is_refused(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words) as refused:
        measured.read(tmp_path / name)
    assert name in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("value, words", [(None, None), ("two", "batch.micro_batch"), ({}, "batch.micro_batch")])
def test_a_run_with_a_damaged_configuration_is_one_line(value, words, tmp_path, config):
    folder = as_run(tmp_path / "run", config, 100, batch__micro_batch=value)
    if words is None:  # not stated: it is requested
        found = measured.read(folder)
        assert found.micro_batches is None and measured.with_micro_batches(found, 7).micro_batches == 7
        return
    with pytest.raises(ValueError, match=words) as refused:
        measured.read(folder)
    assert "config.yml" in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.fixture
def report(cycle_cache, monkeypatch, capsys):
    """report(*options) -> (exit status, tables, what is on stderr)"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cycle_cache))

    def run(*options):
        status = run_main(command.main, [*map(str, options), "--json"])
        out, error = capsys.readouterr()
        return status, json.loads(out)["tables"] if out else [], error

    return run


def test_micro_batches_of_a_profile_are_requested(tmp_path, pipeline, report, monkeypatch):
    """The configuration may state more of them: who profiles makes short updates."""
    predicted = pipeline.step(9, calibration.load().parameters).cycles
    monkeypatch.setitem(sys.modules, "pva", pva)
    steps = [{"type": "OnTileExecute", "name": "/MatMul", "cycles": [predicted, 1, 1, 1]}]
    (tmp_path / "x.pop").write_text(json.dumps({"ipus": 4, "tiles": [], "runs": [{"name": "", "steps": steps}]}))
    words = [word for each in SMALL for word in ("--set", each)]
    profile = ("--measured", tmp_path / "x.pop", "--config", "packed_phase2_pod4", *words)
    status, (table,), _ = report(*profile, "--micro-batches", 9)
    assert status == 0 and table["rows"][0]["difference"] == pytest.approx(0.0, abs=1e-6)
    assert ": 9 micro-batches of " in table["notes"][0]
    status, _, error = report(*profile)
    assert status == 2 and "x.pop" in error and "pass --micro-batches N" in error and error.count("\n") == 1
    status, _, error = report("--micro-batches", 9)
    assert status == 2 and "--measured SOURCE" in error and error.count("\n") == 1


def test_micro_batches_that_a_source_states_are_read(tmp_path, config, work, cycles, report):
    bundle = as_bundle(tmp_path / "x.json", config, work, cycles)
    status, _, error = report("--measured", bundle, "--micro-batches", NUMBER + 1)
    assert status == 2 and f"{NUMBER} micro-batches" in error and "leave --micro-batches out" in error
    status, (table,), _ = report("--measured", bundle, "--micro-batches", NUMBER)
    assert status == 0 and f"{NUMBER} micro-batches" in table["notes"][0]


def test_the_command_names_what_was_measured(tmp_path, config, work, cycles, report):
    page = tmp_path / "page.html"
    mine = ("--measured", as_bundle(tmp_path / "mine_3.json", config, work, cycles))
    assert report(*mine, *mine, "--html", page)[0] == 0 and "of an update, source 2" in page.read_text()
    status, (table,), _ = report(*mine, "--html", page)
    # Of what the file says, and not of the default configuration.
    assert "speed-up: mine_3</title>" in page.read_text() and command.DEFAULT not in page.read_text()
    assert status == 0 and table["rows"][0]["difference"] == pytest.approx(0.0, abs=1e-6)
