"""`make test-changed` runs every test that a change can affect, and leaves out those that it cannot."""

import json
import subprocess
import sys

import pytest

from tests.imports import ROOT
from tests.touched import MODULES, closure, selected

PACKING = "tests/pack_data/packing/test_packing.py"
ENGINE = "tests/ipu_packed_bert/engine/test_host_engine.py"
COMMANDS = "tests/test_refused_commands.py"
PAGES = "tests/test_references.py"

# Changed file -> test files that it selects, and some that it does not.
SELECTED = {
    "pack_data/packing/packing.py": ([PACKING, ENGINE, COMMANDS], []),
    "ipu_packed_bert/model/bert.py": ([ENGINE, COMMANDS], [PACKING]),
    "padding_free/leaks/probe.py": ([COMMANDS], [PACKING, ENGINE]),  # a command is loaded by its name
    "tests/refusals.py": ([COMMANDS], []),
    "tests/conftest.py": ([PACKING, ENGINE, COMMANDS], []),
    "configs/packed_host.yml": ([COMMANDS], []),
    "pack_data/published/squad_1_1_384.csv": ([COMMANDS], []),
    "docs/commands.md": ([PAGES], [PACKING, ENGINE]),
    "tests/golden/look.txt": (["tests/test_transcripts.py"], [PACKING, ENGINE, COMMANDS]),
    "setup.cfg": ([PACKING, ENGINE, COMMANDS, PAGES], []),
}


@pytest.mark.slow
def test_a_change_selects_the_tests_that_reach_it():
    faults = []
    for changed, (expected, others) in SELECTED.items():
        files = selected([ROOT / changed])
        faults += [f"{changed} does not select {name}" for name in expected if ROOT / name not in files]
        faults += [f"{changed} selects {name}" for name in others if ROOT / name in files]
    assert not faults, "\n".join(faults)


def loaded_and_read_by(test_file):
    """Run a test file in a process of its own; return the programs that it loads and the other files that it reads."""
    program = (
        "import json, pytest, sys\n"
        "opened = set()\n"
        "sys.addaudithook(lambda event, values: event == 'open' and opened.add(str(values[0])))\n"
        f"pytest.main(['-q', '-n', '0', '-x', '-p', 'no:cacheprovider', {str(test_file)!r}])\n"
        "print(json.dumps([[*sys.modules], [*opened]]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    names, opened = json.loads(done.stdout.splitlines()[-1])
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    others = {ROOT / name for name in tracked.splitlines() if not name.endswith(".py")}
    return {MODULES[name] for name in names if name in MODULES}, others & {ROOT / path for path in opened}


@pytest.mark.slow
@pytest.mark.parametrize("name", [PACKING, PAGES, "tests/test_commands.py", "tests/padding_free/test_losses.py"])
def test_what_a_test_file_loads_or_reads_selects_it(name, tmp_path):
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    by_every_test, _ = loaded_and_read_by(tmp_path / "test_nothing.py")
    loaded, read = loaded_and_read_by(ROOT / name)
    assert loaded - by_every_test - {ROOT / "tests" / "conftest.py"} <= closure(ROOT / name)
    assert [path for path in read if ROOT / name not in selected([path])] == []
