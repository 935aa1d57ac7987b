"""Measured cycles: run logs and profiles."""

import json
import math
import sys

import pytest

from ipu_profiling.measured.runs import read
from tests.fakes import pva
from tests.refusals import refused


def run_folder(folder, *, packs=8, sequences=16, seconds=1.0, cycles=8000, steps=4):
    folder.mkdir()
    lines = []
    for step in range(steps):
        slow = 100.0 if step == 0 else 1.0  # the first step compiles
        lines.append(
            json.dumps(
                {
                    "step": step,
                    "packs": packs,
                    "sequences": sequences,
                    "seconds": slow * seconds,
                    "cycles": None if cycles is None else int(slow * cycles),
                }
            )
        )
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_hardware_cycles_are_the_median_without_the_first_step(tmp_path):
    folder = run_folder(tmp_path / "a", cycles=8344)
    change(folder, 2, packs=4, cycles=4344)  # 1,086 a pack beside 1,043
    found = read(folder)
    assert (found.source, found.cycles, found.quartiles) == ("hardware", 8344, (8344, 8688))
    assert found.micro_batches is None
    (folder / "config.yml").write_text("data: {}\nbatch: {micro_batch: 2}\nplacement: {replicas: 3}\n")
    assert read(folder).micro_batches == 2  # 8 packs are 4 micro-batches, of 3 replicas


def test_seconds_are_no_cycles(tmp_path):
    with refused("log.jsonl", "engine.log_cycles=true"):
        read(run_folder(tmp_path / "a", cycles=None))


def test_a_log_that_says_too_little(tmp_path):
    with refused("log.jsonl", "2 steps"):
        read(run_folder(tmp_path / "a", steps=1))
    (tmp_path / "a" / "log.jsonl").write_text('{"step": 0}\nnot json\n')
    with refused("log.jsonl", "line 2"):
        read(tmp_path / "a")


def change(folder, line, **fields):
    """Other fields in one line of a run's log."""
    lines = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    lines[line].update(fields)
    (folder / "log.jsonl").write_text("\n".join(json.dumps(record) for record in lines))


@pytest.mark.parametrize(
    "field, value",
    [
        ("cycles", -144),
        ("cycles", float("nan")),
        ("cycles", 0),
        ("cycles", "144"),
        ("cycles", float("inf")),
        ("packs", 0),
        ("packs", "8"),
        ("packs", 1.5),
        ("packs", True),
    ],
)
def test_what_is_no_measurement_is_refused_with_its_line(tmp_path, field, value):
    folder = run_folder(tmp_path / "a")
    change(folder, 2, **{field: value})
    not_finite = isinstance(value, float) and not math.isfinite(value)
    with refused("log.jsonl", "line 3", "JSON" if not_finite else field):
        read(folder)


@pytest.mark.parametrize(
    "text",
    [
        "data: [",
        "- 1\n",
        "",
        "model: {}\n",
        "data: 5\n",
        "data: {}\nmodel: 3\n",
        "data: {}\nbatch: {micro_batch: many}\n",
        "data: {}\nplacement: {replicas: 0}\n",
    ],
)
def test_a_config_that_no_run_wrote_is_refused(tmp_path, text):
    folder = run_folder(tmp_path / "a")
    (folder / "config.yml").write_text(text)
    with refused("config.yml"):
        read(folder)
    (folder / "config.yml").write_text("data: {max_sequence_length: 512, max_sequences_per_pack: null}\n")
    assert read(folder).settings["data"]["max_sequence_length"] == 512


def test_profile_takes_the_busiest_ipu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pva", pva)
    steps = [{"type": "OnTileExecute", "name": "x", "cycles": each} for each in ([100, 300], [50, 250])]
    (tmp_path / "profile.pop").write_text(json.dumps({"ipus": 2, "tiles": [], "runs": [{"name": "", "steps": steps}]}))
    for path in (tmp_path, tmp_path / "profile.pop"):
        found = read(path)
        assert found.source == "profile" and found.cycles == 550
    with refused("nowhere.pop"):
        read(tmp_path / "nowhere.pop")


def test_profile_without_the_sdk_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pva", None)
    (tmp_path / "profile.pop").touch()
    with refused("profile.pop", "pva"):
        read(tmp_path / "profile.pop")
