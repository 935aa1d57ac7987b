"""A build in tasks: the bytes of one process, for any number of tasks, in any order, killed or run twice."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from functools import partial

import pytest

from pack_data.building import assignment_on_disk, inputs, shares, stages, work_folder
from pack_data.building.command import BuildOptions, build
from pack_data.building.shares import STAGES, missing_tasks, run_task
from pack_data.store.data_set import PackStore
from tests.pack_data.text_corpus import Stopped, content, stop_unlink
from tests.refusals import refused
from tests.tiers import slow
from tests.token_sequences import random_sequences

FORK = multiprocessing.get_context("fork")
FILES = 13


@pytest.fixture(scope="module", autouse=True)
def small():
    """A group of one or two files, parts of 20 sequences, a dozen shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "GROUP_BYTES", 1500)
        patch.setattr(inputs, "SOURCE_PART", 20)
        patch.setattr(stages, "SLOTS_PER_SHARD", 32 * 10)
        yield


def options_of(folder, out="data", **more):
    """Files of other sizes, one of them empty, with a column of numbers beside the tokens."""
    source = folder / "source"
    if not source.exists():
        source.mkdir()
        for number in range(FILES):
            rows = random_sequences((number * 7 + 5) % 40, longest=30, seed=number)
            lines = [json.dumps({"input_ids": row, "file": number}) + "\n" for row in rows]
            (source / f"part-{number}.jsonl").write_text("".join(lines))
    return BuildOptions(out=folder / out, source=source, **{"max_sequence_length": 32, **more})


def all_of(options, stage, tasks, order=None):
    return [run_task(options, stage, task, tasks) for task in order or range(tasks)]


def in_tasks(options, counting, dealing):
    """Every stage in turn; returns what the tasks of the last have done."""
    for stage, tasks in zip(STAGES, (counting, 1, dealing)):
        done = all_of(options, stage, tasks)
    return done


@pytest.fixture(scope="module")
def expected(small, tmp_path_factory):
    """Return the files of a data set that one process builds."""
    folder = tmp_path_factory.mktemp("expected")
    build(options_of(folder)).close()
    return content(folder / "data")


@pytest.mark.parametrize("counting, dealing", [(1, 1), (3, 2), (7, 64)])
def test_any_number_of_tasks_gives_the_bytes_of_one_process(tmp_path, expected, counting, dealing):
    options = options_of(tmp_path)
    done = in_tasks(options, counting, dealing)
    (built,) = [task.built for task in done if task.built]
    assert built.store.manifest.sequences == sum((number * 7 + 5) % 40 for number in range(FILES))
    built.store.close()
    assert content(tmp_path / "data") == expected
    assert not (tmp_path / "data.building").exists()
    assert missing_tasks(options, 5) == ("", [])
    assert "nothing to build" in run_task(options, "count", 0, 2).words
    assert not (tmp_path / "data.building").exists()


def test_where_the_places_are_too_many_for_memory(tmp_path, expected, monkeypatch):
    monkeypatch.setattr(assignment_on_disk, "NUMBERS", 64)
    monkeypatch.setattr(assignment_on_disk, "IN_MEMORY", 64)
    build(options_of(tmp_path, "on_disk")).close()
    in_tasks(options_of(tmp_path), 4, 5)
    assert content(tmp_path / "data") == content(tmp_path / "on_disk") != expected


def test_any_order_and_what_is_missing(tmp_path, expected):
    options = options_of(tmp_path)
    assert missing_tasks(options, 4) == ("count", [0, 1, 2, 3])
    groups = len(list(stages.Stages(options, tmp_path, None).input._source.groups(inputs.GROUP_BYTES)))
    assert groups > 5
    all_of(options, "count", 4, [2, 0, 2])
    assert missing_tasks(options, 4) == ("count", [1, 3])
    assert missing_tasks(options, 64) == ("count", [number for number in range(groups) if number % 4 in (1, 3)])
    with refused("data.building", "--missing N"):
        run_task(options, "recipe")
    all_of(options, "count", 4, [3, 1])
    assert missing_tasks(options, 4) == ("recipe", [0])
    with refused("data.building", "--stage recipe"):
        run_task(options, "deal", 0, 3)
    all_of(options, "recipe", 2, [1, 0])
    for later in ("count", "recipe"):  # a task that runs once more changes nothing
        run_task(options, later)
    all_of(options, "deal", 3, [1])
    assert missing_tasks(options, 3) == ("deal", [0, 2])
    all_of(options, "deal", 3, [2, 2, 0])
    assert missing_tasks(options, 3) == ("", [])
    assert content(tmp_path / "data") == expected


def started(options, stage, task, tasks):
    process = FORK.Process(target=run_task, args=(options, stage, task, tasks))
    process.start()
    return process


def test_tasks_beside_one_another_and_twice_at_once(tmp_path, expected):
    options = options_of(tmp_path)
    for stage in STAGES:
        processes = [started(options, stage, task, 3) for task in (0, 1, 2, 1, 0)]
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * len(processes)
    assert missing_tasks(options, 3) == ("", [])
    assert content(tmp_path / "data") == expected


@pytest.mark.parametrize("moment", ["mkdir", "check", "lock"])
def test_a_folder_that_another_task_removes_meanwhile_is_made_again(tmp_path, monkeypatch, moment):
    """The last task of all may remove it between any two steps of one that begins."""
    work = tmp_path / "data.building"
    work.mkdir()
    (work / work_folder.PLAN).write_text('{"options": {}}')
    where, name = {
        "mkdir": (work_folder.Path, "mkdir"),
        "check": (work_folder, "read_object"),
        "lock": (work_folder, "locked"),
    }[moment]
    step = getattr(where, name)

    def removed_first(path, *args, **keywords):
        monkeypatch.setattr(where, name, step)
        shutil.rmtree(work)
        if moment == "mkdir":  # which found the folder, and looks whether it is one
            raise FileExistsError(17, "File exists", str(path))
        return step(path, *args, **keywords)

    monkeypatch.setattr(where, name, removed_first)
    with work_folder.work_of_tasks(tmp_path / "data") as entered:
        assert entered == work
        assert work.is_dir()
        assert getattr(where, name) is step


def test_killed_tasks_are_named_and_run_again(tmp_path, expected):
    """Survive SHARE_KILLS (5) kills of two processes at a time at any moment of a build of 64 tasks."""
    kills = 0
    wanted = int(os.environ.get("SHARE_KILLS", "5"))
    rng = random.Random(7)
    tries = 0
    while kills < wanted or not tries:
        tries += 1
        options = options_of(tmp_path, f"data{tries}")
        while True:
            stage, tasks = missing_tasks(options, 64)
            if not stage:
                break
            two = [started(options, stage, task, 64) for task in rng.sample(tasks, min(2, len(tasks)))]
            if kills < wanted:
                time.sleep(rng.random() * 0.15)
                for process in rng.sample(two, rng.randint(1, len(two))):
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGKILL)
            for process in two:
                process.join()
                assert process.exitcode in (0, -signal.SIGKILL)
                kills += process.exitcode != 0
        assert content(tmp_path / f"data{tries}") == expected
        assert not (tmp_path / f"data{tries}.building").exists()


def test_stopped_while_the_data_set_is_completed(tmp_path, expected, monkeypatch):
    options = options_of(tmp_path)
    all_of(options, "count", 1)
    all_of(options, "recipe", 1)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "complete", lambda work: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_task(options, "deal")
    assert missing_tasks(options, 3) == ("deal", [0])
    run_task(options, "deal", 2, 3)
    assert missing_tasks(options, 3) == ("", [])
    assert content(tmp_path / "data") == expected


@pytest.mark.parametrize("step", [10, slow(3)])
@pytest.mark.parametrize("waiting", [True, False])
def test_stopped_while_the_work_folder_is_removed(tmp_path, expected, monkeypatch, waiting, step):
    """After every n-th of its files; by a task that waited for the folder, and by one that is run later."""
    options = options_of(tmp_path)
    work = tmp_path / "data.building"
    whole = shares.remove

    def stopped(files, folder):
        with monkeypatch.context() as patch:
            stop_unlink(patch, files)
            whole(folder)

    in_tasks(options, 1, 0)
    all_of(options, "deal", 64, range(1, 64))
    shutil.copytree(work, tmp_path / "packed")
    for files in itertools.count(int(waiting), step):
        shutil.copytree(tmp_path / "packed", work, dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(shares, "remove", partial(stopped, files))
            try:
                run_task(options, "deal")
                break
            except Stopped:
                assert work.exists()
        if waiting:
            done = shares._completed(options, options.out, None, "")
            assert "another task has completed" in done.words
        for task in missing_tasks(options, 3)[1]:
            run_task(options, "deal", task, 3)
        assert missing_tasks(options, 3) == ("", [])
        assert content(options.out) == expected
        assert not work.exists()
        shutil.rmtree(options.out)
    assert files > 30


def test_a_damaged_note_and_a_lost_shard_cost_one_task(tmp_path, expected):
    options = options_of(tmp_path)
    work = tmp_path / "data.building"
    all_of(options, "count", 3)
    note = work / "group-00004.json"
    note.write_text(note.read_text()[:-9])
    with refused(note, f"remove {note}"):
        run_task(options, "recipe")
    note.unlink()
    assert missing_tasks(options, 3) == ("count", [1])
    run_task(options, "count", 1, 3)
    run_task(options, "recipe")
    run_task(options, "deal", 0, 2)
    next((work / "ready").glob("packs-00004-*.npy")).unlink()
    assert missing_tasks(options, 12) == ("deal", [1, 3, 4, 5, 7, 9])
    all_of(options, "deal", 2)
    assert content(tmp_path / "data") == expected


def test_the_bad_records_of_all_files_are_counted(tmp_path):
    options = options_of(tmp_path, skip_bad=2)
    for number in (1, 5, 9):
        with open(tmp_path / "source" / f"part-{number}.jsonl", "a") as file:
            file.write('{"input_ids": [-1]}\n')
    all_of(options, "count", 3)
    with refused("3 bad records", "--skip-bad 2", "part-1.jsonl"):
        run_task(options, "recipe")
    in_tasks(options_of(tmp_path, "three", skip_bad=3), 2, 2)
    with PackStore.open(tmp_path / "three") as store:
        assert len(store.manifest.made_with["skipped"]) == 3
