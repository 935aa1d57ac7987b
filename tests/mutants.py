"""Would the tests notice a mistake?  Make seeded random changes of one operator, constant or condition, one at a time,
and see.

    make mutants                                        # 60 changes in the core modules
    python tests/mutants.py --count 300 --seed 1        # others, and more of them
    python tests/mutants.py --modules pack_data/store/packs.py --count 20

Each change is made in a copy of the tree in a temporary folder, so that the tree itself is never touched.  The tests
that belong to a module are those of its name, and then three that import it.  Results are kept in runs/mutants.jsonl:
stopped and run again, it goes on; a module or test that was edited since is tried anew.  Exit status 1 where a change
went unnoticed that is not listed below as equivalent.
"""

from __future__ import annotations

import argparse
import ast
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
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

ROOT = Path(__file__).resolve().parents[1]

CORE = (
    "pack_data/packing/histogram.py",
    "pack_data/packing/packing.py",
    "pack_data/packing/certificate.py",
    "pack_data/store/packs.py",
    "pack_data/store/sequences.py",
    "pack_data/store/data_set.py",
    "pack_data/building/verify.py",
    "pack_data/pack_lengths.py",
    "pack_data/greedy.py",
    "pack_data/sort.py",
    "pack_data/solver/fit_decreasing.py",
    "pack_data/building/assignment.py",
    "pack_data/solver/rounding.py",
    "pack_data/text/examples.py",
    "pack_data/text/vocabulary.py",
    "ipu_packed_bert/run_files/checkpoints.py",
    "ipu_packed_bert/settings/pretraining.py",
    "ipu_packed_bert/run_files/vocabulary_identity.py",
    "ipu_packed_bert/data/global_batches.py",
    "ipu_packed_bert/model/optimizer.py",
    "ipu_packed_bert/settings/placement.py",
    "ipu_packed_bert/training/loop.py",
    "ipu_packed_bert/model/loss.py",
    "ipu_packed_bert/model/packed.py",
    "ipu_packed_bert/model/varlen.py",
    "ipu_packed_bert/padding_free/losses.py",
    "ipu_packed_bert/padding_free/update.py",
    "ipu_packed_bert/tasks/questions.py",
    "ipu_packed_bert/tasks/task.py",
)

# File, beginning of the changed line -> why no test can notice it.
EQUIVALENT: Dict[Tuple[str, str], str] = {
    ("pack_data/packing/packing.py", "def _bar("): "the width of a drawn bar",
    ("pack_data/packing/packing.py", 'return f"{seconds * 1e3:.1f} ms"'): "how one second is printed",
    ("pack_data/building/assignment.py", "_BLOCK ="): "lengths handled at a time; the result does not depend on it",
    (
        "pack_data/building/assignment.py",
        "buckets = rng.integers(",
    ): "how many buckets a shuffle takes: another random order, as good as this one",
    (
        "pack_data/store/sequences.py",
        "terms *= columns[name]",
    ): "lengths are in the digest already, so that zeros count without the 1 too",
    ("pack_data/store/sequences.py", "total += (sequences.scalars[name]"): "as above",
    ("pack_data/store/sequences.py", "_BLOCK ="): "values handled at a time; the result does not depend on it",
    (
        "pack_data/text/vocabulary.py",
        "for start in range(0, len(sentences),",
    ): "sentences encoded at a time; the result does not depend on it",
    ("pack_data/text/vocabulary.py", "TRAINING_CHARACTERS ="): "32 million characters: no test trains on so many",
    ("pack_data/greedy.py", "_CHUNK ="): "sequences looked at together; the result does not depend on it",
    (
        "pack_data/solver/fit_decreasing.py",
        "one_free, one_seats, count, strategy = S, D,",
    ): "too many new packs stay empty, and are left out of the packing",
    (
        "pack_data/solver/rounding.py",
        "packs, left = follow(",
    ): "how much is fixed before the programme is solved again; every result is held against its bound",
    (
        "pack_data/solver/rounding.py",
        "middle =",
    ): "which sequences of about one length are tried first; every result is held against its bound",
}

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


class Mutant(NamedTuple):
    """One change: the bytes from `start` to `end` of a file are replaced."""

    path: str
    line: int  # from 1
    start: int
    end: int
    after: bytes

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after + source[self.end :]

    def changed_line(self, source: bytes) -> str:
        return self.applied(source).split(b"\n")[self.line - 1].decode().strip()


def mutants_of(path: str, source: bytes) -> List[Mutant]:
    """Every change this program can make in a file, in the order of the text."""
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def place(node: Any, end: bool = False) -> int:
        return starts[(node.end_lineno if end else node.lineno) - 1] + (node.end_col_offset if end else node.col_offset)

    def operator(kind: type, after: Any, before: Any) -> Iterator[Mutant]:
        """The operator that stands between two nodes."""
        if kind in _OPERATORS:
            sign, other = _OPERATORS[kind]
            low, high = place(after, end=True), place(before)
            gap = source[low:high].decode()
            at = gap.find(sign)
            # A comment in between could hold the sign too.
            if at >= 0 and "#" not in gap and gap.count(sign) == 1:
                start = low + len(gap[:at].encode())
                yield Mutant(path, source[:start].count(b"\n") + 1, start, start + len(sign), other.encode())

    def replaced(node: Any, text: str) -> Mutant:
        return Mutant(path, node.lineno, place(node), place(node, end=True), text.encode())

    found: List[Mutant] = []
    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            found += operator(type(node.op), node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:]):
                found += operator(type(node.op), left, right)
        elif isinstance(node, ast.Compare):
            for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators):
                found += operator(type(op), left, right)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
            found += operator(type(node.op), node.target, node.value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found.append(replaced(node, source[place(node.operand) : place(node.operand, end=True)].decode()))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            found.append(replaced(node, str(not node.value)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            found += [replaced(node, str(node.value + 1))] + (
                [replaced(node, str(node.value - 1))] if node.value > 0 else []
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            found.append(replaced(node, repr(2 * node.value if node.value else 1.0)))
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(
            node.test, (ast.Compare, ast.BoolOp, ast.Constant)
        ):
            text = source[place(node.test) : place(node.test, end=True)].decode()
            found.append(replaced(node.test, f"(not ({text}))"))
    return sorted(set(found), key=lambda mutant: (mutant.start, mutant.after))


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that says what is computed; what is printed, raised, annotated or run as a script is left out."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, (ast.JoinedStr, ast.Raise)) or not isinstance(child, ast.AST):
                    continue
                if isinstance(child, ast.Call) and getattr(child.func, "id", getattr(child.func, "attr", "")) in (
                    "print",
                    "add_argument",
                ):
                    continue
                if (
                    isinstance(child, ast.FunctionDef)
                    and child.name == "main"
                    or isinstance(child, ast.If)
                    and "__name__" in ast.dump(child.test)
                ):
                    continue
                if isinstance(child, ast.BinOp) and "perf_counter" in ast.dump(child):  # seconds, which no test asserts
                    continue
                waiting.append(child)


def tests_of(path: str, root: Path) -> List[List[str]]:
    """Test files of a module: the one that mirrors it, then, apart, the three that name it most often of those that
    import it."""
    file = path[: -len("/__init__.py")] if path.endswith("/__init__.py") else path[: -len(".py")]
    module, stem = file.replace("/", "."), file.rsplit("/", 1)[1]
    mirrored = f"tests/{file.rsplit('/', 1)[0]}/test_{stem}.py"
    named, importing = [], []
    for test in sorted((root / "tests").rglob("test_*.py")):
        text, place = test.read_text(encoding="utf-8"), test.relative_to(root).as_posix()
        if place == mirrored:
            named.append(place)
        elif module in _imported(ast.parse(text)):
            importing.append((-text.count(stem), place))
    return [group for group in (named, [place for _, place in sorted(importing)[:3]]) if group]


def _imported(tree: ast.AST) -> Set[str]:
    found: Set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


class Trial(NamedTuple):
    passed: bool
    seconds: float
    output: str


def run_tests(root: Path, tests: Sequence[str], timeout: Optional[float]) -> Trial:
    """The tests, in the copy of the tree; one that takes too long has noticed the change."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly", *tests],
        cwd=str(root),
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = b"too slow"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Trial(process.returncode == 0, time.monotonic() - start, output.decode(errors="replace"))


def copy_of_tree(target: Path) -> None:
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


def digest(paths: Sequence[Path]) -> str:
    content = hashlib.sha256()
    for path in paths:
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


def read_results(path: Path) -> Dict[str, Dict[str, Any]]:
    """Results by key; a line that a kill cut short is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []:
        record = json.loads(line)
        found[record["key"]] = record
    return found


def try_all(chosen: Sequence[Mutant], copy: Path, results: Path) -> List[Dict[str, Any]]:
    known, tried, baseline = read_results(results), [], {}
    results.parent.mkdir(parents=True, exist_ok=True)
    for number, mutant in enumerate(chosen, start=1):
        place = copy / mutant.path
        source, groups = place.read_bytes(), tests_of(mutant.path, copy)
        files = digest([place, *(copy / name for group in groups for name in group)])
        key = f"{mutant.path}:{mutant.start}:{mutant.end}:{mutant.after.decode()}:{files}"
        if key not in known:
            noticed = None
            for group in groups:
                names = tuple(group)
                if names not in baseline:
                    baseline[names] = run_tests(copy, group, None)
                    if not baseline[names].passed:
                        raise SystemExit(
                            f"error: {' '.join(group)} fails without any change:\n{baseline[names].output[-2000:]}"
                        )
                try:
                    place.write_bytes(mutant.applied(source))
                    trial = run_tests(copy, group, 60 + 5 * baseline[names].seconds)
                finally:
                    place.write_bytes(source)
                if not trial.passed:
                    noticed = " ".join(group)
                    break
            known[key] = {
                "key": key,
                "file": mutant.path,
                "line": mutant.line,
                "before": source.split(b"\n")[mutant.line - 1].decode().strip(),
                "after": mutant.changed_line(source),
                "noticed_by": noticed,
                "tests": groups,
            }
            with open(results, "a", encoding="utf-8") as out:
                out.write(json.dumps(known[key]) + "\n")
        record = known[key]
        print(
            f"{number:4}/{len(chosen)}  {'noticed ' if record['noticed_by'] else 'SURVIVED'}  "
            f"{mutant.path}:{mutant.line}  {record['after']}",
            flush=True,
        )
        tried.append(record)
    return tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=60, help="changes in all, default 60, spread evenly over the modules"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="+", default=CORE, metavar="FILE", help="default: the core modules")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        copy_of_tree(folder)
        chosen: List[Mutant] = []
        for number, path in enumerate(args.modules):
            source = (folder / path).read_bytes()
            equivalent = tuple(line for file, line in EQUIVALENT if file == path)
            found = [
                mutant for mutant in mutants_of(path, source) if not mutant.changed_line(source).startswith(equivalent)
            ]
            share = (number + 1) * args.count // len(args.modules) - number * args.count // len(args.modules)
            chosen += random.Random(f"{args.seed} {path}").sample(found, min(share, len(found)))
        tried = try_all(chosen, folder, args.results)
    except KeyboardInterrupt:
        print("stopped; run again, it goes on")
        return 130
    finally:
        shutil.rmtree(str(folder), ignore_errors=True)
    survivors = [record for record in tried if not record["noticed_by"]]
    print(f"\n{len(tried)} changes, {len(survivors)} went unnoticed")
    for record in survivors:
        tests = " ".join(sum(record["tests"], [])) or "none"
        print(f"\n{record['file']}:{record['line']}\n  - {record['before']}\n  + {record['after']}\n  tests: {tests}")
    return 1 if survivors else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    sys.exit(main())
