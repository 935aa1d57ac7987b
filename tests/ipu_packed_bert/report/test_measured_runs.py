"""Measured cycles: run logs and profiles, and that nothing is compared with what it isn't."""

import json
import sys

import pytest

from ipu_packed_bert.report.measured import check_pair, read
from ipu_packed_bert.report.paper import measured
from tests.fakes import pva


def run_folder(folder, *, packs, sequences, seconds, cycles=None, steps=4):
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


def test_hardware_cycles_give_overhead_and_realised_speedup(tmp_path):
    packed = read(run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0, cycles=8 * 1043))
    unpacked = read(run_folder(tmp_path / "b", packs=16, sequences=16, seconds=2.0, cycles=16 * 1000))
    check_pair(packed, unpacked)
    assert packed.source == unpacked.source == "hardware" and packed.unit == "cycles"
    row = measured(packed, unpacked, None).rows[0]
    assert row["overhead"] == pytest.approx(4.3) and packed.packing_factor == 2.0
    assert row["realised"] == pytest.approx(2.0 / 1.043)


def test_host_seconds_where_nothing_counts_cycles(tmp_path):
    packed = read(run_folder(tmp_path / "a", packs=8, sequences=15, seconds=0.9))
    assert (packed.source, packed.unit) == ("host", "seconds")
    assert packed.per_pack == pytest.approx(0.9 / 8) and packed.packing_factor == pytest.approx(15 / 8)


def test_cycles_are_not_compared_with_seconds(tmp_path):
    cycles = read(run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0, cycles=100))
    seconds = read(run_folder(tmp_path / "b", packs=8, sequences=8, seconds=1.0))
    with pytest.raises(ValueError, match="same engine"):
        check_pair(cycles, seconds)


def test_a_log_that_says_too_little(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        read(run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0, steps=1))
    (tmp_path / "a" / "log.jsonl").write_text('{"step": 0}\nnot json\n')
    with pytest.raises(ValueError, match="line 2"):
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
        ("seconds", -1.0),
        ("seconds", None),
        ("seconds", float("nan")),
        ("packs", 0),
        ("packs", "8"),
        ("packs", 1.5),
        ("packs", True),
        ("sequences", -16),
        ("sequences", None),
        ("sequences", 0),
    ],
)
def test_what_is_no_measurement_is_refused_with_its_line(tmp_path, field, value):
    folder = run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0, cycles=100)
    change(folder, 2, **{field: value})
    with pytest.raises(ValueError, match=f"log.jsonl, line 3: ({field} is|not JSON .*(NaN|Infinity))"):
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
        "data: {max_sequence_length: many}\n",
        "data: {max_sequences_per_pack: -1}\n",
    ],
)
def test_a_config_that_no_run_wrote_is_refused(tmp_path, text):
    folder = run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0)
    (folder / "config.yml").write_text(text)
    with pytest.raises(ValueError, match="config.yml"):
        read(folder)
    (folder / "config.yml").write_text("data: {max_sequence_length: 512, max_sequences_per_pack: null}\n")
    assert read(folder).settings["data"]["max_sequence_length"] == 512


def test_runs_that_differ_in_more_than_packing_are_not_compared(tmp_path):
    def run(name, sequences, length, **model):
        folder = run_folder(tmp_path / name, packs=8, sequences=sequences, seconds=1.0)
        (folder / "config.yml").write_text(json.dumps({"data": {"max_sequence_length": length}, "model": model}))
        return read(folder)

    packed = run("packed", 16, 512, num_layers=24)
    same = run("same", 8, 512, num_layers=24)
    check_pair(packed, same)
    assert measured(packed, same, None).rows[0]["realised"] == 2.0
    for name, arguments, model, message in (
        ("short", (8, 128), 24, "data.max_sequence_length 512.* 128"),
        ("small", (8, 512), 12, "model.num_layers 24"),
        ("also packed", (12, 512), 24, "1.500 sequences a pack"),
    ):
        with pytest.raises(ValueError, match=message):
            check_pair(packed, run(name, *arguments, num_layers=model))


def test_profile_takes_the_busiest_ipu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pva", pva)
    steps = [{"type": "OnTileExecute", "name": "x", "cycles": each} for each in ([100, 300], [50, 250])]
    (tmp_path / "profile.pop").write_text(json.dumps({"ipus": 2, "tiles": [], "runs": [{"name": "", "steps": steps}]}))
    for path in (tmp_path, tmp_path / "profile.pop"):
        found = read(path)
        assert found.source == "profile" and found.per_pack == 550 and found.packs == 1
    with pytest.raises(ValueError, match="no such profile"):
        read(tmp_path / "nowhere.pop")


def test_profile_without_the_sdk_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pva", None)
    (tmp_path / "profile.pop").touch()
    with pytest.raises(ValueError, match="pva"):
        read(tmp_path / "profile.pop")
