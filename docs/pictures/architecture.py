"""Draws docs/pictures/architecture.svg and writes the tables of docs/architecture.md, both read from the imports.

python docs/pictures/architecture.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Dict, List, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.imports import MODULES, levels, package_graph  # noqa: E402

PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "pictures" / "architecture.svg"
COMMAND = "python docs/pictures/architecture.py"
# No rooms of their own in the picture: the files that are typed or imported by name.
DOORS = ("ipu_packed_bert.__init__", "ipu_packed_bert.__main__", "run_pretraining", "profiling")


def plan() -> Tuple[Dict[str, int], Set[Tuple[str, str]]]:
    """Room -> its floor, from 1; and the imports (upper, lower) that no longer way of imports already shows."""
    arrows = {room: below - set(DOORS) for room, below in package_graph().items() if room not in DOORS}
    floors = levels(arrows)

    def reached(room: str) -> Set[str]:
        return set().union(*({below} | reached(below) for below in arrows[room])) if arrows[room] else set()

    direct = {
        (room, below)
        for room, belows in arrows.items()
        for below in belows
        if not any(below in reached(other) for other in belows - {below})
    }
    return floors, direct


def draw(path: Path) -> None:
    """The rooms floor by floor; a line leads down to what a room imports."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    floors, direct = plan()
    on = {floor: sorted(room for room in floors if floors[room] == floor) for floor in sorted(set(floors.values()))}
    # The floors are of different widths, so that lines pass beside rooms.
    place = {
        room: ((number - (len(rooms) - 1) / 2) * (1 + 0.3 * (3 * floor % 4)), floor)
        for floor, rooms in on.items()
        for number, room in enumerate(rooms)
    }
    with matplotlib.rc_context({"svg.hashsalt": "architecture", "svg.fonttype": "path"}):
        figure, axes = plt.subplots(figsize=(6.4, 0.62 * len(on)))
        for upper, lower in sorted(direct):
            (x, y), (to_x, to_y) = place[upper], place[lower]
            axes.plot((x, to_x), (y, to_y), color="0.7", linewidth=1, zorder=1)
        for room, (x, y) in sorted(place.items()):
            name = room.replace("ipu_packed_bert.", "")
            axes.text(x, y, name, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": "0.4"})
        axes.set_xlim(-1.2, 1.2)
        axes.set_ylim(0.5, len(on) + 0.5)
        axes.axis("off")
        figure.tight_layout(pad=0)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def tables() -> str:
    """The rooms of both packages: floor, name, the first sentence of its docstring."""
    parts: List[str] = []
    for package, inside in (("ipu_packed_bert", None), ("pack_data", "pack_data")):
        floors = levels(package_graph(inside))
        rows = []
        for room, floor in sorted(floors.items(), key=lambda item: (-item[1], item[0])):
            name = room[len(package) + 1 :] if inside is None and room.startswith(package + ".") else room
            if name.startswith("__") or name.endswith("__main__"):
                continue
            rows.append(f"| {floor} | `{name}` | {_sentence(room if inside is None else f'{package}.{room}')} |")
        parts.append(f"**{package}**\n\n| level | package | what |\n| ---: | --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _sentence(module: str) -> str:
    if module == "profiling":
        return "Two scripts: the overhead report and the calibration."
    text = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.])\s|:\n|\n\n", " ".join(text.split("\n\n")[0].split()))[0].rstrip(":")


def page(text: str) -> str:
    """The page with today's tables between its marks."""
    block = f"<!-- generated: {COMMAND} -->\n\n{tables()}\n\n<!-- end of generated -->"
    return re.sub(r"<!-- generated: .*?<!-- end of generated -->", lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    draw(PICTURE)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
