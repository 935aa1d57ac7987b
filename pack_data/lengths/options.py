"""The options of commands that read lengths, `--histogram` or `--synthetic`, and the histogram that they name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from pack_data.cli.option_types import positive_int
from pack_data.cli.reading_options import add_columns, add_split
from pack_data.lengths.synthetic import HELP, synthetic_histogram
from pack_data.packing.histogram import BUNDLED, PUBLISHED, LengthHistogram
from pack_data.store.data_set import MANIFEST


def add_histogram_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--histogram`, `--synthetic` and the options of both; `histogram_from` reads them."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--histogram",
        metavar="NAME|FILE|DIR",
        default=PUBLISHED[0],
        help=f"a bundled histogram ({', '.join(BUNDLED)}), a CSV file 'length,count', a file with one length per "
        "line (.txt, .lengths), an array of lengths (.npy), a packed data set, or a file or directory of sequences "
        f"(TFRecord, HDF5, Parquet, Arrow, JSONL); default {PUBLISHED[0]}",
    )
    source.add_argument(
        "--synthetic",
        metavar="SPEC",
        help="synthetic lengths instead, e.g. sample:wikipedia_512,n=1000000; kinds below",
    )
    parser.epilog = HELP
    parser.add_argument(
        "--max-sequence-length",
        type=positive_int,
        metavar="S",
        help="slots in a pack; required with a file of lengths, else the histogram's own",
    )
    add_columns(parser)
    add_split(parser)


def histogram_from(args: argparse.Namespace) -> LengthHistogram:
    """Return the histogram that the options of `add_histogram_arguments` name, with unrounded lengths."""
    S = args.max_sequence_length
    if args.synthetic is None:
        return named_histogram(args.histogram, S, args.columns, args.split)
    if args.columns or args.split:
        raise ValueError(
            "--columns, --split: apply to --histogram; leave them out with --synthetic"
        )
    histogram = synthetic_histogram(args.synthetic)
    return histogram if S is None else histogram.with_max_sequence_length(S)


def named_histogram(
    name: str,
    max_sequence_length: Optional[int] = None,
    columns: Sequence[str] = (),
    split: str = "",
) -> LengthHistogram:
    """Return the histogram of a `--histogram` option.

    Args:
        name: a bundled name or a packed data set, which know their slots, or anything else that `count` reads.
        max_sequence_length: slots of a pack.
        columns: the columns of sequences of tokens, as for `count`.
        split: which split of a directory to read, as for `count`.

    Raises:
        ValueError: there is no such source, it holds no sequences, or it does not tell the slots of a pack.
    """
    from pack_data.lengths.counting import count, what_was_read

    path = Path(name)
    tells_slots = name in BUNDLED or (path / MANIFEST).is_file()
    # `count` refuses a name that does not exist.
    if path.exists() and not tells_slots and max_sequence_length is None:
        raise ValueError(
            f"--histogram {name}: does not tell the slots of a pack; add --max-sequence-length"
        )
    histogram = count([name], max_sequence_length, workers=1, columns=columns, split=split)
    if not histogram.sequences:
        raise ValueError(
            f"--histogram {name}: contains no sequences; a CSV file has a line `length,count` for each length"
        )
    for line in what_was_read([name], columns, split):
        print(line, file=sys.stderr)
    return histogram
