"""What a run's picture shows is what its log says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from ipu_packed_bert.training.picture import curves, draw, loss_picture, slots_picture


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


def test_the_pictures_are_these_curves():
    found = curves(RECORDS, EVALUATIONS, max_sequence_length=100, unigram=7.5)
    loss = loss_picture(found)
    assert [(line.name, line.x, line.y) for line in loss.lines] == [
        ("training", (3.0, 9.0), (8.0, 5.5)),
        ("held out", (5.0, 9.0), (6.5, 6.0)),
    ]
    assert [level for _, level in loss.levels] == [7.5] and loss.y.least < 5.5 < 8.0 < loss.y.most
    assert [series.values for series in slots_picture(found).series] == [(450.0, 450.0), (450.0, 150.0)]


def test_a_run_without_a_finite_loss_has_pictures():
    found = curves([record(1, 3, loss=None)], [], max_sequence_length=100)
    assert loss_picture(found).lines == () and slots_picture(found).ends == ("50.0% padding", "25.0% padding")


def test_the_file_is_both_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    draw(curves(RECORDS, EVALUATIONS, max_sequence_length=100), tmp_path / "run.svg", title="a run")
    label = ElementTree.parse(tmp_path / "run.svg").getroot().get("aria-label")
    assert label == "a run: loss over the sequences seen; Slots of the rows that these sequences need"
