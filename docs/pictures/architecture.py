"""Draw docs/pictures/architecture.svg and write the table of docs/architecture.md, both from the imports.

python docs/pictures/architecture.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from random import Random
from typing import Dict, List, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.imports import MODULES, graph, levels, module_name, package_graph  # noqa: E402

PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
HALF_BOX = 0.42  # half the width of a package's box, of distances between packages
COMMAND = "python docs/pictures/architecture.py"
# Top-level package -> its colour. The packages inside of `pack_data` and `padding_free` are not drawn.
COLOURS = {
    "pack_data": "#f6e7c1",
    "padding_free": "#d8ecd3",
    "ipu_packed_bert": "#d6e4f2",
    "ipu_profiling": "#f3d9dc",
}
WHOLE = ("pack_data", "padding_free")


def imports_drawn() -> Dict[str, Set[str]]:
    """Return a dictionary: package of the picture -> the packages that it imports."""
    imports: Dict[str, Set[str]] = {}
    for path, targets in graph().items():
        name = _drawn(module_name(path))
        if name:
            below = {_drawn(module_name(target)) for target in targets}
            imports.setdefault(name, set()).update(below - {name, ""})
    return imports


def _drawn(module: str) -> str:
    """Return the package of the picture to which a module belongs; "" for entry points."""
    top_level, *inside = module.split(".")
    if top_level in WHOLE:
        return top_level
    is_package = inside and not inside[0].startswith("__") and inside[0] != "padding_free"
    return ".".join((top_level, inside[0])) if top_level in COLOURS and is_package else ""


def plan() -> Tuple[Dict[str, int], Set[Tuple[str, str]]]:
    """Return the level of each package, from 1, and the imports (upper, lower) that no chain of others implies."""
    imports = imports_drawn()

    def reached(name: str) -> Set[str]:
        packages = set(imports[name])
        for below in imports[name]:
            packages |= reached(below)
        return packages

    direct = set()
    for name, packages in imports.items():
        for below in packages:
            if not any(below in reached(other) for other in packages - {below}):
                direct.add((name, below))
    return levels(imports), direct


def places(level_of: Dict[str, int], direct: Set[Tuple[str, str]]) -> Dict[str, Tuple[float, int]]:
    """Return the place of each package, such that no line passes behind another package."""
    random = Random(0)
    packages = {
        level: sorted(n for n in level_of if level_of[n] == level) for level in level_of.values()
    }
    shifts = dict.fromkeys(packages, 0.0)

    def placed() -> Dict[str, Tuple[float, int]]:
        return {
            name: (number - (len(names) - 1) / 2 + shifts[level], level)
            for level, names in packages.items()
            for number, name in enumerate(names)
        }

    def faults() -> float:
        place = placed()
        length = sum(abs(place[upper][0] - place[lower][0]) for upper, lower in direct)
        return 1000 * len(hidden_lines(place, direct)) + length

    fewest = faults()
    for _ in range(3000):
        level = random.choice(sorted(packages))
        before = packages[level], shifts[level]
        packages[level] = random.sample(packages[level], len(packages[level]))
        shifts[level] = random.choice((-1.0, -0.5, 0.0, 0.5, 1.0))
        now = faults()
        if now <= fewest:
            fewest = now
        else:
            packages[level], shifts[level] = before
    return placed()


def hidden_lines(
    place: Dict[str, Tuple[float, int]], direct: Set[Tuple[str, str]]
) -> List[Tuple[str, str, str]]:
    """Return each line that passes behind a package, with this package."""
    hidden = []
    for upper, lower in direct:
        (x, y), (to_x, to_y) = place[upper], place[lower]
        for name, (left, level) in place.items():
            if to_y < level < y:
                crossing = x + (to_x - x) * (y - level) / (y - to_y)
                if abs(crossing - left) < HALF_BOX:
                    hidden.append((upper, lower, name))
    return hidden


def draw(path: Path) -> None:
    """Draw the packages level by level; a line leads down to an imported package."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    level_of, direct = plan()
    place = places(level_of, direct)
    top = max(level_of.values())
    widest = max(abs(x) for x, _ in place.values()) + HALF_BOX

    with matplotlib.rc_context({"svg.hashsalt": "architecture", "svg.fonttype": "path"}):
        figure, axes = plt.subplots(figsize=(6.4, 0.55 * top))
        for upper, lower in sorted(direct):
            (x, y), (to_x, to_y) = place[upper], place[lower]
            axes.plot((x, to_x), (y, to_y), color="0.7", linewidth=1, zorder=1)
        for package, (x, y) in sorted(place.items()):
            top_level, _, name = package.partition(".")
            axes.text(
                x,
                y,
                name or top_level,
                ha="center",
                va="center",
                bbox={"boxstyle": "round", "fc": COLOURS[top_level], "ec": "0.4"},
            )
        boxes = [Patch(facecolor=colour, edgecolor="0.4") for colour in COLOURS.values()]
        axes.legend(boxes, list(COLOURS), loc="lower center", ncol=len(COLOURS), fontsize=8)
        axes.set_xlim(-widest, widest)
        axes.set_ylim(-0.3, top + 0.5)
        axes.axis("off")
        figure.tight_layout(pad=0)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def table() -> str:
    """Return a table of the top-level packages: name, first sentence of the docstring, packages inside bottom up."""
    rows = ["| package | purpose | inside, bottom up |", "| --- | --- | --- |"]
    for package in COLOURS:
        level_of = levels(package_graph(package))
        inside: Dict[int, List[str]] = {}
        for name, level in sorted(level_of.items()):
            if not name.startswith("__"):
                inside.setdefault(level, []).append(f"`{name}`")
        steps = " -> ".join(" ".join(inside[level]) for level in sorted(inside))
        rows.append(f"| `{package}` | {_sentence(package)} | {steps} |")
    return "\n".join(rows)


def _sentence(module: str) -> str:
    text = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.])\s|:\n|\n\n", " ".join(text.split("\n\n")[0].split()))[0].rstrip(":")


def page(text: str) -> str:
    """Return the page with a new table between its marks."""
    block = f"<!-- generated: {COMMAND} -->\n\n{table()}\n\n<!-- end of generated -->"
    return re.sub(
        r"<!-- generated: .*?<!-- end of generated -->", lambda _: block, text, flags=re.DOTALL
    )


if __name__ == "__main__":
    draw(PICTURE)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
