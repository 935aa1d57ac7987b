"""The table of leaks: what it calls a leak, what it calls apart, and that the page is that of the committed results."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.0", reason="the table is of Transformers 5")

from evidence import leaks  # noqa: E402
from evidence.__main__ import main  # noqa: E402
from evidence.runner import Cell  # noqa: E402
from tests.refusals import refusal_of  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_committed_results():
    page = leaks.shown(ROOT / "evidence" / "results" / "leaks").page()
    assert page == (ROOT / "docs" / "padding_free_leaks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "model, leaking",
    [
        ("BERT", {"sdpa": 4, "eager": 4, "padding_free": 0}),
        ("Llama", {"sdpa": 5, "eager": 5, "padding_free": 0}),
        ("Mamba", {"": 2}),
        ("torch", {"": 1}),
    ],
)
def test_leaks_are_found(monkeypatch, model, leaking):
    monkeypatch.setattr(leaks, "ATTENTIONS", ("sdpa", "eager", "padding_free"))  # flex takes time to compile
    monkeypatch.setattr(leaks, "TORCH_CALLS", dict(list(leaks.TORCH_CALLS.items())[:2]))
    counts = {}
    for row in leaks.Leaks(leaks.SIZES["quick"])(Cell(model, 0)):
        leak = leaks.result_of([row]).leaks
        counts[row["attention"]] = counts.get(row["attention"], 0) + leak
    assert counts == leaking


def test_a_page_in_a_missing_directory_is_refused_before_anything_runs(tmp_path, capsys):
    page = tmp_path / "missing" / "page.md"
    refusal_of(main, ["leaks", "--out", str(tmp_path / "run"), "--page", str(page)], capsys, "--page", str(page.parent))
