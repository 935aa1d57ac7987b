"""`python -m ipu_packed_bert.experiments.figures`: every table and picture of docs/evidence.md from committed results.

`docs/evidence/results` has a folder for each run of an experiment: its settings, the facts of its data, and a JSON file
for each finished cell, as the run's own folder has them. Nothing is trained. A table stands in the page between

    <!-- results: NAME -->
    <!-- end of results -->

and is written anew; a picture is docs/evidence/NAME_KIND.png.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from ipu_packed_bert.experiments.pretraining_shown import FACTS, Shown
from ipu_packed_bert.experiments.runner import CELLS, SETTINGS
from pack_data.command import ArgumentParser, run_main
from pack_data.files import write_atomically

PAGE, PICTURES, RESULTS = "evidence.md", "evidence", "evidence/results"
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def results(docs: Path) -> Dict[str, Shown]:
    """The committed runs by name."""
    folders = sorted(path for path in (docs / RESULTS).glob("*") if (path / SETTINGS).exists())
    return {folder.name: Shown(folder) for folder in folders}


def page(text: str, shown: Dict[str, Shown]) -> str:
    """The page with its tables made anew. ValueError where a block and the results do not belong to each other."""
    named = [match.group(2) for match in _BLOCK.finditer(text)]
    if sorted(named) != sorted(shown):
        raise ValueError(
            f"{PAGE} has blocks of results for {named}, there are results of {sorted(shown)}; each needs one block"
        )
    return _BLOCK.sub(lambda match: f"{match.group(1)}\n{shown[match.group(2)].text()}\n{match.group(3)}", text)


def take(run: Path, docs: Path) -> List[Path]:
    """Copies settings, facts and finished cells of a run into the results, under the name of its folder."""
    if not (run / FACTS).exists():
        raise ValueError(f"{run}: has no {FACTS}; --take names the --out of a pretraining experiment")
    folder = docs / RESULTS / run.name
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    names = [SETTINGS, FACTS, *(f"{CELLS}/{path.name}" for path in sorted((run / CELLS).glob("*.json")))]
    return [Path(shutil.copyfile(run / name, folder / name)) for name in names]


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog="python -m ipu_packed_bert.experiments.figures", description=__doc__.split("\n")[0].split(": ", 1)[1]
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR", help="default %(default)s")
    parser.add_argument(
        "--take", type=Path, action="append", default=[], metavar="OUT", help="first copy the cells of this run"
    )
    options = parser.parse_args(argv)
    if not (options.docs / PAGE).exists():
        raise ValueError(f"{options.docs / PAGE}: no such file; run it in a checkout, or give --docs")
    for run in options.take:
        print(f"{len(take(run, options.docs))} files from {run}")
    shown = results(options.docs)
    path = options.docs / PAGE
    write_atomically(path, page(path.read_text(encoding="utf-8"), shown).encode())
    print(path)
    for name, each in shown.items():
        for picture in each.draw(options.docs / PICTURES, f"{name}_"):
            print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
