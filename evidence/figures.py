"""`python -m evidence.figures`: every table and picture of docs/evidence.md from committed results.

`evidence/results` has a folder for each run of an experiment, NAME or NAME_SIZE after its module: its settings,
the facts of its data, and a JSON file for each finished cell, as the run's own folder has them. The module's
`shown(folder)` reads them. Nothing is trained. The tables of a run are docs/evidence/NAME_SIZE.md, its pictures
docs/evidence/NAME_SIZE_KIND.png. What came of a claim of `claims.yml` stands in docs/evidence.md between

    <!-- results: CLAIM -->
    <!-- end of results -->

and is written anew. `pictures.json` beside the results says from which of them the pictures were drawn, so that a test
finds those of other results; it does not find those that older code drew.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from evidence.__main__ import EXPERIMENTS
from evidence.claims import FILE, Finding, findings, told, verdicts
from evidence.runner import CELLS, FACTS, SETTINGS
from evidence.writer import Shown
from pack_data.cli.command import ArgumentParser, run_main
from pack_data.display.picture import write
from pack_data.reading.files import write_atomically

PAGE, PICTURES, RESULTS = "docs/evidence.md", "docs/evidence", "evidence/results"  # below the checkout
DRAWN = "pictures.json"
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def shown_by(folder: Path) -> Callable[[Path], Shown]:
    """`shown` of the experiment that a folder's name begins with: the longest name that fits.

    ValueError where there is none.
    """
    fitting = [name for name in EXPERIMENTS if f"{folder.name}_".startswith(f"{name}_")]
    if not fitting:
        raise ValueError(
            f"{folder}: no results of an experiment; call it NAME or NAME_SIZE with one of {', '.join(EXPERIMENTS)}"
        )
    return importlib.import_module(f"evidence.{max(fitting, key=len)}").shown


def results(root: Path) -> Dict[str, Shown]:
    """The committed runs by name. ValueError where a folder is not one."""
    found = {}
    for folder in sorted(path for path in (root / RESULTS).glob("*") if path.is_dir()):
        shown = shown_by(folder)
        if not (folder / SETTINGS).exists():
            raise ValueError(f"{folder}: has no {SETTINGS}; take the run anew with --take, or remove the folder")
        found[folder.name] = shown(folder)
    return found


def page(text: str, found: Mapping[str, Finding]) -> str:
    """The page with what came of each claim. ValueError where a claim has no block, or two, or a block no claim."""
    blocks, claims = [match.group(2) for match in _BLOCK.finditer(text)], told()
    if sorted(blocks) != sorted(claims):
        raise ValueError(
            f"{PAGE} has blocks for the claims {sorted(blocks)}, {FILE.name} has {sorted(claims)}; each needs one "
            f"block, <!-- results: CLAIM --> and <!-- end of results --> on lines of their own"
        )
    words = verdicts(found)

    def block(name: str) -> str:
        sentence = (
            f"**{claims[name]['sentence'].strip()}** {words[name][0].upper()}{words[name][1:]}: {found[name].figures}"
        )
        picture = f"\n![The claim above A/A, in margins]({PICTURES.split('/')[-1]}/claim_{name}.png)\n"
        return f"{sentence}\n" + (picture if found[name].picture else "")

    return _BLOCK.sub(lambda match: f"{match.group(1)}\n{block(match.group(2))}\n{match.group(3)}", text)


def tables(name: str, shown: Shown) -> str:
    """The page of a run's tables."""
    return (
        f"# Tables: {name.replace('_', ', ')}\n\n<!-- a generated page: python -m evidence.figures -->\n\n"
        f"What it means: [evidence](../evidence.md).\n\n{shown.text()}"
        + "".join(f"\n![{kind.replace('_', ' ')}]({name}_{kind}.png)\n" for kind in shown.pictures())
    )


def check_run(run: Path) -> None:
    """Raises ValueError where a folder is not that of an experiment's run."""
    shown_by(run)
    if not (run / SETTINGS).exists() or not any((run / CELLS).glob("*.json")):
        raise ValueError(f"{run}: has no finished cell; --take names the --out of an experiment that has one")


def take(run: Path, root: Path) -> List[Path]:
    """Copies settings, facts and finished cells of a run into the results, under the name of its folder.

    Cells that are there already stay, except where they were measured with other settings.
    """
    check_run(run)
    folder = root / RESULTS / run.name
    if (folder / SETTINGS).exists() and (folder / SETTINGS).read_bytes() != (run / SETTINGS).read_bytes():
        shutil.rmtree(folder)
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    names = [SETTINGS, *(f"{CELLS}/{path.name}" for path in sorted((run / CELLS).glob("*.json")))]
    if (run / FACTS).exists():
        names.append(FACTS)
    return [Path(shutil.copyfile(run / name, folder / name)) for name in names]


def drawn(folder: Path, pictures: Sequence[Path]) -> Dict[str, Any]:
    """What a run's results and its pictures are now, as `pictures.json` keeps it."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.json") if path.name != DRAWN):
        whole.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in pictures}
    return {"results": whole.hexdigest(), "pictures": digests}


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m evidence.figures", description=__doc__.split("\n")[0].split(": ", 1)[1])
    parser.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="of a checkout; default: this folder")
    parser.add_argument(
        "--take", type=Path, action="append", default=[], metavar="OUT", help="first copy the cells of this run"
    )
    options = parser.parse_args(argv)
    path = options.root / PAGE
    if not path.exists():
        raise ValueError(f"{path}: no such file; run it in a checkout, or give --root")
    for run in options.take:
        check_run(run)
    for run in options.take:
        print(f"{len(take(run, options.root))} files from {run}")
    shown = results(options.root)
    found = findings(shown)
    write_atomically(path, page(path.read_text(encoding="utf-8"), found).encode())
    print(path)
    for name, finding in found.items():
        if finding.picture is not None:
            write([finding.picture], options.root / PICTURES / f"claim_{name}.png")
    for name, each in shown.items():
        write_atomically(options.root / PICTURES / f"{name}.md", tables(name, each).encode())
        pictures = each.draw(options.root / PICTURES, f"{name}_")
        for picture in pictures:
            print(picture)
        folder = options.root / RESULTS / name
        write_atomically(folder / DRAWN, (json.dumps(drawn(folder, pictures), indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
