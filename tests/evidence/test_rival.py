"""Packs against the strongest rival: every batch of it must pass, A/A too, and the control must fail."""

import pytest

from evidence import claims, rival
from evidence.__main__ import main
from evidence.runner import RESULTS, Cell, Results, write_results

pytestmark = pytest.mark.slow


def finished(path, *, draws=8, apart=0.0, slots=(128, 512), **seconds):
    """Rounds in which all of the rival's batches take 1.2 times as long as packs, and padded rows twice as long."""
    settings = {"slots": [128, 512], "commit": "0123456789"}
    facts = {"clock": "s", "machine": "m", "rival": "r"}
    times = {**dict.fromkeys(rival.RIVALS, 1.2), "packed": 1.0, "again": 1.0, "alone": 1.0, "padded": 2.0, **seconds}
    cells = {}
    for item in slots:
        rows = []
        for draw in range(draws):
            shaken = {f"{name}_s": time * (1 + 0.001 * ((draw + len(name)) % 3)) for name, time in times.items()}
            rows.append({"sequences": 48, "packs": 24, "losses_apart": apart, **shaken})
        cells[Cell(f"{item} slots", 1)] = rows
    write_results(path, Results(settings, cells, facts))
    return rival.RivalShown(path)


@pytest.mark.parametrize(
    "change, kept",
    [
        ({}, True),
        ({"eager_1024": 1.04}, False),  # one of the four batches: it is the rival at its best
        ({"again": 1.06}, False),
        ({"again": 0.94}, False),
        ({"padded": 1.1}, False),  # the control passes
        ({"apart": 0.03}, False),
        ({"apart": float("nan")}, False),
        ({"draws": 7}, None),
        ({"slots": (128,)}, None),
    ],
)
def test_the_fastest_rival_decides_if_the_controls_allow(tmp_path, change, kept):
    actual = claims.findings({"rival": finished(tmp_path / "rival.jsonl", **change)})["rival"]
    assert actual.kept is kept
    if kept is False:
        assert ("shows nothing" in actual.figures) == ("eager_1024" not in change)


def test_all_sides_compute_the_same_sequences(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="4.48", reason="needs transformers 4.48 or newer")
    monkeypatch.setattr(rival, "keep_buffers", lambda: True)  # not to be undone in this process
    out = tmp_path / "rival_quick"
    assert main(["rival", "--size", "quick", "--seeds", "2", "--out", str(out), "--no-plot"]) == 0
    shown = rival.shown(out / RESULTS)
    (timings,) = shown.timings
    assert shown.draws == 2
    assert (out / "table.md").read_text() == shown.text()
    first, second = timings.rows
    assert max(first["losses_apart"], second["losses_apart"]) < rival.LOSSES
    works = rival.draw_works(rival.SIZES["quick"], 64, 2)
    assert len({work.unpacked["input_ids"].tobytes() for work in works}) == 2
    assert {name for name in first if name.endswith("_s")} >= {f"{name}_s" for name in rival.RIVALS}
