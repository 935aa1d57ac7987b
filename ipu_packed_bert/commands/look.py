"""Show lengths and how they pack, a packed data set, or a run: a summary, a page, a picture or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.run_files.folder import LOG
from ipu_packed_bert.training.picture import page_of_run
from pack_data.cli.command import (
    ArgumentParser,
    check_output,
    check_page,
    check_picture,
    count_from_zero,
    parse_depth,
    positive_int,
    process_count,
    typed,
)
from pack_data.cli.reading_options import add_columns, add_record_limit, add_split
from pack_data.display.page import Page
from pack_data.display.picture import write
from pack_data.inspection.lengths import summary
from pack_data.inspection.page_sections import headline, page_of_data_set, page_of_histogram
from pack_data.lengths.counting import count, picture, what_was_read
from pack_data.packers import PACKERS, get_packer, packs_at_depth
from pack_data.packing.histogram import BUNDLED, PUBLISHED
from pack_data.solver.free_slots import cost_of_depth
from pack_data.store.data_set import MANIFEST, PackStore

# Options that only apply to lengths, to the page of lengths, and to the page of a data set.
_LENGTH_OPTIONS = ("max_sequence_length", "workers", "plot", "out")
_DEPTH_OF_PAPER = 3  # for the bundled histograms
_PACKING_OPTIONS = ("packer", "depth")
_DATA_SET_OPTIONS = ("pack",)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print a summary of lengths, a data set or a run; write the page, picture or histogram that was asked for."""
    args = _parser().parse_args(argv)
    sources = args.what
    if args.html:
        check_page("--html", args.html, reads=sources)
    if "plot" in args:
        check_picture("--plot", args.plot, reads=sources)
    if "out" in args:
        check_output("--out", args.out, reads=sources)

    first = Path(sources[0])
    is_shipped = sources[0] in BUNDLED
    if not is_shipped and (first / LOG).is_file():
        _refuse(args, _LENGTH_OPTIONS + _PACKING_OPTIONS + _DATA_SET_OPTIONS, f"{first} is a run")
        _refuse_several(sources, "a run")
        _show_page(args, page_of_run(first))
    elif not is_shipped and (first / MANIFEST).is_file() and not _counts_only(args):
        _refuse(args, ("max_sequence_length",) + _PACKING_OPTIONS, f"{first} is packed already")
        _refuse_several(sources, "a packed data set")
        with PackStore.open(first) as store:
            _show_page(args, page_of_data_set(store, pack=getattr(args, "pack", 0)))
    else:
        _refuse(args, _DATA_SET_OPTIONS, f"{sources[0]} holds lengths, not packs")
        _look_at_lengths(args)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=typed("look"),
        description="Show the lengths of sequences and the gain of packing, or a packed data set, or a run.\n\n"
        "Without an output option, it prints a summary. --html writes one self-contained page: for lengths, how a\n"
        "packing fills its packs, the padding by depth and packer, the proof that no packing is better, and a pack\n"
        "with its attention mask; for a run, losses, throughput and the padding saved.\n\n"
        "Several sources of lengths are counted in parallel and added up.",
        argument_default=argparse.SUPPRESS,  # an option that is absent was not given, and can be refused if it was
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="WHAT",
        help=f"a bundled histogram ({', '.join(BUNDLED)}), a CSV 'length,count', a text file with one length per "
        "line (also .gz, .xz, .bz2), a .npy array of lengths, a file of sequences (TFRecord, HDF5, Parquet, Arrow, "
        "JSONL), a packed data set, or the directory of a run",
    )
    parser.add_argument("--html", default=None, metavar="FILE", help="write one HTML page")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the lengths (Figure 1 of the paper) as .png, .pdf or .svg",
    )
    parser.add_argument("--out", metavar="CSV", help="write the histogram as 'length,count'")
    parser.add_argument(
        "--json",
        action="store_true",
        default=False,
        help="print the tables of the page as one JSON object",
    )
    parser.add_argument(
        "--max-sequence-length",
        type=positive_int,
        metavar="S",
        help="slots per pack (default: stated by the source, else its longest sequence)",
    )
    parser.add_argument(
        "--packer", choices=PACKERS, metavar="NAME", help="packer (default optimal)"
    )
    parser.add_argument(
        "--max-sequences-per-pack",
        "--depth",
        dest="depth",
        type=parse_depth,
        metavar="D",
        help="depth limit (default unlimited, and 3 for a bundled histogram)",
    )
    parser.add_argument(
        "--pack", type=count_from_zero, metavar="N", help="index of the pack to draw (data sets)"
    )
    parser.add_argument(
        "--workers",
        type=process_count,
        metavar="N",
        help="processes (default: one per file and core if there is much to read)",
    )
    add_columns(parser)
    add_split(parser)
    add_record_limit(parser)
    parser.rare("--workers", "--max-record-bytes")
    return parser


def _counts_only(args: argparse.Namespace) -> bool:
    """Return True if the lengths of a data set are wanted, not its page."""
    return "plot" in args or "out" in args


def _look_at_lengths(args: argparse.Namespace) -> None:
    packer = getattr(args, "packer", "optimal")
    is_published = all(source in PUBLISHED for source in args.what)
    depth = getattr(args, "depth", _DEPTH_OF_PAPER if is_published else None)
    if not packs_at_depth(packer, depth):
        raise ValueError(
            f"--packer {packer}: does not support this depth; add --max-sequences-per-pack 3"
        )

    histogram = count(
        args.what,
        getattr(args, "max_sequence_length", None),
        getattr(args, "workers", None),
        args.max_record_bytes,
        args.columns,
        args.split,
    )
    for line in what_was_read(args.what, args.columns, args.split):
        print(line, file=sys.stderr)
    if not histogram.sequences:
        raise ValueError(f"{args.what[0]}: contains no sequences")
    if "out" in args:
        histogram.to_csv(args.out)
    if "plot" in args:
        write([picture(histogram)], args.plot)
    if args.html or args.json:
        _show_page(args, page_of_histogram(histogram, packer=packer, depth=depth))
        return
    print(summary(histogram))
    if not _counts_only(args):
        packing = get_packer(packer)(histogram, max_sequences_per_pack=depth)
        print(f"\n{headline(packing)}")
        cost = cost_of_depth(packing) if packer != "none" else ""
        if cost:
            print(cost)


def _show_page(args: argparse.Namespace, page: Page) -> None:
    """Write the page if --html is given, and print its tables as JSON or its answer as text."""
    if args.html:
        page.write(args.html)
    if args.json:
        print(json.dumps(page.to_json()))
        return
    print(page.answer)
    if args.html:
        tables = len(page.tables())
        pictures = len(page.pictures())
        print(f"page      {args.html}: {pictures} pictures, {tables} tables")


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise ValueError if one of these options was given."""
    for name in names:
        if name in args:
            raise ValueError(f"--{name.replace('_', '-')}: {reason}; leave the option out")


def _refuse_several(sources: Sequence[str], kind: str) -> None:
    """Raise ValueError if there are further sources besides one that can only be shown alone."""
    if len(sources) > 1:
        raise ValueError(
            f"{sources[1]}: {sources[0]} is {kind}, which can only be shown alone; pass one directory"
        )
