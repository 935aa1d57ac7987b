"""The picture and the page of a run show the numbers of its log and summary."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import yaml

from ipu_packed_bert.training.picture import _loss_picture, _losses, draw_curves, page_of_run
from tests.pages import check_page
from tests.refusals import refused


def record(step, sequences, **values):
    return {"step": step, "sequences": sequences, "packs": 2, "tokens": 150, **values}


RECORDS = [
    record(1, 3, loss=9.0, mlm_loss=8.0),
    record(2, 2, loss=None, mlm_loss=None),  # an update that was left out
    record(3, 4, loss=6.0, mlm_loss=5.5),
]
EVALUATIONS = [record(2, 40, loss=7.0, mlm_loss=6.5), record(3, 40, loss=6.5, mlm_loss=6.0)]


def test_the_curves_are_the_logs():
    losses = _loss_picture(_losses(RECORDS, EVALUATIONS, unigram=7.5))
    training, held_out = losses.lines
    assert (training.x, training.y) == ((3, 9), (8.0, 5.5)) and losses.levels[0][1] == 7.5
    assert (held_out.x, held_out.y) == ((5, 9), (6.5, 6.0))  # at the sequences that training had seen


def test_other_tasks_are_drawn_by_their_loss_and_scores_are_no_loss():
    losses = _loss_picture(_losses([record(1, 3, loss=9.0)], [record(1, 9, exact=50.0)], unigram=7.5))
    (training,) = losses.lines
    assert (training.x, training.y) == ((3,), (9.0,)) and not losses.levels and "masked" not in losses.y.label


def test_the_file_is_both_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    path = tmp_path / "run.svg"
    draw_curves(path, RECORDS, EVALUATIONS, title="a run", max_sequence_length=100, unigram=None)
    title = ElementTree.parse(path).getroot().find("{http://www.w3.org/2000/svg}title").text
    assert title == "a run: loss over the sequences seen; Slots of the rows that these sequences need"


LOG = [
    dict(step=1, loss=9.0, mlm_loss=8.0, packs=4, sequences=7, tokens=380, seconds=2.0),
    dict(step=2, loss=8.0, mlm_loss=None, packs=4, sequences=8, tokens=396, seconds=1.0),
    dict(step=3, loss=7.5, mlm_loss=6.5, packs=2, sequences=4, tokens=190, seconds=0.5),
]
EVALUATED = [dict(step=2, mlm_loss=7.25, mlm_accuracy=0.125, packs=2, sequences=3, tokens=150, seconds=0.1)]
SUMMARY = dict(task="pretraining", steps=3, loss=7.5, held_out=dict(step=2, unigram_loss=7.5), compare_unpacked=None)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, lines in (("log.jsonl", LOG), ("evaluation.jsonl", EVALUATED)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "environment.json").write_text(json.dumps({"device": "CPU", "versions": {"python": "3.8"}}))
    (folder / "config.yml").write_text(yaml.safe_dump({"data": {"max_sequence_length": 100}}))
    return folder


def page_of(run):
    made = page_of_run(run)
    return made, check_page(made.html())


def test_the_tables_are_the_files(run):
    made, page = page_of(run)
    summary = {row["what"]: row["value"] for row in page.tables["summary"]}
    assert summary.pop("held_out.unigram_loss") == 7.5 and summary.pop("held_out.step") == 2
    assert summary == {key: value for key, value in SUMMARY.items() if key != "held_out"}
    assert page.tables["evaluations"] == EVALUATED and page.shown["evaluations"][0]["mlm_accuracy"] == "12.50%"
    assert {row["what"]: row["value"] for row in page.tables["environment"]}["versions.python"] == "3.8"
    packed, unpacked = 10 * 100 - 966, 19 * 100 - 966
    tokens, padding = next(each for each in made.pictures() if each.title.startswith("Slots")).series
    assert (tokens.values, padding.values) == ((966, 966), (unpacked, packed))


def test_the_curves_of_the_page_are_the_logs(run):
    pictures = {picture.title: picture for picture in page_of(run)[0].pictures()}
    training, held_out = pictures["Loss over the sequences seen"].lines
    assert (training.x, training.y) == ((7.0, 19.0), (8.0, 6.5)) and (held_out.x, held_out.y) == ((15.0,), (7.25,))
    assert pictures["Loss over the sequences seen"].levels == (("always the token frequencies", 7.5),)
    assert pictures["Throughput of each update"].lines[0].y == (3.5, 8.0, 8.0)


def test_a_run_that_goes_on_has_no_summary_yet(run):
    (run / "summary.json").unlink()
    (run / "config.yml").unlink()
    made, page = page_of(run)
    assert "summary" not in page.tables and len(page.pictures) == 2
    assert made.figures[2].value == f"{19 / 10:.3f}"


@pytest.mark.parametrize(
    "name, text",
    [
        ("log.jsonl", ""),
        ("log.jsonl", "[]\n"),
        ("summary.json", "{"),
        ("summary.json", "[1]"),
        ("summary.json", '{"held_out": {"unigram_loss": "low"}}'),
        ("summary.json", '{"compare_unpacked": {"speedup": 2.0}}'),
        ("config.yml", "- 1"),
    ],
)
def test_a_damaged_file_is_named(run, name, text):
    (run / name).write_text(text)
    with refused(name, unchanged=run):
        page_of_run(run)


def test_a_run_without_a_finite_loss_has_pictures(run):
    (run / "evaluation.jsonl").unlink()
    (run / "log.jsonl").write_text(json.dumps({**record(1, 3), "seconds": 1.0, "loss": None}) + "\n")
    pictures = {picture.title: picture for picture in page_of(run)[0].pictures()}
    assert pictures["Loss over the sequences seen"].lines == ()
    (slots,) = [picture for title, picture in pictures.items() if title.startswith("Slots")]
    assert slots.ends == ("50.0% padding", "25.0% padding")


def test_the_answer_says_what_was_learnt(run):
    made, _ = page_of(run)
    assert all(words in made.answer for words in ("3 updates", "6.500", "8.000", "7.250"))
    avoided = 1 - (10 * 100 - 966) / (19 * 100 - 966)
    assert [each.value for each in made.figures] == ["7.250", f"{19 / 3.5:,.1f}", f"{avoided:.1%}"]
    assert "7.500" in made.figures[0].words and len(made.first) == 1
    accuracy = dict(mlm_accuracy=0.25, most_frequent_token_accuracy=0.125, unigram_loss=7.5)
    (run / "summary.json").write_text(json.dumps({**SUMMARY, "held_out": accuracy}))
    answer = page_of(run)[0].answer
    assert "25.0%" in answer and "12.5%" in answer


def test_packed_stands_beside_unpacked_where_that_was_measured(run):
    """The median of the ratios, 1.9, is not the ratio of the medians; its quartiles contain it."""
    sides = dict(updates=5, packed_sequences_per_second=90.0, unpacked_sequences_per_second=50.0, packing_factor=2.0)
    sides.update(speedup=1.9, speedup_quartiles=[1.8, 1.95], loss_difference=None, gradient_difference=1e-7)
    (run / "summary.json").write_text(json.dumps({**SUMMARY, "compare_unpacked": sides}))
    made, page = page_of(run)
    _, speed = made.first
    (series,) = speed.series
    assert series.values == (1.0, 1.9) and (series.lower, series.upper) == ((None, 1.8), (None, 1.95))
    assert speed.levels[0][1] == 2.0 and speed.title in page.pictures and speed.ends == ("50.0/s", "90.0/s")
    assert made.figures[1].value == "1.90 times" and "90.0 and 50.0" in made.figures[1].words
