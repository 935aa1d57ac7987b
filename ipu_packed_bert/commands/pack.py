"""Pack a histogram of lengths with one packer: `--packer NAME`, then the options of that packer."""

from __future__ import annotations

import importlib
from typing import Optional, Sequence

from pack_data.cli.command import ArgumentParser, typed
from pack_data.packers import PACKERS

_DEFAULT = "optimal"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the main function of the packer's module."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--packer", default=_DEFAULT)
    args, others = parser.parse_known_args(argv)
    if args.packer not in PACKERS:
        raise ValueError(
            f"--packer {args.packer}: no such packer; choose one of {', '.join(PACKERS)}"
        )
    if {"-h", "--help", "--help-all"} & {*others}:
        names = f"NAME is one of\n{', '.join(PACKERS)} (default {_DEFAULT})\n"
        print(f"{typed('pack')} [--packer NAME] [options]; {names}")
    return importlib.import_module(f"pack_data.{args.packer}").main(others)
