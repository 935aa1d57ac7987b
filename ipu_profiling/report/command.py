"""Turn cycle counts into the paper's tables: `python profiling/overhead_report.py`.

The report starts with the overhead of a packed row and the speed-ups of the graph and of the whole run, computed by
the analytic IPU cycle model (no IPU needed), beside the paper's values. Without options they are those of BERT-large at
512 slots with the published Wikipedia histogram. The notes below a table name the source of each column; --json has it
as hardware (run logs with PopTorch's cycle counter), profile (PopVision), predicted and fitted (analytic model), paper,
published (measured by others), computed (arithmetic) or config.

  --config A           the gain of packing for the runs of this configuration (--set changes it)
  --table 1            Table 1 of the packedBERT paper for --config
  --table 2            Table 2: base and large, 128 and 384
  --table breakdown    the overhead by cause, the cycles of each IPU, the time of an update by part
  --table points       published measurements and the model's errors
  --figure 1           Figure 1: lengths and theoretical speed-ups of bundled histograms
  --figure 2           Figure 2: the mask of a pack, computed by the model
  --figure 5           Figure 5 and section 4.4: packing and un-padding on 1 to 2,048 accelerators
  --all                all of these
  --html FILE          one page with the tables and figures that you name, or with all if you name none
  --plot FILE          the pictures of the tables and figures that you name
  --measured SOURCE    measured and modelled cycles of an update and, from a profile, of each IPU

A SOURCE is the directory of a run, a bundle of ipu-check, or a profile.pop (with the Poplar SDK).
If the counted memory of a configuration exceeds an IPU's, no sequences/s are printed and the exit status is 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.data.factors import parse_factor
from ipu_profiling.report import DEFAULT, FIGURES, TABLES
from pack_data.cli.option_types import positive_int
from pack_data.cli.outputs import check_page, check_picture
from pack_data.cli.parser import ArgumentParser, typed
from pack_data.cli.terminal import progress_bar
from pack_data.lengths.options import add_histogram_arguments
from pack_data.reading.words import counted


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog=typed("report"), description=__doc__)
    what = parser.add_argument_group("what to print")
    what.add_argument(
        "--table",
        choices=TABLES,
        action="append",
        default=[],
        help="a table, described by --help-all; repeat for more",
    )
    what.add_argument(
        "--figure",
        choices=FIGURES,
        action="append",
        default=[],
        help="a figure of the paper, described by --help-all; repeat for more",
    )
    what.add_argument("--all", action="store_true", help="all tables and figures")
    model = parser.add_argument_group("what to model")
    model.add_argument("--config", metavar="FILE|NAME", help=f"configuration; default {DEFAULT}")
    model.add_argument(
        "--set",
        dest="overrides",
        metavar="a.b=c",
        action="append",
        default=[],
        help="override a setting",
    )
    model.add_argument(
        "--packing-factor",
        type=parse_factor,
        help="mean sequences per pack, in place of the histogram's",
    )
    add_histogram_arguments(parser)
    runs = parser.add_argument_group("runs and profiles")
    runs.add_argument(
        "--measured",
        type=Path,
        metavar="SOURCE",
        action="append",
        default=[],
        help="compare the cycles of a run, a bundle or a profile with the model; repeat for more",
    )
    runs.add_argument(
        "--micro-batches",
        type=positive_int,
        metavar="N",
        help="micro-batches in an update of --measured, which a profile does not state",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object in place of text")
    out.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write one page with all tables and pictures in place of text",
    )
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the pictures as .png, .pdf or .svg"
    )
    parser.rare("--synthetic", "--max-sequence-length", "--columns", "--split")
    parser.rare("--packing-factor", "--measured", "--micro-batches", "--plot")
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; the exit status is 1 if the configuration does not fit."""
    args = _parser().parse_args(argv)
    if args.html is not None:
        check_page("--html", args.html, reads=[args.histogram])
    if args.plot is not None:
        check_picture("--plot", args.plot, reads=[args.histogram])
        if (args.table or args.measured) and not (args.figure or args.all):
            raise ValueError("--plot: the tables have no pictures; add --figure 1, 2 or 5")
    # The cycle model and its tables are loaded once the options are accepted.
    from ipu_profiling.report import pictures
    from ipu_profiling.report.report import Report
    from pack_data.display.picture import write

    report = Report(args)
    # It takes seconds unless an earlier call stored the graphs in the cache.
    with progress_bar(None, "cycles of the graph", at_once=True):
        report.run()

    if args.json:
        print(json.dumps(report.tree(), indent=1))
    elif args.html is None:
        print(report.text())
        if not report.tables:
            print(
                "the paper's Table 1: --table 1; all tables: --all; a page with pictures: --html FILE",
                file=sys.stderr,
            )
    if args.plot is not None:
        drawn = [picture for table in report.tables for picture in pictures.pictures(table)]
        write(drawn, args.plot)
        print(f"wrote {args.plot}: {counted(len(drawn), 'picture')}", file=sys.stderr)
    if args.html is not None:
        page = report.page()
        page.write(args.html)
        print(
            f"wrote {args.html}: {len(page.pictures())} pictures, {len(page.tables())} tables",
            file=sys.stderr,
        )
    if report.too_large:
        print(report.too_large, file=sys.stderr)
    return 1 if report.too_large else 0
