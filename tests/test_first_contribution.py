"""A packer, a file format and a task, added to a copy of the checkout as their pages say, pass the checks there.

A block that begins with the comment `# FILE` is that file; a line `FILE, in NAME: ENTRY` adds an entry to the
dictionary or tuple of that name.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.complexity import ROOT, tracked_files
from tests.test_docs_blocks import run_blocks

pytest.importorskip("mypy", reason="make check needs ruff and mypy")

PAGES = ("packer", "file_format", "task")
ENTRY = re.compile(r"^(\S+\.\w+), in (\w+): +(.+)$", re.M)


def add_entry(path, name, entry):
    """Insert an entry right below the line that opens a dictionary, a tuple or a call."""
    text = path.read_text(encoding="utf-8")
    opening = re.search(rf"^( *){name}\b.*[({{]\n", text, re.M)
    assert opening, f"{path}: no {name}"
    line = f"{opening[1]}    {entry}\n"
    path.write_text(text[: opening.end()] + line + text[opening.end() :], encoding="utf-8")


def follow(page, copy):
    """Do in the copy what the blocks of a page tell to write; return the files."""
    text = (ROOT / page).read_text(encoding="utf-8")
    changed = []
    for block in run_blocks.blocks_of(text, page):
        first, _, rest = block.code.partition("\n")
        named = re.fullmatch(r"# (\S+/\S+)", first)
        if named:
            (copy / named[1]).write_text(rest, encoding="utf-8")
            changed.append(named[1])
    for name, container, entry in ENTRY.findall(text):
        add_entry(copy / name, container, entry)
        changed.append(name)
    assert len(changed) >= 3, page
    return changed


def move_task(copy):
    """Copy the example into the package and move its settings, as add_task.md says; return the files."""
    task = copy / "ipu_packed_bert/tasks/mean.py"
    registry = copy / "ipu_packed_bert/settings/finetuning.py"
    text = (copy / "examples/mean_task.py").read_text(encoding="utf-8")
    (settings,) = re.findall(r"^@dataclass.*?\n\n\n", text, re.M | re.S)
    task.write_text(text.replace(settings, "").replace("import TaskConfig", "import MeanConfig"), encoding="utf-8")
    above = registry.read_text(encoding="utf-8").replace("class _Task(", "\0class _Task(")
    registry.write_text(above.replace("\0", settings), encoding="utf-8")
    run(copy, "-m", "ruff", "check", "--no-cache", "--fix", "--quiet", ".")
    return ["ipu_packed_bert/tasks/mean.py"]


def run(copy, *words):
    """Run `python WORDS` in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "COVERAGE_PROCESS_START": ""}
    done = subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def contributed(tmp_path_factory):
    """A copy with all three contributions, and the Python files that they change."""
    copy = tmp_path_factory.mktemp("contribution") / "a copy"
    for path in tracked_files():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    if (ROOT / ".mypy_cache").is_dir():  # mypy tells by time and size what changed
        shutil.copytree(ROOT / ".mypy_cache", copy / ".mypy_cache")
    changed = [name for page in PAGES for name in follow(f"docs/how_to/add_{page}.md", copy)]
    changed += move_task(copy)
    run(copy, "docs/reference.py")
    for words in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *words], cwd=copy, check=True)
    return copy, sorted({name for name in changed if name.endswith(".py")})


def test_the_page_of_contributing_names_these():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(f"docs/how_to/add_{page}.md" in text for page in PAGES)


@pytest.mark.slow
def test_they_keep_the_laws_and_the_import_rules(contributed):
    """In one process, which starts and collects once."""
    files = [
        "tests/pack_data/test_packers_laws.py",
        "tests/pack_data/formats/test_lines.py",
        "tests/ipu_packed_bert/tasks/test_packed_is_unpacked.py",
        "tests/test_boundaries.py",
        "tests/test_docs_reference.py",
    ]
    wanted = "pairs or certified or lines or mean or import or reference"
    printed = run(
        contributed[0], "-m", "pytest", "-n", "0", "-q", "-rA", "-p", "no:cacheprovider", *files, "-k", wanted
    )
    assert "SKIPPED" not in printed
    for file, least in zip(files, (10, 2, 8, 100, 2)):
        assert printed.count(f"PASSED {file}") >= least, file


@pytest.mark.slow
def test_make_check_passes_but_for_types(contributed):
    copy, _ = contributed
    run(copy, "-m", "ruff", "check", "--no-cache", ".")
    run(copy, "-m", "ruff", "format", "--no-cache", "--check", ".")
    run(copy, "-m", "tests.complexity")


@pytest.mark.slow
def test_their_types_are_right(contributed):
    copy, changed = contributed
    run(copy, "-m", "mypy", *(name for name in changed if not name.startswith("tests")))
