"""The table of leaks: its page is that of the committed results, and the installed versions still give them."""

from importlib.util import find_spec

import pytest

pytest.importorskip("transformers", minversion="5.0", reason="the table is of Transformers 5")

from evidence import leaks  # noqa: E402
from evidence.runner import Cell  # noqa: E402
from padding_free import assert_isolated  # noqa: E402
from tests.imports import ROOT

COMMITTED = leaks.shown(ROOT / "evidence" / "results" / "leaks.jsonl")
LINES = COMMITTED.lines()
LEAKING = [line for line in LINES if line.leaking()]
# A family of each kind; `make test-trainers-newest` runs all.
SAMPLE = ("BERT", "Llama", "Mamba", leaks.TORCH)


def skip_unless_sampled(variant):
    if variant not in SAMPLE and not find_spec("trl"):
        pytest.skip("make test-trainers installs TRL, and runs the whole table")


def test_each_leaking_line_names_measured_calls_that_do_not_leak():
    apart = {(line.model, line.call) for line in LINES if not line.leaking()}
    for line in LINES:
        ours = line.results.get("padding_free")
        if line.call == leaks._PLAIN and ours is not None and not ours.leaks and not ours.error:
            apart.add((line.model, leaks._OURS))
    assert len(LEAKING) > 40
    for line in LEAKING:
        assert line.instead and {(line.model, call) for call in line.instead} <= apart, line


@pytest.mark.parametrize("variant", leaks.VARIANTS)
def test_the_installed_versions_have_the_committed_results(variant):
    """The whole of the first seed: which calls leak, which fail, and how large the leaks are."""
    skip_unless_sampled(variant)
    committed = COMMITTED.cells[Cell(variant, 0)]
    measured = [*leaks.Leaks(leaks.SIZES["default"])(Cell(variant, 0))]
    assert [(row["attention"], row["call"]) for row in measured] == leaks.calls_of(variant)
    assert len(measured) == len(committed)
    for now, before in zip(measured, committed):
        results = leaks.result_of([now]), leaks.result_of([before])
        assert (now["attention"], now["call"]) == (before["attention"], before["call"])
        assert (results[0].leaks, results[0].error) == (results[1].leaks, results[1].error), now
        if results[0].leaks:
            assert now["change"] == pytest.approx(before["change"], rel=1e-3)


# A text tower has no logits.
KINDS_WITH_LOGITS = (leaks.ENCODER, leaks.DECODER, leaks.STATES)
JUDGED = [line for line in LEAKING if leaks.kind_of(line.model) in KINDS_WITH_LOGITS and line.call != leaks._TRAIN]


@pytest.mark.parametrize(
    "line",
    JUDGED,
    ids=lambda line: f"{line.model}, {line.call}",
)
def test_the_judge_refuses_the_leaking_lines(line):
    skip_unless_sampled(line.model if line.call == leaks._PLAIN else line.call)
    family = leaks.FAMILIES[line.model]
    attention = line.leaking()[0]

    def collator(examples):
        return leaks.inputs_of(
            line.call,
            family.kind,
            [example["input_ids"].tolist() for example in examples],
        )

    model = leaks.new_model(family, attention, leaks.SIZES["default"], 0)
    with pytest.raises(AssertionError, match="affect each other"):
        assert_isolated(
            model,
            collator=collator,
            forward=lambda model, inputs: model(**inputs).logits,
            longest=16,
            row=40,
            quick=True,
        )
