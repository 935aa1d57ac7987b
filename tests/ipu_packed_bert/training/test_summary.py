"""summary.json has what a run came to, however it ended; the last lines printed are made from the same value."""

import dataclasses
import json
import signal
from types import SimpleNamespace
from unittest import mock

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.run_files.folder import EVALUATIONS, PICTURE, SUMMARY, read_log
from ipu_packed_bert.training import summary as run_summary
from ipu_packed_bert.training.log import Totals
from ipu_packed_bert.training.summary import _RunSummary, _summarise, _write
from pack_data.cli.command import run_main
from pack_data.display.facts import as_json, printed
from tests.tiny_runs import logged

FIELDS = {field.name for field in dataclasses.fields(_RunSummary)}
RECORDS = [
    {"step": 1, "loss": 9.0, "packs": 4, "sequences": 7, "tokens": 380, "seconds": 2.0},
    {"step": 2, "loss": None, "packs": 4, "sequences": 7, "tokens": 380, "seconds": 0.5},
    {"step": 3, "loss": 7.0, "packs": 2, "sequences": 3, "tokens": 190, "seconds": 0.5},
]


def read(folder):
    return json.loads((folder / SUMMARY).read_text())


def summary_of(evaluation=None, stopped_by=None, **options):
    """The summary of a run of nine updates, three of which were made."""
    config = SimpleNamespace(task=SimpleNamespace(name="pretraining"))
    run = SimpleNamespace(config=config, task=SimpleNamespace(max_sequence_length=100), steps=9)
    evaluations = [{"sequences": 40, **evaluation}] if evaluation else []
    return _summarise(run, Totals(6, 10, 570, 1.0), RECORDS, evaluations, stopped_by, **options)


def test_by_hand(tmp_path):
    evaluation = {
        "step": 3,
        "loss": 6.5,
        "mlm_accuracy": 0.25,
        "nsp_accuracy": 0.75,
        "sequences": 40,
    }
    summary = summary_of({**evaluation, "seconds": 1.0}, stopped_by="SIGTERM")
    _write(summary, tmp_path)
    assert read(tmp_path) == dataclasses.asdict(summary)
    assert set(read(tmp_path)) == FIELDS
    assert (summary.steps, summary.steps_planned) == (3, 9)
    # All updates count for the work, this process's but its first for the speed.
    assert (summary.packs, summary.sequences, summary.tokens, summary.seconds) == (
        10,
        17,
        950,
        3.0,
    )
    assert (summary.sequences_per_second, summary.tokens_per_second) == (10.0, 570.0)
    assert (summary.packing_factor, summary.padding_avoided) == (1.7, 1 - 50 / 750)
    assert (summary.first_loss, summary.loss) == (9.0, 7.0)
    assert summary.held_out == evaluation
    assert summary.compare_unpacked is None
    facts = summary.facts(precision="float32")
    values = as_json(facts)
    assert all(words in values["stopped"] for words in ("SIGTERM", "3 of 9"))
    assert (values["steps"], values["loss"], values["held out loss"]) == (3, 7.0, 6.5)
    text = printed(facts)
    assert all(words in text for words in ("9.000", "7.000", "17 sequences", "6.500", "25.0%", "75.0%"))
    # Infinite values are null.
    _write(dataclasses.replace(summary, seconds=float("inf")), tmp_path)
    assert read(tmp_path)["seconds"] is None


def test_a_run_ends_with_summary_and_picture_and_the_comparison_leaves_its_checkpoint(tiny, tmp_path, pictures, capsys):
    runs = [tmp_path / "alone", tmp_path / "compared"]
    for folder, options in zip(runs, ([], ["--compare-unpacked", "2"])):
        assert pretrain.main(["--config", tiny, "--out", str(folder), "--steps", "3", *options]) == 0
        summary = read(folder)
        assert set(summary) == FIELDS
        assert summary["stopped_by"] is None
        assert summary["steps"] == summary["steps_planned"] == 3
        assert summary["loss"] == logged(folder, "loss")[-1]
        for name in (
            "step",
            "loss",
            "mlm_loss",
            "mlm_accuracy",
            "nsp_accuracy",
            "sequences",
        ):
            assert summary["held_out"][name] == read_log(folder / EVALUATIONS)[-1][name]
        assert 0 < summary["held_out"]["unigram_loss"] < 10
        printed = capsys.readouterr().out
        assert (folder / PICTURE).exists() and str(folder / PICTURE) in printed or "matplotlib" in printed
        assert f"export {folder} DIR" in printed.splitlines()[-1]
    assert read(runs[0])["compare_unpacked"] is None
    compared = read(runs[1])["compare_unpacked"]
    assert compared["loss_difference"] <= 1e-5
    assert compared["gradient_difference"] <= 2e-5
    assert compared["updates"] == 2
    assert compared["speedup"] > 0
    # It goes on as if nothing had been compared; until it ends anew there is no summary.
    for folder in runs:
        again = [
            "--resume",
            str(folder),
            "--steps",
            "4",
            "--set",
            "optimizer.schedule_steps=4",
        ]
        assert pretrain.main(again) == 0
        assert read(folder)["steps"] == 4
    assert logged(runs[0], "loss") == logged(runs[1], "loss")


def changed_after(monkeypatch, number, change):
    """Change the result of an update of the next run."""
    original = HostEngine.step
    results = []

    def step(engine, batch, rate):
        results.append(original(engine, batch, rate))
        return change(results[-1]) if len(results) == number else results[-1]

    monkeypatch.setattr(HostEngine, "step", step)


def test_runs_that_end_early_have_a_summary_too(tiny, tmp_path, monkeypatch, capsys):
    """By a signal, by a loss that is not finite; a comparison that fails, or a picture, costs nothing else."""

    def interrupted(result):
        signal.raise_signal(signal.SIGTERM)
        return result

    def broken(result):
        return result._replace(metrics={**result.metrics, "loss": float("nan")})

    command = ["--config", tiny, "--compare-unpacked", "2", "--out"]
    for name, change, status, stopped_by in (
        ("a", interrupted, 143, "SIGTERM"),
        ("b", broken, 3, "not finite"),
    ):
        with monkeypatch.context() as patch:
            changed_after(patch, 2, change)
            assert run_main(pretrain.main, [*command, str(tmp_path / name)]) == status
        summary = read(tmp_path / name)
        assert (summary["stopped_by"], summary["steps"], summary["compare_unpacked"]) == (
            stopped_by,
            2,
            None,
        )
        assert (summary["loss"] is None) == (status == 3)
    assert f"--resume {tmp_path / 'a'}" in capsys.readouterr().out

    failures = {
        "not enough memory": ValueError("not enough\nmemory"),
        "interrupted": KeyboardInterrupt(),
    }
    for reason, failure in failures.items():
        folder = tmp_path / reason.split()[0]
        monkeypatch.setattr(run_summary, "compare_unpacked", mock.Mock(side_effect=failure))
        assert pretrain.main([*command, str(folder), "--steps", "1"]) == 0
        assert read(folder)["compare_unpacked"] is None
        assert f"unpacked  not compared: {reason}\n" in capsys.readouterr().out
