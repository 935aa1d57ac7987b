"""The picture and the page of a run show the numbers of its log and summary."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import yaml

from ipu_packed_bert.training.picture import (
    _loss_picture,
    _losses,
    draw_curves,
    page_of_run,
)
from tests.pages import check_page


def record(step, sequences, **values):
    return {"step": step, "sequences": sequences, "packs": 2, "tokens": 150, **values}


RECORDS = [
    record(1, 3, loss=9.0, mlm_loss=8.0),
    record(2, 2, loss=None, mlm_loss=None),  # an update that was left out
    record(3, 4, loss=6.0, mlm_loss=5.5),
]
EVALUATIONS = [record(2, 40, loss=7.0, mlm_loss=6.5), record(3, 40, loss=6.5, mlm_loss=6.0)]


def points(line):
    return list(zip(line.x, line.y))


def test_the_curves_are_the_logs():
    picture = _loss_picture(_losses(RECORDS, EVALUATIONS, unigram=7.5))
    training, held_out = picture.lines
    assert points(training) == [(3, 8.0), (9, 5.5)]
    assert picture.levels[0][1] == 7.5
    assert points(held_out) == [
        (5, 6.5),
        (9, 6.0),
    ]  # at the sequences that training had seen


def test_other_tasks_are_drawn_by_their_loss_and_scores_are_no_loss():
    picture = _loss_picture(_losses([record(1, 3, loss=9.0)], [record(1, 9, exact=50.0)], unigram=7.5))
    (training,) = picture.lines
    assert points(training) == [(3, 9.0)]
    assert not picture.levels
    assert "masked" not in picture.y.label


def test_the_file_is_both_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    path = tmp_path / "run.svg"
    draw_curves(path, RECORDS, EVALUATIONS, title="a run", max_sequence_length=100, unigram=None)
    title = ElementTree.parse(path).getroot().find("{http://www.w3.org/2000/svg}title").text
    assert "a run: loss" in title
    assert "Slots" in title


LOG = [
    dict(step=1, loss=9.0, mlm_loss=8.0, packs=4, sequences=7, tokens=380, seconds=2.0),
    dict(step=2, loss=8.0, mlm_loss=None, packs=4, sequences=8, tokens=396, seconds=1.0),
    dict(step=3, loss=7.5, mlm_loss=6.5, packs=2, sequences=4, tokens=190, seconds=0.5),
]
EVALUATED = [
    dict(
        step=2,
        mlm_loss=7.25,
        mlm_accuracy=0.125,
        packs=2,
        sequences=3,
        tokens=150,
        seconds=0.1,
    )
]
SUMMARY = dict(
    task="pretraining",
    steps=3,
    loss=7.5,
    held_out=dict(step=2, unigram_loss=7.5),
    compare_unpacked=None,
)
# Of 966 tokens: the padding of 10 packs and of 19 rows of one sequence.
PACKED = 10 * 100 - 966
UNPACKED = 19 * 100 - 966


def page_of(folder, *, lines=LOG, evaluations=EVALUATED, summary=SUMMARY, slots=100):
    """Write the files of a run and return its page, and the page as a browser reads it."""
    for name, records in (("log.jsonl", lines), ("evaluation.jsonl", evaluations)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in records))
    (folder / "environment.json").write_text(json.dumps({"device": "CPU", "versions": {"python": "3.8"}}))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    if slots:
        (folder / "config.yml").write_text(yaml.safe_dump({"data": {"max_sequence_length": slots}}))
    page = page_of_run(folder)
    return page, check_page(page.html())


def test_the_page_has_the_tables_curves_and_figures_of_the_files(tmp_path):
    page, shown = page_of(tmp_path)
    summary = {row["what"]: row["value"] for row in shown.tables["summary"]}
    assert (summary.pop("held_out.unigram_loss"), summary.pop("held_out.step")) == (7.5, 2)
    assert summary == {key: value for key, value in SUMMARY.items() if key != "held_out"}
    assert shown.tables["evaluations"] == EVALUATED
    assert shown.shown["evaluations"][0]["mlm_accuracy"] == "12.50%"
    environment = {row["what"]: row["value"] for row in shown.tables["environment"]}
    assert environment["versions.python"] == "3.8"

    losses, throughput, slots = (picture for picture in page.pictures())
    training, held_out = losses.lines
    assert points(training) == [(7.0, 8.0), (19.0, 6.5)]
    assert points(held_out) == [(15.0, 7.25)]
    assert losses.levels[0][1] == 7.5
    assert throughput.lines[0].y == (3.5, 8.0, 8.0)
    tokens, padding = slots.series
    assert (tokens.values, padding.values) == ((966, 966), (UNPACKED, PACKED))

    assert all(words in page.answer for words in ("3 updates", "6.500", "8.000", "7.250"))
    avoided = 1 - PACKED / UNPACKED
    figures = [figure.value for figure in page.figures]
    assert figures == ["7.250", f"{19 / 3.5:,.1f}", f"{avoided:.1%}"]
    assert "7.500" in page.figures[0].words
    assert len(page.first) == 1


def test_a_run_without_a_finite_loss_has_pictures(tmp_path):
    page, _ = page_of(tmp_path, lines=[{**record(1, 3), "seconds": 1.0, "loss": None}], evaluations=())
    losses, _, slots = page.pictures()
    assert losses.lines == ()
    assert slots.ends == ("50.0% padding", "25.0% padding")
