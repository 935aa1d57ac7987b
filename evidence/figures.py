"""`python -m evidence.figures`: every table and picture of docs/evidence.md from committed results.

`evidence/results` has a file for each run of an experiment, NAME.jsonl or NAME_SIZE.jsonl after its module, as in the
directory of the run.  The module's `shown(path)` reads it.  Nothing is trained.  The tables of a run are
docs/evidence/NAME_SIZE.md, its pictures docs/evidence/NAME_SIZE_KIND.png.  The result of a claim of `claims.yml` is
written into docs/evidence.md between

    <!-- results: CLAIM -->
    <!-- end of results -->
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence

from evidence.__main__ import EXPERIMENTS
from evidence.claims import FILE, Finding, findings, told, verdicts
from evidence.runner import RESULTS, read_results, write_results
from evidence.writer import Shown
from pack_data.cli.command import ArgumentParser, run_main
from pack_data.display.picture import write
from pack_data.reading.durable import write_atomically

# Paths in a checkout.
PAGE = "docs/evidence.md"
PICTURES = "docs/evidence"
COMMITTED = "evidence/results"
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def shown_by(name: str) -> Callable[[Path], Shown]:
    """Return `shown` of the experiment with the longest name with which the name of a run begins.

    Raises:
        ValueError: There is no such experiment.
    """
    fitting = [experiment for experiment in EXPERIMENTS if f"{name}_".startswith(f"{experiment}_")]
    if not fitting:
        raise ValueError(
            f"{name}: not the results of an experiment; name it NAME or NAME_SIZE, with NAME one of "
            f"{', '.join(EXPERIMENTS)}"
        )
    return importlib.import_module(f"evidence.{max(fitting, key=len)}").shown


def results(root: Path) -> Dict[str, Shown]:
    """Read the committed runs, by name."""
    paths = sorted((root / COMMITTED).glob("*.jsonl"))
    return {path.stem: shown_by(path.stem)(path) for path in paths}


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


def take(run: Path, root: Path) -> Path:
    """Copy the results of a run to the committed ones, under the name of its directory.

    Existing cells of the same settings are kept.

    Raises:
        ValueError: It is not the directory of a run with finished cells.
    """
    shown_by(run.name)
    path = run / RESULTS
    taken = read_results(path) if path.exists() else None
    if taken is None or not taken.cells:
        raise ValueError(
            f"{run}: no finished cell; pass the --out of an experiment with finished cells to --take"
        )
    committed = root / COMMITTED / f"{run.name}.jsonl"
    committed.parent.mkdir(parents=True, exist_ok=True)
    if committed.exists():
        stored = read_results(committed)
        if stored.settings == taken.settings:
            taken = taken._replace(cells={**stored.cells, **taken.cells})
    write_results(committed, taken)
    return committed


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
        print(take(run, options.root))

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
        for picture in run_shown.draw(folder, f"{name}_"):
            print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
