"""Measure how large the project is and how much each line carries; `make check` runs `python -m tests.complexity`.

Size is counted in AST nodes (expressions and statements), so that a named intermediate value costs little and an empty
line nothing. Lines are printed, never limited. The reach of an entry point is the number of nodes in all modules that
its imports lead to: what a reader has to know. The limits stand in `tests/complexity_limits.json`; `--set` lowers them
to the weight, rounded up to its step, and one step to spare, so that an outside contribution fits. It never raises one:
edit the file for that, with a reason in the commit. The nodes per code line are limited too, in every file and on
average.
"""

import ast
import json
import re
import subprocess
import sys
from functools import lru_cache
from typing import NamedTuple

from tests.imports import ROOT, cycles, graph, levels, package_graph, reached_from

LIMITS = ROOT / "tests" / "complexity_limits.json"
# Weight -> the step in which its limit moves. What is not here is printed only.
STEPS = {
    "product nodes": 1000,
    "evidence nodes": 1000,
    "test nodes": 1000,
    "public functions": 25,
    "options": 5,
    "configurations": 5,
    "words": 500,
}
STEP_OF_PACKAGES = 1000
STEP_OF_REACH = 500
# Entry point -> its module.
ENTRIES = {
    "nnlshp": "pack_data.nnlshp",
    "pack": "pack_data.pack_lengths",
    "PackStore": "pack_data.store.data_set",
    "PackDataset": "pack_data.batching.pack_dataset",
    "model": "ipu_packed_bert.model.packed",
    "engine host": "ipu_packed_bert.engine.host.engine",
    "engine ipu": "ipu_packed_bert.engine.ipu.engine",
    "run": "ipu_packed_bert.training.run",
    "pretrain command": "ipu_packed_bert.commands.pretrain",
    "pack_into": "padding_free.trainers",
    "check_no_leak": "padding_free.leaks.probe",
    "report": "ipu_profiling.report.command",
    "cycles": "ipu_profiling.cycles.workload",
}
# These hold exactly.
ZERO = ("packages in import cycles", "files in import cycles", "class names used twice")

DENSEST_FILE = 7.0  # nodes per code line, in every file of the product and evidence with at least 40 code lines
DENSEST_AVERAGE = 5.5  # nodes per code line over the whole product, and over evidence
SHORT_FILE = 40  # code lines

TOP_LEVEL = ("pack_data", "padding_free", "ipu_packed_bert", "ipu_profiling")
PRODUCT = (*TOP_LEVEL, "profiling", "run_pretraining.py")
PAGES = (".html", ".jinja", ".css", ".js")
# A generated page says so at its head; a generated part of a page stands between these two comments.
_GENERATED = re.compile(r"<!-- (?:results|generated)\b.*?<!-- end of (?:results|generated)\b", re.DOTALL)


class Density(NamedTuple):
    """AST nodes and code lines of some source text."""

    nodes: int
    code_lines: int  # neither blank, nor a comment, nor part of a docstring

    @property
    def per_line(self):
        """AST nodes per code line."""
        return self.nodes / max(1, self.code_lines)


def density(source):
    """Count the AST nodes and the code lines of a source text."""
    tree = ast.parse(source)
    docstring_lines = set()
    nodes = 0
    for node in ast.walk(tree):
        nodes += isinstance(node, (ast.expr, ast.stmt))
        may_have_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if may_have_docstring and ast.get_docstring(node):
            docstring = node.body[0]
            docstring_lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    code_lines = 0
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        code_lines += bool(text) and not text.startswith("#") and number not in docstring_lines
    return Density(nodes, code_lines)


def total_density(paths):
    """Add up the densities of some files."""
    densities = [_density_of(path) for path in paths]
    return Density(sum(density.nodes for density in densities), sum(density.code_lines for density in densities))


@lru_cache(None)
def _density_of(path):
    return density(path.read_text(encoding="utf-8"))


def tracked_files(root=ROOT):
    """Return the files that git tracks."""
    names = subprocess.check_output(["git", "-C", str(root), "ls-files"], text=True).splitlines()
    return [root / name for name in names if (root / name).is_file()]


def python_files(top_level, root=ROOT):
    """Return the tracked Python files below these top-level directories."""
    return [
        path for path in tracked_files(root) if path.suffix == ".py" and path.relative_to(root).parts[0] in top_level
    ]


def weights(root=ROOT):
    """Return a dictionary: name of a weight -> its value, over the files that git tracks."""
    files = tracked_files(root)
    product = python_files(PRODUCT, root)
    evidence = python_files(("evidence",), root)
    tests = python_files(("tests",), root)
    pages = [path for path in files if path.relative_to(root).parts[0] in PRODUCT and path.suffix in PAGES]
    configurations = [path for path in files if path.parent == root / "configs" and path.suffix == ".yml"]
    return {
        "product nodes": total_density(product).nodes,
        "evidence nodes": total_density(evidence).nodes,
        "test nodes": total_density(tests).nodes,
        "public functions": sum(_public_functions(path) for path in product),
        "options": len(set().union(*map(_options, product))),
        "configurations": len(configurations),
        "words": sum(map(_words, _pages_of_documentation(files, root))),
        "product lines": _lines(product + pages),
        "evidence lines": _lines(evidence),
        "test lines": _lines(tests),
        "product files": len(product),
        "class names used twice": _class_names_used_twice(product),
    }


def package_nodes(root=ROOT):
    """Return a dictionary: "nodes of PACKAGE" -> the AST nodes of a top-level package."""
    return {f"nodes of {name}": total_density(python_files((name,), root)).nodes for name in TOP_LEVEL}


def reach():
    """Return a dictionary: "reach of ENTRY" -> the AST nodes of all modules that its imports lead to at run time."""
    return {f"reach of {name}": total_density(reached_from(module)).nodes for name, module in ENTRIES.items()}


def steps():
    """Return a dictionary: name of a limited weight -> the step in which its limit moves."""
    packages = dict.fromkeys((f"nodes of {name}" for name in TOP_LEVEL), STEP_OF_PACKAGES)
    entries = dict.fromkeys((f"reach of {name}" for name in ENTRIES), STEP_OF_REACH)
    return {**STEPS, **packages, **entries}


def lowered(limits, measured):
    """Return limits one step above the rounded weights, none above the limit that stands."""
    new = {}
    for name, step in steps().items():
        rounded_up = -(-measured[name] // step) * step
        new[name] = min(rounded_up + step, limits.get(name, rounded_up + step))
    return new


def structure():
    """Return a dictionary: name of a weight of the import graph -> its value."""
    inside = {name: package_graph(name) for name in TOP_LEVEL}
    without_level = []
    for edges in (package_graph(), *inside.values()):
        without_level += edges.keys() - levels(edges).keys()
    pack_data = inside["pack_data"]
    return {
        "packages and loose files of pack_data": len(pack_data),
        "imports between those of pack_data": sum(map(len, pack_data.values())),
        "packages in import cycles": len(without_level),
        "files in import cycles": sum(map(len, cycles(graph()))),
    }


def _lines(paths):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _public_functions(path):
    """Count functions without an underscore: module-level ones, and methods of public classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public_classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    count = 0
    for owner in [tree, *public_classes]:
        functions = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
        count += sum(not function.name.startswith("_") for function in functions)
    return count


def _options(path):
    """Return the command-line options that a file declares."""
    options = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            options.update(word for word in words if isinstance(word, str) and word.startswith("--"))
    return options


def _class_names_used_twice(paths):
    files_by_name = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files_by_name.setdefault(node.name, set()).add(path)
    return sum(len(files) > 1 for files in files_by_name.values())


def _pages_of_documentation(files, root):
    top_level = (root / "README.md", root / "CONTRIBUTING.md")
    return [path for path in files if path.suffix == ".md" and (path in top_level or root / "docs" in path.parents)]


def _words(page):
    """Count the hand-written words of a page."""
    text = page.read_text(encoding="utf-8")
    if "generated page" in text[:400]:
        return 0
    return len(_GENERATED.sub("", text).split())


def dense_files(paths):
    """Return the files above the limit of nodes per code line, the densest first: [(nodes per line, path)]."""
    dense = []
    for path in paths:
        measured = _density_of(path)
        if measured.code_lines >= SHORT_FILE and measured.per_line > DENSEST_FILE:
            dense.append((measured.per_line, path))
    return sorted(dense, reverse=True)


def main(argv=None):
    """Print all weights; return 1 if one is above its limit."""
    arguments = sys.argv[1:] if argv is None else argv
    measured = {**weights(), **package_nodes(), **reach(), **structure()}
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    if arguments == ["--set"]:
        limits = lowered(limits, measured)
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n", encoding="utf-8")
    limits.update(dict.fromkeys(ZERO, 0))

    problems = [name for name, limit in limits.items() if measured[name] > limit]
    for name, value in measured.items():
        limit = f"of {limits[name]:7,}" if name in limits else ""
        print(f"{name:38} {value:7,} {limit}{'  <- over' if name in problems else ''}")

    product = python_files(PRODUCT)
    evidence = python_files(("evidence",))
    for part, paths in (("the product", product), ("evidence", evidence)):
        name = f"nodes per code line of {part}"
        average = total_density(paths).per_line
        print(f"{name:38} {average:7.2f} of {DENSEST_AVERAGE:7}")
        if average > DENSEST_AVERAGE:
            problems.append(name)
    for per_line, path in dense_files(product + evidence):
        name = path.relative_to(ROOT).as_posix()
        print(f"{name:38} {per_line:7.2f} of {DENSEST_FILE:7} nodes per code line  <- over")
        problems.append(name)
    if problems:
        print(f"error: above the limits: {', '.join(problems)}; remove something, or see CONTRIBUTING.md")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
