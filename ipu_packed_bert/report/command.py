"""Turn cycle counts into the paper's tables: `python profiling/overhead_report.py`.

The report starts with three lines: the overhead of a packed row and the speed-ups of the graph and of the whole run,
computed by the analytic IPU cycle model (no IPU needed), and the paper's values, quoted. Without options they are those
of BERT-large at 512 slots with the published Wikipedia histogram. Every column names its source: hardware (run logs
with PopTorch's cycle counter), profile (PopVision), predicted and fitted (analytic model), paper, published (measured
by others), computed (arithmetic), config.

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

import argparse
import json
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, List, Optional, Sequence, Set

from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.matmul import cache_folder
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.data.factors import parse_factor, planned_factor
from ipu_packed_bert.planning.plan import plan
from ipu_packed_bert.planning.printing import memory_words
from ipu_packed_bert.report import figures, measured, paper, pictures
from ipu_packed_bert.report.breakdown import breakdown
from ipu_packed_bert.report.headline import Headline, headline
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import FOLDER, config_file
from pack_data import sort
from pack_data.cli.command import (
    ArgumentParser,
    check_page,
    check_picture,
    counted,
    positive_int,
    progress_bar,
    typed,
)
from pack_data.display.page import Page
from pack_data.display.picture import write
from pack_data.display.table import Table, wrapped
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packers import get_packer

DEFAULT = "packed_phase2_pod16"
_TABLES = ("1", "2", "breakdown", "points")
_FIGURES = ("1", "2", "5")
_OF_THE_CONFIGURATION = {"1", "breakdown"}
_WITHOUT_MODEL = {f"figure{number}" for number in _FIGURES}  # tables
_SORT_BATCH = 256  # sequences of a batch of SORT, as in the paper's Table 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog=typed("report"), description=__doc__)
    what = parser.add_argument_group("what to print")
    what.add_argument(
        "--table",
        choices=_TABLES,
        action="append",
        default=[],
        help="a table, described by --help-all; repeat for more",
    )
    what.add_argument(
        "--figure",
        choices=_FIGURES,
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


def _load(name: str, overrides: Sequence[str] = ()) -> Config:
    """Load a configuration for IPUs."""
    texts = ["without_ipus=null", *overrides]
    return load_config(config_file(name), texts, command="pretrain").with_micro_batch(1.0)


def _load_shipped(file: str) -> Config:
    """Load a file of configs/ for IPUs."""
    return _load(str(FOLDER / file))


class _Report:
    """One call of the command: its options, the modelled machine, and its tables."""

    def __init__(self, args: argparse.Namespace):
        if args.micro_batches is not None and not args.measured:
            raise ValueError(
                "--micro-batches: needs --measured SOURCE; add it, or leave --micro-batches out"
            )
        self.args = args
        self.folder = cache_folder()
        self.calibration = calibration.load()
        self.config = _load(args.config or DEFAULT, args.overrides)
        self.machine = Machine(TARGETS[self.config.placement.machine], self.folder)
        self.too_large: Optional[str] = None  # the reason why the configuration does not fit
        self.answer: Optional[Headline] = None
        self.tables: List[Table] = []
        self.about: List[str] = []  # the configurations of the tables, for the title of a page

    def run(self) -> None:
        """Compute the tables that the options name."""
        args = self.args
        for number, path in enumerate(args.measured, start=1):
            table = self._measured(path)
            if len(args.measured) > 1:
                table = table._replace(
                    name=f"{table.name} {number}", title=f"{table.title}, source {number}"
                )
            self.tables.append(table)

        bare = not (args.table or args.figure or args.measured or args.all)
        everything = args.all or (bare and (args.html or args.plot))
        names = [name for name in _TABLES if everything or name in args.table]
        if bare or _OF_THE_CONFIGURATION & set(names):
            self.too_large = self._too_large()
            self.about.insert(0, self.config.name)
        self.tables += map(self._table, names)
        numbers = [number for number in _FIGURES if everything or number in args.figure]
        self.tables += map(self._figure, numbers)
        if bare or "1" in names:
            self.answer = headline(
                self._comparison, self.config, self._depth, self._packing_factor, self.too_large
            )
        self.machine.save()

    def _table(self, name: str) -> Table:
        """Compute a table by its name on the command line."""
        if name == "1":
            return self._table1()
        if name == "2":
            return paper.table2(self.machine, _load_shipped, self.calibration)
        if name == "breakdown":
            return breakdown(self._comparison, self._depth, self._packing_factor)
        return paper.points(self.calibration)

    def _table1(self) -> Table:
        config = self.config
        histogram = histogram_from(self.args)
        if config.data.max_sequence_length != histogram.max_sequence_length:
            raise ValueError(
                f"{config.path}: data.max_sequence_length is {config.data.max_sequence_length}, that of the histogram "
                f"{histogram.name} is {histogram.max_sequence_length}; pass a matching --config"
            )
        packings = {}
        for packer, depth in paper.ROWS:
            packings[packer, depth] = get_packer(packer)(histogram, max_sequences_per_pack=depth)
        batching = sort.batch(histogram, batch_size=_SORT_BATCH)
        return paper.table1(self._comparison, packings, batching, histogram.name)

    def _figure(self, number: str) -> Table:
        """Compute a figure of the paper by its number."""
        if number == "1":
            return figures.figure1()
        if number == "2":
            return figures.figure2()
        histogram = histogram_from(self.args)
        return figures.figure5(histogram, self.config.model.hidden_size, self._packing_factor)

    def _measured(self, path: Path) -> Table:
        """Compare a measured source with the model."""
        named_config = self.config if self.args.config else None
        ipus = named_config.placement.ipus_per_replica if named_config else None
        source = measured.read(path, ipus=ipus)
        config = measured.configuration(source, named_config)
        self.about.append(config.name)

        source = measured.with_micro_batches(source, self.args.micro_batches)
        target = TARGETS[config.placement.machine]
        machine = self.machine
        if target is not machine.target:
            machine = Machine(target, self.folder, machine.traces)
        pipeline = machine.pipeline(config)
        return measured.beside(source, config, pipeline, self.calibration)

    # ---- of the configuration ----------------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        """Most sequences of a pack in tables that compare packed with unpacked; 3 if the configuration has no packs."""
        depth = self.config.data.max_sequences_per_pack
        return depth if depth and depth > 1 else 3

    @cached_property
    def _packing_factor(self) -> float:
        """Mean sequences per pack: of --packing-factor, of the histogram, or of the paper."""
        data = self.config.data
        factor = planned_factor(
            data.max_sequence_length,
            data.packer,
            self._depth,
            given=self.args.packing_factor,
            histogram=histogram_from(self.args),
        )
        if factor is None:
            raise ValueError(
                f"{self.config.path}: data.max_sequence_length is {data.max_sequence_length}, for which there is no "
                "published histogram; pass --packing-factor or --histogram"
            )
        return factor.value

    @cached_property
    def _comparison(self) -> paper.ModelledOverhead:
        return paper.ModelledOverhead(self.machine, self.config, self.calibration)

    def _too_large(self) -> Optional[str]:
        """Return a line if the configuration's counted memory exceeds an IPU's, else None."""
        data = replace(self.config.data, max_sequences_per_pack=self._depth)
        # No memory depends on the packing factor.
        counted = plan(replace(self.config, data=data), packing_factor=1.0)
        if counted.fits is not False:
            return None
        words = "; ".join(memory_words(counted, counted.micro_batch_that_fits()))
        return f"{self.config.name}: {words}"

    # ---- output ------------------------------------------------------------------------------------------------------

    @property
    def _all_tables(self) -> List[Table]:
        return self.tables if self.answer is None else [*self.answer.tables, *self.tables]

    def _words(self) -> List[str]:
        """Return notes that apply to all tables."""
        parameters = self.calibration.parameters
        errors = self.calibration.report
        operators = [f"{name} x{calls}" for name, calls in sorted(self.machine.unknown.items())]
        unknown = ", ".join(operators) or "none"
        return [
            f"Model: 5 fitted parameters (factor {parameters.factor}, {parameters.framework} times that of PopART's "
            f"graphs; layout {parameters.layout} cycles/byte; host {1e3 * parameters.replica_seconds:.1f} ms per call "
            f"and replica, {1e3 * parameters.popart_replica_seconds:.1f} in PopART). Error of {len(errors['points'])} "
            f"published throughputs, each left out of its own fit: {100 * errors['mean_error']['left_out']:.1f} % on "
            f"average, {100 * errors['worst_error']['left_out']:.1f} % at worst.",
            f"Operators without an estimator, costed as elementwise work: {unknown}.",
        ]

    def page(self) -> Page:
        """Return the report as a page."""
        name = ", ".join(dict.fromkeys(self.about))
        lead = (
            f"Cost and gain of packing on an IPU, {name}: cycles of the analytic model and measurements of the paper "
            "and of others."
        )
        return pictures.page_of(name, lead, self._all_tables, self._words())

    def text(self) -> str:
        """Return the answer, and the tables with the notes that apply to all of them."""
        printed_notes: Set[str] = set()
        parts = []
        if self.answer is not None:
            parts.append("\n".join(self.answer.lines))
            parts += [table.text() for table in self.answer.tables[1:]]
        parts += [table.text(printed_notes) for table in self.tables]
        if any(table.name not in _WITHOUT_MODEL for table in self.tables):
            lines: List[str] = []
            for words in self._words():
                lines += wrapped(words)
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def tree(self) -> Any:
        """Return the report in types of JSON."""
        return {
            "calibration": calibration.named(self.calibration.parameters),
            "unknown_operators": self.machine.unknown,
            "does_not_fit": [self.too_large] if self.too_large else [],
            "tables": [table.to_json() for table in self._all_tables],
        }


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; the exit status is 1 if the configuration does not fit."""
    args = _parser().parse_args(argv)
    if args.html is not None:
        check_page("--html", args.html, reads=[args.histogram])
    if args.plot is not None:
        check_picture("--plot", args.plot, reads=[args.histogram])
    report = _Report(args)
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
        if not drawn:
            raise ValueError("--plot: the tables have no pictures; add --figure 1, 2 or 5")
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
