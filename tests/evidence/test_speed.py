"""Speed beside the packing factor: estimates of whole models, controls that must fail, the same work on both sides."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from evidence import speed
from evidence.__main__ import main
from evidence.runner import CELLS, Cell, finished_cells
from evidence.speed_shown import SpeedShown
from evidence.statistics import ratio
from ipu_packed_bert.training.compare_unpacked import EXPECTED

HEADS, LAYER = 0.5, 1.0  # seconds: of an update's packed rows
from tests.refusals import refused


def rounds(number=4, *, again=1.0, one=1.0, layer=LAYER, gradients=1e-6, noise=0.0):
    """Packs of 2 and 3 sequences in turn; unpacked rows take as long as packed ones, each."""
    found = []
    for index in range(number):
        sequences, packs = (4, 2) if index % 2 else (6, 2)
        factor, shake = sequences / packs, 1 + noise * (-1) ** index
        row = dict(round=index, sequences=sequences, packs=packs, tokens=100)
        row.update(packed_heads_s=HEADS, unpacked_heads_s=HEADS * factor)
        row.update(packed_dense_s=HEADS + layer, unpacked_dense_s=(HEADS + LAYER) * factor)
        row.update(again_s=(HEADS + layer) / again * shake, one_s=(HEADS + LAYER) * factor / one)
        found.append({**row, "dense_gradients": gradients})
    return found


def folder_of(path, cells):
    (path / CELLS).mkdir(parents=True, exist_ok=True)
    settings = {**speed.SIZES["default"]._asdict(), "size": "default"}
    (path / "settings.json").write_text(json.dumps(settings))
    facts = {
        "rows": {"512": {"packing_factor": 2.5, "depth": 3}},
        "corpus": "x",
        "vocabulary": "y",
        "clock": "s",
        "machine": "z",
    }
    (path / "facts.json").write_text(json.dumps(facts))
    for (name, seed), rows in cells.items():
        rows = [{"variant": name, "seed": seed, **row} for row in rows]
        record = dict(variant=name, seed=seed, seconds=1.0, rows=rows)
        (path / CELLS / f"{Cell(name, seed).stem}.json").write_text(json.dumps(record))
    return path


def test_an_estimate_has_the_layer_as_often_as_the_model_and_heads_once(tmp_path):
    """Packed layers that take twice as long: 2.5 (0.5 + 1) / (0.5 + 2), of 12 of them 2.5 (0.5 + 12) / (0.5 + 24)."""
    cells = {("512 base float32", 1): rounds(2, layer=2.0), ("512 base float32", 2): rounds(2, layer=2.0)}
    (timings,) = SpeedShown(folder_of(tmp_path, cells)).timings
    assert timings.factor == 2.5 and len(timings.rows) == 4
    assert ratio(timings.speed_ups("dense")).mean == pytest.approx(2.5 * 1.5 / 2.5)
    whole = timings.whole("dense")
    assert whole.mean == pytest.approx(2.5 * 12.5 / 24.5)
    assert whole.high - whole.low == pytest.approx(0.0, abs=1e-9)  # packs of other factors are no noise
    assert not timings.realised() and SpeedShown(tmp_path).draws == 2


@pytest.mark.parametrize(
    "change, why",
    [
        ({}, ""),
        ({"again": 1.2}, "timed twice differ"),
        ({"noise": 0.2}, "timed twice differ"),
        ({"number": 1}, "timed twice differ"),  # no interval
        ({"one": 2.4}, "packs of one sequence"),
        ({"gradients": 1.0}, "not the same work"),
        ({"gradients": float("nan")}, "not the same work"),
    ],
)
def test_rows_whose_controls_pass_show_nothing(tmp_path, change, why):
    cells = {("512 base float32", 1): rounds(), ("512 base bfloat16", 1): rounds(**change)}
    shown = SpeedShown(folder_of(tmp_path, cells))
    assert shown.all_pass == (not why) and shown.draws == 1
    assert [each.case.precision for each in shown.nothing] == (["bfloat16"] if why else [])
    assert why in shown.text() and ("shows nothing" in shown.text()) == bool(why)


def test_a_machine_without_bfloat16_says_so_and_other_rows_count(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "bfloat16_slowdown", lambda: 3.0)
    rows = speed.measure(SimpleNamespace(), Cell("512 base bfloat16", 1))
    shown = SpeedShown(folder_of(tmp_path, {("512 base float32", 1): rounds(), ("512 base bfloat16", 1): rows}))
    assert shown.all_pass and "no bfloat16" in shown.text() and len(shown.timings) == 1
    assert not SpeedShown(folder_of(tmp_path / "other", {("512 base bfloat16", 1): rows})).all_pass


def test_a_cell_times_the_same_work_on_both_sides_and_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "keep_buffers", lambda: True)  # not to be undone in this process
    monkeypatch.setitem(speed.SIZES, "quick", speed.SIZES["quick"]._replace(rows=((64, 4, 2),)))
    out = tmp_path / "speed_quick"
    arguments = ["speed", "--size", "quick", "--types", "float32", "--widths", "tiny", "--no-plot", "--out", str(out)]
    assert main([*arguments, "--slots", "64", "--seeds", "1"]) == 0
    cells = finished_cells(out)
    assert {cell.variant for cell in cells} == {"64 tiny float32", "64 tiny float32 whole"}
    first, *others = cells[Cell("64 tiny float32", 1)]
    for row in (first, *others):
        assert row["packs"] == 1 and 1 <= row["sequences"] <= 4 and row["tokens"] <= 64
        sides = {f"{layout}_{kind}_s" for layout in ("packed", "unpacked") for kind in ("dense", "within", "heads")}
        assert {name for name in row if name.endswith("_s")} == {*sides, "again_s", "one_s"}
    assert max(first["dense_gradients"], first["within_gradients"]) < EXPECTED["float32"]
    shown = speed.shown(out)
    assert (out / "table.md").read_text() == shown.text()
    assert "all 4 layers" in shown.text()
    with refused("--slots", "quick"):
        main([*arguments, "--slots", "2048"])


def test_typical_packs_have_the_factor_of_all(tmp_path):
    random = np.random.default_rng(0)
    lengths = np.where(np.arange(4) < random.integers(1, 5, size=300)[:, None], 8, 0)
    factor = np.count_nonzero(lengths) / len(lengths)
    table = np.array([(row,) for row in lengths], dtype=[("lengths", "u2", 4)])

    class Store:
        manifest = SimpleNamespace(packing_factor=factor)
        lengths = staticmethod(lambda numbers: table[numbers])
        __len__ = staticmethod(lambda: len(table))

    chosen = speed.typical(Store(), updates=3, packs=4, multiple=2, seed=1).reshape(3, 4)
    counts = np.count_nonzero(lengths, axis=1)[chosen]
    assert not (counts.sum(axis=1) % 2).any() and counts.mean() == pytest.approx(factor, abs=0.1)
    assert len(set(chosen.flat)) == 12
