"""The log of a run, and the lines that resuming from an earlier checkpoint removes."""

import contextlib
import errno
import io
import json
import subprocess
import sys
import threading

import pytest
import torch

from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.run_files.folder import CHECKPOINTS, EVALUATIONS, LOG, read_log
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.task import Evaluation
from ipu_packed_bert.training import log as runlog
from ipu_packed_bert.training import run_folder
from ipu_packed_bert.training.log import RunLog, Totals
from ipu_packed_bert.training.log_files import Events, JsonlWriter
from ipu_packed_bert.training.run_folder import (
    data_of,
    environment,
    locked_run,
    open_run_folder,
    refuse_a_run_in,
    resumes,
)
from pack_data.cli.command import _without_controls
from pack_data.store.data_set import read_manifest
from pack_data.store.quantities import padding_avoided
from tests.refusals import refused
from tests.tiny_runs import tiny_data


def result(step):
    metrics = {"loss": 10.0 - step, "mlm_loss": 9.0 - step, "nsp_loss": 1.0}
    metrics.update(mlm_accuracy=0.1 * step, nsp_accuracy=0.5)
    return StepResult(metrics, seconds=0.5, cycles=None)


COUNTS = {"packs": 4, "sequences": 7, "tokens": 380, "masked_tokens": 50}


def written(folder, steps, *, first_step=0, total=6, **options):
    stream = io.StringIO()
    log = RunLog(folder, steps=total, first_step=first_step, max_sequence_length=100, stream=stream, **options)
    for step in steps:
        log.step(step, 0.01, COUNTS, result(step))
    log.close()
    return log, stream.getvalue()


def test_padding_avoided_by_hand():
    # 7 sequences, 380 tokens, rows of 100: unpacked 700 slots with 320 of padding; 4 packs have 400 with 20.
    assert padding_avoided(4, 7, 380, 100) == 1 - 20 / 320
    assert padding_avoided(7, 7, 380, 100) == 0.0  # unpacked
    assert padding_avoided(2, 2, 200, 100) == 0.0  # nothing to avoid
    assert padding_avoided(0, 0, 0, 100) == 0.0


def test_a_line_a_step_with_every_key(tmp_path):
    written(tmp_path, [1, 2, 3])
    lines = (tmp_path / LOG).read_text().splitlines()
    wanted = dict(step=2, loss=8.0, mlm_loss=7.0, nsp_loss=1.0, mlm_accuracy=0.2, nsp_accuracy=0.5, learning_rate=0.01)
    wanted.update(gradient_norm=None, packs=4, sequences=7, tokens=380, seconds=0.5, cycles=None)
    assert json.loads(lines[1]) == wanted and [list(json.loads(line)) for line in lines] == [list(wanted)] * 3


def test_the_first_step_of_a_process_does_not_count_for_the_speed(tmp_path):
    log, text = written(tmp_path, [1, 2, 3])
    assert log.totals == Totals(packs=8, sequences=14, tokens=760, seconds=1.0)
    assert log.totals.sequences_per_second == 14.0 and log.totals.tokens_per_second == 760.0
    assert log.totals.packing_factor == 7 / 4
    assert "14.0 seq/s" in text and "padding avoided 93.75%" in text
    alone, _ = written(tmp_path, [4], first_step=3)
    assert alone.totals.packs == 4  # but for the only one


def test_not_on_a_terminal_about_twenty_lines(tmp_path):
    _, text = written(tmp_path, range(1, 201), total=200)
    measures, meaning, *lines = text.splitlines()
    assert measures == "loss in nats and accuracy of masked tokens (mlm) and the next sentence (nsp)"
    assert meaning.startswith("padding avoided: ") and not {measures, meaning} & set(lines)
    assert 20 <= len(lines) <= 22 and lines[0].startswith("step   1/200") and lines[-1].startswith("step 200/200")


def test_a_live_line_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLog(tmp_path, steps=2, max_sequence_length=100)
    log.step(1, 0.01, COUNTS, result(1))
    log.step(2, 0.01, COUNTS, result(2))
    log.evaluation(2, Evaluation(COUNTS, result(2).metrics, 0.5))
    log.close()
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "loss 8.000" in shown.err and "padding avoided 93.75%" in shown.err
    assert [line.split(":")[0] for line in shown.out.splitlines()[1:]] == ["padding avoided", "held out after step 2"]


def test_a_printed_line_clears_the_live_line_first(tmp_path, monkeypatch):
    """In a command, stderr removes control characters, and the live line goes to the stream behind it."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", _without_controls(screen))
    log = RunLog(tmp_path, steps=300, max_sequence_length=100, stream=screen)
    log._say("printed")
    log.close()
    before = screen.getvalue().partition("printed")[0]
    assert "0/300" in before and before.endswith(" \r")


def test_resumed_it_forgets_the_steps_after_the_checkpoint(tmp_path):
    written(tmp_path, [1, 2, 3, 4])
    with open(tmp_path / LOG, "a") as file:
        file.write('{"step": 5, "lo')  # cut short by a kill
    written(tmp_path, [3, 4, 5], first_step=2)
    assert [record["step"] for record in read_log(tmp_path / LOG)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "steps, said",
    [
        ([1, 2, 3, 4, 5], []),
        ([1, 4, 5], ["lacks 2 of 5", "is 2"]),
        ([], ["lacks 5 of 5", "is 1"]),
        ([1, 2, 2, 3, 4, 5], ["has 1 more than once"]),
        ([2, 2, 3, 5, 6], ["lacks 2 of 5", "is 1", "has 1 more than once"]),
    ],
)
def test_updates_that_the_log_lacks_before_the_checkpoint_are_named(tmp_path, steps, said):
    written(tmp_path, steps)
    log, printed = written(tmp_path, [], first_step=5)
    log.close()
    assert printed.count("note") == bool(said) and all(words in printed for words in said)
    assert [record["step"] for record in read_log(tmp_path / LOG)] == [step for step in steps if step <= 5]


def test_tensorboard_has_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, steps=4, max_sequence_length=100, stream=io.StringIO())
    for step in range(1, 5):
        log.step(step, 0.01, COUNTS, result(step))
    log.evaluation(4, Evaluation(COUNTS, result(4).metrics, 0.5))
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(each.step, each.value) for each in events.Scalars("loss/total")]
    assert scalars == [(step, 10.0 - step) for step in range(1, 5)]
    assert events.Scalars("packing/padding_avoided")[0].value == pytest.approx(0.9375)
    assert events.Scalars("evaluation/mlm_accuracy")[0].value == pytest.approx(0.4)


def test_a_full_disk_ends_the_curves_and_not_the_run(tmp_path, monkeypatch, capsys):
    from tensorboard.summary.writer import record_writer

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    said, hook = [], threading.excepthook
    events = Events(tmp_path, 0, said.append)
    events.add(1, {"loss": 1.0})
    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    events.add(2, {"loss": 1.0, "gradient_norm": None})
    (thread,) = [each for each in threading.enumerate() if "AsyncWriter" in type(each).__name__]
    thread.join(10)
    for step in (3, 4):
        events.add(step, {"loss": 1.0})
    events.close()
    assert len(said) == 1 and "No space left on device" in said[0] and threading.excepthook == hook
    assert capsys.readouterr().err == ""


def test_a_full_disk_costs_the_files_of_an_evaluation_and_not_its_scores(tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(runlog, "write_atomically", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with contextlib.closing(RunLog(tmp_path, steps=4, max_sequence_length=64, stream=stream)) as log:
        log.evaluation(2, Evaluation(COUNTS, result(2).metrics, 0.5, files={"predictions.json": {}}))
    assert f"{tmp_path / 'predictions.json'} cannot be written (full)" in stream.getvalue()
    assert [record["step"] for record in read_log(tmp_path / EVALUATIONS)] == [2]


def test_without_tensorboard_it_says_so_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    _, text = written(tmp_path, [1])
    assert text.startswith("no TensorBoard events: pip install tensorboard\n")
    assert len(read_log(tmp_path / LOG)) == 1


def test_environment_says_what_a_run_depends_on(tmp_path):
    data = data_of(read_manifest(tiny_data(tmp_path)))
    found = environment(device="host engine", seed=5, data=data, command=["run_pretraining.py"])
    assert found["data"] == data and found["data"]["sequences"] == 60
    assert found["versions"]["torch"] == torch.__version__ and found["seed"] == 5 and found["device"] == "host engine"
    assert json.loads(json.dumps(found)) == found
    head = subprocess.run(["git", "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True)
    if head.returncode == 0:
        assert found["commit"].rstrip("+") == head.stdout.strip()


def test_a_new_run_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # All within one second.
    monkeypatch.setattr("ipu_packed_bert.training.run_folder.time.strftime", lambda form: "20260102-030405")
    config = Config(path="configs/packed_host.yml")
    runs = []
    for _ in range(3):
        with open_run_folder(None, config, first_step=0, environment={"seed": 5}) as folder:
            runs.append(folder)
    first = runs[0]
    assert first.parent.name == "runs"
    assert [run.name for run in runs] == ["packed_host-20260102-030405" + end for end in ("", "-2", "-3")]
    assert (first / "config.yml").read_text() == config.to_yaml()
    assert json.loads((first / "environment.json").read_text()) == {"seed": 5}
    with open_run_folder(str(first), config, first_step=7, environment={"seed": 6}):
        pass
    assert json.loads((first / "environment.json").read_text()) == {"seed": 5}
    assert json.loads((first / "environment-from-step-7.json").read_text()) == {"seed": 6}


def test_a_run_is_not_overwritten(tmp_path):
    """And what is told to be typed can be pasted."""
    folder = tmp_path / "my run"
    folder.mkdir()
    written(folder, [1])
    with refused("my run", "--resume-if-there"):
        refuse_a_run_in(str(folder))
    (folder / CHECKPOINTS / "step_00000001").mkdir(parents=True)
    with refused("--resume '/.*/my run'", "--out"):
        refuse_a_run_in(str(folder))
    refuse_a_run_in(str(tmp_path / "new"))
    refuse_a_run_in(None)


@pytest.mark.parametrize("below", ["", "runs/mine"])
def test_a_file_is_no_place_for_a_run(tmp_path, below):
    (tmp_path / "a file").write_text("")
    with refused("--out", "a file"):
        refuse_a_run_in(str(tmp_path / "a file" / below))


@pytest.mark.parametrize(
    "change", [{"packs": None}, {"tokens": "7"}, {"sequences": -1}, {"seconds": True}, {"loss": "1"}], ids=str
)
def test_a_log_whose_counts_were_changed_is_refused_before_the_run_goes_on(tmp_path, change):
    written(tmp_path, [1, 2])
    first, second = read_log(tmp_path / LOG)
    (tmp_path / LOG).write_text("".join(json.dumps(each) + "\n" for each in (first, {**second, **change})))
    with refused(LOG, "line 2", *change):
        written(tmp_path, [3], first_step=2)


@pytest.mark.parametrize("saved", ["step_00000001", None])
def test_only_what_saved_nothing_begins_again(tmp_path, saved, capsys):
    """The log of a run with a checkpoint is never taken away."""
    assert not resumes(tmp_path / "new")
    written(tmp_path, [1])
    if saved:
        (tmp_path / CHECKPOINTS / saved).mkdir(parents=True)
    assert resumes(tmp_path) == bool(saved) == (tmp_path / LOG).exists()
    assert ("begins again" in capsys.readouterr().out) == (not saved)


def test_what_another_process_saved_before_the_lock_is_not_taken_away(tmp_path, monkeypatch):
    written(tmp_path, [1])

    @contextlib.contextmanager
    def after_another(*_):
        (tmp_path / CHECKPOINTS / "step_00000001").mkdir(parents=True)
        yield

    monkeypatch.setattr(run_folder, "locked", after_another)
    assert resumes(tmp_path) and (tmp_path / LOG).exists()


def test_one_process_at_a_time_writes_a_run(tmp_path):
    config, folder = Config(), str(tmp_path / "run")
    with open_run_folder(folder, config, first_step=0, environment={"seed": 1}):
        for other in (  # a second new run, and one that is resumed
            open_run_folder(folder, config, first_step=0, environment={"seed": 2}),
            locked_run(folder),
        ):
            with refused(folder, "another process"), other:
                pass
    assert json.loads((tmp_path / "run" / "environment.json").read_text()) == {"seed": 1}
    (tmp_path / "run" / LOG).write_text("")  # the first wrote its run and ended before the second took the lock
    with refused(folder), open_run_folder(folder, config, first_step=0, environment={"seed": 2}):
        pass


def test_a_full_disk_ends_the_run_with_the_file_and_resume_and_no_whole_line_is_lost(tmp_path):
    class Full:
        """A file on a disk that has room for a few more bytes."""

        def __init__(self, file, room):
            self.file, self.room = file, room

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            fits, self.room = data[: self.room], max(0, self.room - len(data))
            return self.file.write(fits)

    lines = JsonlWriter(tmp_path / LOG)
    lines.append({"step": 1, "loss": float("nan")})
    lines._file = Full(lines._file, room=5)
    with refused(LOG, "No space left on device", f"--resume {tmp_path}", kind=OSError):
        lines.append({"step": 2})
    lines.close()
    assert read_log(tmp_path / LOG, note=lambda _: None) == [{"step": 1, "loss": None}]


def test_other_tasks_have_their_own_metrics(tmp_path):
    """Whatever a task names: a line in log.jsonl, a scalar in TensorBoard, files of predictions."""
    stream = io.StringIO()
    log = RunLog(tmp_path, steps=1, max_sequence_length=100, stream=stream)
    log.step(1, 0.01, COUNTS, StepResult({"loss": 2.0, "accuracy": 0.5}, 0.1))
    scores = {"exact": 50.0, "f1": 61.25, "questions": 4, "pearson": None}
    log.evaluation(1, Evaluation(COUNTS, scores, 0.1, files={"predictions.json": {"q": "é"}}))
    log.close()
    assert list(read_log(tmp_path / LOG)[0])[:4] == ["step", "loss", "accuracy", "learning_rate"]
    record = read_log(tmp_path / EVALUATIONS)[0]
    assert {"f1": 61.25, "questions": 4, "pearson": None, "packs": 4}.items() <= record.items()
    assert json.loads((tmp_path / "predictions.json").read_text(encoding="utf-8")) == {"q": "é"}
    assert "loss 2.000  accuracy 50.0%" in stream.getvalue()
    assert "exact 50.00  f1 61.25  questions 4  pearson none" in stream.getvalue()


def test_evaluating_is_seen_and_changes_no_batch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLog(tmp_path, steps=3, max_sequence_length=100)
    batches = [{"input_ids": number} for number in range(3)]
    assert list(log.watched(iter(batches))) == batches
    log.close()
    assert "evaluating, batch 3" in capsys.readouterr().err


def test_only_a_long_save_is_printed(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path, steps=9, max_sequence_length=100, stream=stream)
    log.saved(3, 2.0)
    log.saved(6, 2.06)
    log.close()
    assert stream.getvalue().splitlines() == ["saved     step 6 in 2.1 s"]
