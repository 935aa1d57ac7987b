"""Who may be one of several processes, torchrun's here; a program that one process makes refuses to be more."""

import threading

import pytest

from ipu_packed_bert.commands import finetune, pretrain
from ipu_packed_bert.processes.beats import Beats
from ipu_packed_bert.processes.ranks import joined, refuse_several
from pack_data.cli.command import run_main

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment, says",
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS is 4"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
    ],
)
@pytest.mark.parametrize("main", [pretrain.main, finetune.main])
def test_processes_that_would_make_a_run_each_are_refused(main, environment, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert run_main(main, ["--config", "packed_host"]) == 2
    text = capsys.readouterr().err
    assert says in text
    assert "torchrun" in text
    assert text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # a batch script, before srun
    ],
)
def test_one_process_is_one(environment):
    with joined(environment) as processes:
        assert (processes.rank, processes.size) == (0, 1)


def test_torchrun_under_another_launcher_passes_where_several_may_run():
    """Its processes are torchrun's, whatever started them."""
    with pytest.raises(ValueError, match="each process of torchrun would repeat it"):
        refuse_several("it", {**TORCHRUN, "SLURM_STEP_NUM_TASKS": "2"})


def test_a_command_of_one_process_refuses_several_and_no_other():
    for environment in ({}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}):
        refuse_several("it", environment)
    with pytest.raises(ValueError, match="poprun .*each process would repeat it"):
        refuse_several("it", {"POPDIST_RANK": "0"})


class SlowStore:
    """A store whose calls in the thread of the beats wait until they are released."""

    def __init__(self):
        self.called = threading.Event()
        self.released = threading.Event()

    def set(self, key, value):
        pass

    def add(self, key, number):
        if threading.current_thread().name == "beats":
            self.called.set()
            self.released.wait(10)
        return 0


def test_a_rank_ends_after_its_last_call_of_the_store():
    """Python aborts if it ends while a thread is inside the store."""
    store = SlowStore()
    beats = Beats(lambda: store, 1, 2, "--resume")
    beats._silence = 2.0
    beats.begin()
    assert store.called.wait(10)
    threading.Timer(0.05, store.released.set).start()
    beats.end()
    assert store.released.is_set()
    assert not beats._beating.is_alive()
