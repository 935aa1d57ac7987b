"""A build called from a plain script, which worker processes would run once more."""

import os
import signal
import subprocess
import sys
import time

from tests.imports import ROOT

SCRIPT = """
from pack_data import BuildOptions, build

HOW = dict(synthetic="squad_1_1_384", sequences=50, max_sequence_length=384, packer="spfhp")
with build(BuildOptions(out="one", **HOW)) as store:
    print(store.manifest.sequences)
try:
    build(BuildOptions(out="two", workers=2, **HOW))
except ValueError as error:
    print(error)
"""


def test_one_process_needs_no_guard_and_the_error_of_more_names_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert (done.returncode, done.stderr) == (0, "")
    sequences, error = done.stdout.splitlines()
    assert sequences == "50"
    assert "workers = 2" in error
    assert 'if __name__ == "__main__":' in error
    assert "memory" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "script.py"]


SLOW_TO_START = """
import signal, sys, time
from pathlib import Path

from ipu_packed_bert.commands.build import main
from pack_data.cli.command import run_main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it, and what they start
    given = "--synthetic squad_1_1_384 --sequences 50 --max-sequence-length 384 --workers 2 --out data"
    sys.exit(run_main(main, given.split()))
Path("starting").touch()
time.sleep(2)
"""


def test_ctrl_c_while_workers_start_is_one_line(tmp_path):
    (tmp_path / "script.py").write_text(SLOW_TO_START)
    running = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 600
    while not (tmp_path / "starting").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)  # a terminal's Ctrl-C goes to all of them
    assert (running.communicate(timeout=600)[1], running.returncode) == ("interrupted\n", 130)


def test_sigterm_ends_a_build_and_its_workers_without_a_word(tmp_path):
    """The resource tracker of Python reported leaked semaphores."""
    script = SLOW_TO_START.replace("time.sleep(2)", "").replace('Path("starting").touch()', "")
    (tmp_path / "script.py").write_text(script.replace("--sequences 50 ", "--sequences 3000000 "))
    running = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("data.building/examples-*.json")) and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGTERM
    assert "leaked" not in error
    assert "Traceback" not in error
