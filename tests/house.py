"""What the house weighs and how its rooms stand, read from the sources. `python -m tests.house` fails above a limit.

A room is a folder or a loose file right below a package; a folder's `__main__.py` is the door of a command and counts
as a loose file. A room stands one floor above the highest room that it imports from.
The limits stand in `tests/house_limits.json`; only a page in docs/decisions raises one.
"""

import ast
import json
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "tests" / "house_limits.json"
PACKAGES = ("pack_data", "ipu_packed_bert", "profiling", "evidence", "examples")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")) + [
    ROOT / "run_pretraining.py"
]
# A generated page says so at its head; a generated part of a page stands between these two comments.
_GENERATED = re.compile(r"<!-- (?:results|generated)\b.*?<!-- end of (?:results|generated)\b", re.DOTALL)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imported_modules(path: Path):
    """Every module a file imports anywhere in it, late imports included; the package too where a name is its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names
            if not MODULES.keys() >= set(names):
                yield node.module


@lru_cache(None)
def graph():
    """File -> the files it imports."""
    return {
        path: {MODULES[name] for name in imported_modules(path) if MODULES.get(name, path) != path} for path in SOURCES
    }


def circles(arrows):
    """Groups of nodes that reach each other (Tarjan's strongly connected components), each sorted."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in arrows[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in arrows:
        if node not in index:
            visit(node)
    return found


def rooms(inside=None):
    """Room -> the rooms it imports from: of the application, pack_data as one room, or `inside` one package."""

    def room(path):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if inside is not None:
            return ".".join(parts[1:] if parts[-1] == "__main__" else parts[1:2]) if parts[0] == inside else None
        if parts[0] in ("examples", "evidence"):
            return None
        return ".".join(parts[:2]) if parts[0] == "ipu_packed_bert" else parts[0]

    arrows = {}
    for path, targets in graph().items():
        if room(path) is not None:
            arrows.setdefault(room(path), set()).update({room(target) for target in targets} - {room(path), None})
    return arrows


def floors(arrows):
    """Room -> its floor, from 1; rooms of a circle have none."""
    height = {}
    while True:
        built = [name for name, below in arrows.items() if name not in height and below <= height.keys()]
        if not built:
            return height
        for name in built:
            height[name] = 1 + max((height[below] for below in arrows[name]), default=0)


def weights(root=ROOT):
    """Name of a weight -> what the files that git tracks come to."""
    listed = subprocess.check_output(["git", "-C", str(root), "ls-files"], text=True).splitlines()
    files = [root / name for name in listed if (root / name).is_file()]
    top = {path: path.relative_to(root).parts[0] for path in files}

    def lines(paths):
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)

    code = [path for path in files if path.suffix == ".py"]
    product = [
        path for path in code if top[path] in ("pack_data", "ipu_packed_bert", "profiling", "run_pretraining.py")
    ]
    # Templates and scripts of pages are part of the product.
    pages = [
        path
        for path in files
        if top[path] in ("pack_data", "ipu_packed_bert") and path.suffix in (".html", ".jinja", ".css", ".js")
    ]
    public, options, classes = 0, set(), {}
    for path in product:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # Nested functions, and methods of private classes, are offered to nobody.
        owners = [tree] + [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
        functions = (node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef))
        public += sum(not node.name.startswith("_") for node in functions)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).add(path)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                words = (word.value for word in node.args if isinstance(word, ast.Constant))
                options |= {word for word in words if isinstance(word, str) and word.startswith("--")}
    words = 0
    for path in files:
        if path.suffix == ".md" and (top[path] == "docs" or path.name in ("README.md", "CONTRIBUTING.md")):
            text = path.read_text(encoding="utf-8")
            words += 0 if "generated page" in text[:400] else len(_GENERATED.sub("", text).split())

    def loose(package):
        return sum(path.parent == root / package and not path.name.startswith("__") for path in product)

    return {
        "product lines": lines(product + pages),
        "evidence lines": lines(path for path in code if top[path] == "evidence"),
        "test lines": lines(path for path in code if top[path] == "tests"),
        "product files": len(product),
        "functions without an underscore": public,
        "options": len(options),
        "configurations": sum(top[path] == "configs" and path.suffix == ".yml" for path in files),
        "words": words,
        "loose files in ipu_packed_bert": loose("ipu_packed_bert"),
        "loose files in pack_data": loose("pack_data"),
        "class names used twice": sum(len(paths) > 1 for paths in classes.values()),
    }


def plan():
    """The same for rooms and floors, of the application and inside pack_data."""
    outside, inside = rooms(), rooms("pack_data")
    return {
        "rooms": len(outside),
        "floors": max(floors(outside).values()),
        "rooms in circles": len(outside) - len(floors(outside)),
        "rooms inside pack_data": len(inside),
        "floors inside pack_data": max(floors(inside).values()),
        "rooms in circles inside pack_data": len(inside) - len(floors(inside)),
    }


def main():
    limits, got = json.loads(LIMITS.read_text(encoding="utf-8")), {**weights(), **plan()}
    for name, value in got.items():
        print(f"{name:34} {value:7,} of {limits[name]:7,}{'  <- over' if value > limits[name] else ''}")
    over = [name for name, value in got.items() if value > limits[name]]
    if over:
        print(f"error: over the limits of tests/house_limits.json: {', '.join(over)}; take something else out")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
