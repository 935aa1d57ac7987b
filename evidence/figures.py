"""`python -m evidence.figures`: every table and picture of docs/evidence.md from committed results.

`evidence/results` has a directory for each run of an experiment, NAME or NAME_SIZE after its module: its settings, the
facts of its data, and a JSON file for each finished cell, as in the directory of the run.  The module's
`shown(folder)` reads them.  Nothing is trained.  The tables of a run are docs/evidence/NAME_SIZE.md, its pictures
docs/evidence/NAME_SIZE_KIND.png.  The result of a claim of `claims.yml` is written into docs/evidence.md between

    <!-- results: CLAIM -->
    <!-- end of results -->

`pictures.json`, next to the results, records from which of them the pictures were drawn, so that a test detects
pictures of other results; it does not detect those that older code drew.
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
from pack_data.reading.durable import write_atomically

# Paths in a checkout.
PAGE = "docs/evidence.md"
PICTURES = "docs/evidence"
RESULTS = "evidence/results"
DRAWN = "pictures.json"
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def shown_by(folder: Path) -> Callable[[Path], Shown]:
    """Return `shown` of the experiment with the longest name with which the name of a directory begins.

    Raises:
        ValueError: There is no such experiment.
    """
    fitting = [name for name in EXPERIMENTS if f"{folder.name}_".startswith(f"{name}_")]
    if not fitting:
        raise ValueError(
            f"{folder}: not the results of an experiment; name it NAME or NAME_SIZE, with NAME one of "
            f"{', '.join(EXPERIMENTS)}"
        )
    return importlib.import_module(f"evidence.{max(fitting, key=len)}").shown


def results(root: Path) -> Dict[str, Shown]:
    """Read the committed runs, by name; raise ValueError for a directory without one."""
    runs = {}
    for folder in sorted((root / RESULTS).glob("*/")):
        shown = shown_by(folder)
        if not (folder / SETTINGS).exists():
            raise ValueError(
                f"{folder}: no {SETTINGS}; copy the run again with --take, or remove the directory"
            )
        runs[folder.name] = shown(folder)
    return runs


def page(text: str, judged: Mapping[str, Finding]) -> str:
    """Return the page with the result of each claim; raise ValueError unless each claim has one block."""
    blocks = [match.group(2) for match in _BLOCK.finditer(text)]
    claims = told()
    if sorted(blocks) != sorted(claims):
        raise ValueError(
            f"{PAGE} has blocks for the claims {sorted(blocks)}, {FILE.name} has {sorted(claims)}; add one block per "
            "claim, <!-- results: CLAIM --> and <!-- end of results --> on separate lines"
        )
    words = verdicts(judged)

    def block(match: Any) -> str:
        begin, name, end = match.groups()
        sentence = claims[name]["sentence"].strip()
        verdict = words[name][0].upper() + words[name][1:]
        finding = judged[name]
        lines = [begin, f"**{sentence}** {verdict}: {finding.figures}", ""]
        if finding.picture:
            folder = PICTURES.split("/")[-1]
            lines += [f"![The claim above A/A, in margins]({folder}/claim_{name}.png)", ""]
        return "\n".join([*lines, end])

    return _BLOCK.sub(block, text)


def tables(name: str, shown: Shown) -> str:
    """Return the page with a run's tables."""
    title = name.replace("_", ", ")
    lines = [
        f"# Tables: {title}",
        "<!-- a generated page: python -m evidence.figures -->",
        "What it means: [evidence](../evidence.md).",
        shown.text(),
    ]
    pictures = [f"\n![{kind.replace('_', ' ')}]({name}_{kind}.png)\n" for kind in shown.pictures()]
    return "\n\n".join(lines) + "".join(pictures)


def check_run(run: Path) -> None:
    """Raise ValueError if a directory is not that of an experiment's run."""
    shown_by(run)
    if not (run / SETTINGS).exists() or not any((run / CELLS).glob("*.json")):
        raise ValueError(
            f"{run}: no finished cell; pass the --out of an experiment with finished cells to --take"
        )


def take(run: Path, root: Path) -> List[Path]:
    """Copy settings, facts and finished cells of a run into the results, under the name of its directory.

    Existing cells are kept, unless they were measured with other settings.
    """
    check_run(run)
    folder = root / RESULTS / run.name
    stored = folder / SETTINGS
    if stored.exists() and stored.read_bytes() != (run / SETTINGS).read_bytes():
        shutil.rmtree(folder)
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    names = [SETTINGS]
    for path in sorted((run / CELLS).glob("*.json")):
        names.append(f"{CELLS}/{path.name}")
    if (run / FACTS).exists():
        names.append(FACTS)
    return [Path(shutil.copyfile(run / name, folder / name)) for name in names]


def drawn(folder: Path, pictures: Sequence[Path]) -> Dict[str, Any]:
    """Return the digests of a run's results and pictures, as in `pictures.json`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.json")):
        if path.name != DRAWN:
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name}\n".encode() + path.read_bytes())
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in pictures}
    return {"results": digest.hexdigest(), "pictures": digests}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser = ArgumentParser(
        prog="python -m evidence.figures", description=__doc__.split("\n")[0].split(": ", 1)[1]
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="root of a checkout; default: the current directory",
    )
    parser.add_argument(
        "--take",
        type=Path,
        action="append",
        default=[],
        metavar="OUT",
        help="copy the cells of this run first; repeat for more",
    )
    options = parser.parse_args(argv)
    path = options.root / PAGE
    if not path.exists():
        raise ValueError(f"{path}: no such file; run this command in a checkout, or pass --root")

    for run in options.take:
        check_run(run)
    for run in options.take:
        print(f"{len(take(run, options.root))} files from {run}")

    # The page, and the pictures of claims.
    shown = results(options.root)
    judged = findings(shown)
    text = page(path.read_text(encoding="utf-8"), judged)
    write_atomically(path, text.encode())
    print(path)
    folder = options.root / PICTURES
    for name, finding in judged.items():
        if finding.picture is not None:
            write([finding.picture], folder / f"claim_{name}.png")

    # The tables and pictures of each run.
    for name, run_shown in shown.items():
        write_atomically(folder / f"{name}.md", tables(name, run_shown).encode())
        pictures = run_shown.draw(folder, f"{name}_")
        for picture in pictures:
            print(picture)
        stored = options.root / RESULTS / name
        digests = json.dumps(drawn(stored, pictures), indent=1)
        write_atomically(stored / DRAWN, f"{digests}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
