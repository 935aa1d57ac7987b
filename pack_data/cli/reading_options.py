"""The options of commands that read sequences or text."""

from __future__ import annotations

import argparse

from pack_data.cli.option_types import byte_count, count_from_zero
from pack_data.reading.bad_records import MOST_RECORD_BYTES


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add `--skip-bad`, `--split` and `--max-record-bytes`, which every command has that reads sequences or text."""
    parser.add_argument(
        "--skip-bad",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="skip up to N bad records or lines of text (default 0: the first is an error)",
    )
    add_split(parser)
    add_record_limit(parser)


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add `--columns` for sequences of tokens."""
    parser.add_argument(
        "--columns",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="A,B",
        help="Parquet, Arrow, JSONL: columns of integers (default input_ids)",
    )


def add_split(parser: argparse.ArgumentParser) -> None:
    """Add `--split` only."""
    parser.add_argument(
        "--split",
        default="",
        metavar="NAME",
        help="which of several splits of a directory to read, such as train",
    )


def add_record_limit(parser: argparse.ArgumentParser) -> None:
    """Add `--max-record-bytes` only."""
    parser.add_argument(
        "--max-record-bytes",
        type=byte_count,
        default=MOST_RECORD_BYTES,
        metavar="N",
        help="the largest record or line of JSON, unpacked, such as 1GiB; a larger one is a bad record "
        f"(default {MOST_RECORD_BYTES >> 20}MiB)",
    )
