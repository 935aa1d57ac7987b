"""The examples that build on Ray and in datatrove give the bytes of a build in one process."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pack_data.building.test_shares import options_of
from tests.pack_data.text_corpus import content

ROOT = Path(__file__).resolve().parents[3]


def run(words, folder):
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "HOME": os.fspath(folder), "RAY_AUTH_MODE": "disabled"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("engine, said", [("ray", "deal: "), ("datatrove", "tasks completed")])
def test_an_engine_gives_the_bytes_of_one_process(tmp_path, engine, said):
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}; make test-engines installs it")
    words = ["--from", str(options_of(tmp_path).source), "--max-sequence-length", "32", "--out"]
    alone = run(["-m", "pack_data.build", *words, "whole"], tmp_path)
    assert alone.returncode == 0, alone.stderr
    example = [str(ROOT / "examples" / f"build_with_{engine}.py"), *words, "packed", "--tasks", "3"]
    more = {"ray": ["--address", "local"], "datatrove": ["--logs", "logs"]}[engine]
    for time in ("first", "again"):
        ended = run([*example, *more], tmp_path)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert time == "again" or said in ended.stdout + ended.stderr
        assert content(tmp_path / "packed") == content(tmp_path / "whole")
