"""Pack a histogram of lengths with one packer, or the sequences of a file into rows of indices.

`--packer NAME`, then the options of that packer; or `SOURCE ... --rows FILE`, then the options of `_main_of_rows`.
"""

from __future__ import annotations

from typing import Optional, Sequence

from pack_data.cli.command import (
    ArgumentParser,
    check_output,
    count_from_zero,
    parse_depth,
    positive_int,
    typed,
)
from pack_data.display.accounting import table
from pack_data.lengths import packer_command
from pack_data.packers import PACKERS

_DEFAULT = "optimal"
_ROWS = "--rows"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the main function of the packer's module, or `_main_of_rows` if --rows is given."""
    parser = ArgumentParser(prog=typed("pack"), add_help=False, allow_abbrev=False)
    parser.add_argument("--packer", choices=PACKERS, default=_DEFAULT)
    args, others = parser.parse_known_args(argv)
    if any(option.split("=")[0] == _ROWS for option in others):
        return _main_of_rows(others)
    if {"-h", "--help", "--help-all"} & {*others}:
        names = f"NAME is one of\n{', '.join(PACKERS)} (default {_DEFAULT})\n"
        print(f"{typed('pack')} [--packer NAME] [options]; {names}")
        print(f"{typed('pack')} --rows FILE SOURCE writes the indices of each row; add --help\n")
    return packer_command.main(args.packer, others)


def _main_of_rows(argv: Sequence[str]) -> int:
    """Pack the sequences of files and write the rows, for other loaders; return the exit status."""
    from pack_data.lengths.counting import lengths_in
    from pack_data.lengths.overlong import RULES
    from pack_data.pack_lengths import ROWS_ENDINGS, pack

    parser = ArgumentParser(
        prog=typed("pack"), description="Pack sequences, and write the indices of each row."
    )
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a file with one length per line (.txt, .lengths), an array of lengths (.npy), or a file or directory of "
        "sequences",
    )
    parser.add_argument(
        _ROWS,
        required=True,
        metavar="FILE",
        help=".parquet or .jsonl: a list of indices in each row; .npy: flat indices, and rows.offsets.npy beside "
        "rows.npy",
    )
    parser.add_argument(
        "--max-sequence-length",
        type=positive_int,
        metavar="S",
        help="slots in a row; default the longest sequence",
    )
    parser.add_argument(
        "--max-sequences-per-pack", type=parse_depth, metavar="D", help="default unlimited"
    )
    parser.add_argument(
        "--multiple-of", type=positive_int, default=1, metavar="M", help="rounds each length up"
    )
    parser.add_argument(
        "--longer",
        choices=RULES,
        default="raise",
        help="sequences longer than a row; default raise",
    )
    parser.add_argument(
        "--seed", type=count_from_zero, default=0, help="of the order of the rows; default 0"
    )
    args = parser.parse_args(argv)
    check_output(_ROWS, args.rows, reads=args.source, endings=ROWS_ENDINGS)

    lengths = lengths_in(args.source)
    longest = int(lengths.max(initial=1))
    try:
        packed = pack(
            lengths,
            max_sequence_length=args.max_sequence_length
            or -(-longest // args.multiple_of) * args.multiple_of,
            max_sequences_per_pack=args.max_sequences_per_pack,
            seed=args.seed,
            longer=args.longer,
            multiple_of=args.multiple_of,
            progress=True,
        )
    except ValueError as error:
        raise ValueError(f"{', '.join(args.source)}: {error}") from None
    packed.save_rows(args.rows)
    print(table(packed.packing))
    if packed.fitted.longer.longer:
        print(f"\n{packed.fitted.longer}")
    print(f"\nrows written to {args.rows}")
    return 0
