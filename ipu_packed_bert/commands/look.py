"""A page to look at: lengths and how they pack, a packed data set, or the folder of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from ipu_packed_bert.training.picture import is_run, sections_of_run
from pack_data import page_sections as look
from pack_data.cli.command import (
    ArgumentParser,
    check_page,
    count_from_zero,
    parse_depth,
    positive_int,
    run_main,
    typed,
)
from pack_data.compare import ALGORITHMS
from pack_data.display.page import Page
from pack_data.histogram import PUBLISHED
from pack_data.lengths.counting import count
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.store.data_set import MANIFEST, PackStore

# The options of the page of lengths alone, of that of a data set alone, and of both.
_OF_LENGTHS, _OF_A_DATA_SET = ("max_sequence_length", "packer", "depth"), ("pack",)
_COMPARED = ("depths", "packers")


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog=typed("look"),
        description="Writes one HTML page that needs nothing else: no network, no other file. Its tables sort,\n"
        "its pictures say more where they are pointed at.\n\n"
        "Of lengths: how long they are, how a packing fills its packs, the padding by depth and packer, the proof\n"
        "that no packing is better, and a pack with its attention mask. Of a run: losses, throughput, padding saved.",
        argument_default=argparse.SUPPRESS,  # what is not given is not there, so that what is given is not ignored
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="what python -m pack_data.histogram takes: a packed data set, a shipped name "
        f"({', '.join(PUBLISHED)}), a CSV 'length,count', lengths as text or .npy, sequences in a format that is "
        "read; or the folder of a run",
    )
    parser.add_argument("--html", default=None, metavar="FILE", help="the page, written whole or not at all")
    parser.add_argument(
        "--json", action="store_true", default=False, help="print what the page's tables hold as one JSON object"
    )
    parser.add_argument(
        "--max-sequence-length", type=positive_int, metavar="S", help="slots of a pack; else as WHAT says"
    )
    parser.add_argument("--packer", help="of the packing that is drawn; default optimal")
    parser.add_argument("--depth", type=parse_depth, metavar="D", help="of that packing; default 3")
    parser.add_argument("--pack", type=count_from_zero, metavar="N", help="of a data set: the pack drawn")
    parser.add_argument(
        "--depths",
        type=lambda text: tuple(parse_depth(part) for part in text.split(",")),
        metavar="D,D,...",
        help="packing depths to compare; default 2,3,4,8,unlimited",
    )
    parser.add_argument("--packers", metavar="NAME,...", help=f"to compare: some of {','.join(ALGORITHMS)}")
    args = parser.parse_args(argv)
    if not args.html and not args.json:
        raise ValueError("nothing to write: give --html FILE, or --json")
    if args.html:
        check_page("--html", args.html, reads=[args.what])
    page = _page(args)
    if args.html:
        page.write(args.html)
    if args.json:
        print(json.dumps(page.to_json()))
    else:
        tables, pictures = len(page.tables()), len(page.pictures())
        print(f"page      {args.html}: {pictures} pictures, {tables} tables")
    return 0


def _page(args: argparse.Namespace) -> Page:
    folder = Path(args.what)
    if args.what not in PUBLISHED and folder.is_dir() and is_run(folder):
        _refuse(args, _OF_LENGTHS + _OF_A_DATA_SET + _COMPARED, f"{folder} is a run, which is shown as it was")
        lead = f"The run in {folder}: losses, throughput, and the padding that its packs did without."
        return Page(f"Run {folder.resolve().name}", lead, sections_of_run(folder))
    given = vars(args)
    packer, depth = given.get("packer", "optimal"), given.get("depth", 3)
    if packer not in PACKERS:
        raise ValueError(f"--packer {packer}: no packer has this name; there are {', '.join(PACKERS)}")
    if not packs_at_depth(packer, depth):
        raise ValueError(f"--packer {packer}: does not pack at this --depth; give a smaller one, at most 3")
    compared = {"depths": given.get("depths", look.DEPTHS), "packers": _packers(given.get("packers"))}
    if args.what not in PUBLISHED and (folder / MANIFEST).is_file():
        return _page_of_data_set(folder, args, compared)
    _refuse(args, _OF_A_DATA_SET, f"{args.what} holds lengths, not packs")
    histogram = count([args.what], given.get("max_sequence_length"))
    if not histogram.sequences:
        raise ValueError(f"{args.what}: holds no sequence; there is nothing to look at")
    lead = (
        f"{histogram.sequences:,} sequences of at most {histogram.max_sequence_length} tokens, and what packing them "
        "brings."
    )
    sections = look.sections_of_histogram(histogram, packer=packer, depth=depth, progress=None, **compared)
    return Page(f"Packing {histogram.name}", lead, sections)


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ValueError where one of these options is given."""
    for name in names:
        if name in args:
            raise ValueError(f"--{name.replace('_', '-')}: {why}; leave the option out")


def _page_of_data_set(folder: Path, args: argparse.Namespace, compared: Dict[str, Any]) -> Page:
    _refuse(args, _OF_LENGTHS, f"{folder} is packed already; give its lengths as a file")
    with PackStore.open(folder) as store:
        manifest = store.manifest
        if not manifest.packs:
            raise ValueError(f"{folder}: holds no pack; there is nothing to look at")
        sections = look.sections_of_data_set(store, pack=vars(args).get("pack", 0), progress=None, **compared)
    lead = (
        f"The data set {folder}: {manifest.sequences:,} sequences in {manifest.packs:,} packs of "
        f"{manifest.schema.max_sequence_length} slots."
    )
    return Page(f"Data set {folder.resolve().name}", lead, sections)


def _packers(given: Optional[str]) -> Optional[Sequence[str]]:
    if given is None:
        return None
    names = given.split(",")
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown:
        raise ValueError(f"--packers: no packer is called {unknown[0]!r}; there are {', '.join(ALGORITHMS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(run_main(main))
