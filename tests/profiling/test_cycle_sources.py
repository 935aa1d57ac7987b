"""Measured cycles: run logs and profiles, and that nothing is compared with what it isn't."""
import json
import sys
from types import SimpleNamespace

import pytest

from cycle_sources import PopVisionProfile, RunLog, compare


def run_folder(folder, *, packs, sequences, seconds, cycles=None, steps=4):
    folder.mkdir()
    lines = []
    for step in range(steps):
        slow = 100.0 if step == 0 else 1.0                       # the first step compiles
        lines.append(json.dumps({"step": step, "packs": packs, "sequences": sequences, "seconds": slow * seconds,
                                 "cycles": None if cycles is None else int(slow * cycles)}))
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_hardware_cycles_give_overhead_and_realised_speedup(tmp_path):
    packed = RunLog(run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0, cycles=8 * 1043)).measure()
    unpacked = RunLog(run_folder(tmp_path / "b", packs=16, sequences=16, seconds=2.0, cycles=16 * 1000)).measure()
    found = compare(packed, unpacked)
    assert packed.source == unpacked.source == "hardware" and packed.unit == "cycles"
    assert found.overhead == pytest.approx(0.043) and packed.packing_factor == 2.0
    assert found.realised == pytest.approx(2.0 / 1.043)


def test_host_seconds_where_nothing_counts_cycles(tmp_path):
    packed = RunLog(run_folder(tmp_path / "a", packs=8, sequences=15, seconds=0.9)).measure()
    assert (packed.source, packed.unit) == ("host", "seconds")
    assert packed.per_pack == pytest.approx(0.9 / 8) and packed.packing_factor == pytest.approx(15 / 8)


def test_cycles_are_not_compared_with_seconds(tmp_path):
    cycles = RunLog(run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0, cycles=100)).measure()
    seconds = RunLog(run_folder(tmp_path / "b", packs=8, sequences=8, seconds=1.0)).measure()
    with pytest.raises(ValueError, match="same engine"):
        compare(cycles, seconds)


def test_a_log_that_says_too_little(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        RunLog(run_folder(tmp_path / "a", packs=8, sequences=16, seconds=1.0, steps=1)).measure()
    (tmp_path / "a" / "log.jsonl").write_text('{"step": 0}\nnot json\n')
    with pytest.raises(ValueError, match="line 2"):
        RunLog(tmp_path / "a").measure()


def test_profile_takes_the_busiest_ipu(tmp_path, monkeypatch):
    """Through the names of the SDK's analysis library: execution.steps[].ipus[].cycles."""
    def step(*cycles):
        return SimpleNamespace(ipus=[SimpleNamespace(cycles=c) for c in cycles])
    opened = []

    def open_report(path):
        opened.append(path)
        return SimpleNamespace(execution=SimpleNamespace(steps=[step(100, 300), step(50, 250)]))
    monkeypatch.setitem(sys.modules, "pva", SimpleNamespace(openReport=open_report))
    (tmp_path / "profile.pop").write_bytes(b"")
    measured = PopVisionProfile(tmp_path, packs=11).measure()
    assert measured.source == "profile" and measured.per_pack == 550 / 11
    assert opened == [str(tmp_path / "profile.pop")]
    with pytest.raises(ValueError, match="no such profile"):
        PopVisionProfile(tmp_path / "nowhere.pop", packs=1).measure()


def test_profile_without_the_sdk_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pva", None)
    with pytest.raises(ValueError, match="pva"):
        PopVisionProfile(tmp_path, packs=1).measure()
