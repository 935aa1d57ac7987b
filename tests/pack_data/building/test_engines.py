"""The examples that build on Ray and in datatrove give the bytes of a build in one process, whatever is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.pack_data.building.test_shares import options_of
from tests.pack_data.text_corpus import content

ROOT = Path(__file__).resolve().parents[3]
# As in test_shares, in every process of an engine: groups of one or two files, a dozen shards.
SMALL = """
from pack_data.building import inputs, stages
inputs.GROUP_BYTES, inputs.SOURCE_PART, stages.SLOTS_PER_SHARD = 1500, 20, 320
"""


def start(words, folder):
    (folder / "sitecustomize.py").write_text(SMALL)
    path = os.pathsep.join([os.fspath(ROOT), os.fspath(folder)])
    environment = {**os.environ, "PYTHONPATH": path, "HOME": os.fspath(folder), "RAY_AUTH_MODE": "disabled"}
    environment["RAY_raylet_start_wait_time_s"] = "600"  # on a busy machine
    with open(folder / "output", "w") as output:
        how = dict(stdout=output, stderr=output, start_new_session=True)
        return subprocess.Popen([sys.executable, *words], env=environment, cwd=folder, **how)


def command_of(engine, folder, out):
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}; make test-engines installs it")
    words = ["--from", str(options_of(folder).source), "--max-sequence-length", "32", "--out"]
    if not (folder / "whole").exists():
        alone = start(["-m", "ipu_packed_bert", "build", *words, "whole"], folder)
        assert alone.wait() == 0
    more = {"ray": ["--address", "local"], "datatrove": ["--logs", f"{out}.logs"]}[engine]
    return [str(ROOT / "examples" / f"build_with_{engine}.py"), *words, out, "--tasks", "64", *more]


@pytest.mark.parametrize("engine, said", [("ray", "deal: "), ("datatrove", "tasks completed")])
def test_an_engine_gives_the_bytes_of_one_process(tmp_path, engine, said):
    for time_ in ("first", "again"):
        running = start(command_of(engine, tmp_path, "packed"), tmp_path)
        assert running.wait() == 0
        assert time_ == "again" or said in (tmp_path / "output").read_text()
        assert content(tmp_path / "packed") == content(tmp_path / "whole")


def at_work(driver):
    """The processes below a driver that hold the lock of a build: those that run one of its tasks."""
    found = []
    with suppress(psutil.Error):
        for each in driver.children(recursive=True):
            with suppress(psutil.Error):
                found += [each for file in each.open_files() if "building/lock" in file.path]
    return found


@pytest.mark.parametrize("engine", ["ray", "datatrove"])
def test_killed_workers_and_drivers_cost_no_byte(tmp_path, engine):
    """Survive SHARE_KILLS (4) SIGKILLs at any moment; started again at once, until it is complete."""
    kills, wanted, rng, tries, before = [], int(os.environ.get("SHARE_KILLS", "4")), random.Random(7), 0, None
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
