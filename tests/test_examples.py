"""The examples run as they stand, on their small model, and print the speed of both runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NEEDS = {"plain_loop": ["transformers"], "hf_trainer": ["accelerate", "datasets"], "trl_sft": ["trl"]}


def test_every_example_is_run_and_short():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "tiny"}
    assert all(len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60 for name in NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_one_line(name):
    """In an environment that has the interpreter and NumPy, but not the packages that the example needs."""
    hidden = f"import sys; sys.path.insert(0, {os.fspath(EXAMPLES)!r}); sys.argv = ['{name}']; import tiny, {name}; "
    hidden += f"tiny.find_spec = lambda name: None; {name}.main()"
    finished = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 2 and not finished.stdout
    assert finished.stderr.startswith("error: this example needs ") and finished.stderr.count("\n") == 1


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_prints_the_speed_of_both_runs(name, tmp_path):
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"needs {package}; make test-trainers installs it")
    pytest.importorskip("transformers", minversion="4.57")
    finished = subprocess.run(
        [sys.executable, os.fspath(EXAMPLES / f"{name}.py"), "--examples", "40", "--row", "512"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    speeds = re.findall(r"^(unpacked|packed) +([\d,]+) tokens/s$", finished.stdout, re.MULTILINE)
    assert [name for name, _ in speeds] == ["unpacked", "packed"]
    assert all(int(speed.replace(",", "")) > 0 for _, speed in speeds)
    assert re.search(r"^packed is [\d.]+ times as fast as unpacked$", finished.stdout, re.MULTILINE)
    assert not list(tmp_path.iterdir())
