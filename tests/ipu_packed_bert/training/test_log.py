"""The log of a run, what resuming removes from it, and the directory that one process at a time writes."""

import contextlib
import errno
import io
import json
import subprocess
import sys
import threading
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.run_files.folder import CHECKPOINTS, EVALUATIONS, LOG, read_log
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.task import Evaluation
from ipu_packed_bert.training import log as runlog
from ipu_packed_bert.training import run_folder
from ipu_packed_bert.training.log import RunLog
from ipu_packed_bert.training.log_files import Events, JsonlWriter
from ipu_packed_bert.training.run_folder import data_of, environment, locked_run, open_run_folder, resumes
from pack_data.cli.command import _without_controls
from pack_data.reading import files
from pack_data.store.data_set import read_manifest
from tests.refusals import refused
from tests.tiny_runs import logged, tiny_data

COUNTS = {"packs": 4, "sequences": 7, "tokens": 380, "masked_tokens": 50}


def metrics_of(step):
    return {
        "loss": 10.0 - step,
        "mlm_loss": 9.0 - step,
        "nsp_loss": 1.0,
        "mlm_accuracy": 0.1 * step,
        "nsp_accuracy": 0.5,
    }


def written(folder, steps, *, first_step=0, total=6, evaluated=()):
    """Log updates and evaluations; return the closed log and what it printed."""
    stream = io.StringIO()
    log = RunLog(folder, steps=total, first_step=first_step, max_sequence_length=100, stream=stream)
    with contextlib.closing(log):
        for step in steps:
            log.step(step, 0.01, COUNTS, StepResult(metrics_of(step), seconds=0.5, cycles=None))
        for evaluation in evaluated:
            log.evaluation(steps[-1], evaluation)
    return log, stream.getvalue()


def test_a_line_a_step_with_every_key(tmp_path):
    written(tmp_path, [1, 2, 3])
    lines = (tmp_path / LOG).read_text().splitlines()
    wanted = {"step": 2, **metrics_of(2), "learning_rate": 0.01, "gradient_norm": None}
    wanted.update(packs=4, sequences=7, tokens=380, seconds=0.5, cycles=None)
    assert json.loads(lines[1]) == wanted
    assert [list(json.loads(line)) for line in lines] == [list(wanted)] * 3


def test_the_first_step_of_a_process_does_not_count_for_the_speed(tmp_path):
    log, _ = written(tmp_path, [1, 2, 3])
    assert (log.totals.packs, log.totals.sequences, log.totals.tokens, log.totals.seconds) == (8, 14, 760, 1.0)
    assert (log.totals.sequences_per_second, log.totals.tokens_per_second) == (14.0, 760.0)
    assert log.totals.packing_factor == 7 / 4
    log, _ = written(tmp_path, [4], first_step=3)
    assert log.totals.packs == 4  # but for the only one


def test_the_live_line_of_a_terminal_shows_updates_and_evaluations(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLog(tmp_path, steps=2, max_sequence_length=100)
    for step in (1, 2):
        log.step(step, 0.01, COUNTS, StepResult(metrics_of(step), 0.5))
    log.evaluation(2, Evaluation(COUNTS, metrics_of(2), 0.5))
    batches = [{"input_ids": number} for number in range(3)]
    assert list(log.watched(iter(batches))) == batches
    log.close()
    shown = capsys.readouterr().err
    # Of 320 slots of padding with a sequence a row, packs leave 20.
    assert all(words in shown for words in ("2/2", "loss 8.000", f"{1 - 20 / 320:.2%}", "batch 3"))


def test_a_printed_line_clears_the_live_line_first(tmp_path, monkeypatch):
    """In a command, stderr removes control characters, and the live line goes to the stream behind it."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", _without_controls(screen))
    log = RunLog(tmp_path, steps=300, max_sequence_length=100, stream=screen)
    log._say("printed")
    log.close()
    before = screen.getvalue().partition("printed")[0]
    assert "0/300" in before
    assert before.endswith(" \r")


@given(st.lists(st.integers(1, 8), max_size=10), st.integers(1, 8), st.booleans())
def test_a_resumed_log_keeps_the_updates_before_the_checkpoint_and_names_the_lost_ones(
    tmp_path_factory, steps, first_step, is_cut
):
    folder = tmp_path_factory.mktemp("log")
    written(folder, steps)
    if is_cut:
        with open(folder / LOG, "a") as file:
            file.write('{"step": 5, "lo')  # cut short by a kill
    _, printed = written(folder, [first_step + 1], first_step=first_step)
    kept = [step for step in steps if step <= first_step]
    assert logged(folder) == [*kept, first_step + 1]
    missing = sorted(set(range(1, first_step + 1)) - set(kept))
    repeated = sum(count - 1 for count in Counter(kept).values())
    notes = [line for line in printed.splitlines() if "of the updates before the checkpoint" in line]
    assert len(notes) == bool(missing or repeated)
    if missing:
        assert f"lacks {len(missing)} of {first_step}" in notes[0]
        assert f"is {missing[0]}" in notes[0]
    if repeated:
        assert f"has {repeated} more than once" in notes[0]


def test_tensorboard_has_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(tmp_path, [1, 2, 3, 4], evaluated=[Evaluation(COUNTS, metrics_of(4), 0.5)])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss/total")]
    assert scalars == [(step, 10.0 - step) for step in range(1, 5)]
    assert abs(events.Scalars("packing/padding_avoided")[0].value - 0.9375) < 1e-6
    assert abs(events.Scalars("evaluation/mlm_accuracy")[0].value - 0.4) < 1e-6


def test_a_full_disk_ends_the_curves_and_not_the_run(tmp_path, monkeypatch, capsys):
    from tensorboard.summary.writer import record_writer

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    printed = []
    hook = threading.excepthook
    events = Events(tmp_path, 0, printed.append)
    events.add(1, {"loss": 1.0})
    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    events.add(2, {"loss": 1.0, "gradient_norm": None})
    (thread,) = [thread for thread in threading.enumerate() if "AsyncWriter" in type(thread).__name__]
    thread.join(10)
    for step in (3, 4):
        events.add(step, {"loss": 1.0})
    events.close()
    assert len(printed) == 1
    assert "No space left on device" in printed[0]
    assert threading.excepthook == hook
    assert capsys.readouterr().err == ""


def test_a_full_disk_costs_the_files_of_an_evaluation_and_not_its_scores(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    evaluation = Evaluation(COUNTS, metrics_of(2), 0.5, files={"predictions.json": {}})
    with monkeypatch.context() as patch:
        patch.setattr(runlog, "write_atomically", full)
        _, printed = written(tmp_path, [2], evaluated=[evaluation])
    assert f"{tmp_path / 'predictions.json'} cannot be written (full)" in printed
    assert logged(tmp_path, file=EVALUATIONS) == [2]


def test_without_tensorboard_a_line_names_it_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    _, printed = written(tmp_path, [1])
    assert "pip install tensorboard" in printed.splitlines()[0]
    assert logged(tmp_path) == [1]


def test_environment_has_what_a_run_depends_on(tmp_path):
    data = data_of(read_manifest(tiny_data(tmp_path)))
    facts = environment(device="host engine", seed=5, data=data, command=["run_pretraining.py"])
    assert facts["data"] == data
    assert data["sequences"] == 60
    assert (facts["versions"]["torch"], facts["seed"], facts["device"]) == (torch.__version__, 5, "host engine")
    assert json.loads(json.dumps(facts)) == facts
    head = subprocess.run(["git", "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True)
    if head.returncode == 0:
        assert facts["commit"].rstrip("+") == head.stdout.strip()


def seed_in(folder, name="environment.json"):
    return json.loads((folder / name).read_text())["seed"]


def test_a_new_run_has_a_directory_of_its_own(tmp_path, monkeypatch):
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
    assert [run.name for run in runs] == [f"packed_host-20260102-030405{end}" for end in ("", "-2", "-3")]
    assert (first / "config.yml").read_text() == config.to_yaml()
    with open_run_folder(str(first), config, first_step=7, environment={"seed": 6}):
        pass
    assert (seed_in(first), seed_in(first, "environment-from-step-7.json")) == (5, 6)


def test_only_a_run_that_saved_nothing_begins_again(tmp_path, monkeypatch):
    """The log of a run with a checkpoint is never removed, nor that of one that another process saves meanwhile."""
    assert not resumes(tmp_path / "new")
    saved = tmp_path / CHECKPOINTS / "step_00000001"
    written(tmp_path, [1])
    assert not resumes(tmp_path)
    assert not (tmp_path / LOG).exists()

    @contextlib.contextmanager
    def after_another(*_):
        saved.mkdir(parents=True)
        yield

    written(tmp_path, [1])
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "locked", after_another)
        assert resumes(tmp_path)
        assert (tmp_path / LOG).exists()
    assert resumes(tmp_path)
    assert (tmp_path / LOG).exists()


def test_one_process_at_a_time_writes_a_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def opened(seed):
        return open_run_folder(str(folder), Config(), first_step=0, environment={"seed": seed})

    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    with opened(1):
        for other in (opened(2), locked_run(folder)):  # a second new run, and one that is resumed
            with refused(folder, "another process"), other:
                pass
    assert seed_in(folder) == 1
    (folder / LOG).write_text("")  # the first wrote its run and ended before the second took the lock
    with refused(folder), opened(2):
        pass


class Full:
    """A file on a disk that has room for a few more bytes."""

    def __init__(self, file, room):
        self.file = file
        self.room = room

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, content):
        fits = content[: self.room]
        self.room -= len(fits)
        return self.file.write(fits)


def test_a_full_disk_ends_the_run_with_the_file_and_resume_and_no_whole_line_is_lost(tmp_path):
    lines = JsonlWriter(tmp_path / LOG)
    lines.append({"step": 1, "loss": float("nan")})
    lines._file = Full(lines._file, room=5)
    with refused(LOG, "No space left on device", f"--resume {tmp_path}", kind=OSError):
        lines.append({"step": 2})
    lines.close()
    assert read_log(tmp_path / LOG, note=lambda _: None) == [{"step": 1, "loss": None}]


def test_not_on_a_terminal_about_twenty_lines(tmp_path):
    _, text = written(tmp_path, range(1, 201), total=200)
    lines = [line for line in text.splitlines() if line.startswith("step")]
    assert 20 <= len(lines) <= 22
    assert "1/200" in lines[0]
    assert "200/200" in lines[-1]
