"""`make test-ipu` without the SDK is one line; with one the tests marked `ipu` run on what is imported as poptorch."""

import os
import subprocess
import sys
from pathlib import Path

from tests import on_ipus

ROOT = Path(__file__).resolve().parents[2]


def test_without_the_sdk_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "poptorch", None)
    assert on_ipus.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "Poplar SDK" in said.err


def test_the_tier_takes_the_poptorch_that_is_installed(tmp_path):
    """A stand-in that is installed as a package is taken for the SDK itself."""
    (tmp_path / "poptorch.py").write_text(
        "import sys\nfrom tests.fakes import poptorch as stand_in\nfrom tests.fakes.machine import machine\n"
        "machine.reset(16)\n"
        "sys.modules['poptorch'], sys.modules['poptorch.optim'] = stand_in, stand_in.optim\n"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("POPTORCH_", "PYTEST_"))}
    one = ["-p", "no:cacheprovider", "-k", "compiled_without_a_device"]
    code = f"from tests import on_ipus; on_ipus.SUITE = on_ipus.ON_THE_SDK; raise SystemExit(on_ipus.main({one!r}))"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    counted = (line for line in finished.stdout.splitlines() if " in " in line and "deselected" in line)
    assert [line[:8] for line in counted] == ["1 passed"] * 2
