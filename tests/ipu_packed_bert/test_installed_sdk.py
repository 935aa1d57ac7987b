"""With a package `poptorch` on the path, as an installed SDK has one: the IPU suite, and the commands of a pod's user.

Each in a process of its own, which imports the stand-ins of `tests/fakes/installed`: PopTorch and PopVision's library.
All are slow: `make test` runs the suite and such commands in its own process, without a package on the path.
"""

import json
import os
import subprocess
import sys

import pytest
import yaml

from ipu_packed_bert.run_files.folder import read_log
from tests import on_ipus
from tests.fine_tuning_files import PIPELINE, tiny_checkpoint, training_file
from tests.fine_tuning_files import tiny_config as fine_tuning
from tests.imports import ROOT
from tests.tiny_runs import tiny_data, tiny_settings

pytestmark = pytest.mark.slow

SDK = ROOT / "tests" / "fakes" / "installed"


def on_the_pod(*command, folder=ROOT, ipus=16, path=()):
    """Run Python with the SDK on the path; the exit status and what it printed."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*path, SDK, ROOT])),
        "TEST_IPUS": str(ipus),
    }
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def packed_bert(*words, **where):
    return on_the_pod("-m", "ipu_packed_bert", *words, **where)


def suite(names, marked):
    """Run files of the suite of `make test-ipu` in one process; the exit status of pytest and what it printed."""
    files = [ROOT / "tests" / "ipu_packed_bert" / f"{name}.py" for name in names]
    return on_the_pod(
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-rA",
        "-m",
        marked,
        *files,
    )


def test_the_suite_is_green_where_an_sdk_is_installed():
    """Files that start processes or lower graphs are left out: `make test` runs them on the same stand-in."""
    names = ["engine/test_ipu_signatures", "engine/test_ipu_engine", "tasks/test_on_ipus"]
    assert set(names) < set(on_ipus.SUITE)
    status, out, error = suite(names, "not ipu and not slow")
    assert status == 0, out + error
    assert [name for name in names if f"PASSED tests/ipu_packed_bert/{name}.py" not in out] == []


def test_the_tests_on_the_sdk_run_on_the_package():
    status, out, error = suite(on_ipus.ON_THE_SDK, "ipu and not slow")
    assert status == 0 and "PASSED" in out and "SKIPPED" not in out, out + error


def test_make_test_ipu_finds_the_sdk_and_both_parts():
    status, out, error = on_the_pod(ROOT / "tests" / "on_ipus.py", "--collect-only", "-p", "no:cacheprovider")
    assert status == 0, out + error
    assert out.startswith("PopTorch 3.4")
    assert out.splitlines()[0].endswith(" on 16 IPUs")
    assert out.count(" tests collected (") == 2
    assert "[sdk]" in out
    assert "[stand-in]" in out


def test_the_commands_of_a_first_day(tmp_path):
    """ipu-check, pretrain, resume, and too few IPUs, each in a new process."""
    settings = tiny_settings(tiny_data(tmp_path / "data"))
    settings["engine"] = {"half_weights": False, "log_cycles": True}
    settings["placement"] = dict(PIPELINE)
    settings["batch"] = {"micro_batch": 1, "gradient_accumulation": 10}
    settings["run"].update(steps=2, evaluate_every=0)
    (tmp_path / "pod.yml").write_text(yaml.safe_dump(settings))
    run = ("--config", "pod.yml", "--engine", "ipu", "--out", "run")

    status, out, error = packed_bert("ipu-check", "--config", "pod.yml", "--out", "check", folder=tmp_path)
    assert (tmp_path / "check" / "bundle.json").is_file(), error
    assert status in (0, 1)
    assert "Traceback" not in error

    status, out, error = packed_bert("pretrain", *run, folder=tmp_path)
    assert status == 0 and "IPU hardware: 4 IPUs (2 x 2)" in out, error
    longer = ("--set", "run.steps=4", "--set", "optimizer.schedule_steps=4")
    status, out, error = packed_bert("pretrain", "--resume", "run", *longer, folder=tmp_path)
    assert status == 0 and "IPU hardware" in out, error
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["cycles"] > 0 for record in records)

    status, out, error = packed_bert(
        "pretrain",
        *run[:-1],
        "less",
        folder=tmp_path,
        ipus=2,
    )
    assert status == 2
    assert error.startswith("error: ")
    assert "has 2 IPUs" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "version, refused",
    [("3.1.0", True), ("3.2.0+109946", True), ("3.3.0", False)],
)
def test_a_poptorch_for_torch_1_13_is_refused(tmp_path, version, refused):
    """That of SDK 3.1 and 3.2; a package of that version in the place of the installed one."""
    imports = "from tests.fakes.poptorch import *\nfrom tests.fakes.poptorch import optim\n"
    (tmp_path / "poptorch.py").write_text(f"{imports}__version__ = {version!r}\n")
    config = ("--config", "packed_phase2_pod64", "--engine", "ipu", "--out", tmp_path / "run")
    status, _, error = packed_bert("pretrain", *config, folder=tmp_path, path=[tmp_path])
    assert status == 2
    assert error.count("\n") == 1
    assert (version in error and "torch 1.13.1" in error and "SDK 3.4" in error) == refused, error


def test_fine_tuning_and_prediction(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "bert")
    training = training_file(tmp_path, "single_label")
    sections = {"engine": {"half_weights": False, "loss_scaling": 16.0}, "placement": PIPELINE, "run": {"epochs": 1}}
    sections["batch"] = {"sequences_per_update": 24, "micro_batch": 2}
    config = fine_tuning(checkpoint, training, task="single_label", **sections)
    (tmp_path / "pod.yml").write_text(config.to_yaml())
    words = ("finetune", "--config", "pod.yml", "--engine", "ipu", "--out", "run")
    status, out, error = packed_bert(*words, folder=tmp_path)
    assert status == 0 and "IPU hardware: 4 IPUs (2 x 2)" in out, error
    status, out, error = packed_bert("predict", "run", training, "--out", "found.jsonl", folder=tmp_path)
    assert status == 0, error
    lines = (tmp_path / "found.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert all(isinstance(json.loads(line), dict) for line in lines)
