"""`packed-bert convert SRC DST`: one file format to another, and packs back to sequences.

Reads one record at a time and writes DST whole or not at all.  Packs stay packs where the target can hold them;
`--unpack` takes them apart.  Examples are packed by `packed-bert build --from SRC`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Iterator, Optional, Sequence, Tuple

from pack_data.building.work_folder import check_out, only_writer_of_packs
from pack_data.cli.bad_records import add_reading_options
from pack_data.cli.command import ArgumentParser, positive_int, progress_bar, typed
from pack_data.formats.detect import FORMATS, Source, module_of, open_source
from pack_data.formats.records import NO_COLUMNS, UNPACKED, Record, RowWidths
from pack_data.reading.files import only_writer
from pack_data.store.data_set import MANIFEST

# Target format -> the kinds it can hold.
TARGETS = {
    "mlperf_tfrecord": ("examples",),
    "packed_tfrecord": ("packs",),
    "parquet": ("tokens",),
    "arrow": ("tokens",),
    "packed_parquet": ("token_packs",),
    "store": ("packs",),
}
# What to do with a kind that the target does not hold.
_INSTEAD = {
    "examples": "pack them first: packed-bert build --from SRC --out DIR, then convert DIR",
    "packs": "use --to-format packed_tfrecord",
    "tokens": "pack them first: packed-bert build --from SRC --out DIR, then convert DIR",
    "token_packs": "use --to-format packed_parquet, or --unpack",
}
_WORDS = {
    "examples": "examples",
    "packs": "packs",
    "tokens": "token sequences",
    "token_packs": "packs of token sequences",
}


def _target_format(destination: str, kind: str) -> str:
    """The format that a file name asks for.  Raises ValueError where its suffix is of none."""
    name = destination[:-3] if destination.endswith(".gz") else destination
    suffix = os.path.splitext(name)[1]
    if suffix in (".tfrecord", ".tfrecords"):
        if UNPACKED[kind] == "tokens":
            raise ValueError(f"{destination}: token sequences are written as .parquet or .arrow")
        return "packed_tfrecord" if kind == "packs" else "mlperf_tfrecord"
    if suffix in (".parquet", ".arrow"):
        return suffix[1:]
    if suffix in (".h5", ".hdf5"):
        raise ValueError(f"{destination}: HDF5 is only read; write .tfrecord, .parquet or .arrow")
    raise ValueError(f"{destination}: the name does not tell the format; add --to-format {'|'.join(TARGETS)}")


def _convert(
    source: Source,
    destination: str,
    to_format: str = "auto",
    *,
    unpack: bool = False,
    widths: Optional[RowWidths] = None,
) -> Tuple[str, str, int]:
    """Writes every good record of `source` to `destination`. Returns format and kind, and how many records.

    unpack: take packs apart into sequences, also where the target could hold packs.  widths: row widths of an unpacked
    TFRecord (S and P), else those of the source.  Raises ValueError.
    """
    widths = RowWidths() if widths is None else widths
    kind = source.unpacked_kind if unpack else source.kind
    if to_format == "auto":
        to_format = _target_format(destination, kind)
    if to_format not in TARGETS:
        raise ValueError(f"format {to_format!r} cannot be written; choose from {', '.join(TARGETS)}")
    if UNPACKED[kind] == "examples" and FORMATS[to_format] == "parquet":
        raise ValueError(f"{destination}: {NO_COLUMNS}")
    if kind == "packs" and to_format == "mlperf_tfrecord":
        kind = "examples"
    if kind not in TARGETS[to_format]:
        raise ValueError(
            f"{source.path} holds {kind}, {to_format} holds {' or '.join(TARGETS[to_format])}; {_INSTEAD[kind]}"
        )
    if os.path.exists(destination):
        inside = Path(source.path).resolve() in Path(destination).resolve().parents
        if inside or any(os.path.samefile(destination, file) for file in source.files):
            raise ValueError(f"{destination}: is one of the files to read, or lies among them; name another one")
    if to_format == "store" and os.path.isdir(destination):
        check_out(Path(destination))
        if (Path(destination) / MANIFEST).exists():
            raise ValueError(f"{destination}: holds a data set already; remove it, or name another folder")
    if to_format in ("mlperf_tfrecord", "store"):
        own = source.example_shape() if kind == "examples" else source.shape()
        widths = RowWidths(*(given if given is not None else found for given, found in zip(widths, own)))

    def records() -> Iterator[Record]:
        found = 0
        with progress_bar(None, f"{source.format} to {to_format}", unit=" records") as bar:
            for record in source.examples() if kind == source.unpacked_kind else source.read():
                found += 1
                bar.update()
                yield record
        if not found:
            raise ValueError(f"{source.path}: has no record to convert")

    module = module_of(to_format)

    # Two conversions to one place would spoil it. Who holds the lock removes what killed ones have left there.
    path = Path(destination) if Path(destination).name else Path(destination).resolve()
    with only_writer_of_packs(path) if to_format == "store" else only_writer(path):
        if to_format == "store":
            written = module.write(destination, records, widths)
        elif FORMATS[to_format] == "parquet":
            written = module.write(destination, records(), to_format)
        else:
            written = module.write(destination, records(), widths, to_format)
    return to_format, kind, written


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog=typed("convert"), description="One file format to another, and packs back to sequences."
    )
    parser.add_argument("source", metavar="SRC", help="a file, a folder of files, or a data set of this package")
    parser.add_argument(
        "destination",
        metavar="DST",
        help="the file to write (.tfrecord, .tfrecord.gz, .parquet, .arrow), or a folder with --to-format store",
    )
    parser.add_argument(
        "--from-format",
        choices=("auto",) + tuple(FORMATS),
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(FORMATS)}; default: told from the content",
    )
    parser.add_argument(
        "--to-format",
        choices=("auto",) + tuple(TARGETS),
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(TARGETS)}; default: told from the name of DST",
    )
    parser.add_argument("--unpack", action="store_true", help="take packs apart into sequences")
    add_reading_options(parser)
    parser.add_argument(
        "--columns",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="A,B",
        help="Parquet, Arrow, JSONL: the integer columns of the sequences",
    )
    parser.add_argument(
        "--max-sequence-length",
        type=positive_int,
        metavar="S",
        help="slots in a row of an unpacked TFRecord; default: as in SRC",
    )
    parser.add_argument(
        "--max-predictions-per-sequence",
        type=positive_int,
        metavar="P",
        help="predictions in such a row; default: as in SRC",
    )
    parser.rare(
        *("--from-format", "--max-record-bytes", "--columns", "--max-sequence-length", "--max-predictions-per-sequence")
    )
    args = parser.parse_args(argv)
    source = open_source(args.source, args.from_format, args.skip_bad, args.columns, args.max_record_bytes)
    to_format, kind, written = _convert(
        source,
        args.destination,
        args.to_format,
        unpack=args.unpack,
        widths=RowWidths(args.max_sequence_length, args.max_predictions_per_sequence),
    )
    print(
        f"{args.source} ({source.format}, {_WORDS[source.kind]}) -> {args.destination} ({to_format}): "
        f"{written:,} {_WORDS[kind]}"
    )
    if source.bad.count:
        print(source.report(), file=sys.stderr)
        print(f"{source.bad.count} bad records skipped of {args.skip_bad} allowed", file=sys.stderr)
    if source.foreign_lost:
        print(
            f"left out: {', '.join(source.foreign_lost)} (a value for a whole pack belongs to no single sequence)",
            file=sys.stderr,
        )
    return 0
