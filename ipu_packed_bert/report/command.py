"""From cycle counts to the paper's tables: python profiling/overhead_report.py, or python -m ipu_packed_bert.report

Without options: Table 1 of the packedBERT paper for BERT-large at 512, from the analytic IPU cycle model (no IPU needed)
and the published Wikipedia histogram, and where the overhead comes from. Every column says where its numbers come from:
hardware (run logs with PopTorch's cycle counter), profile (PopVision), model (analytic), host (seconds), paper,
published (measured by others), computed (arithmetic), config.

  --table 2            Table 2: base and large, 128 and 384
  --graphs             Table 1's overheads for this engine's graph, for an additive mask and for the paper's own graph
  --per-ipu            cycles of each IPU, the bottleneck, sequences/s of all replicas
  --scaling            Figure 5: packing against un-padding on 1 to 2048 devices
  --points             published measurements D1 to D11, the model's errors and those of "31 % of peak"
  --arrangements       ways to write mask, heads and positions, and what each gains
  --config A --config B                                                 what if: any configurations side by side
  --config A [--set KEY=VALUE] [--depth 4] [--target bow] [--micro-batch 3]    what if: one against itself as written
  --packed RUN --unpacked RUN    two run folders of run_pretraining.py, or --profile-packed/--profile-unpacked profiles

A configuration whose counted memory is more than an IPU has does not fit: no sequences/s, and exit status 1.
"""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from ipu_packed_bert.config import load_config
from ipu_packed_bert.configurations import FOLDER, config_file
from ipu_packed_bert.cycles import calibration, matmul, points, target, workload
from ipu_packed_bert.plan import memory_words, micro_batch_that_fits, plan
from ipu_packed_bert.report import paper, pictures, scaling, sources, tables
from ipu_packed_bert.report.packings import Packings
from pack_data import sort
from pack_data.command import ArgumentParser, positive_int
from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.lengths.factors import PAPER_FACTORS

DEFAULT = FOLDER / "packed_phase2_pod16.yml"


def factor_argument(text: str) -> float:
    """An argparse type: sequences a pack, a finite number of at least 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not isfinite(value) or value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no packing factor: a pack holds at least one sequence, give a number of at least 1")
    return value


def parser(prog: Optional[str] = None) -> argparse.ArgumentParser:
    found = ArgumentParser(prog=prog, description=__doc__)
    what = found.add_argument_group("what to print (several may be given; Table 1 where none is)")
    what.add_argument("--table", type=int, choices=(1, 2), action="append", default=[])
    what.add_argument("--graphs", action="store_true")
    what.add_argument("--per-ipu", action="store_true")
    what.add_argument("--scaling", action="store_true")
    what.add_argument("--points", action="store_true")
    what.add_argument("--arrangements", action="store_true")
    what.add_argument("--all", action="store_true", help="all of these")
    where = found.add_argument_group("of what")
    where.add_argument("--config", type=Path, action="append", default=[], help="configuration; two or more are compared")
    where.add_argument("--set", dest="overrides", metavar="SECTION.KEY=VALUE", action="append", default=[],
                       help="override a setting (in a comparison: of the last configuration)")
    where.add_argument("--depth", type=positive_int, help="packing depth instead of the configured one")
    where.add_argument("--micro-batch", type=positive_int, help="packs in a forward pass instead of the configured number")
    where.add_argument("--packing-factor", type=factor_argument, help="sequences a pack instead of what the histogram gives")
    where.add_argument("--target", choices=("mk2", "bow"), default="mk2")
    where.add_argument("--histogram", default="wikipedia_512", help=f"{', '.join(PUBLISHED)} or a CSV of length,count")
    where.add_argument("--max-sequence-length", type=positive_int, help="needed with a CSV")
    runs = found.add_argument_group("instead of the model: what really ran")
    runs.add_argument("--packed", type=Path, help="run folder")
    runs.add_argument("--unpacked", type=Path, help="run folder")
    runs.add_argument("--profile-packed", type=Path, help="profile.pop or its folder; needs the Poplar SDK")
    runs.add_argument("--profile-unpacked", type=Path)
    runs.add_argument("--profile-packs", type=positive_int, default=1, help="packs each profile processed (default 1)")
    out = found.add_argument_group("how")
    out.add_argument("--json", action="store_true")
    out.add_argument("--csv", action="store_true")
    out.add_argument("--plot", type=Path, metavar="FILE.png|svg", help="paper and model side by side (needs matplotlib)")
    out.add_argument("--no-cache", action="store_true", help="neither read nor write the cache")
    return found


class Report:
    """One call: its options, the machine it asks, and the tables it has found."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.folder = None if args.no_cache else matmul.cache_folder()
        self.calibration = calibration.load()
        self.machine = workload.Machine(target.get_target(args.target), self.folder)
        self.tables: List[Any] = []
        self.too_large: List[str] = []        # configurations that do not fit, a line each

    def load(self, path: Path, overrides: Sequence[str] = (), *, as_written: bool = False) -> Any:
        """A configuration for IPUs, with the options that replace settings unless it is wanted as_written."""
        given = ["without_ipus=null"] + list(overrides)
        if self.args.micro_batch is not None and not as_written:
            given.append(f"batch.micro_batch={self.args.micro_batch}")
        return load_config(config_file(str(path)), given)

    @property
    def main_config(self) -> Any:
        config = self.load(self.args.config[0] if self.args.config else DEFAULT, self.args.overrides)
        depth = self.depth(config)
        self.too_large_for(config.name, config, depth, min(self.args.packing_factor or 1.0, depth))
        return config

    def too_large_for(self, name: str, config: Any, depth: Optional[int], packing_factor: float) -> Optional[str]:
        """A line where the counted memory of the configuration at this depth is more than an IPU has, else None."""
        config = replace(config, data=replace(config.data, max_sequences_per_pack=depth))
        made = plan(config, packing_factor=packing_factor)
        if made.fits is not False:
            return None
        line = f"{name}: {'; '.join(memory_words(made, micro_batch_that_fits(config, packing_factor=packing_factor)))}"
        if line not in self.too_large:
            self.too_large.append(line)
        return line

    def histogram(self) -> LengthHistogram:
        if self.args.histogram in PUBLISHED:
            return LengthHistogram.published(self.args.histogram)
        if self.args.max_sequence_length is None:
            raise ValueError(f"--histogram {self.args.histogram}: a CSV needs --max-sequence-length as well")
        return LengthHistogram.from_csv(self.args.histogram, self.args.max_sequence_length)

    def depth(self, config: Any) -> int:
        depth = self.args.depth or config.data.max_sequences_per_pack
        return depth if depth and depth > 1 else 3

    # Tables ------------------------------------------------------------------------------------------------------------

    def table1(self) -> None:
        histogram, config = self.histogram(), self.main_config
        if config.data.max_sequence_length != histogram.max_sequence_length:
            raise ValueError(f"{config.path}: data.max_sequence_length is {config.data.max_sequence_length}, the histogram "
                             f"{histogram.name} is of {histogram.max_sequence_length}; give a matching --config")
        packings = Packings(histogram, self.folder, paper.ROWS)
        try:
            comparison = paper.Comparison(self.machine, config, self.calibration)
            for _, depth in paper.ROWS:            # the model works while the packers do
                if depth is not None and depth > 1:
                    comparison.packed(depth)
            batching = sort.batch(histogram, batch_size=256)
            self.tables.append(paper.table1(comparison, packings, paper.ROWS, batching, histogram.name))
            # At one depth, for each row more costs two more traces; --graphs has all.
            self.tables.append(paper.graphs(comparison, packings, [("nnlshp", 3)]))
        finally:
            packings.close()
        self.tables.append(paper.decomposition(comparison, self.depth(config)))

    def graphs(self) -> None:
        rows = [key for key in paper.ROWS if key[0] in ("spfhp", "nnlshp")]
        packings = Packings(self.histogram(), self.folder, rows)
        try:
            comparison = paper.Comparison(self.machine, self.main_config, self.calibration)
            self.tables.append(paper.graphs(comparison, packings, rows))
        finally:
            packings.close()

    def table2(self) -> None:
        self.tables.append(paper.table2(self.machine, lambda name: self.load(FOLDER / name), self.calibration))

    def factor(self, config: Any, depth: Optional[int]) -> Tuple[float, str]:
        """Sequences a pack, and where that number comes from."""
        if depth == 1:
            return 1.0, "unpacked"
        if self.args.packing_factor is not None:
            if depth is not None and self.args.packing_factor > depth:
                raise ValueError(f"--packing-factor {self.args.packing_factor:g}: packs of {config.name} hold at most {depth} sequences; "
                                 "give no more than that, or a larger --depth")
            return self.args.packing_factor, "--packing-factor"
        length = config.data.max_sequence_length
        histogram = self.histogram()
        if histogram.max_sequence_length == length:
            packer = config.data.packer
            key = (packer if packer not in ("none", "nnlshp") or depth is not None and depth <= 3 and packer != "none" else "optimal", depth)
            packings = Packings(histogram, self.folder, [key])
            try:
                return packings[key].packing_factor, f"{key[0]} on {histogram.name}"
            finally:
                packings.close()
        if length in PAPER_FACTORS:
            return PAPER_FACTORS[length], "paper, Table 2"
        raise ValueError(f"{config.path}: no histogram of length {length} is known; give --packing-factor or --histogram")

    def candidate(self, path: Path, overrides: Sequence[str] = (), *, as_written: bool = False) -> Any:
        """A configuration on the target, or as_written on Mk2 without --depth, --micro-batch and --target."""
        args = self.args
        config = self.load(path, overrides, as_written=as_written)
        depth = config.data.max_sequences_per_pack
        name = config.name + "".join(f" {override}" for override in overrides)
        machine = self.machine
        if as_written:
            if args.target != target.MK2.name:
                machine = workload.Machine(target.MK2, self.folder, self.machine.traces)
        else:
            if args.depth and depth != 1 and depth != args.depth:
                depth = args.depth
                name += f" depth {depth}"
            if args.micro_batch:
                name += f" micro-batch {args.micro_batch}"
        factor, source = self.factor(config, depth)
        return paper.Candidate(name, machine.pipeline(config, depth=depth), config.accumulation(factor), factor, source,
                                 self.too_large_for(name, config, depth, factor))

    def what_if(self) -> None:
        """Several configurations against the first; a single one, with what the options change, against itself as written."""
        args = self.args
        paths = args.config or [DEFAULT]
        changed = bool(args.overrides or args.depth or args.micro_batch or args.target != "mk2")
        if len(paths) == 1:
            candidates = [self.candidate(paths[0], as_written=True)]
        else:
            candidates = [self.candidate(path) for path in paths]
        if changed and (len(paths) == 1 or args.overrides):
            candidates.append(self.candidate(paths[-1], args.overrides))
        if len(candidates) > 1:
            self.tables.append(paper.what_if(candidates, self.calibration))
        for candidate in candidates:
            self.tables.append(self._breakdown(candidate))

    def per_ipu(self) -> None:
        self.tables.append(self._breakdown(self.candidate(self.args.config[0] if self.args.config else DEFAULT, self.args.overrides)))

    def _breakdown(self, candidate: Any) -> Any:
        return paper.breakdown(candidate, self.calibration)

    def scaling(self) -> None:
        histogram = self.histogram()
        found = scaling.simulate(histogram.counts, hidden_size=self.main_config.model.hidden_size)
        factor, _ = self.factor(self.main_config, self.depth(self.main_config))
        self.tables.append(paper.scaling(found, factor, histogram.name))

    def points(self) -> None:
        machine_of = calibration.machines(self.folder)
        observations = calibration.observe(machine_of, load_config)
        config = load_config(FOLDER / points.PAPER_CONFIG, calibration.IPUS_ONLY)
        self.tables.append(paper.points(
            observations, self.calibration,
            paper.Comparison(machine_of["mk2"], config, self.calibration, packed=points.POPART),
            [paper.Comparison(machine_of["mk2"], config, self.calibration, packed=arrangement)
             for arrangement in (workload.PACKED, workload.ADDITIVE)]))
        for machine in machine_of.values():
            machine.save()

    def arrangements(self) -> None:
        config = self.main_config
        depth = self.depth(config)
        factor, _ = self.factor(config, depth)
        self.tables.append(paper.arrangements(self.machine, config, self.calibration, depth, factor))

    def measured(self) -> None:
        args = self.args
        for packed, unpacked, open_source, names in (
                (args.packed, args.unpacked, sources.RunLog, ("--packed", "--unpacked")),
                (args.profile_packed, args.profile_unpacked,
                 lambda path: sources.PopVisionProfile(path, packs=args.profile_packs), ("--profile-packed", "--profile-unpacked"))):
            if (packed is None) != (unpacked is None):
                raise ValueError(f"{names[0]} and {names[1]} belong together; give both")
            if packed is not None:
                found = sources.compare(open_source(packed).measure(), open_source(unpacked).measure())
                self.tables.append(paper.measured(found, args.packing_factor))

    # What was asked for ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        args = self.args
        self.measured()
        asked = bool(self.tables)
        for wanted, make in (
                (1 in args.table or args.all, self.table1), (args.graphs or args.all, self.graphs),
                (2 in args.table or args.all, self.table2),
                (args.per_ipu or args.all, self.per_ipu), (args.scaling or args.all, self.scaling),
                (args.points or args.all, self.points), (args.arrangements or args.all, self.arrangements)):
            if wanted:
                make()
                asked = True
        if not asked:
            if args.config or args.overrides or args.depth or args.micro_batch or args.target != "mk2":
                self.what_if()
            else:
                self.table1()
        self.machine.save()


def main(argv: Optional[Sequence[str]] = None, *, prog: Optional[str] = None) -> int:
    args = parser(prog).parse_args(argv)
    if args.json and args.csv:
        raise ValueError("--json and --csv exclude each other; choose one")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot {args.plot}: must end in .png or .svg")
    if args.plot is not None and not args.plot.parent.is_dir():
        raise ValueError(f"--plot {args.plot}: there is no folder {args.plot.parent}; make it first")
    report = Report(args)
    report.run()

    if args.json:
        print(json.dumps({"calibration": {"factor": report.calibration.parameters.factor,
                                          "layout_cycles_per_byte": report.calibration.parameters.layout},
                          "unknown_operators": report.machine.unknown, "does_not_fit": report.too_large,
                          "tables": [tables.as_json(table) for table in report.tables]}, indent=1))
    elif args.csv:
        print(tables.as_csv(report.tables), end="")
    else:
        print("\n\n".join(tables.text(table) for table in report.tables))
        said = {note for table in report.tables for note in table.notes}
        for line in report.too_large:
            if line not in said:
                print(f"\n{line}")
        parameters, rms = report.calibration.parameters, report.calibration.report["rms_error"]
        print(f"\nModel: calibrated with 2 parameters (factor {parameters.factor}, layout {parameters.layout} cycles/byte; "
              f"left-out error {100 * rms['left_out']:.1f} % rms over six published throughputs).")
        unknown = ", ".join(f"{operator} x{times}" for operator, times in sorted(report.machine.unknown.items()))
        print(f"Operators without an estimator, costed as elementwise work: {unknown or 'none'}.")
        print(f"Cache of plans, traces and packings: {report.folder if report.folder else 'off'}")
    if args.plot is not None:
        pictures.draw(report.tables, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    for line in report.too_large:
        print(line, file=sys.stderr)
    return 1 if report.too_large else 0

