"""From cycle counts to the paper's tables: python profiling/overhead_report.py

Without options: what packing gains of a whole run of BERT-large at 512, in ten lines, from the analytic IPU cycle
model (no IPU needed) and the published Wikipedia histogram. Every column names its source: hardware (run logs with
PopTorch's cycle counter), profile (PopVision), predicted and fitted (analytic model), host (seconds), paper, published
(measured by others), computed (arithmetic), config.

  --config A           what packing gains of the runs of this configuration (--set changes it)
  --table 1            Table 1 of the packedBERT paper, of --config; the same answer stands below it
  --table 2            Table 2: base and large, 128 and 384
  --table parts        what the overhead consists of
  --table ipus         cycles of each IPU, the slowest
  --table update       what an update's time consists of
  --table points       published measurements, the model's errors and those of "31 % of peak"
  --all                all of these
  --html FILE          one page to look at, of what is asked for; of everything where nothing is
  --measured SOURCE    measured cycles beside the model's: of an update, of each IPU, of each class of operator
  --packed SOURCE --unpacked SOURCE     the overhead of two measured runs of as many packs an update

A SOURCE is the folder of a run, a bundle of ipu-check, or a profile.pop (with the Poplar SDK).
Where the counted memory of a configuration exceeds an IPU's, no sequences/s are given and the exit status is 1.
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
from ipu_packed_bert.cycles.arrangement import UNPACKED
from ipu_packed_bert.cycles.matmul import cache_folder
from ipu_packed_bert.cycles.pipeline import Parameters
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.cycles.uncertainty import Interval
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.data.factors import parse_factor
from ipu_packed_bert.planning.plan import memory_words, plan
from ipu_packed_bert.report import headline, measured, paper, pictures
from ipu_packed_bert.report.packings import factor_of, packing
from ipu_packed_bert.settings.pretraining import Config, config_from_tree, load_config
from ipu_packed_bert.settings.shipped import FOLDER, config_file
from pack_data import sort
from pack_data.cli.command import ArgumentParser, check_page, progress_bar, typed
from pack_data.display.page import Page
from pack_data.display.table import Table, wrapped
from pack_data.lengths.options import add_histogram_arguments, histogram_from

DEFAULT = "packed_phase2_pod16"
_TABLES = ("1", "2", "parts", "ipus", "update", "points")


def _parser() -> ArgumentParser:
    found = ArgumentParser(prog=typed("report"), description=__doc__)
    what = found.add_argument_group("what to print")
    what.add_argument(
        "--table", choices=_TABLES, action="append", default=[], help="several may be given; --help-all explains"
    )
    what.add_argument("--all", action="store_true", help="all of these")
    where = found.add_argument_group("of what")
    where.add_argument("--config", metavar="FILE|NAME", help=f"configuration; default {DEFAULT}")
    where.add_argument(
        "--set", dest="overrides", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override a setting"
    )
    where.add_argument(
        "--packing-factor", type=parse_factor, help="sequences per pack instead of what the histogram gives"
    )
    add_histogram_arguments(found)
    runs = found.add_argument_group("runs and profiles")
    runs.add_argument("--measured", type=Path, metavar="SOURCE", action="append", default=[], help="beside the model")
    runs.add_argument("--packed", type=Path, metavar="SOURCE")
    runs.add_argument("--unpacked", type=Path, metavar="SOURCE", help="the same of unpacked rows")
    out = found.add_argument_group("how")
    out.add_argument("--json", action="store_true", help="one JSON object in place of text")
    out.add_argument(
        "--html", type=Path, metavar="FILE", help="one page with all tables and pictures, in place of text"
    )
    found.rare("--synthetic", "--max-sequence-length", "--packing-factor", "--measured", "--packed", "--unpacked")
    return found


class _OverheadReport:
    """One call of the command: its options, the modelled machine, and the tables made so far."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.folder = cache_folder()
        self.calibration = calibration.load()
        self.config = self._load(args.config or DEFAULT, args.overrides)
        self.machine = Machine(TARGETS[self.config.placement.machine], self.folder)
        self.too_large: Optional[str] = None  # why the configuration does not fit
        self.answer: Optional[Table] = None  # what packing gains: first in a page, last on a terminal
        self.tables: List[Table] = []
        self.about: List[str] = []  # what they are about, for the title of a page

    def _load(self, name: str, overrides: Sequence[str] = ()) -> Config:
        """A configuration for IPUs."""
        return load_config(config_file(name), ["without_ipus=null", *overrides])

    def _machine_of(self, config: Config) -> Machine:
        """The machine that a configuration names, with this report's traces."""
        wanted = config.placement.machine
        if wanted == self.machine.target.name:
            return self.machine
        return Machine(TARGETS[wanted], self.folder, self.machine.traces)

    def _factor(self, config: Config, depth: Optional[int]) -> float:
        """Sequences of a pack."""
        return factor_of(
            config,
            config.data.packer,
            depth,
            given=self.args.packing_factor,
            histogram=histogram_from(self.args),
            folder=self.folder,
        ).value

    @property
    def _depth(self) -> int:
        """The packing depth of tables that compare packed with unpacked; 3 where the configuration names none."""
        depth = self.config.data.max_sequences_per_pack
        return depth if depth and depth > 1 else 3

    @cached_property
    def _packing_factor(self) -> float:
        return self._factor(self.config, self._depth)

    @cached_property
    def _comparison(self) -> paper.ModelledOverhead:
        return paper.ModelledOverhead(self.machine, self.config, self.calibration)

    def _too_large(self) -> Optional[str]:
        """A line that says so where the configuration's counted memory exceeds an IPU's, else None."""
        data = replace(self.config.data, max_sequences_per_pack=self._depth)
        made = plan(replace(self.config, data=data), packing_factor=1.0)  # which no memory depends on
        if made.fits is not False:
            return None
        return f"{self.config.name}: {'; '.join(memory_words(made, made.micro_batch_that_fits()))}"

    # Tables ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All that was asked for."""
        args = self.args
        self._measured()
        asked = list(args.table)
        bare = not (asked or self.tables or args.all)
        if args.all or (bare and args.html is not None):
            asked = list(_TABLES)
        if bare or {"1", "parts", "ipus", "update"} & set(asked):
            self.too_large = self._too_large()
            self.about.insert(0, self.config.name)
        makers = (self._table1, self._table2, self._parts, self._ipus, self._update, self._points)
        self.tables += [make() for name, make in zip(_TABLES, makers) if name in asked]
        if bare or "1" in asked:
            self.answer = headline.headline(
                self._comparison, self.config, self._depth, self._packing_factor, self.too_large
            )
        self.machine.save()

    def _table1(self) -> Table:
        histogram, config = histogram_from(self.args), self.config
        if config.data.max_sequence_length != histogram.max_sequence_length:
            raise ValueError(
                f"{config.path}: data.max_sequence_length is {config.data.max_sequence_length}, the histogram "
                f"{histogram.name} is of {histogram.max_sequence_length}; give a matching --config"
            )
        packings = {key: packing(histogram, *key, folder=self.folder) for key in paper.ROWS}
        batching = sort.batch(histogram, batch_size=256)
        return paper.table1(self._comparison, packings, batching, histogram.name)

    def _table2(self) -> Table:
        return paper.table2(self.machine, lambda name: self._load(str(FOLDER / name)), self.calibration)

    def _parts(self) -> Table:
        return paper.decomposition(self._comparison, self._depth)

    def _ipus(self) -> Table:
        config = self.config
        factor = self._factor(config, config.data.max_sequences_per_pack)
        accumulation = config.accumulation(factor)
        return paper.breakdown(config.name, self.machine.pipeline(config), accumulation, self.calibration)

    def _update(self) -> Table:
        config = self.config
        packed = self.machine.pipeline(config, depth=self._depth)
        unpacked = self.machine.pipeline(config, arrangement=UNPACKED, depth=1)
        both = (packed, config.accumulation(self._packing_factor)), (unpacked, config.batch.gradient_accumulation)
        return paper.update(config.name, *both, self.calibration)

    def _points(self) -> Table:
        return paper.points(self.calibration)

    # What was measured ----------------------------------------------------------------------------------------------

    def _measured(self) -> None:
        args = self.args
        for number, table in enumerate(map(self._beside, args.measured), start=1):
            if len(args.measured) > 1:
                table = table._replace(name=f"{table.name} {number}", title=f"{table.title}, source {number}")
            self.tables.append(table)
        if (args.packed is None) != (args.unpacked is None):
            raise ValueError("--packed and --unpacked belong together; give both")
        if args.packed is not None:
            self.about.append(f"{args.packed} against {args.unpacked}")
            packed, unpacked = measured.read(args.packed), measured.read(args.unpacked)
            measured.check_pair(packed, unpacked)
            self.tables.append(
                paper.measured(packed, unpacked, args.packing_factor, self._modelled_pair(packed, unpacked))
            )

    def _beside(self, path: Path) -> Table:
        given = self.config if self.args.config else None
        found = measured.read(path, ipus=given.placement.ipus_per_replica if given else None)
        config = measured.configuration(found, given)
        number = found.micro_batches or config.accumulation(self._factor(config, config.data.max_sequences_per_pack))
        self.about.append(config.name)
        return measured.beside(found, config, number, self._machine_of(config).pipeline(config), self.calibration)

    def _modelled_pair(self, packed: measured.Measured, unpacked: measured.Measured) -> Optional[Interval]:
        """The model's overhead of two runs that counted cycles, as many micro-batches in an update as they had.

        None where the runs do not say their settings, or counted seconds.
        """
        pipelines = []
        for each in (packed, unpacked):
            if each.unit != "cycles" or "model" not in each.settings or not each.micro_batches:
                return None
            config = config_from_tree({**each.settings, "without_ipus": None}, each.detail)
            packs = each.micro_batches * config.batch.micro_batch * config.placement.replicas
            pipelines.append((self._machine_of(config).pipeline(config), each.micro_batches, packs))

        def overhead(parameters: Parameters) -> Any:
            first, second = (line.step(number, parameters).cycles / packs for line, number, packs in pipelines)
            return first / second - 1.0

        return self.calibration.draws.interval(overhead)

    # What comes of it -----------------------------------------------------------------------------------------------

    @property
    def all_tables(self) -> List[Table]:
        return [*([self.answer] if self.answer is not None else []), *self.tables]

    def words(self) -> List[str]:
        """What holds for all tables."""
        parameters, errors = self.calibration.parameters, self.calibration.report
        unknown = ", ".join(f"{operator} x{times}" for operator, times in sorted(self.machine.unknown.items()))
        return [
            f"Model: 4 fitted parameters (factor {parameters.factor}, {parameters.framework} times that of PopART's "
            f"graphs; layout {parameters.layout} cycles/byte; host "
            f"{1e3 * parameters.replica_seconds:.1f} ms a call and replica). {len(errors['points'])} published "
            f"throughputs, each left out of its own fit: {100 * errors['mean_error']['left_out']:.1f} % off on "
            f"average, {100 * errors['worst_error']['left_out']:.1f} % at worst.",
            f"Operators without an estimator, costed as elementwise work: {unknown or 'none'}.",
        ]

    def page(self) -> Page:
        name = ", ".join(dict.fromkeys(self.about))
        lead = (
            f"What packing costs on an IPU and what it brings, {name}: cycles of the analytic model beside what the "
            "paper and others measured."
        )
        return pictures.page_of(name, lead, self.all_tables, self.words())

    def text(self) -> str:
        """The tables, what holds for all of them where there are any, and the answer."""
        said: Set[str] = set()
        parts = [table.text(said) for table in self.tables]
        if parts:
            parts.append("\n".join(line for words in self.words() for line in wrapped(words)))
        return "\n\n".join([*parts, *([self.answer.text()] if self.answer is not None else [])])


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = _parser().parse_args(argv)
    if args.html is not None:
        check_page("--html", args.html, reads=[args.histogram])
    report = _OverheadReport(args)
    with progress_bar(None, "cycles of the graph", at_once=True):  # seconds where no earlier call has kept them
        report.run()
    if args.json:
        parameters = report.calibration.parameters
        print(
            json.dumps(
                {
                    "calibration": {
                        "factor": parameters.factor,
                        "framework": parameters.framework,
                        "layout_cycles_per_byte": parameters.layout,
                        "replica_seconds": parameters.replica_seconds,
                    },
                    "unknown_operators": report.machine.unknown,
                    "does_not_fit": [report.too_large] if report.too_large else [],
                    "tables": [table.to_json() for table in report.all_tables],
                },
                indent=1,
            )
        )
    elif args.html is None:
        print(report.text())
        if not report.tables:
            print(
                "the paper's Table 1: --table 1; all tables: --all; a page with pictures: --html FILE", file=sys.stderr
            )
    if args.html is not None:
        page = report.page()
        page.write(args.html)
        print(f"wrote {args.html}: {len(page.pictures())} pictures, {len(page.tables())} tables", file=sys.stderr)
    if report.too_large:
        print(report.too_large, file=sys.stderr)
    return 1 if report.too_large else 0
