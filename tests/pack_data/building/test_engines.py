"""Builds on Ray, in datatrove, on Dask and by Slurm's tasks give the bytes of one process, whatever is killed."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

import psutil
import pytest

from tests.imports import ROOT
from tests.pack_data.building.test_shares import options_of
from tests.pack_data.text_corpus import content
from tests.tiers import slow

# As in test_shares, in every process of an engine: groups of one or two files, a dozen shards.
SMALL = """
from pack_data.building import inputs, stages
inputs.GROUP_BYTES, inputs.SOURCE_PART, stages.SLOTS_PER_SHARD = 1500, 20, 320
"""


def start(words, folder, program=sys.executable, **more):
    (folder / "sitecustomize.py").write_text(SMALL)
    path = os.pathsep.join([os.fspath(ROOT), os.fspath(folder)])
    environment = {**os.environ, "PYTHONPATH": path, "HOME": os.fspath(folder), "RAY_AUTH_MODE": "disabled"}
    environment.update({"RAY_raylet_start_wait_time_s": "600", **more})  # on a busy machine
    with open(folder / "output", "w") as output:
        how = dict(stdout=output, stderr=output, start_new_session=True)
        return subprocess.Popen([program, *words], env=environment, cwd=folder, **how)


BUILD = ["-m", "ipu_packed_bert", "build"]


def words_of(folder):
    words = ["--from", str(options_of(folder).source), "--max-sequence-length", "32", "--out"]
    if not (folder / "whole").exists():
        assert start([*BUILD, *words, "whole"], folder).wait() == 0
    return words


def command_of(engine, folder, out):
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}; make test-engines installs it")
    words = words_of(folder)
    if engine == "distributed":
        return [*BUILD, *words, out, "--on", "dask:local:2"]
    more = {"ray": ["--address", "local"], "datatrove": ["--logs", f"{out}.logs"]}[engine]
    return [str(ROOT / "examples" / f"build_with_{engine}.py"), *words, out, "--tasks", "64", *more]


def at_work(driver):
    """The processes below a driver that run tasks: those that hold the lock of a build, and the workers of Dask."""
    processes = []
    with suppress(psutil.Error):
        for process in driver.children(recursive=True):
            with suppress(psutil.Error):
                processes += [process for file in process.open_files() if "building/lock" in file.path]
                processes += [process for word in process.cmdline() if "spawn_main" in word]
    return processes


@pytest.mark.parametrize("engine", ["ray", "datatrove", slow("distributed")])
def test_killed_workers_and_drivers_cost_no_byte(tmp_path, engine):
    """Survive SHARE_KILLS (4) SIGKILLs at any moment; started again at once, until it is complete."""
    kills = []
    wanted = int(os.environ.get("SHARE_KILLS", "4"))
    rng = random.Random(7)
    tries = 0
    before = None
    while len(kills) < wanted or not tries:
        tries += 1
        while not (tmp_path / f"data{tries}" / "manifest.json").exists():
            running = start(command_of(engine, tmp_path, f"data{tries}"), tmp_path)
            driver = psutil.Process(running.pid)
            while running.poll() is None:
                time.sleep(rng.random() * 0.1)
                # None is at work, or it has ended since it was found.
                with suppress(IndexError, psutil.NoSuchProcess):
                    if len(kills) < wanted:
                        victim = rng.choice(at_work(driver))
                        victim.kill()
                        kills.append(victim)
                        # The pool of datatrove waits for ever for a process that was killed.
                        if engine == "datatrove" or rng.random() < 0.2:
                            running.kill()
                            running.wait()
                            kills.append(driver)
            end_group(before)  # what a killed driver has left works on beside the next one
            before = running.pid
        assert content(tmp_path / f"data{tries}") == content(tmp_path / "whole")
    end_group(before)


def end_group(leader):
    with suppress(TypeError, ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def write_program(path, source):
    """Write a Python program that a shell starts; a first line cannot name an interpreter whose path has a space."""
    script = path.with_suffix(".py")
    script.write_text(source)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    path.chmod(0o755)


# Runs all tasks of an array twice, up to four at a time, in a random order; a task that was killed is queued again.
SBATCH = """
import os, random, subprocess, sys, time
words = sys.argv[1:]
arrays = [word for word in words if word.startswith("--array=")]
number = int(arrays[0].rpartition("-")[2]) + 1 if arrays else 1
rng = random.Random(number)
tasks = rng.sample(list(range(number)) * 2, 2 * number)
running = []
kills = KILLS
while tasks or running:
    while tasks and len(running) < 4:
        task = tasks.pop()
        command = ["bash", "-c", "exec " + words[words.index("--wrap") + 1]]
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}
        running.append((task, subprocess.Popen(command, env=environment, stdout=sys.stderr)))
    time.sleep(rng.random() / 5)  # a task takes longer
    at_work = [job for _, job in running if job.poll() is None]
    if kills and at_work:
        victim = rng.choice(at_work)
        victim.kill()
        kills -= victim.wait() == -9
    for one in list(running):
        task, job = one
        if job.poll() is None:
            continue
        running.remove(one)
        if job.returncode == -9:
            tasks.append(task)
            print("killed", file=sys.stderr)
        elif job.returncode:
            sys.exit(job.returncode)
print(os.getpid())
"""


@pytest.mark.slow
def test_slurms_tasks_run_twice_at_once_in_any_order_and_killed(tmp_path):
    kills = int(os.environ.get("SHARE_KILLS", "4")) // 2  # in each stage
    words = words_of(tmp_path)
    printed = start([*BUILD, *words, "packed", "--slurm", "3"], tmp_path)
    assert printed.wait() == 0
    (tmp_path / "build.sh").write_text((tmp_path / "output").read_text())
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    write_program(sbatch, SBATCH.replace("KILLS", str(kills)))
    path = os.pathsep.join([str(sbatch.parent), os.environ["PATH"]])
    submitted = start(["build.sh"], tmp_path, "bash", PATH=path)
    assert submitted.wait() == 0, (tmp_path / "output").read_text()
    assert kills < (tmp_path / "output").read_text().count("killed") <= 3 * kills
    assert content(tmp_path / "packed") == content(tmp_path / "whole")
