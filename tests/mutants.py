"""Measure whether the tests notice mistakes: make one small change to the product at a time, and run its tests.

    make mutants                                                        # 12 changes in each area
    python tests/mutants.py --areas store solver --count 30 --seed 1    # other areas, numbers and draws
    python tests/mutants.py --like ../before/runs/mutants.jsonl         # the changes of another commit, here

An area is a package and its own tests. They run once under coverage, so that a change runs only the tests that execute
its line, the fastest first, in a process forked from one that has already imported torch. A change that the area's own
tests miss then runs the test files that import its module most often.

The program works on a copy of the tree and never touches the tree itself. Results go to runs/mutants.jsonl: a stopped
run continues, and an area is tried anew once its code or its tests change. The exit status is 1 if a change survives
that EQUIVALENT does not explain.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# Area -> its code, and its own tests.
AREAS = {
    **{
        name: (f"pack_data/{name}", f"tests/pack_data/{name}")
        for name in "batching building formats packing reading solver store stream text".split()
    },
    **{
        name: (f"ipu_packed_bert/{name}", f"tests/ipu_packed_bert/{name}")
        for name in "data model processes run_files settings tasks training".split()
    },
    "host": ("ipu_packed_bert/engine/host", "tests/ipu_packed_bert/engine"),
    "padding_free": ("padding_free", "tests/padding_free"),
    **{name: (f"ipu_profiling/{name}", f"tests/ipu_profiling/{name}") for name in ("cycles", "planning", "report")},
}

# File, beginning of the changed line -> why no test can notice the change.
EQUIVALENT = {
    ("pack_data/building/assignment.py", "_BLOCK ="): "lengths per block; the result does not depend on it",
    (
        "pack_data/solver/column_generation.py",
        "share = stop //",
    ): "of two equal factors each half has the same best sum; the whole takes twice the time",
    (
        "pack_data/solver/column_generation.py",
        "at_optimum = value - self.bound <",
    ): "a difference of two floats that equals the tolerance",
    ("pack_data/solver/programmes.py", "if self._programmes_left < 0 or"): "a clock that shows the deadline itself",
    ("pack_data/formats/parquet.py", "if skipped <"): "a batch of which every row is skipped has no rows to yield",
    ("pack_data/reading/fields.py", "most_common = Counter("): "only the most frequent name is used",
    ("pack_data/reading/fields.py", "return self.list_of(key, Fields.text"): "texts of 1 GiB: no test reads so many",
    ("pack_data/reading/files.py", "if error.errno not in _HELD"): "no clock shows exactly the end of the patience",
    ("pack_data/stream/pack_stream.py", "if buffer.tokens + length >"): "`_close` compares again",
    (
        "pack_data/store/sequences.py",
        "terms *= columns[name]",
    ): "the digest holds the lengths, so that zeros count without the 1 too",
    ("pack_data/store/sequences.py", "total += (sequences.scalars[name]"): "the digest holds the lengths",
    ("pack_data/store/sequences.py", "_BLOCK ="): "values per block; the result does not depend on it",
    ("pack_data/text/examples.py", "rows = np.searchsorted(bounds"): "other blocks; the masks do not depend on them",
    ("pack_data/text/vocabulary.py", "for start in range(0, len(sentences),"): "sentences per call of the tokenizer",
    ("pack_data/text/vocabulary.py", "TRAINING_CHARACTERS ="): "32 million characters: no test trains on so many",
    ("ipu_packed_bert/processes/beats.py", 'text = one_line(error["text"],'): "characters of a message",
    ("pack_data/formats/parquet.py", "reason = one_line(error,"): "characters of a message",
    ("ipu_packed_bert/settings/launch_lines.py", "IPUS_OF_A_PROGRAM = 65"): "numbers of IPUs are powers of two",
    (
        "pack_data/building/tasks.py",
        "if int(taken.max(initial=1",
    ): "of no sequences at all: a row has at least one slot",
    (
        "pack_data/building/inputs.py",
        'sizes = note.integers("bytes", sum(counts), least=0, most=1 << 63)',
    ): "files of 4 EiB",
    ("pack_data/packing/packing.py", 'accounting.text("algorithm", most='): "characters of a name",
    ("ipu_packed_bert/model/optimizer.py", "fused=False,"): "the same update in more kernels",
    ("pack_data/packing/dual_feasible.py", "every_k = np.arange(1,"): "k = 1 is left out again below",
    ("pack_data/packing/dual_feasible.py", "short = lengths[2 * lengths <"): "half of a row is a candidate anyway",
}

# The tests that one change may cost: seconds, by their durations without changes, and a number for the command line.
_SECONDS_PER_CHANGE = 60.0
_TESTS_PER_CHANGE = 200
# Test files outside the area that a surviving change runs.
_OTHER_FILES = 3

_PAIRS = {
    (ast.Add, ast.Sub): "+ -",
    (ast.Mult, ast.Div): "* /",
    (ast.LShift, ast.RShift): "<< >>",
    (ast.BitAnd, ast.BitOr): "& |",
    (ast.Lt, ast.LtE): "< <=",
    (ast.Gt, ast.GtE): "> >=",
    (ast.Eq, ast.NotEq): "== !=",
    (ast.And, ast.Or): "and or",
}
_OPERATORS = {
    **{kinds[at]: (signs.split()[at], signs.split()[1 - at]) for kinds, signs in _PAIRS.items() for at in (0, 1)},
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
# Calls whose arguments are wording.
_WORDING = ("print", "add_argument", "note", "warn")


class Mutant(NamedTuple):
    """One change: `after` replaces the bytes from `start` to `end` of a file."""

    path: str
    line: int  # from 1
    start: int
    end: int
    after: bytes

    def applied(self, source):
        return source[: self.start] + self.after + source[self.end :]

    def lines(self, source):
        """Return the line without the change and with it."""
        before = source.split(b"\n")[self.line - 1].decode().strip()
        after = self.applied(source).split(b"\n")[self.line - 1].decode().strip()
        return before, after


class _Source:
    """The bytes of a file, addressed by the nodes of its syntax tree."""

    def __init__(self, path, source):
        self.path = path
        self.source = source
        self._line_starts = [0]
        for line in source.split(b"\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)

    def start(self, node):
        return self._line_starts[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node):
        return self.source[self.start(node) : self.end(node)].decode()

    def replaced(self, node, text):
        return Mutant(self.path, node.lineno, self.start(node), self.end(node), text.encode())

    def operator(self, kind, left, right):
        """Yield the change of the operator between two nodes."""
        if kind not in _OPERATORS:
            return
        sign, other = _OPERATORS[kind]
        low = self.end(left)
        gap = self.source[low : self.start(right)].decode()
        # A comment between the nodes may hold the sign too.
        if "#" in gap or gap.count(sign) != 1:
            return
        start = low + len(gap[: gap.find(sign)].encode())
        line = self.source[:start].count(b"\n") + 1
        yield Mutant(self.path, line, start, start + len(sign), other.encode())


def mutants_of(path, source):
    """Return every change that this program can make to a file, in the order of the text."""
    file = _Source(path, source)
    mutants = {mutant for node in _nodes(ast.parse(source)) for mutant in _changes(file, node)}
    return sorted(mutants, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _changes(file, node):
    if isinstance(node, ast.BinOp):
        yield from file.operator(type(node.op), node.left, node.right)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:]):
            yield from file.operator(type(node.op), left, right)
    elif isinstance(node, ast.Compare):
        for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators):
            yield from file.operator(type(op), left, right)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield from file.operator(type(node.op), node.target, node.value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield file.replaced(node, file.text(node.operand))
    elif isinstance(node, ast.Constant):
        yield from _other_constants(file, node)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.Constant)):
            yield file.replaced(node.test, f"(not ({file.text(node.test)}))")
    elif isinstance(node, ast.Call) and len(node.args) >= 2:
        yield from _swapped_arguments(file, node)
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield file.replaced(node, "pass")


def _other_constants(file, node):
    value = node.value
    if isinstance(value, bool):
        yield file.replaced(node, str(not value))
    elif isinstance(value, int):
        yield file.replaced(node, str(value + 1))
        if value > 0:
            yield file.replaced(node, str(value - 1))
    elif isinstance(value, float):
        yield file.replaced(node, repr(2 * value if value else 1.0))


def _swapped_arguments(file, node):
    first, second = node.args[:2]
    if getattr(node.func, "id", "") in ("max", "min"):
        return  # their arguments may stand in any order
    if isinstance(first, ast.Starred) or isinstance(second, ast.Starred) or first.lineno != second.end_lineno:
        return
    start = file.start(first)
    end = file.end(second)
    between = file.source[file.end(first) : file.start(second)].decode()
    swapped = file.text(second) + between + file.text(first)
    if swapped != file.source[start:end].decode():
        yield Mutant(file.path, first.lineno, start, end, swapped.encode())


def _nodes(tree):
    """Yield every node that computes something; wording, annotations and what runs as a script are left out."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.Raise):
            continue
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            waiting += [child for child in children if isinstance(child, ast.AST) and not _is_wording(child)]


def _is_wording(node):
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", getattr(node.func, "attr", "")) in _WORDING
    if isinstance(node, ast.Expr):
        return _is_wording(node.value)
    if isinstance(node, ast.FunctionDef):
        return node.name == "main"
    if isinstance(node, ast.If):
        return "__name__" in ast.dump(node.test)
    if isinstance(node, ast.BinOp):
        # Seconds, which no test asserts.
        return "perf_counter" in ast.dump(node)
    return isinstance(node, ast.JoinedStr)


class _Durations:
    """A pytest plugin that writes {test: seconds} of the tests that passed to a file."""

    def __init__(self, path):
        self._path = path
        self._seconds = collections.Counter()
        self._not_passed = set()

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self):
        passed = {test: seconds for test, seconds in self._seconds.items() if test not in self._not_passed}
        self._path.write_text(json.dumps(passed), encoding="utf-8")


def _import_what_takes_seconds():
    for name in ("numpy", "scipy.optimize", "torch", "tokenizers", "h5py", "pyarrow.parquet", "hypothesis", "yaml"):
        with contextlib.suppress(ImportError):
            __import__(name)


def run_pytest(tree, arguments, limit, durations=None):
    """Run pytest in a forked process and return its exit status, or None if it took longer than `limit` seconds."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setsid()
            os.chdir(tree)
            output = os.open(str(tree / "pytest_output"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            import pytest

            plugins = [_Durations(durations)] if durations else []
            status = int(
                pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow", *arguments], plugins=plugins)
            )
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while True:
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done or time.monotonic() > end:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if done:
        return os.WEXITSTATUS(raw) if os.WIFEXITED(raw) else 70
    os.waitpid(pid, 0)
    return None


class OwnTests:
    """The tests of an area: their seconds, and the lines that each of them runs."""

    def __init__(self, tree, code, tests):
        import coverage

        durations = tree / "durations.json"
        data_file = tree / ".coverage"
        arguments = [tests, f"--cov={code}", "--cov-context=test", "--cov-report="]
        status = run_pytest(tree, arguments, limit=3600, durations=durations)
        if status not in (0, 1):
            raise SystemExit(f"error: {tests} does not run:\n{(tree / 'pytest_output').read_text()[-2000:]}")
        self._seconds = json.loads(durations.read_text(encoding="utf-8"))
        self._tree = tree
        self._data = coverage.CoverageData(str(data_file))
        self._data.read()
        self._by_line = {}

    def running(self, path, line):
        """Return the tests that run a line, the fastest first; for a line run by an import, those of the whole file."""
        if path not in self._by_line:
            self._by_line[path] = self._data.contexts_by_lineno(str(self._tree / path))
        by_line = self._by_line[path]
        # A statement over several lines is recorded at its first.
        for statement in range(line, max(0, line - 12), -1):
            tests = self._passing(by_line.get(statement, ()))
            if tests or statement in by_line:
                break
        return tests or self._passing(context for contexts in by_line.values() for context in contexts)

    def _passing(self, contexts):
        tests = {context.rpartition("|")[0] for context in contexts} & set(self._seconds)
        return sorted(tests, key=lambda test: (self._seconds[test], test))

    def notice(self, mutant):
        """Run the tests that execute the changed line and return whether one of them fails."""
        chosen = []
        total = 0.0
        for test in self.running(mutant.path, mutant.line)[:_TESTS_PER_CHANGE]:
            total += self._seconds[test]
            if chosen and total > _SECONDS_PER_CHANGE:
                break
            chosen.append(test)
        return bool(chosen) and run_pytest(self._tree, ["-x", *chosen], limit=60 + 5 * total) != 0


def other_tests(tree, path, own):
    """Return the test files outside the area that name the module of a file most often."""
    module = path[: -len(".py")].replace("/__init__", "").replace("/", ".")
    files = []
    for test in sorted((tree / "tests").rglob("test_*.py")):
        name = test.relative_to(tree).as_posix()
        text = test.read_text(encoding="utf-8")
        if not name.startswith(own + "/") and module in _imports(ast.parse(text)):
            files.append((-text.count(module.rsplit(".", 1)[1]), name))
    return [name for _, name in sorted(files)[:_OTHER_FILES]]


def _imports(tree):
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def copy_of_tree(target):
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=str(ROOT),
        check=True,
        stdout=subprocess.PIPE,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(ROOT / name), str(target / name))


def read_results(path):
    """Return the records of a results file without a line that a kill cut short."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def drawn(tree, area, count, seed):
    """Return `count` changes of an area, drawn by the seed."""
    every = []
    for file in sorted((tree / AREAS[area][0]).rglob("*.py")):
        every += mutants_of(file.relative_to(tree).as_posix(), file.read_bytes())
    return random.Random(f"{seed} {area}").sample(every, min(count, len(every)))


def found_again(tree, area, records):
    """Return the changes of another commit's records whose line still exists here, in the area or elsewhere."""
    by_lines = {}
    files = sorted((tree / AREAS[area][0]).rglob("*.py"))
    others = [file for top in ("pack_data", "ipu_packed_bert") for file in sorted((tree / top).rglob("*.py"))]
    for file in [*files, *others]:
        source = file.read_bytes()
        for mutant in mutants_of(file.relative_to(tree).as_posix(), source):
            by_lines.setdefault(mutant.lines(source), mutant)
    lines = [(record["before"], record["after"]) for record in records if record["area"] == area]
    return [by_lines[pair] for pair in lines if pair in by_lines]


def why_equivalent(path, after):
    reasons = [why for (file, line), why in EQUIVALENT.items() if file == path and after.startswith(line)]
    return reasons[0] if reasons else ""


def digest(tree, area):
    content = hashlib.sha256()
    for top in AREAS[area]:
        for file in sorted((tree / top).rglob("*.py")):
            content.update(file.read_bytes())
    return content.hexdigest()[:16]


def try_area(tree, area, mutants, results):
    """Try the changes of an area, append a record of each to the results, and return the records."""
    code, tests = AREAS[area]
    version = digest(tree, area)
    known = {record["key"]: record for record in read_results(results)}
    own_tests = None
    records = []
    for number, mutant in enumerate(mutants, start=1):
        place = tree / mutant.path
        source = place.read_bytes()
        before, after = mutant.lines(source)
        key = f"{mutant.path}:{mutant.start}:{mutant.end}:{mutant.after.decode()}:{version}"
        if key not in known:
            verdict = why_equivalent(mutant.path, after) and "equivalent"
            if not verdict:
                own_tests = own_tests or OwnTests(tree, code, tests)
                try:
                    place.write_bytes(mutant.applied(source))
                    verdict = _verdict(tree, own_tests, mutant, tests)
                finally:
                    place.write_bytes(source)
            record = {"key": key, "area": area, "file": mutant.path, "line": mutant.line}
            known[key] = {**record, "before": before, "after": after, "verdict": verdict}
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(known[key]) + "\n")
        records.append(known[key])
        print(
            f"{area} {number:3}/{len(mutants)}  {known[key]['verdict']:10} {mutant.path}:{mutant.line}  {after}",
            flush=True,
        )
    return records


def _verdict(tree, own, mutant, tests):
    if own.notice(mutant):
        return "own tests"
    others = other_tests(tree, mutant.path, tests)
    if others and run_pytest(tree, ["-x", *others], limit=600) not in (0, 5):
        return "others"
    return "SURVIVED"


def print_rates(records):
    """Print, by area and in all, the share of the non-equivalent changes that the tests notice."""
    print(f"\n{'area':14} {'changes':>8} {'equivalent':>10} {'own tests':>10} {'with others':>11}")
    areas = sorted({record["area"] for record in records})
    for area in [*areas, "all"]:
        verdicts = collections.Counter(record["verdict"] for record in records if area in (record["area"], "all"))
        total = sum(verdicts.values()) - verdicts["equivalent"]
        noticed_by_own = verdicts["own tests"] / max(total, 1)
        both = (verdicts["own tests"] + verdicts["others"]) / max(total, 1)
        print(f"{area:14} {sum(verdicts.values()):8} {verdicts['equivalent']:10} {noticed_by_own:10.0%} {both:11.0%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areas", nargs="+", default=list(AREAS), choices=list(AREAS), metavar="AREA")
    parser.add_argument("--count", type=int, default=12, help="changes in each area, default 12")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--like", type=Path, help="results of another commit: try its changes where their lines exist")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    tree = Path(tempfile.mkdtemp(prefix="mutants-"))
    records = []
    try:
        copy_of_tree(tree)
        sys.path[0] = str(tree)
        os.environ.update(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        _import_what_takes_seconds()
        earlier = read_results(args.like) if args.like else []
        for area in args.areas:
            mutants = found_again(tree, area, earlier) if args.like else drawn(tree, area, args.count, args.seed)
            records += try_area(tree, area, mutants, args.results)
    except KeyboardInterrupt:
        print("stopped; the same command continues")
        return 130
    finally:
        shutil.rmtree(str(tree), ignore_errors=True)
    print_rates(records)
    survivors = [record for record in records if record["verdict"] == "SURVIVED"]
    for record in survivors:
        print(f"\n{record['file']}:{record['line']}\n  - {record['before']}\n  + {record['after']}")
    return 1 if survivors else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
