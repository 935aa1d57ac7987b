"""A page to look at: lengths and how they pack, a packed data set, or the folder of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.training.picture import is_run, page_of_run
from pack_data.cli.command import (
    ArgumentParser,
    check_page,
    count_from_zero,
    parse_depth,
    positive_int,
    run_main,
    typed,
)
from pack_data.display.page import Page
from pack_data.inspection.page_sections import page_of_data_set, page_of_histogram
from pack_data.lengths.counting import count
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.packing.histogram import PUBLISHED
from pack_data.store.data_set import MANIFEST, PackStore

# The options of the page of lengths alone, and of that of a data set alone.
_OF_LENGTHS, _OF_A_DATA_SET = ("max_sequence_length", "packer", "depth"), ("pack",)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog=typed("look"),
        description="Writes one HTML page that needs nothing else: no network, no other file. The answer comes first;\n"
        "its pictures say more where they are pointed at.\n\n"
        "Of lengths: how long they are, how a packing fills its packs, the padding by depth and packer, the proof\n"
        "that no packing is better, and a pack with its attention mask. Of a run: losses, throughput, padding saved.",
        argument_default=argparse.SUPPRESS,  # what is not given is not there, so that what is given is not ignored
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="what packed-bert look takes: a packed data set, a shipped name "
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
        print(page.answer)
        print(f"page      {args.html}: {pictures} pictures, {tables} tables")
    return 0


def _page(args: argparse.Namespace) -> Page:
    folder = Path(args.what)
    if args.what not in PUBLISHED and folder.is_dir() and is_run(folder):
        _refuse(args, _OF_LENGTHS + _OF_A_DATA_SET, f"{folder} is a run, which is shown as it was")
        return page_of_run(folder)
    given = vars(args)
    packer, depth = given.get("packer", "optimal"), given.get("depth", 3)
    if packer not in PACKERS:
        raise ValueError(f"--packer {packer}: no packer has this name; there are {', '.join(PACKERS)}")
    if not packs_at_depth(packer, depth):
        raise ValueError(f"--packer {packer}: does not pack at this --depth; give a smaller one, at most 3")
    if args.what not in PUBLISHED and (folder / MANIFEST).is_file():
        _refuse(args, _OF_LENGTHS, f"{folder} is packed already; give its lengths as a file")
        with PackStore.open(folder) as store:
            return page_of_data_set(store, pack=given.get("pack", 0))
    _refuse(args, _OF_A_DATA_SET, f"{args.what} holds lengths, not packs")
    histogram = count([args.what], given.get("max_sequence_length"))
    if not histogram.sequences:
        raise ValueError(f"{args.what}: holds no sequence; there is nothing to look at")
    return page_of_histogram(histogram, packer=packer, depth=depth)


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ValueError where one of these options is given."""
    for name in names:
        if name in args:
            raise ValueError(f"--{name.replace('_', '-')}: {why}; leave the option out")


if __name__ == "__main__":
    raise SystemExit(run_main(main))
