"""The import graph of this project, read from the sources.

A package of the graph is a top-level one, or a directory or loose file directly below one. Its level is one above the
highest level that it imports from; the packages of an import cycle have no level.
"""

import ast
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
PACKAGES = ("pack_data", "padding_free", "ipu_packed_bert", "ipu_profiling", "profiling", "evidence", "examples")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")) + [
    ROOT / "run_pretraining.py"
]


def module_name(path):
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


MODULES = {module_name(path): path for path in SOURCES}


@lru_cache(None)
def tree_of(path):
    """Return the syntax tree of a source file; nobody changes it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path, *, without=()):
    """Yield every module that a file imports, late imports and strings passed to `import_module` included.

    `from package import name` yields `package.name`, and `package` too if the name is no module.

    Args:
        path: a source file.
        without: names of conditions, such as TYPE_CHECKING. Imports below an `if` that names one are left out.
    """
    yield from _imported_below(tree_of(path), set(without))


def modules_imported_by(source, *, without=()):
    """Yield the modules that a source text imports; see `imported_modules`."""
    yield from _imported_below(ast.parse(source), set(without))


def _imported_below(node, without):
    yield from _imported_by(node)
    children = ast.iter_child_nodes(node)
    if without and isinstance(node, ast.If):
        names = {inner.id for inner in ast.walk(node.test) if isinstance(inner, ast.Name)}
        if names & without:
            children = node.orelse
    for child in children:
        yield from _imported_below(child, without)


def _imported_by(node):
    """Yield the modules that one node of a syntax tree imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from names
        if not MODULES.keys() >= set(names):
            yield node.module
    elif isinstance(node, ast.Call) and node.args:
        function = getattr(node.func, "id", getattr(node.func, "attr", ""))
        argument = node.args[0]
        if function == "import_module" and isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


@lru_cache(None)
def graph(*, at_run_time=False):
    """Return a dictionary: file -> the files that it imports, as a module and not as a program.

    With `at_run_time`, imports below `if TYPE_CHECKING` are left out.
    """
    without = ("__name__", "TYPE_CHECKING") if at_run_time else ("__name__",)
    imports = {}
    for path in SOURCES:
        names = imported_modules(path, without=without)
        targets = {MODULES[name] for name in names if name in MODULES}
        imports[path] = targets - {path}
    return imports


def reached_from(module):
    """Return the files that the imports of a module lead to at run time, its own included."""
    edges = graph(at_run_time=True)
    reached = set()
    waiting = [MODULES[module]]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting.extend(edges[path])
    return reached


def cycles(edges):
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components), each sorted."""
    index = {}
    low = {}
    stack = []
    groups = []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges[node]:
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
                groups.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return groups


def package_graph(inside=None):
    """Return a dictionary: package -> the packages that it imports from, top-level ones or those inside of one."""
    edges = {}
    for path, targets in graph().items():
        package = _package_of(path, inside)
        if package is not None:
            others = {_package_of(target, inside) for target in targets}
            edges.setdefault(package, set()).update(others - {package, None})
    return edges


def _package_of(path, inside):
    """Return the package of the graph to which a file belongs, None for a file outside it."""
    top_level, *below = path.relative_to(ROOT).with_suffix("").parts
    if top_level in ("examples", "evidence"):
        return None
    if inside is None:
        return top_level
    return below[0] if top_level == inside else None


def levels(edges):
    """Return a dictionary: package -> its level, from 1; packages of a cycle are left out."""
    level = {}
    while True:
        ready = [name for name, targets in edges.items() if name not in level and targets <= level.keys()]
        if not ready:
            return level
        for name in ready:
            level[name] = 1 + max((level[target] for target in edges[name]), default=0)
