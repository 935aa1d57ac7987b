"""Directories, logs, summaries and options of runs that are refused, each in one line that names file and value."""

# ruff: noqa: F401  names that the table uses

import json
import sys
from pathlib import Path

import yaml

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.run_files.folder import CHECKPOINTS, LOG
from ipu_packed_bert.tasks.examples import Asked
from ipu_packed_bert.tasks.files import ExampleSource
from ipu_packed_bert.training import predictions
from ipu_packed_bert.training.log import RunLog
from ipu_packed_bert.training.picture import page_of_run
from ipu_packed_bert.training.run_folder import refuse_a_run_in
from pack_data.cli.command import NotFinite
from tests.fine_tuning_files import tiny_fine_tuned
from tests.refusals import faults_of_refusals, refusal_of, rows_of
from tests.tiny_runs import tiny_config, tiny_data

RECORD = {"step": 1, "loss": 9.0, "packs": 4, "sequences": 7, "tokens": 380, "seconds": 2.0}


def run(**files):
    """A run whose files have this content; those without one have that of a run after its first update."""
    folder = Path("run")
    folder.mkdir(exist_ok=True)
    contents = {
        "log": json.dumps(RECORD) + "\n",
        "evaluation": "",
        "summary": json.dumps({"task": "pretraining", "steps": 1}),
        "environment": "{}",
        "config": yaml.safe_dump({"data": {"max_sequence_length": 100}}),
    }
    names = {"log": LOG, "evaluation": "evaluation.jsonl", "config": "config.yml"}
    for part, content in {**contents, **files}.items():
        (folder / names.get(part, f"{part}.json")).write_text(content)
    return folder


def page(**files):
    return page_of_run(run(**files))


def resumed(**changes):
    """Resume a log, one record of which was changed."""
    folder = run(log="".join(json.dumps(record) + "\n" for record in (RECORD, {**RECORD, "step": 2, **changes})))
    return RunLog(folder, steps=6, first_step=2, max_sequence_length=100)


def begun(folder, *, saved=False):
    """A directory with the log of a run, which has saved a checkpoint."""
    path = Path(folder)
    checkpoint = path / CHECKPOINTS / "step_00000001"
    (checkpoint if saved else path).mkdir(parents=True, exist_ok=True)
    (path / LOG).write_text("")
    return refuse_a_run_in(folder)


def predicted(*overrides, change=lambda weights: weights):
    """Predict a table with a fine-tuned model, whose weights are changed before."""
    trained = predictions.find_trained(Path("tuned"))
    trained = trained._replace(weights=change(trained.weights))
    request = Asked(ExampleSource.of("train.csv"))
    return predictions.predict(predictions.prepare(trained, request, overrides))


def without_head(weights):
    return {name: weight for name, weight in weights.items() if name != "classifier.weight"}


def not_finite(weights):
    return {name: weight * float("nan") for name, weight in weights.items()}


REFUSED = [
    *rows_of(
        """
predicted('run.seed=3') => --set run.seed | training
predicted('task.name=squad') => --set task.name=squad | tuned | single_label
predicted('data.max_sequence_length=128') => tuned | data.max_sequence_length is 128 | 64 positions
predicted(change=without_head) => tuned | classifier.weight | single_label
predicted(change=not_finite) => infinite or NaN | checkpoint => NotFinite
predictions.find_trained(Path('nothing')) => nothing | no such directory
predictions.find_trained(Path('data')) => data | config.yml | config.json
begun('my run') => my run | --resume-if-there | --out
begun('our run', saved=True) => --resume 'our run' | --out
refuse_a_run_in('a file') => --out a file | a file is a file
refuse_a_run_in('a file/runs/mine') => --out a file/runs/mine | a file is a file
refuse_a_run_in('data') => --out data | data set
page(summary='{') => summary.json | JSON
page(summary='[1]') => summary.json | object
page(summary='{"held_out": {"unigram_loss": "low"}}') => summary.json | unigram_loss | low
page(summary='{"compare_unpacked": {"speedup": 2.0}}') => summary.json | compare_unpacked
page(config='- 1') => config.yml
"""
    ),
    ("resumed(packs=None)", [LOG, "line 2", "packs"]),
    ("resumed(tokens='7')", [LOG, "line 2", "tokens"]),
    ("resumed(sequences=-1)", [LOG, "line 2", "sequences"]),
    ("resumed(seconds=True)", [LOG, "line 2", "seconds"]),
    ("resumed(loss='1')", [LOG, "line 2", "loss"]),
    ("page(log='')", [LOG, "no updates"]),
    (r"page(log='[]\n')", [LOG, "line 1"]),
]


def test_calls_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a file").write_text("")
    tiny_data(Path("data"))
    tiny_fine_tuned(Path("tuned"), "single_label")
    faults = faults_of_refusals(REFUSED, globals())
    assert not faults, "\n".join(faults)
    refuse_a_run_in("new")
    refuse_a_run_in(None)


def test_a_missing_package_of_a_tracker_is_one_line_before_the_work(tmp_path, monkeypatch, capsys):
    config = tiny_config(tmp_path / "tiny.yml", tiny_data(tmp_path / "data"))
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        words = ["--config", config, "--out", tmp_path / "run", "--track", name]
        refusal_of(pretrain.main, words, capsys, f"run.track={name}", f"pip install {name}", after=".*")
        assert not (tmp_path / "run").exists()
