"""summary.json says what a run came to, however it ended; the last lines printed are made from the same value."""

import dataclasses
import json
import signal
from types import SimpleNamespace

import pytest

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.run_files.folder import EVALUATIONS, LOG, PICTURE, SUMMARY, read_log
from ipu_packed_bert.training import summary as run_summary
from ipu_packed_bert.training.log import Totals
from ipu_packed_bert.training.summary import _RunSummary, _summarise, _write
from pack_data.cli.command import run_main
from tests.tiny_runs import tiny_config, tiny_data

BASELINE = {"most_frequent_token_accuracy": 0.05, "unigram_loss": 6.0, "most_frequent_next_sentence_accuracy": 0.5}
FIELDS = {field.name for field in dataclasses.fields(_RunSummary)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("summary")
    return str(tiny_config(folder / "tiny.yml", tiny_data(folder / "data")))


def read(folder):
    return json.loads((folder / SUMMARY).read_text())


def logged(folder, evaluation=None):
    records = [
        {"step": 1, "loss": 9.0, "packs": 4, "sequences": 7, "tokens": 380, "seconds": 2.0},
        {"step": 2, "loss": None, "packs": 4, "sequences": 7, "tokens": 380, "seconds": 0.5},
        {"step": 3, "loss": 7.0, "packs": 2, "sequences": 3, "tokens": 190, "seconds": 0.5},
    ]
    (folder / LOG).write_text("".join(json.dumps(record) + "\n" for record in records))
    if evaluation:
        (folder / EVALUATIONS).write_text(json.dumps(evaluation) + "\n")


def summary_of(folder, stopped_by=None, **options):
    config, task = SimpleNamespace(task=SimpleNamespace(name="pretraining")), SimpleNamespace(max_sequence_length=100)
    run = SimpleNamespace(config=config, task=task, steps=9)
    logs = [read_log(folder / name) for name in (LOG, EVALUATIONS)]
    return _summarise(run, Totals(6, 10, 570, 1.0), *logs, stopped_by, **options)


def test_by_hand(tmp_path):
    evaluation = {"step": 3, "loss": 6.5, "mlm_accuracy": 0.25, "nsp_accuracy": 0.75, "sequences": 40, "seconds": 1.0}
    logged(tmp_path, evaluation)
    found = summary_of(tmp_path, stopped_by="SIGTERM")
    _write(found, tmp_path)
    assert read(tmp_path) == dataclasses.asdict(found) and set(read(tmp_path)) == FIELDS
    assert (found.steps, found.steps_planned) == (3, 9)
    # All updates count for the work, this process's but its first for the speed.
    assert (found.packs, found.sequences, found.tokens, found.seconds) == (10, 17, 950, 3.0)
    assert (found.sequences_per_second, found.tokens_per_second) == (10.0, 570.0)
    assert found.packing_factor == 1.7 and found.padding_avoided == 1 - 50 / 750
    assert (found.first_loss, found.loss) == (9.0, 7.0)
    assert found.held_out == {name: value for name, value in evaluation.items() if name != "seconds"}
    assert found.compare_unpacked is None
    text = "\n".join(found.lines(precision="float32"))
    for part in (
        "stopped   by SIGTERM after update 3 of 9; saved",
        "loss 9.000 -> 7.000 in 3 updates, 17 sequences, 3.0 s",
        "held out  loss 6.500  mlm 25.0%  nsp 75.0%",
        "10.0 sequences/s, 570 tokens/s",
        "1.700 sequences per pack",
    ):
        assert part in text, text


def test_the_baseline_stands_beside_the_model_and_null_where_a_figure_is_none(tmp_path):
    evaluation = {"step": 3, "mlm_accuracy": 0.125, "mlm_loss": 5.5, "nsp_accuracy": 0.75, "nsp_loss": None}
    logged(tmp_path, {**evaluation, "sequences": 40})
    found = summary_of(tmp_path, baseline=BASELINE)
    _write(dataclasses.replace(found, seconds=float("inf")), tmp_path)
    held_out = read(tmp_path)["held_out"]
    assert read(tmp_path)["seconds"] is None and {**held_out, **BASELINE} == held_out
    lines = [line.split() for line in found.lines(precision="float32")]
    assert ["masked", "tokens,", "right", "12.5%", "5.0%"] in [line[:5] for line in lines]
    assert ["masked", "tokens,", "loss", "5.500", "6.000"] in [line[:5] for line in lines]


@pytest.mark.parametrize(
    "baseline, line", [(None, "held out  after update 2: loss 6.500"), (BASELINE, "held out  after update 2 ")]
)
def test_the_update_is_stated_if_a_run_was_stopped_after_its_last_evaluation(tmp_path, baseline, line):
    logged(tmp_path, {"step": 2, "loss": 6.5, "sequences": 40})
    lines = summary_of(tmp_path, baseline=baseline).lines(precision="float32")
    assert any(each.startswith(line) for each in lines), lines


@pytest.mark.parametrize("loss, verdict", [(5.9, "better"), (6.0, "no better"), (None, None)])
def test_a_sentence_compares_the_loss_with_the_unigram_baseline(tmp_path, loss, verdict):
    """A run without next sentences has no row of them."""
    logged(tmp_path, {"step": 3, "mlm_accuracy": 0.05, "mlm_loss": loss, "sequences": 40})
    lines = summary_of(tmp_path, baseline=BASELINE).lines(precision="float32")
    said = [line for line in lines if line.startswith("verdict")]
    wanted = [f"verdict   {loss:.3f} nats per masked token: {verdict} than the unigram baseline, 6.000"] if loss else []
    assert [line.split(", which")[0] for line in said] == wanted
    assert not any("next sentence" in line for line in lines)


@pytest.mark.parametrize("gradients, words", [(1e-6, "the same updates"), (1e-3, "MORE than 1e-04")])
def test_the_comparison_says_whether_it_came_out_equal(tmp_path, gradients, words):
    logged(tmp_path)
    compared = {
        "packed_sequences_per_second": 1234.0,
        "unpacked_sequences_per_second": 617.0,
        "speedup": 2.0,
        "speedup_quartiles": [1.9, 2.1],
        "updates": 5,
    }
    compared.update(packing_factor=1.96, loss_difference=1e-8, gradient_difference=gradients)
    found = dataclasses.replace(summary_of(tmp_path), compare_unpacked=compared)
    text = "\n".join(found.lines(precision="float32"))
    assert (
        "1,234.0     617.0  2.000 times as fast (quartiles of 5 pairs: 1.90 to 2.10); the packing factor is 1.960"
        in text
        and words in text
    )


@pytest.mark.parametrize(
    "error, why",
    [(ValueError("not enough\nmemory"), "not enough memory"), (KeyboardInterrupt(), "interrupted")],
    ids=["memory", "Ctrl-C"],
)
def test_a_comparison_that_fails_costs_nothing_else(tiny, tmp_path, capsys, monkeypatch, error, why):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(run_summary, "compare_unpacked", fails)
    options = ["--steps", "1", "--compare-unpacked", "2"]
    assert pretrain.main(["--config", tiny, "--out", str(tmp_path / "run"), *options]) == 0
    assert read(tmp_path / "run")["compare_unpacked"] is None
    assert f"unpacked  not compared: {why}\n" in capsys.readouterr().out


def test_a_run_ends_with_summary_and_picture_and_the_comparison_leaves_its_checkpoint(tiny, tmp_path, pictures, capsys):
    outcomes = []
    for options in ([], ["--compare-unpacked", "2"]):
        folder = tmp_path / f"run{len(options)}"
        assert pretrain.main(["--config", tiny, "--out", str(folder), "--steps", "3", *options]) == 0
        summary, last = read(folder), read_log(folder / EVALUATIONS)[-1]
        assert set(summary) == FIELDS and summary["stopped_by"] is None
        assert (
            summary["steps"] == summary["steps_planned"] == 3 and summary["loss"] == read_log(folder / LOG)[-1]["loss"]
        )
        for name in ("step", "loss", "mlm_loss", "mlm_accuracy", "nsp_accuracy", "sequences"):
            assert summary["held_out"][name] == last[name]
        assert 0 < summary["held_out"]["unigram_loss"] < 10
        out = capsys.readouterr().out
        assert (folder / PICTURE).exists() and str(folder / PICTURE) in out or "needs the package matplotlib" in out
        assert f"export {folder} DIR" in out.splitlines()[-1]
        outcomes.append((summary["compare_unpacked"], [record["loss"] for record in read_log(folder / LOG)]))
    (nothing, losses), (compared, same) = outcomes
    assert nothing is None and losses == same
    assert compared["loss_difference"] <= 1e-5 and compared["gradient_difference"] <= 2e-5
    assert compared["updates"] == 2 and compared["speedup"] > 0
    # It goes on as if nothing had been compared; until it ends anew there is no summary.
    for folder in (tmp_path / "run0", tmp_path / "run2"):
        again = ["--resume", str(folder), "--steps", "4", "--set", "optimizer.schedule_steps=4"]
        assert pretrain.main(again) == 0 and read(folder)["steps"] == 4
    assert [record["loss"] for record in read_log(tmp_path / "run0" / LOG)] == [
        record["loss"] for record in read_log(tmp_path / "run2" / LOG)
    ]


def stopping(monkeypatch, at, how):
    original = HostEngine.step

    def step(engine, batch, rate):
        result = original(engine, batch, rate)
        step.made += 1
        return how(result) if step.made == at else result

    step.made = 0
    monkeypatch.setattr(HostEngine, "step", step)


def test_stopped_runs_and_those_that_are_not_finite_have_a_summary_too(tiny, tmp_path, monkeypatch, capsys):
    def interrupted(result):
        signal.raise_signal(signal.SIGTERM)
        return result

    stopping(monkeypatch, 2, interrupted)
    command = ["--config", tiny, "--compare-unpacked", "2", "--out"]
    assert pretrain.main([*command, str(tmp_path / "stopped")]) == 143
    found = read(tmp_path / "stopped")
    assert (found["stopped_by"], found["steps"], found["compare_unpacked"]) == ("SIGTERM", 2, None)
    assert "resume    python run_pretraining.py --resume" in capsys.readouterr().out

    stopping(monkeypatch, 2, lambda result: result._replace(metrics={**result.metrics, "loss": float("nan")}))
    assert run_main(pretrain.main, [*command, str(tmp_path / "broken")]) == 3
    found = read(tmp_path / "broken")
    assert (found["stopped_by"], found["steps"], found["loss"]) == ("not finite", 2, None)


def test_without_matplotlib_a_line_says_so(tiny, tmp_path, pictures, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert pretrain.main(["--config", tiny, "--out", str(tmp_path / "run"), "--steps", "1"]) == 0
    assert "picture   not drawn: drawing needs the package matplotlib" in capsys.readouterr().out
    assert read(tmp_path / "run")["steps"] == 1 and not (tmp_path / "run" / PICTURE).exists()
