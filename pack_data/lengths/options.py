"""The options `--histogram`, `--synthetic` and `--max-sequence-length`, and the histogram that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional

from pack_data.command import positive_int
from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.lengths.synthetic import HELP, synthetic_histogram


def add_histogram_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--histogram`, `--synthetic` and `--max-sequence-length`; `histogram_from` reads them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--histogram",
        metavar="NAME|CSV",
        default=PUBLISHED[0],
        help=f"a shipped histogram ({', '.join(PUBLISHED)}) or a CSV file 'length,count'; default {PUBLISHED[0]}",
    )
    where.add_argument(
        "--synthetic", metavar="SPEC", help="made-up lengths instead, e.g. sample:wikipedia_512,n=1000000; kinds below"
    )
    parser.epilog = HELP
    parser.add_argument(
        "--max-sequence-length",
        type=positive_int,
        metavar="S",
        help="slots in a pack; required with a CSV file, else the histogram's own",
    )


def histogram_from(args: argparse.Namespace) -> LengthHistogram:
    """The histogram that the options of `add_histogram_arguments` name."""
    if args.synthetic is None:
        return named_histogram(args.histogram, args.max_sequence_length)
    histogram = synthetic_histogram(args.synthetic)
    return (
        histogram if args.max_sequence_length is None else histogram.with_max_sequence_length(args.max_sequence_length)
    )


def named_histogram(name: str, max_sequence_length: Optional[int] = None) -> LengthHistogram:
    """The histogram of a `--histogram` option: a shipped name, or a CSV file, which needs max_sequence_length."""
    if name in PUBLISHED:
        histogram = LengthHistogram.published(name)
        return histogram if max_sequence_length is None else histogram.with_max_sequence_length(max_sequence_length)
    if not Path(name).exists():
        raise ValueError(f"--histogram {name}: neither a file nor a shipped name; shipped are {', '.join(PUBLISHED)}")
    if max_sequence_length is None:
        raise ValueError(f"--histogram {name}: a CSV file does not say how long a pack is; add --max-sequence-length")
    histogram = LengthHistogram.from_csv(name, max_sequence_length)
    if not histogram.sequences:
        raise ValueError(
            f"--histogram {name}: holds no sequence; a CSV file has a line `length,count` for each length that occurs"
        )
    return histogram
