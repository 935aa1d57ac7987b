"""The options `--histogram`, `--synthetic` and `--max-sequence-length`, and the histogram that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional

from pack_data.cli.command import positive_int
from pack_data.lengths.synthetic import HELP, synthetic_histogram
from pack_data.packing.histogram import PUBLISHED, LengthHistogram
from pack_data.store.data_set import MANIFEST


def add_histogram_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--histogram`, `--synthetic` and `--max-sequence-length`; `histogram_from` reads them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--histogram",
        metavar="NAME|FILE|DIR",
        default=PUBLISHED[0],
        help=f"a shipped histogram ({', '.join(PUBLISHED)}), a CSV file 'length,count', a file with a length a line "
        "(.txt, .lengths), an array of lengths (.npy), a data set's folder, or a file or folder of sequences "
        f"(TFRecord, HDF5, Parquet, Arrow, JSONL); default {PUBLISHED[0]}",
    )
    where.add_argument(
        "--synthetic", metavar="SPEC", help="made-up lengths instead, e.g. sample:wikipedia_512,n=1000000; kinds below"
    )
    parser.epilog = HELP
    parser.add_argument(
        "--max-sequence-length",
        type=positive_int,
        metavar="S",
        help="slots in a pack; required with a file of lengths, else the histogram's own",
    )


def histogram_from(args: argparse.Namespace) -> LengthHistogram:
    """The histogram that the options of `add_histogram_arguments` name, of the lengths as they are."""
    if args.synthetic is None:
        return named_histogram(args.histogram, args.max_sequence_length)
    histogram = synthetic_histogram(args.synthetic)
    return (
        histogram if args.max_sequence_length is None else histogram.with_max_sequence_length(args.max_sequence_length)
    )


def named_histogram(name: str, max_sequence_length: Optional[int] = None) -> LengthHistogram:
    """The histogram of a `--histogram` option: whatever `pack_data.packing.histogram` takes as a source.

    Shipped names and data sets know their slots. Any other file (a CSV histogram `length,count`; a length a line in
    .txt or .lengths, plain or .gz, .xz, .bz2; an array in .npy; sequences in a format of pack_data.formats), or a
    folder of such files, needs max_sequence_length. ValueError, one line, for anything else.
    """
    from pack_data.lengths.counting import count

    path = Path(name)
    known = name in PUBLISHED or (path / MANIFEST).is_file()
    if not known and not path.exists():
        raise ValueError(
            f"--histogram {name}: neither a file, nor a folder, nor a shipped name; shipped are {', '.join(PUBLISHED)}"
        )
    if not known and max_sequence_length is None:
        raise ValueError(
            f"--histogram {name}: a file of lengths does not say how long a pack is; add --max-sequence-length"
        )
    histogram = count([name], max_sequence_length, workers=1)
    if not histogram.sequences:
        raise ValueError(
            f"--histogram {name}: holds no sequence; a CSV file has a line `length,count` for each length that occurs"
        )
    return histogram
