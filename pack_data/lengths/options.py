"""The options `--histogram`, `--synthetic` and `--max-sequence-length`, and the histogram that they name."""
from __future__ import annotations

import argparse
from pathlib import Path

from pack_data.command import positive_int
from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.lengths.synthetic import HELP, synthetic_histogram


def add_histogram_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--histogram`, `--synthetic` and `--max-sequence-length`; `histogram_from` reads them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--histogram", metavar="NAME|CSV", default=PUBLISHED[0],
        help=f"a shipped histogram ({', '.join(PUBLISHED)}) or a CSV file 'length,count'; default {PUBLISHED[0]}")
    where.add_argument(
        "--synthetic", metavar="SPEC",
        help="made-up lengths instead, e.g. sample:wikipedia_512,n=1000000; kinds below")
    parser.epilog = HELP
    parser.add_argument(
        "--max-sequence-length", type=positive_int, metavar="S",
        help="slots in a pack; required with a CSV file, else the histogram's own")


def histogram_from(args: argparse.Namespace) -> LengthHistogram:
    """The histogram that the options of `add_histogram_arguments` name."""
    histogram = _named_histogram(args)
    if not histogram.sequences:
        raise ValueError(f"--histogram {args.histogram}: holds no sequence; a CSV file has a line `length,count` for each length that occurs")
    return histogram


def _named_histogram(args: argparse.Namespace) -> LengthHistogram:
    if args.synthetic is not None:
        histogram = synthetic_histogram(args.synthetic)
    elif args.histogram in PUBLISHED:
        histogram = LengthHistogram.published(args.histogram)
    elif not Path(args.histogram).exists():
        raise ValueError(f"--histogram {args.histogram}: neither a file nor a shipped name; shipped are {', '.join(PUBLISHED)}")
    elif args.max_sequence_length is None:
        raise ValueError(f"--histogram {args.histogram}: a CSV file does not say how long a pack is; add --max-sequence-length")
    else:
        return LengthHistogram.from_csv(args.histogram, args.max_sequence_length)
    if args.max_sequence_length is None:
        return histogram
    return histogram.with_max_sequence_length(args.max_sequence_length)
