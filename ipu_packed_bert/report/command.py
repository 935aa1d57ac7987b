"""From cycle counts to the paper's tables: python profiling/overhead_report.py, or python -m ipu_packed_bert.report

Without options: what packing gains, and Table 1 of the packedBERT paper for BERT-large at 512, from the analytic IPU
cycle model (no IPU needed) and the published Wikipedia histogram. Every column names its source: hardware (run logs
with PopTorch's cycle counter), profile (PopVision), predicted and fitted (analytic model), host (seconds), paper,
published (measured by others), computed (arithmetic), config.

  --table 1            the same of a --config
  --table 2            Table 2: base and large, 128 and 384
  --table parts        what the overhead consists of
  --table scaling      Figure 5: packing against un-padding on 1 to 2048 devices
  --table points       published measurements, the model's errors and those of "31 % of peak"
  --table schedule     an update over time: what each IPU does when; one picture with --plot or --html
  --table operators    cycles of each operator, class of operator and product; what an update's time consists of
  --all                all of these, and cycles of each IPU
  --html FILE          one page to look at, of what is asked for; of everything where nothing is
  --config A           cycles of each IPU, the bottleneck, sequences/s of all replicas
  --config A --config B          what if: any configurations
  --config A --set KEY=VALUE     what if: changed, against as written (data.max_sequences_per_pack=2)
  --measured SOURCE    measured cycles beside the model's: of an update, of each IPU, of each class of operator
  --packed RUN --unpacked RUN    two run folders of run_pretraining.py, or two profiles of as many packs

Where the counted memory of a configuration exceeds an IPU's, no sequences/s are given and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Container, List, Optional, Sequence, Set, Tuple

from ipu_packed_bert.cycles import arrangement, calibration, matmul, target, workload
from ipu_packed_bert.cycles.pipeline import Parameters
from ipu_packed_bert.planning.plan import RunPlan, memory_words, plan
from ipu_packed_bert.report import headline, measured, operators, paper, pictures, scaling, schedule, sources
from ipu_packed_bert.report.packings import Packings, packed_factor
from ipu_packed_bert.settings.pretraining import Config, config_from_tree, load_config
from ipu_packed_bert.settings.shipped import FOLDER, config_file
from pack_data import sort
from pack_data.cli.command import ArgumentParser, check_page, check_picture, typed
from pack_data.display.page import Page
from pack_data.display.picture import write_each
from pack_data.display.table import Table, as_csv, wrapped
from pack_data.histogram import LengthHistogram
from pack_data.lengths.factors import parse_factor, planned_factor
from pack_data.lengths.options import add_histogram_arguments, histogram_from

DEFAULT = FOLDER / "packed_phase2_pod16.yml"
_TABLES = ("1", "2", "parts", "scaling", "points", "schedule", "operators")


def _parser() -> argparse.ArgumentParser:
    found = ArgumentParser(prog=typed("report"), description=__doc__)
    what = found.add_argument_group("what to print (several may be given; Table 1 where none is)")
    what.add_argument("--table", choices=_TABLES, action="append", default=[])
    what.add_argument("--all", action="store_true", help="all of these, and more")
    where = found.add_argument_group("of what")
    where.add_argument(
        "--config", type=Path, action="append", default=[], help="configuration; two or more are compared"
    )
    where.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override a setting (in a comparison: of the last configuration)",
    )
    where.add_argument(
        "--packing-factor", type=parse_factor, help="sequences per pack instead of what the histogram gives"
    )
    add_histogram_arguments(found)
    runs = found.add_argument_group("runs and profiles instead of the model")
    runs.add_argument(
        "--measured",
        type=Path,
        metavar="SOURCE",
        action="append",
        default=[],
        help="measured beside predicted: a run's folder, a bundle of ipu-check, a profile.pop, or cycles as .json",
    )
    runs.add_argument("--packed", type=Path, help="run folder; or a profile.pop or its folder, with the Poplar SDK")
    runs.add_argument("--unpacked", type=Path, help="the same of unpacked rows")
    out = found.add_argument_group("how")
    out.add_argument("--json", action="store_true")
    out.add_argument("--csv", action="store_true")
    out.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png|pdf|svg",
        help="the pictures, a file each, of a size for a paper; several are called FILE_PICTURE.png",
    )
    out.add_argument(
        "--html", type=Path, metavar="FILE", help="one page with all tables and pictures, in place of text"
    )
    out.add_argument("--no-cache", action="store_true", help="neither read nor write the cache")
    return found


class _OverheadReport:
    """One call of the command: its options, the modelled machine, and the tables made so far."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.folder = None if args.no_cache else matmul.cache_folder()
        self.calibration = calibration.load()
        self.machine = workload.Machine(target.TARGETS[self._main_machine], self.folder)
        self.tables: List[Table] = []
        self.about: List[str] = []  # what they are about, for the title of a page
        self.whole = False  # everything is asked for
        self.too_large: List[str] = []  # configurations that do not fit, a line each
        self.measurements: List[Tuple[measured.Measured, Config]] = []

    def load(self, path: Path, overrides: Sequence[str] = ()) -> Config:
        """A configuration for IPUs."""
        return load_config(config_file(str(path)), ["without_ipus=null", *overrides])

    @property
    def _main_machine(self) -> str:
        return self.load(self._main_path, self.args.overrides).placement.machine

    @property
    def _main_path(self) -> Path:
        """The first configuration named, or the default."""
        return self.args.config[0] if self.args.config else DEFAULT

    @property
    def _main_config(self) -> Config:
        config = self.load(self._main_path, self.args.overrides)
        depth = self.depth(config)
        self._too_large_for(config.name, config, depth, min(self.args.packing_factor or 1.0, depth))
        return config

    def _too_large_for(self, name: str, config: Config, depth: Optional[int], packing_factor: float) -> Optional[str]:
        """A line that says so where the configuration's counted memory at this depth exceeds an IPU's, else None."""
        made = self.planned(config, depth, packing_factor)
        if made.fits is not False:
            return None
        smaller = made.micro_batch_that_fits()
        line = f"{name}: {'; '.join(memory_words(made, smaller))}"
        if line not in self.too_large:
            self.too_large.append(line)
        return line

    def planned(self, config: Config, depth: Optional[int], packing_factor: float) -> RunPlan:
        """The plan of a configuration at this depth."""
        config = replace(config, data=replace(config.data, max_sequences_per_pack=depth))
        return plan(config, packing_factor=packing_factor)

    def histogram(self) -> LengthHistogram:
        return histogram_from(self.args)

    def depth(self, config: Config) -> int:
        """The packing depth of tables that compare packed with unpacked; 3 where the configuration names none."""
        depth = config.data.max_sequences_per_pack
        return depth if depth and depth > 1 else 3

    # Tables ---------------------------------------------------------------------------------------------------------

    def table1(self) -> None:
        histogram, config = self.histogram(), self._main_config
        if config.data.max_sequence_length != histogram.max_sequence_length:
            raise ValueError(
                f"{config.path}: data.max_sequence_length is {config.data.max_sequence_length}, the histogram "
                f"{histogram.name} is of {histogram.max_sequence_length}; give a matching --config"
            )
        packings = Packings(histogram, self.folder, paper.ROWS)
        try:
            comparison = paper.ModelledOverhead(self.machine, config, self.calibration)
            for _, depth in paper.ROWS:  # traced here while the packers run in their own process
                if depth is not None and depth > 1:
                    comparison.packed(depth)
            batching = sort.batch(histogram, batch_size=256)
            self.tables.append(self.headline(comparison))
            self.tables.append(paper.table1(comparison, packings, paper.ROWS, batching, histogram.name))
        finally:
            packings.close()

    def parts(self) -> None:
        config = self._main_config
        comparison = paper.ModelledOverhead(self.machine, config, self.calibration)
        self.tables.append(paper.decomposition(comparison, self.depth(config)))

    def headline(self, comparison: paper.ModelledOverhead) -> Table:
        config = comparison.config
        depth = self.depth(config)
        factor, _ = self.factor(config, depth)
        return headline.headline(
            comparison, config, depth, factor, self._too_large_for(config.name, config, depth, factor)
        )

    def table2(self) -> None:
        self.tables.append(paper.table2(self.machine, lambda name: self.load(FOLDER / name), self.calibration))

    def factor(self, config: Config, depth: Optional[int]) -> Tuple[float, str]:
        """Sequences per pack, and where that number comes from."""
        if depth == 1:
            return 1.0, "unpacked"
        given = self.args.packing_factor
        packed_by: List[str] = []

        def packed(histogram: LengthHistogram, packer: str, depth: Optional[int]) -> float:
            packed_by.append(f"{packer} on {histogram.name}")
            return packed_factor(histogram, self.folder, packer, depth)

        slots = config.data.max_sequence_length
        made = planned_factor(
            slots, config.data.packer, depth, given=given, histogram=self.histogram(), factor_of=packed
        )
        if made is None:
            raise ValueError(
                f"{config.path}: no histogram of length {slots} is known; give --packing-factor or --histogram"
            )
        # In a few words, for a column.
        source = made.source if given is not None else packed_by[0] if packed_by else "paper, Table 2"
        return made.value, source

    def modelled(self, path: Path, overrides: Sequence[str] = ()) -> paper.ModelledRun:
        """A configuration on its machine."""
        config = self.load(path, overrides)
        depth = config.data.max_sequences_per_pack
        name = config.name + "".join(f" {override}" for override in overrides)
        factor, source = self.factor(config, depth)
        return paper.ModelledRun(
            name,
            self.machine_of(config).pipeline(config, depth=depth),
            config.accumulation(factor),
            factor,
            source,
            self.planned(config, depth, factor),
            self._too_large_for(name, config, depth, factor),
        )

    def what_if(self) -> None:
        """Several configurations beside the first; --set changes the last one, which stands there as written, too."""
        paths, overrides = self.args.config or [DEFAULT], self.args.overrides
        runs = [self.modelled(path) for path in paths]
        if overrides:
            runs.append(self.modelled(paths[-1], overrides))
        if len(runs) > 1:
            self.tables.append(paper.what_if(runs, self.calibration))
        for run in runs:
            self._add_run(run)

    def per_ipu(self) -> None:
        self._add_run(self.modelled(self._main_path, self.args.overrides))
        if self.args.html:  # unpacked beside it
            self._add_run(self.modelled(self._main_path, [*self.args.overrides, "data.max_sequences_per_pack=1"]))

    def operators(self) -> None:
        config = self._main_config
        depth = self.depth(config)
        packed = self.machine.pipeline(config, depth=depth)
        unpacked = self.machine.pipeline(config, arrangement=arrangement.UNPACKED, depth=1)
        factor, _ = self.factor(config, depth)
        accumulations = config.accumulation(factor), config.batch.gradient_accumulation
        both = (packed, accumulations[0]), (unpacked, accumulations[1])
        self.tables += [
            operators.classes(config.name, packed, unpacked, self.calibration),
            operators.operators(config.name, packed, unpacked, self.calibration),
            operators.products(config.name, packed, self.calibration),
            operators.update(config.name, *both, self.calibration),
            operators.beyond(config.name, *both, self.calibration),
        ]

    def _add_run(self, run: paper.ModelledRun) -> None:
        drawn = (pictures.memory(run.made, run.name),)
        self.tables.append(paper.breakdown(run, self.calibration)._replace(pictures=drawn))

    def schedule(self) -> None:
        """Of what was measured of each IPU, with the model beside it; else of the configuration."""
        for found, config in self.measurements:
            if found.work:
                number, line = measured.micro_batches_of(found), self.machine_of(config).pipeline(config)
                name = f"{config.name}, {found.detail}"
                self.tables.append(schedule.table(name, line, number, self.calibration, found))
        if not any(found.work for found, _ in self.measurements):
            run = self.modelled(self._main_path, self.args.overrides)
            self.tables.append(schedule.table(run.name, run.pipeline, run.accumulation, self.calibration))

    def scaling(self) -> None:
        histogram = self.histogram()
        found = scaling.simulate(histogram.counts, hidden_size=self._main_config.model.hidden_size)
        factor, _ = self.factor(self._main_config, self.depth(self._main_config))
        self.tables.append(paper.scaling(found, factor, histogram))

    def points(self) -> None:
        machine_of = calibration.machines(self.folder)
        self.tables.append(paper.points(calibration.observe(machine_of, load_config), self.calibration))
        for machine in machine_of.values():
            machine.save()

    def measured(self) -> None:
        args = self.args
        for path in args.measured:
            self.tables.append(self.measured_beside(path))
        if (args.packed is None) != (args.unpacked is None):
            raise ValueError("--packed and --unpacked belong together; give both")
        if args.packed is not None:
            self.about.append(f"{args.packed} against {args.unpacked}")
            found = sources.compare(sources.measure(args.packed), sources.measure(args.unpacked))
            self.tables.append(paper.measured(found, args.packing_factor, self._modelled_pair(found)))

    def measured_beside(self, path: Path) -> Table:
        given = self._main_config if self.args.config else None
        found = measured.read(path, ipus=given.placement.ipus_per_replica if given else None)
        config = measured.configuration(found, given)
        found = measured.completed(
            found, config, lambda config: self.factor(config, config.data.max_sequences_per_pack)[0]
        )
        self.measurements.append((found, config))
        self.about.append(config.name)
        return measured.beside(found, config, self.machine_of(config).pipeline(config), self.calibration)

    def machine_of(self, config: Config) -> workload.Machine:
        """The machine that a configuration names, with this report's traces."""
        wanted = config.placement.machine
        if wanted == self.machine.target.name:
            return self.machine
        return workload.Machine(target.TARGETS[wanted], self.folder, self.machine.traces)

    def _modelled_pair(self, found: sources.MeasuredOverhead) -> Optional[Tuple[float, float, float]]:
        """The model's overhead of two runs that counted cycles, as many micro-batches in an update as they had.

        None where the runs do not say their settings, or counted seconds.
        """
        pipelines = []
        for each in (found.packed, found.unpacked):
            if each.unit != "cycles" or "model" not in (each.settings or {}) or not each.packs_per_step:
                return None
            config = config_from_tree({**(each.settings or {}), "without_ipus": None}, each.detail)
            packs = config.batch.micro_batch * config.placement.replicas
            number = max(1, -(-each.packs_per_step // packs))
            pipelines.append((self.machine_of(config).pipeline(config), number, number * packs))

        def overhead(parameters: Parameters) -> Any:
            packed, unpacked = (line.step(number, parameters).cycles / packs for line, number, packs in pipelines)
            return packed / unpacked - 1.0

        return self.calibration.interval(overhead)

    # What was asked for ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        args = self.args
        self.measured()
        number = len(self.tables)
        asked = bool(self.tables)
        makers = (self.table1, self.table2, self.parts, self.scaling, self.points, self.schedule, self.operators)
        asked = asked or args.all or bool(args.table)
        self.whole = args.all or (not asked and args.html is not None and len(args.config) < 2)
        for name, make in zip(_TABLES, makers):
            if name in args.table or self.whole:
                make()
        if self.whole:
            self.per_ipu()
        if not asked and not self.whole:
            if args.config or args.overrides:
                self.what_if()
            else:
                self.table1()
        if len(self.tables) > number:
            self.about.insert(0, self.load(self._main_path, self.args.overrides).name)
        self.machine.save()

    # What comes of it -----------------------------------------------------------------------------------------------

    def words(self, said: Container[str] = ()) -> List[str]:
        """What holds for all tables; what is said already is left out."""
        parameters, errors = self.calibration.parameters, self.calibration.report
        unknown = ", ".join(f"{operator} x{times}" for operator, times in sorted(self.machine.unknown.items()))
        return [line for line in self.too_large if line not in said] + [
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
        return pictures.page_of(name, lead, self.tables, self.words())

    def draw(self, path: Path) -> List[Path]:
        found = [picture for table in self.tables for picture in pictures.pictures(table)]
        if not found:
            raise ValueError(f"--plot: none of these tables has a picture; there are {', '.join(pictures.PICTURES)}")
        return write_each(found, path)


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = _parser().parse_args(argv)
    if args.json and args.csv:
        raise ValueError("--json and --csv exclude each other; choose one")
    if args.plot is not None:
        check_picture("--plot", args.plot, reads=[args.histogram])
    if args.html is not None:
        check_page("--html", args.html, reads=[args.histogram])
    report = _OverheadReport(args)
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
                    "does_not_fit": report.too_large,
                    "tables": [table.to_json() for table in report.tables],
                },
                indent=1,
            )
        )
    elif args.csv:
        print(as_csv(report.tables), end="")
    elif args.html is None:
        said: Set[str] = set()
        print("\n\n".join(table.text(said) for table in report.tables))
        print("\n" + "\n".join(line for words in report.words(said) for line in wrapped(words)))
        print(f"Cache of plans, traces and packings: {report.folder if report.folder else 'off'}")
    if args.html is not None:
        page = report.page()
        page.write(args.html)
        print(f"wrote {args.html}: {len(page.pictures())} pictures, {len(page.tables())} tables", file=sys.stderr)
    if args.plot is not None:
        for path in report.draw(args.plot):
            print(f"wrote {path}", file=sys.stderr)
    for line in report.too_large:
        print(line, file=sys.stderr)
    return 1 if report.too_large else 0
