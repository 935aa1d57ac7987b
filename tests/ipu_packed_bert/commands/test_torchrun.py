"""The programs under torchrun: killed and stopped runs go on, exactly; a mistake ends all ranks with one line."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ipu_packed_bert.commands import finetune, pretrain
from ipu_packed_bert.commands.run_options import _train_with
from ipu_packed_bert.processes import beats
from ipu_packed_bert.processes.ranks import joined
from ipu_packed_bert.run_files.checkpoints import newest_checkpoint
from ipu_packed_bert.run_files.folder import CHECKPOINTS, EVALUATIONS, LOG, read_log
from ipu_packed_bert.training import summary as run_summary
from pack_data.cli.command import NotFinite, run_main
from tests.fine_tuning_files import tiny_config as fine_tuning_config
from tests.fine_tuning_files import tiny_table
from tests.kill_ranks import differences, disturbed
from tests.ranks_at_work import forking
from tests.tiers import slow
from tests.tiny_runs import logged, not_drawn

STEPS = 30


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_goes_on_exactly(tiny, tmp_path):
    """Under torchrun two ranks are killed, which restarts all, and then torchrun is told to end; the same line of
    arguments goes on. Weights and log are those of an undisturbed run, with dropout, bit for bit."""
    plain = tmp_path / "plain"
    run = tmp_path / "run"
    assert [status for status, _ in ended(partial(_run, tiny, plain))] == [0, 0]
    stopped = disturbed(tiny, run, ranks=2, steps=STEPS, kills=2, seed=1, then=signal.SIGTERM)
    created = len(read_log(run / LOG))
    assert stopped.kills == 2 and stopped.status != 0 and 0 < created < STEPS, stopped.output
    assert re.search("stopped +by SIGTERM", stopped.output)
    assert newest_checkpoint(run / CHECKPOINTS).name.endswith(f"{created:08d}")
    assert [status for status, _ in ended(partial(_run, tiny, run))] == [0, 0]
    assert differences(plain, run) == []


def _run(tiny, out, processes, steps=STEPS):
    sys.argv[1:] = ["--config", str(tiny), "--out", str(out), "--steps", str(steps), "--resume-if-there"]
    return _train_with(pretrain._start, pretrain.parse(None), processes)


def ended(main, *, size=2, stopped=None):
    """(exit status, words on stderr) of each of `size` ranks that run `main(processes)`, as under torchrun.

    stopped: the rank that stops itself, and is killed when the others have ended.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    context = forking()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(size)]
        ranks = [
            context.Process(target=_rank, args=(main, rank, size, store.port, file)) for rank, file in enumerate(files)
        ]
        for process in ranks:
            process.start()
        for rank, process in sorted(enumerate(ranks), key=lambda each: each[0] == stopped):
            process.join(0 if rank == stopped else 60)
            process.kill()
        for process in ranks:
            process.join()
        return [(process.exitcode, file.read_text()) for process, file in zip(ranks, files)]


def _rank(main, rank, size, port, file):
    environment = {
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    os.environ.update(environment)
    run_summary.draw_curves = not_drawn

    if hasattr(main, "prepare"):
        main.prepare(rank)

    def program(_):
        with joined(environment) as processes:
            return main(processes)

    with open(file, "w") as words, contextlib.redirect_stderr(words), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = run_main(program)
        except SystemExit as end:
            status = end.code
    sys.exit(status)


def _own_mistake_of_rank_1(processes):
    if processes.rank == 1:
        raise ValueError("no such file")
    processes.summed([1.0])


def _a_mistake_while_others_meet(processes):
    raise ValueError("no such setting")


def _cut_off(rank):
    meet = dist.init_process_group

    def fails(*arguments, **named):
        meet(*arguments, **named)
        time.sleep(0.3)  # the other one says its mistake meanwhile
        raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")

    if rank == 1:
        dist.init_process_group = fails


_a_mistake_while_others_meet.prepare = _cut_off


def _not_finite(processes):
    time.sleep(0 if processes.rank else 1.5)  # rank 0 sets checkpoints aside and writes its summary
    raise NotFinite("nothing was saved" if processes.rank else "the newest checkpoint is 7")


def _killed(processes):
    if processes.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    processes.summed([1.0])


def _no_data_set(processes):
    argv = ["--config", "packed_host", "--set", f"data.directory=nowhere{processes.rank}"]
    sys.argv[1:] = ["the same"]
    return _train_with(pretrain._start, pretrain.parse(argv), processes)


@pytest.mark.parametrize(
    "main, statuses, said",
    [
        (_own_mistake_of_rank_1, [2, 2], {1: "error: rank 1 on "}),
        (_a_mistake_while_others_meet, [2, 2], {0: "error: no such setting"}),
        (_not_finite, [3, 3], {0: "error: the newest checkpoint is 7"}),
        (_killed, [1, -9], {0: "error: rank 0: another process of this run ended"}),
        (_no_data_set, [2, 2], {0: "error: nowhere0: no data set there"}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_mistake_ends_all_ranks_with_one_line(main, statuses, said):
    actual = ended(main)
    assert [status for status, _ in actual] == statuses
    for rank, (_, words) in enumerate(actual):
        if rank in said:
            assert words.startswith(said[rank])
            assert words.count("\n") == 1
        else:
            assert not words


def _soon(_rank):
    beats.SILENCE = 3.0


def _stops(rank, processes):
    if processes.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)


def _stops_before_an_update(processes):
    processes.summed([1.0])
    _stops(1, processes)
    processes.summed([1.0])


def _stops_while_it_builds(processes):
    with processes.first_alone():
        time.sleep(1)
        _stops(0, processes)


for each in (_stops_before_an_update, _stops_while_it_builds):
    each.prepare = _soon


@pytest.mark.parametrize(
    "main, size, stopped",
    [(_stops_before_an_update, 4, 1), slow((_stops_while_it_builds, 2, 0))],
)
def test_a_rank_that_hangs_is_named_and_the_others_end(main, size, stopped):
    actual = ended(main, size=size, stopped=stopped)
    assert [status for status, _ in actual] == [-9 if rank == stopped else 1 for rank in range(size)]
    (line,) = [words for _, words in actual if words]
    assert line.startswith(f"error: rank {stopped} on ")
    assert "silent for 3 s" in line
    assert line.count("\n") == 1


def _fails_unnoticed(processes):
    """Sums of NCCL do not notice that another rank has ended."""
    processes.summed([1.0])
    if processes.rank == 1:
        raise ValueError("no such file")
    if processes.rank == 0:
        with processes.shielded():
            time.sleep(5)
            print("saved", file=sys.stderr)
    time.sleep(50)


_fails_unnoticed.prepare = _soon


@pytest.mark.slow
def test_a_rank_that_fails_unnoticed_is_named_by_all_others_once_they_have_saved():
    actual = ended(_fails_unnoticed, size=3)
    assert [status for status, _ in actual] == [2, 2, 2]
    (zeroth, first, second) = [words for _, words in actual]
    assert zeroth.startswith("saved\nerror: rank 1 on ")
    assert zeroth.count("\n") == 2
    assert first.startswith("error: rank 1 on ")
    assert first.count("\n") == 1
    assert second.startswith("error: rank 1 on ")
    assert "no such file" in second
    assert second.count("\n") == 1


def _works_long(processes):
    """Each for longer than a silence may last: in Python, in an update and in a build, while the others wait."""
    processes.summed([1.0])
    end = time.monotonic() + 4
    while processes.rank == 1 and time.monotonic() < end:
        sum(range(1000))
    processes.summed([1.0])
    with processes.first_alone():
        time.sleep(4 if processes.rank == 0 else 0)
    matrix = torch.ones(400, 400)
    while processes.rank == 0 and time.monotonic() < end + 8:
        matrix = matrix @ matrix / 400
    assert processes.gathered(processes.rank) == [0, 1]


_works_long.prepare = _soon


@pytest.mark.slow
def test_work_is_no_silence_however_long_it_takes():
    assert ended(_works_long) == [(0, ""), (0, "")]


@pytest.mark.slow
def test_ends_of_two_ranks_under_load():
    """A few: `python -m tests.ends_of_ranks 200 --load 2` takes a quarter of an hour."""
    subprocess.run([sys.executable, "-m", "tests.ends_of_ranks", "4", "--load", "2"], check=True)


def _stop_of_rank_1(processes):
    sums = []
    for number in range(5):
        if (processes.rank, number) == (1, 2):
            processes.received = signal.SIGUSR1
        sums.append(processes.summed([1.0, processes.rank]))
        if processes.stop:
            break
    assert sums == [[2.0, 1.0]] * 3
    assert processes.gathered(processes.rank) == [0, 1]
    assert processes.of_first(lambda: {"made": processes.rank}) == {"made": 0}
    return processes.stop


def test_all_stop_at_the_same_update():
    assert [status for status, _ in ended(_stop_of_rank_1)] == [signal.SIGUSR1] * 2


def _fine_tune(file, out, processes):
    # More rows than divide an update evenly: the run has fewer, and goes on by the same line.
    sys.argv[1:] = ["--config", str(file), "--out", str(out), "--resume-if-there", "--set", "batch.micro_batch=3"]
    return _train_with(finetune._start, finetune.parse(None), processes)


def _told_to_end(tiny, out, processes):
    told = []

    def tell():
        while _updates(out) <= 2:
            time.sleep(0.02)
        told.append(_updates(out))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    status = _run(tiny, out, processes, steps=1_000_000)
    assert _updates(out) - told[0] < 20
    return status


def _updates(out):
    log = out / LOG
    return log.read_bytes().count(b"\n") if log.exists() else 0


def test_ranks_that_are_told_to_end_save_and_end_after_a_few_updates(tiny, tmp_path):
    """torchrun kills ranks after 30 seconds."""
    run = tmp_path / "run"
    assert ended(partial(_told_to_end, tiny, run)) == [(143, ""), (143, "")]
    assert newest_checkpoint(run / CHECKPOINTS).name == f"step_{len(read_log(run / LOG)):08d}"


def test_fine_tuning_in_two_ranks_is_one_run(tmp_path):
    table = tiny_table(tmp_path / "train.csv", "single_label")
    config = fine_tuning_config(
        None, table, task="single_label", batch={"micro_batch": 1}, optimizer={"learning_rate": 1.0e-4}
    )
    file = tmp_path / "tiny.yml"
    alone = tmp_path / "alone"
    run = tmp_path / "run"
    file.write_text(config.to_yaml())
    assert finetune.main(["--config", str(file), "--out", str(alone)]) == 0
    for _ in range(2):  # the second time it is done, and only evaluated again
        assert [status for status, _ in ended(partial(_fine_tune, file, run))] == [0, 0]
    ours = read_log(alone / LOG)
    theirs = read_log(run / LOG)
    assert len(ours) == len(theirs) > 4
    for one, two in zip(ours, theirs):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["sequences"] == one["sequences"]
    assert (run / "model").is_dir()
    assert (run / "predictions.json").exists()
    assert logged(run, file=EVALUATIONS) == [len(theirs)]
