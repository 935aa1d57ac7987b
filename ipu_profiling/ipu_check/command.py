"""Compile a program, make ten updates on IPUs, and compare them with the plan and the cycle model.

packed-bert ipu-check --config packed_phase2_pod16

The command counts the cycles of the updates. With --profile it profiles the program instead, which gives memory and
cycles of each IPU (slower; needs Poplar's analysis library).

Each stage prints a line when it is done; a stage that fails prints the cause and the remedy. The bundle (bundle.json,
see docs/ipu_check.md), which can be attached to a report, is written after every stage, so Ctrl-C keeps the results so
far. No data set is read: the batch is random.

Exit status: 0 all stages are done and nothing differs; 1 a stage failed, the program does not fit or a number differs;
2 a usage error.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from pack_data.cli.command import ArgumentParser, typed


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Check a configuration on the attached IPUs; return the exit status."""
    args = _parse(argv)
    # The cycle model is loaded once the options are accepted.
    from ipu_profiling.ipu_check.stages import check

    return check(args)


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("ipu-check"), description=__doc__)
    parser.add_argument(
        "--config", required=True, metavar="FILE|NAME", help="a pre-training configuration"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help="override a setting; may be repeated",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="profile the updates instead of counting their cycles",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory to write (default runs/ipu-check-NAME-TIME)",
    )
    return parser.parse_args(argv)
