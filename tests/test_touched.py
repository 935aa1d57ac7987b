"""`make test-changed` runs every test that a change can affect, and leaves out those that it cannot."""

import subprocess
import sys

import pytest

from tests.imports import ROOT
from tests.touched import MODULES, closure, selected

PACKING = "tests/pack_data/packing/test_packing.py"
ENGINE = "tests/ipu_packed_bert/engine/test_host_engine.py"
COMMANDS = "tests/test_refused_commands.py"

# Changed file -> test files that it selects, and some that it does not.
SELECTED = {
    "pack_data/packing/packing.py": ([PACKING, ENGINE, COMMANDS], []),
    "ipu_packed_bert/model/bert.py": ([ENGINE, COMMANDS], [PACKING]),
    "padding_free/leaks/probe.py": ([COMMANDS], [PACKING, ENGINE]),  # a command is loaded by its name
    "tests/refusals.py": ([COMMANDS], []),
    "tests/conftest.py": ([PACKING, ENGINE, COMMANDS], []),
    "configs/packed_small.yml": ([PACKING, ENGINE, COMMANDS], []),
}


@pytest.mark.slow
def test_a_change_selects_the_tests_that_reach_it():
    faults = []
    for changed, (expected, others) in SELECTED.items():
        found = selected([ROOT / changed])
        faults += [f"{changed} does not select {name}" for name in expected if ROOT / name not in found]
        faults += [f"{changed} selects {name}" for name in others if ROOT / name in found]
    assert not faults, "\n".join(faults)


def loaded_by(test_file):
    """Run a test file in a process of its own; return the files of this project that the process has loaded."""
    program = f"import pytest, sys; pytest.main(['-q', '-n', '0', '-x', {str(test_file)!r}]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    names = done.stdout.splitlines()[-1].split()
    return {MODULES[name] for name in names if name in MODULES}


@pytest.mark.slow
@pytest.mark.parametrize("name", [PACKING, "tests/test_commands.py", "tests/padding_free/test_losses.py"])
def test_what_a_test_file_loads_selects_it(name, tmp_path):
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    by_every_test = loaded_by(tmp_path / "test_nothing.py") | {ROOT / "tests" / "conftest.py"}
    assert loaded_by(ROOT / name) - by_every_test <= closure(ROOT / name)
