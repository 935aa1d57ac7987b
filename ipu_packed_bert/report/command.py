"""From cycle counts to the paper's tables: python profiling/overhead_report.py, or python -m ipu_packed_bert.report

Without options: Table 1 of the packedBERT paper for BERT-large at 512, from the analytic IPU cycle model (no IPU
needed) and the published Wikipedia histogram, and what the overhead consists of. Every column names its source:
hardware (run logs with PopTorch's cycle counter), profile (PopVision), predicted and fitted (analytic model), host
(seconds), paper, published (measured by others), computed (arithmetic), config.

  --table 2            Table 2: base and large, 128 and 384
  --scaling            Figure 5: packing against un-padding on 1 to 2048 devices
  --points             published measurements, the model's errors and those of "31 % of peak"
  --schedule           an update over time: what each IPU does when; one picture with --plot or --html
  --operators          cycles of each operator, class of operator and product; what an update's time consists of
  --all                all of these, and cycles of each IPU
  --html FILE          one page to look at, of what is asked for; of everything where nothing is
  --config A           cycles of each IPU, the bottleneck, sequences/s of all replicas
  --config A --config B                                                        what if: any configurations
  --config A [--set KEY=VALUE] [--depth 4] [--target bow] [--micro-batch 3]    what if: changed, against as written
  --measured SOURCE    measured cycles beside the model's: of an update, of each IPU, of each class of operator
  --packed RUN --unpacked RUN    two run folders of run_pretraining.py, or --profile-packed/--profile-unpacked profiles

Where the counted memory of a configuration exceeds an IPU's, no sequences/s are given and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Container, List, Optional, Sequence, Set, Tuple

from ipu_packed_bert.cycles import arrangement, calibration, matmul, points, target, workload
from ipu_packed_bert.cycles.pipeline import Parameters
from ipu_packed_bert.planning.plan import RunPlan, memory_words, plan
from ipu_packed_bert.report import headline, measured, operators, paper, pictures, scaling, schedule, sources
from ipu_packed_bert.report.packings import Packings, packed_factor
from ipu_packed_bert.settings.pretraining import Config, config_from_tree, load_config
from ipu_packed_bert.settings.shipped import FOLDER, config_file
from pack_data import sort
from pack_data.cli.command import ArgumentParser, check_page, check_picture, positive_int, typed
from pack_data.display.page import Page
from pack_data.display.picture import write_each
from pack_data.display.table import Table, as_csv, wrapped
from pack_data.histogram import LengthHistogram
from pack_data.lengths.factors import parse_factor, planned_factor
from pack_data.lengths.options import add_histogram_arguments, histogram_from

DEFAULT = FOLDER / "packed_phase2_pod16.yml"


def _parser() -> argparse.ArgumentParser:
    found = ArgumentParser(prog=typed("report"), description=__doc__)
    what = found.add_argument_group("what to print (several may be given; Table 1 where none is)")
    what.add_argument("--table", type=int, choices=(1, 2), action="append", default=[])
    what.add_argument("--scaling", action="store_true")
    what.add_argument("--points", action="store_true")
    what.add_argument("--schedule", action="store_true")
    what.add_argument("--operators", action="store_true")
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
    where.add_argument("--depth", type=positive_int, help="packing depth instead of the configured one")
    where.add_argument(
        "--micro-batch", type=positive_int, help="packs in a forward pass instead of the configured number"
    )
    where.add_argument(
        "--packing-factor", type=parse_factor, help="sequences per pack instead of what the histogram gives"
    )
    where.add_argument("--target", choices=("mk2", "bow"), help="instead of placement.machine")
    add_histogram_arguments(found)
    runs = found.add_argument_group("runs and profiles instead of the model")
    runs.add_argument(
        "--measured",
        type=Path,
        metavar="SOURCE",
        action="append",
        default=[],
        help="measured beside predicted: a run's folder, a bundle of ipu-check, a profile.pop, cycles as .json or "
        ".csv; or what make gpu wrote",
    )
    runs.add_argument("--packed", type=Path, help="run folder")
    runs.add_argument("--unpacked", type=Path, help="run folder")
    runs.add_argument("--profile-packed", type=Path, help="profile.pop or its folder; needs the Poplar SDK")
    runs.add_argument("--profile-unpacked", type=Path)
    runs.add_argument("--profile-packs", type=positive_int, default=1, help="packs each profile processed (default 1)")
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
        self.machine = workload.Machine(target.get_target(args.target or self.main_machine), self.folder)
        self.tables: List[Table] = []
        self.about: List[str] = []  # what they are about, for the title of a page
        self.whole = False  # everything is asked for
        self.too_large: List[str] = []  # configurations that do not fit, a line each
        self.measurements: List[Tuple[measured.Measured, Config]] = []

    def load(self, path: Path, overrides: Sequence[str] = (), *, as_written: bool = False) -> Config:
        """A configuration for IPUs; as_written: without the options that replace its settings."""
        given = ["without_ipus=null", *overrides]
        if self.args.micro_batch is not None and not as_written:
            given.append(f"batch.micro_batch={self.args.micro_batch}")
        return load_config(config_file(str(path)), given)

    @property
    def main_machine(self) -> str:
        return self.load(self.main_path, self.args.overrides).placement.machine

    @property
    def main_path(self) -> Path:
        """The first configuration named, or the default."""
        return self.args.config[0] if self.args.config else DEFAULT

    @property
    def main_config(self) -> Config:
        config = self.load(self.main_path, self.args.overrides)
        depth = self.depth(config)
        self.too_large_for(config.name, config, depth, min(self.args.packing_factor or 1.0, depth))
        return config

    def too_large_for(self, name: str, config: Config, depth: Optional[int], packing_factor: float) -> Optional[str]:
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
        depth = self.args.depth or config.data.max_sequences_per_pack
        return depth if depth and depth > 1 else 3

    # Tables ---------------------------------------------------------------------------------------------------------

    def table1(self) -> None:
        histogram, config = self.histogram(), self.main_config
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
        self.tables.append(paper.decomposition(comparison, self.depth(config)))

    def headline(self, comparison: paper.ModelledOverhead) -> Table:
        config = comparison.config
        depth = self.depth(config)
        factor, _ = self.factor(config, depth)
        return headline.headline(
            comparison, config, depth, factor, self.too_large_for(config.name, config, depth, factor)
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

    def modelled(self, path: Path, overrides: Sequence[str] = (), *, as_written: bool = False) -> paper.ModelledRun:
        """A configuration on its machine or the target; as_written: without --depth, --micro-batch and --target."""
        args = self.args
        config = self.load(path, overrides, as_written=as_written)
        depth = config.data.max_sequences_per_pack
        name = config.name + "".join(f" {override}" for override in overrides)
        machine = self.machine_of(config, None if as_written else args.target)
        if not as_written:
            if args.depth and depth != 1 and depth != args.depth:
                depth = args.depth
                name += f" depth {depth}"
            if args.micro_batch:
                name += f" micro-batch {args.micro_batch}"
        factor, source = self.factor(config, depth)
        return paper.ModelledRun(
            name,
            machine.pipeline(config, depth=depth),
            config.accumulation(factor),
            factor,
            source,
            self.planned(config, depth, factor),
            self.too_large_for(name, config, depth, factor),
        )

    def what_if(self) -> None:
        """Several configurations beside the first; a single one, as the options change it, beside itself as written."""
        args = self.args
        paths = args.config or [DEFAULT]
        if len(paths) == 1:
            runs = [self.modelled(paths[0], as_written=True)]
        else:
            runs = [self.modelled(path) for path in paths]
        if self.options_change_a_setting and (len(paths) == 1 or args.overrides):
            runs.append(self.modelled(paths[-1], args.overrides))
        if len(runs) > 1:
            self.tables.append(paper.what_if(runs, self.calibration))
        for run in runs:
            self.add_run(run)

    @property
    def options_change_a_setting(self) -> bool:
        args = self.args
        return bool(args.overrides or args.depth or args.micro_batch or args.target)

    def per_ipu(self) -> None:
        self.add_run(self.modelled(self.main_path, self.args.overrides))
        if self.args.html:  # unpacked beside it
            self.add_run(self.modelled(self.main_path, [*self.args.overrides, "data.max_sequences_per_pack=1"]))

    def operators(self) -> None:
        config = self.main_config
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

    def add_run(self, run: paper.ModelledRun) -> None:
        self.tables += [paper.breakdown(run, self.calibration), paper.memory(run)]

    def schedule(self) -> None:
        """Of what was measured of each IPU, with the model beside it; else of the configuration."""
        for found, config in self.measurements:
            if found.work:
                number, line = measured.micro_batches_of(found), self.machine_of(config).pipeline(config)
                name = f"{config.name}, {found.detail}"
                self.tables.append(schedule.table(name, line, number, self.calibration, found))
        if not any(found.work for found, _ in self.measurements):
            run = self.modelled(self.main_path, self.args.overrides)
            self.tables.append(schedule.table(run.name, run.pipeline, run.accumulation, self.calibration))

    def scaling(self) -> None:
        histogram = self.histogram()
        found = scaling.simulate(histogram.counts, hidden_size=self.main_config.model.hidden_size)
        factor, _ = self.factor(self.main_config, self.depth(self.main_config))
        self.tables.append(paper.scaling(found, factor, histogram))

    def points(self) -> None:
        machine_of = calibration.machines(self.folder)
        observations = calibration.observe(machine_of, load_config)
        config = load_config(FOLDER / points.PAPER_CONFIG, calibration.IPUS_ONLY)

        def overhead_of(packed: arrangement.Arrangement) -> paper.ModelledOverhead:
            return paper.ModelledOverhead(machine_of["mk2"], config, self.calibration, packed=packed)

        self.tables.append(
            paper.points(
                observations,
                self.calibration,
                overhead_of(points.POPART),
                [overhead_of(arrangement.PACKED), overhead_of(arrangement.ADDITIVE)],
            )
        )
        for machine in machine_of.values():
            machine.save()

    def measured(self) -> None:
        args = self.args
        for path in args.measured:
            if measured.is_gpu(path):
                self.about.append(str(path))
                self.tables.append(measured.gpu(path))
            else:
                self.tables.append(self.measured_beside(path))
        self._measured(("--packed", args.packed), ("--unpacked", args.unpacked), sources.LoggedRun)
        self._measured(
            ("--profile-packed", args.profile_packed),
            ("--profile-unpacked", args.profile_unpacked),
            lambda path: sources.PopVisionProfile(path, packs=args.profile_packs),
        )

    def measured_beside(self, path: Path) -> Table:
        given = self.main_config if self.args.config else None
        found = measured.read(path, ipus=given.placement.ipus_per_replica if given else None)
        config = measured.configuration(found, given)
        found = measured.completed(
            found, config, lambda config: self.factor(config, config.data.max_sequences_per_pack)[0]
        )
        self.measurements.append((found, config))
        self.about.append(config.name)
        return measured.beside(found, config, self.machine_of(config).pipeline(config), self.calibration)

    def machine_of(self, config: Config, instead: Optional[str] = None) -> workload.Machine:
        """The machine that a configuration names, or another instead, with this report's traces."""
        wanted = instead or config.placement.machine
        if wanted == self.machine.target.name:
            return self.machine
        return workload.Machine(target.get_target(wanted), self.folder, self.machine.traces)

    def modelled_pair(self, found: sources.MeasuredOverhead) -> Optional[Tuple[float, float, float]]:
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

    def _measured(
        self,
        packed: Tuple[str, Optional[Path]],
        unpacked: Tuple[str, Optional[Path]],
        source_of: Callable[[Path], sources.CycleSource],
    ) -> None:
        """packed, unpacked: an option and its value."""
        if packed[1] is not None and unpacked[1] is not None:
            self.about.append(f"{packed[1]} against {unpacked[1]}")
            found = sources.compare(source_of(packed[1]).measure(), source_of(unpacked[1]).measure())
            self.tables.append(paper.measured(found, self.args.packing_factor, self.modelled_pair(found)))
        elif packed[1] is not None or unpacked[1] is not None:
            raise ValueError(f"{packed[0]} and {unpacked[0]} belong together; give both")

    # What was asked for ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        args = self.args
        self.measured()
        number = len(self.tables)
        asked = bool(self.tables)
        every = (
            (1 in args.table, self.table1),
            (2 in args.table, self.table2),
            (False, self.per_ipu),
            (args.scaling, self.scaling),
            (args.points, self.points),
            (args.schedule, self.schedule),
            (args.operators, self.operators),
        )
        asked = asked or args.all or any(wanted for wanted, _ in every)
        self.whole = args.all or (not asked and args.html is not None and len(args.config) < 2)
        for wanted, make in every:
            if wanted or self.whole:
                make()
        if not asked and not self.whole:
            if args.config or self.options_change_a_setting:
                self.what_if()
            else:
                self.table1()
        if len(self.tables) > number:
            self.about.insert(0, self.load(self.main_path, self.args.overrides).name)
        self.machine.save()

    # What comes of it -----------------------------------------------------------------------------------------------

    def words(self, said: Container[str] = ()) -> List[str]:
        """What holds for all tables; what is said already is left out."""
        parameters, errors = self.calibration.parameters, self.calibration.report
        unknown = ", ".join(f"{operator} x{times}" for operator, times in sorted(self.machine.unknown.items()))
        return [line for line in self.too_large if line not in said] + [
            f"Model: 3 fitted parameters (factor {parameters.factor}, layout {parameters.layout} cycles/byte, host "
            f"{1e3 * parameters.replica_seconds:.1f} ms a call and replica). {len(errors['points'])} published "
            f"throughputs, each left out of its own fit: {100 * errors['mean_error']['left_out']:.1f} % off on "
            f"average, {100 * errors['worst_error']['left_out']:.1f} % at worst.",
            f"Operators without an estimator, costed as elementwise work: {unknown or 'none'}.",
        ]

    def page(self) -> Page:
        name = ", ".join(dict.fromkeys(self.about))
        lead = (
            f"What packing costs on an IPU and what it brings, {name}: cycles of the analytic model beside what the "
            "paper and others measured. Point at a picture for its numbers; press a table's head to sort it."
        )
        return pictures.page_of(f"Cycles, overhead and speed-up: {name}", lead, self.tables, self.words())

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
