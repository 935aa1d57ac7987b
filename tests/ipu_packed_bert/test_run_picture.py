"""What a run's picture shows is what its log says."""

from __future__ import annotations

import pytest

from ipu_packed_bert.run_picture import curves, draw


def record(step, sequences, **values):
    return {"step": step, "sequences": sequences, "packs": 2, "tokens": 150, **values}


RECORDS = [
    record(1, 3, loss=9.0, mlm_loss=8.0),
    record(2, 2, loss=None, mlm_loss=None),  # an update that was left out
    record(3, 4, loss=6.0, mlm_loss=5.5),
]
EVALUATIONS = [record(2, 40, loss=7.0, mlm_loss=6.5), record(3, 40, loss=6.5, mlm_loss=6.0)]


def test_the_curves_are_the_logs():
    found = curves(RECORDS, EVALUATIONS, max_sequence_length=100, unigram=7.5)
    assert found.measure == "mlm_loss" and found.unigram == 7.5
    assert found.training == ([3, 9], [8.0, 5.5])
    assert found.held_out == ([5, 9], [6.5, 6.0])  # at the sequences that training had seen
    # 450 tokens: in 6 packs of 100 slots, or in 9 rows of their own.
    assert (found.tokens, found.packed_padding, found.unpacked_padding) == (450, 150, 450)


def test_other_tasks_are_drawn_by_their_loss_and_scores_are_no_loss():
    found = curves([record(1, 3, loss=9.0)], [record(1, 9, exact=50.0)], max_sequence_length=100, unigram=7.5)
    assert found.measure == "loss" and found.unigram is None
    assert found.training == ([3], [9.0]) and found.held_out == ([], [])


def test_the_picture_is_a_png_of_these_curves(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    from ipu_packed_bert import run_picture

    figures = []
    original = run_picture.save
    monkeypatch.setattr(run_picture, "save", lambda figure, path: (figures.append(figure), original(figure, path)))
    found = curves(RECORDS, EVALUATIONS, max_sequence_length=100, unigram=7.5)
    draw(found, tmp_path / "run.png", title="a run")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "run.png").stat().st_size > 5000
    loss, slots = figures[0].axes
    drawn = {line.get_label(): line for line in loss.lines}
    for label, points in (("training", found.training), ("held out", found.held_out)):
        assert (list(drawn[label].get_xdata()), list(drawn[label].get_ydata())) == points
    assert any(set(line.get_ydata()) == {7.5} for line in loss.lines)
    assert loss.get_xlabel() and loss.get_ylabel() and slots.get_xlabel()
    assert [bar.get_width() for bar in slots.patches] == [450, 450, 450, 150]
