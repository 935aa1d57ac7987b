"""Run the tests that a change can affect: those whose imports lead to a changed file.

    make test-changed                         # against the merge base with origin/main, uncommitted files included
    make test-changed BASE=HEAD~3
    python -m tests.touched --history 200     # the share of test functions that each of the last commits selects

A test file imports what its text imports, late imports included, and every module that a text in it names, such as
"ipu_packed_bert.__main__" of a process that it starts. The `conftest.py` above a test file belong to it. A file that is
no program selects the tests that lead to a text with its name, a directory of it, or a pattern such as "*.md". A change
of `tests/conftest.py`, or of what is installed, selects all tests.
"""

import argparse
import ast
import fnmatch
import re
import statistics
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.imports import ROOT, SOURCES, imported_modules, module_name, tree_of

TESTS = ROOT / "tests"
TEST_FILES = sorted(TESTS.rglob("test_*.py"))
MODULES = {module_name(path): path for path in [*SOURCES, *TESTS.rglob("*.py")]}
# Programs that tests load by their file names.
PROGRAMS = {path.name: path for path in (ROOT / "docs").rglob("*.py")}
_DOTTED = re.compile(r"\w+(?:\.\w+)+")
_WORD = re.compile(r"[\w.*?-]+")
_SELECTS_ALL = {"tests/conftest.py", "setup.py", "setup.cfg", "pyproject.toml", "requirements.txt"}
# The product reads files of these directories; what its messages say of other files is not read.
_READ_BY_PRODUCT = {"configs", "pack_data", "ipu_packed_bert", "ipu_profiling", "padding_free"}


@lru_cache(None)
def _public_names():
    """Return a dictionary: public name of a package, such as "pack_data.pack" -> the module that defines it."""
    places = {}
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            continue
        blocks = [node for node in tree_of(path).body if isinstance(node, ast.If)]
        for statement in sum((block.body for block in blocks), []):
            if isinstance(statement, ast.ImportFrom):
                public_name = statement.names[0].asname
                places[f"{name}.{public_name}"] = statement.module
    return places


def _texts(tree):
    """Yield the texts of a program that are no docstrings."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def _named_in(tree, *, follows_texts):
    """Yield the dotted names that a program uses as attributes, or that stand in its texts."""
    for text in _texts(tree):
        yield from _DOTTED.findall(text) if follows_texts else [text]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            # f"pack_data.{name}" may be any module of the package.
            yield ast.unparse(node.args[0]).strip("f'").partition("{")[0] + "*"


@lru_cache(None)
def _imported_files(path):
    """Return the files that a file imports at run time or names in a text, with the `__init__.py` of their packages."""
    reached = set()
    names = set(imported_modules(path, without=("TYPE_CHECKING",)))
    # A package loads its public names when they are first used.
    if path.name != "__init__.py":
        # A message of the product may advise a command; a test may start it, a fixture does not.
        follows_texts = TESTS in path.parents and path.name != "conftest.py"
        named = set(_named_in(tree_of(path), follows_texts=follows_texts))
        places = _public_names()
        names |= {places[name] for name in places.keys() & (names | named)}
        names |= named & MODULES.keys()
        loose = [name for name, target in MODULES.items() if not target.name.startswith("__")]
        names |= {name for name in loose if f"{name.rpartition('.')[0]}.*" in named}
        reached = {PROGRAMS[name] for name in PROGRAMS.keys() & named}
    for name in names:
        while name:
            reached.add(MODULES.get(name))
            name = name.rpartition(".")[0]
    return reached - {None}


@lru_cache(None)
def closure(test_file):
    """Return all files that a test file leads to, its own included."""
    folders = [folder for folder in test_file.parents if TESTS in folder.parents]
    fixtures = [folder / "conftest.py" for folder in folders]
    waiting = [test_file, *filter(Path.is_file, fixtures)]
    reached = set()
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting.extend(_imported_files(path))
    return reached


@lru_cache(None)
def _words(path):
    """Return the words of a program's texts: parts of paths, and patterns of file names."""
    words = set()
    for text in _texts(tree_of(path)):
        words.update(_WORD.findall(text))
    return words


@lru_cache(None)
def _readers(path):
    """Return the programs with a text that names this file, which is no program, or a directory of it."""
    *folders, name = path.relative_to(ROOT).parts
    names = set(folders) - {"tests"}
    if "." in name or not folders:
        names.add(name)
    readers = set()
    for program in [*MODULES.values(), *PROGRAMS.values()]:
        is_product = program.relative_to(ROOT).parts[0] in _READ_BY_PRODUCT
        if is_product and not _READ_BY_PRODUCT & set(folders):
            continue
        words = _words(program)
        patterns = [word for word in words if "*" in word and word.strip("*.")]
        if words & names or any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            readers.add(program)
    return readers


def selected(changed):
    """Return the test files that a change of these files can affect, in the order of their names."""
    if any(path.relative_to(ROOT).as_posix() in _SELECTS_ALL for path in changed):
        return TEST_FILES
    programs = {path for path in changed if path.suffix == ".py"}
    for path in set(changed) - programs:
        programs |= _readers(path)
    return [path for path in TEST_FILES if closure(path) & programs]


def _git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line]


def changed_files(base):
    """Return the files that differ from the merge base with a commit, uncommitted and new ones included."""
    merge_base = _git("merge-base", base, "HEAD")[0]
    names = _git("diff", "--name-only", merge_base)
    names += _git("ls-files", "--others", "--exclude-standard")
    return [ROOT / name for name in names]


@lru_cache(None)
def _functions(path):
    return len(re.findall(r"(?m)^ *def test", path.read_text(encoding="utf-8")))


def share(files):
    """Return the share of all test functions that stand in these files, from 0 to 1."""
    chosen = sum(map(_functions, files))
    return chosen / sum(map(_functions, TEST_FILES))


def _print_history(commits):
    shares = []
    for commit in _git("log", "--no-merges", f"-{commits}", "--format=%h"):
        paths = [ROOT / name for name in _git("show", "--name-only", "--format=", commit)]
        existing = list(filter(Path.is_file, paths))
        shares.append(share(selected(existing)))
        print(f"{commit} {len(existing):4} files, {shares[-1]:6.1%} of the test functions", flush=True)
    print(f"median of {len(shares)} commits: {statistics.median(shares):.1%}")


def main():
    """Select the tests and run them; return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="origin/main", help="compare with the merge base of this commit")
    parser.add_argument("--history", type=int, metavar="N", help="print what each of the last N commits selects")
    options, arguments = parser.parse_known_args()
    if options.history:
        _print_history(options.history)
        return 0
    files = selected(changed_files(options.base))
    chosen = f"{share(files):.0%} of the test functions, in {len(files)} of {len(TEST_FILES)} files"
    print(f"running {chosen}", flush=True)
    status = pytest.main([*arguments, *map(str, files)]) if files else 0
    print(f"ran {chosen}; make test runs all")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
