"""`packed-bert convert SRC DST`: one file format to another, and packs back to sequences.

Reads one record at a time and writes DST whole or not at all. Packs stay packs if the target can hold them; `--unpack`
takes them apart. Examples are packed by `packed-bert build --from SRC`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Sequence, Tuple

from pack_data.cli.command import ArgumentParser, positive_int, typed
from pack_data.cli.reading_options import add_columns, add_reading_options
from pack_data.cli.terminal import progress_bar
from pack_data.formats import sequence_output
from pack_data.formats.detect import FORMATS
from pack_data.formats.records import NO_COLUMNS, UNPACKED, Record, RowWidths, Tally, counting
from pack_data.formats.source import Source, module_of, open_source
from pack_data.reading.account import Account
from pack_data.reading.fields import printable, said_of
from pack_data.reading.files import only_writer

# The kind of records that each target format holds.
TARGETS = {
    "mlperf_tfrecord": "examples",
    "packed_tfrecord": "packs",
    "parquet": "tokens",
    "arrow": "tokens",
    "jsonl": "tokens",
    "packed_parquet": "token_packs",
}
# The way out for a kind that the target does not hold.
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


class _Converted(NamedTuple):
    to_format: str
    kind: str
    written: int  # records of the kind
    account: str


def _format_of_name(destination: str, kind: str) -> str:
    """Return the format that a file name asks for. ValueError if there is none for its suffix."""
    suffix = os.path.splitext(destination)[1]
    if destination.endswith((".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")):
        if UNPACKED[kind] == "tokens":
            raise ValueError(
                f"{destination}: token sequences are written as .parquet, .arrow or .jsonl"
            )
        return "packed_tfrecord" if kind == "packs" else "mlperf_tfrecord"
    if suffix in (".parquet", ".arrow", ".jsonl"):
        return suffix[1:]
    if suffix in (".h5", ".hdf5"):
        raise ValueError(
            f"{destination}: HDF5 is only read; write .tfrecord, .parquet, .arrow or .jsonl"
        )
    raise ValueError(
        f"{destination}: the name does not determine the format; add --to-format {'|'.join(TARGETS)}"
    )


def _format_and_kind(
    source: Source, destination: str, to_format: str, unpack: bool
) -> Tuple[str, str]:
    """Return the target format and the kind of records to write. ValueError if the format does not hold them."""
    kind = source.unpacked_kind if unpack else source.kind
    if to_format == "auto":
        to_format = _format_of_name(destination, kind)
    if UNPACKED[kind] == "examples" and UNPACKED[TARGETS[to_format]] == "tokens":
        raise ValueError(f"{destination}: {NO_COLUMNS}")
    if kind == "packs" and to_format == "mlperf_tfrecord":
        kind = "examples"
    if kind != TARGETS[to_format]:
        raise ValueError(
            f"{source.path} holds {kind}, {to_format} holds {TARGETS[to_format]}; {_INSTEAD[kind]}"
        )
    return to_format, kind


def _check_destination(source: Source, destination: str) -> None:
    """Raise ValueError if the destination is one of the files that are read, or lies among them."""
    if os.path.exists(destination):
        is_inside = Path(source.path).resolve() in Path(destination).resolve().parents
        if is_inside or any(os.path.samefile(destination, file) for file in source.files):
            raise ValueError(
                f"{destination}: is one of the files to read, or lies among them; name another one"
            )


def _convert(
    source: Source, destination: str, to_format: str, unpack: bool, widths: RowWidths
) -> _Converted:
    """Write every good record of `source` to `destination`.

    unpack: take packs apart into sequences, even if the target could hold packs. widths: row widths of an unpacked
    TFRecord (S and P), where they differ from those of the source. ValueError for a mistake.
    """
    to_format, kind = _format_and_kind(source, destination, to_format, unpack)
    _check_destination(source, destination)
    if to_format == "mlperf_tfrecord":
        chosen = (
            given if given is not None else default
            for given, default in zip(widths, source.example_shape())
        )
        widths = RowWidths(*chosen)

    went_out: Tally = {}

    def records() -> Iterator[Record]:
        read = source.read() if kind == source.kind else source.examples()
        with progress_bar(None, f"{source.format} to {to_format}", unit=" records") as bar:
            for record in counting(read, kind, went_out):
                bar.update()
                if to_format == "packed_parquet":
                    source.lose(record.foreign)
                yield record
        if not went_out["records"]:
            raise ValueError(f"{source.path}: has no record to convert")
        # Checked before the writer replaces the destination.
        with said_of(source.path):
            _account(source, went_out)

    module = module_of(to_format)
    # Two conversions to one place would spoil it. The holder of the lock removes what killed ones have left there.
    path = Path(destination) if Path(destination).name else Path(destination).resolve()
    with only_writer(path):
        if hasattr(module, "write"):
            written = module.write(destination, records(), widths, to_format)
        else:
            written = sequence_output.write(destination, records, to_format)
    assert written == went_out["yielded"], (written, went_out)
    return _Converted(to_format, kind, written, _account(source, went_out))


def _account(source: Source, went_out: Tally) -> str:
    """Describe what came in and what went out. ValueError if it does not add up."""
    came_in = source.came_in
    bad = source.bad.count
    reasons = {"bad, whose tokens are not counted": bad}
    records = Account(came_in["records"] + bad, went_out["records"], reasons)
    tokens = Account(came_in["tokens"], went_out["tokens"], {})
    return f"{records.text('records')}, {tokens.text('tokens')}"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Convert the file or data set that the arguments name."""
    parser = ArgumentParser(
        prog=typed("convert"),
        description="One file format to another, and packs back to sequences.",
    )
    parser.add_argument(
        "source", metavar="SRC", help="a file, a directory of files, or a data set of this package"
    )
    parser.add_argument(
        "destination",
        metavar="DST",
        help="the file to write (.tfrecord[.gz], .parquet, .arrow, .jsonl)",
    )
    parser.add_argument(
        "--from-format",
        choices=("auto",) + tuple(FORMATS),
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(FORMATS)}; default: determined from the content",
    )
    parser.add_argument(
        "--to-format",
        choices=("auto",) + tuple(TARGETS),
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(TARGETS)}; default: determined from the name of DST",
    )
    parser.add_argument("--unpack", action="store_true", help="take packs apart into sequences")
    add_reading_options(parser)
    add_columns(parser)
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
        *(
            "--from-format",
            "--max-record-bytes",
            "--columns",
            "--split",
            "--max-sequence-length",
            "--max-predictions-per-sequence",
        )
    )
    args = parser.parse_args(argv)
    source = open_source(
        args.source,
        args.from_format,
        args.skip_bad,
        args.columns,
        args.max_record_bytes,
        args.split,
    )
    summary = source.summary(has_others=True)
    widths = RowWidths(args.max_sequence_length, args.max_predictions_per_sequence)
    done = _convert(source, args.destination, args.to_format, args.unpack, widths)
    line = (
        f"{args.source} ({source.format}, {_WORDS[source.kind]}) -> {args.destination} ({done.to_format}): "
        f"{done.written:,} {_WORDS[done.kind]}"
    )
    print(printable(f"{args.source}: {done.account}"))
    print(printable(line))
    print(summary, file=sys.stderr)
    if source.bad.count:
        print(source.report(), file=sys.stderr)
    if source.foreign_lost:
        lost = printable(", ".join(source.foreign_lost))
        print(
            f"left out: {lost} (values of whole packs, for which {done.to_format} has no column)",
            file=sys.stderr,
        )
    return 0
