"""One call of the report: the modelled machine, and the tables that the options name, as text, JSON or a page."""

from __future__ import annotations

import argparse
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipu_packed_bert.data.factors import planned_factor
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.rules import check_accumulation
from ipu_packed_bert.settings.shipped import FOLDER, config_file
from ipu_profiling.cycles import calibration
from ipu_profiling.cycles.matmul import cache_folder
from ipu_profiling.cycles.target import TARGETS
from ipu_profiling.cycles.workload import Machine
from ipu_profiling.measured import runs as measured
from ipu_profiling.planning.ipu_memory import memory_of_packs, memory_words
from ipu_profiling.report import DEFAULT, FIGURES, TABLES, figures, paper, pictures
from ipu_profiling.report.breakdown import breakdown
from ipu_profiling.report.headline import headline
from pack_data import sort
from pack_data.display.facts import Fact, Facts, as_json, printed, with_unit
from pack_data.display.page import Page
from pack_data.lengths.options import histogram_from
from pack_data.packers import get_packer

_OF_THE_CONFIGURATION = {"1", "breakdown"}
_WITHOUT_MODEL = {f"figure{number}" for number in FIGURES}  # tables
_SORT_BATCH = 256  # sequences of a batch of SORT, as in the paper's Table 1


def _load(name: str, overrides: Sequence[str] = ()) -> Config:
    """Load a configuration for IPUs."""
    texts = ["without_ipus=null", *overrides]
    return load_config(config_file(name), texts, command="pretrain").with_micro_batch(1.0)


def _load_shipped(file: str) -> Config:
    """Load a file of configs/ for IPUs."""
    return _load(str(FOLDER / file))


class Report:
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
        self.answer: List[Facts] = []  # the first tables
        self.tables: List[Facts] = []
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
        names = [name for name in TABLES if everything or name in args.table]
        if bare or _OF_THE_CONFIGURATION & set(names):
            self.too_large = self._too_large()
            self.about.insert(0, self.config.name)
        for name in names:
            self.tables += self._table(name)
        numbers = [number for number in FIGURES if everything or number in args.figure]
        self.tables += map(self._figure, numbers)
        if bare or "1" in names:
            factor = self._packing_factor  # is refused before the graphs are traced
            self.answer = headline(
                self._comparison, self.config, self._depth, factor, self.too_large
            )
        self.machine.save()

    def _table(self, name: str) -> List[Facts]:
        """Compute a table by its name on the command line; it may have parts."""
        if name == "1":
            return self._table1()
        if name == "2":
            return paper.table2(self.machine, _load_shipped, self.calibration)
        if name == "breakdown":
            factor = self._packing_factor  # is refused before the graphs are traced
            return breakdown(self._comparison, self._depth, factor)
        return [paper.points(self.calibration)]

    def _table1(self) -> List[Facts]:
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

    def _figure(self, number: str) -> Facts:
        """Compute a figure of the paper by its number."""
        if number == "1":
            return figures.figure1()
        if number == "2":
            return figures.figure2()
        histogram = histogram_from(self.args)
        return figures.figure5(histogram, self.config.model.hidden_size, self._packing_factor)

    def _measured(self, path: Path) -> Facts:
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
        depth = self.config.data.depth
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
        config = self.config.changed("data", max_sequences_per_pack=self._depth)
        check_accumulation(config, 1.0)
        counted = memory_of_packs(config)
        if counted.fits is not False:
            return None
        words = "; ".join(memory_words(counted, counted.micro_batch_that_fits()))
        return f"{self.config.name}: {words}"

    # ---- output ------------------------------------------------------------------------------------------------------

    def _words(self) -> List[str]:
        """Return notes that apply to all tables."""
        parameters = self.calibration.parameters
        errors = self.calibration.report
        operators = [f"{name} x{calls}" for name, calls in sorted(self.machine.unknown.items())]
        unknown = ", ".join(operators) or "none"
        host = with_unit(1e3 * parameters.replica_seconds, "ms")
        host_of_popart = with_unit(1e3 * parameters.popart_replica_seconds, "ms")
        mean = with_unit(100 * errors["mean_error"]["left_out"], "percent")
        worst = with_unit(100 * errors["worst_error"]["left_out"], "percent")
        return [
            f"5 fitted parameters (factor {parameters.factor}, {parameters.framework} times that of PopART's "
            f"graphs; layout {parameters.layout} cycles/byte; host {host} per call "
            f"and replica, {host_of_popart} in PopART). Error of {len(errors['points'])} published throughputs, each "
            f"left out of its own fit: {mean} on average, {worst} at worst.",
            f"Operators without an estimator, costed as elementwise work: {unknown}.",
        ]

    def page(self) -> Page:
        """Return the report as a page."""
        name = ", ".join(dict.fromkeys(self.about))
        lead = (
            f"Cost and gain of packing on an IPU, {name}: cycles of the analytic model and measurements of the paper "
            "and of others."
        )
        return pictures.page_of(name, lead, self.answer, self.tables, self._words())

    def text(self) -> str:
        """Return the tables with the notes that apply to all of them."""
        tables = [*self.answer, *self.tables]
        if any(table.name not in _WITHOUT_MODEL for table in self.tables):
            tables.append(Facts("Model", {}, self._words()))
        return "\n\n".join(map(printed, tables))

    def tree(self) -> Any:
        """Return the report in types of JSON."""
        named: Dict[str, List[Facts]] = {}
        for facts in [*self.answer, *self.tables]:
            named.setdefault(facts.name, []).append(facts)
        return {
            "calibration": calibration.named(self.calibration.parameters),
            "unknown_operators": self.machine.unknown,
            "does_not_fit": [self.too_large] if self.too_large else [],
            "tables": list(map(_tree, named.values())),
        }


def _tree(parts: Sequence[Facts]) -> Dict[str, Any]:
    """Return the parts of a table as one table in types of JSON.

    Rows of the same labels are one row, which has a value, or null, for every column.
    """
    columns: Dict[str, Fact] = {}
    rows: Dict[Any, Dict[str, Any]] = {}
    notes: List[str] = []
    for part in parts:
        notes += part.notes
        for number, (row, values) in enumerate(zip(part.subjects, as_json(part))):
            columns = {**row, **columns}
            labels = [fact.value for fact in row.values() if not (fact.unit or fact.source)]
            row_id = tuple(labels) if len(parts) > 1 else number
            rows.setdefault(row_id, {}).update(values)
    about_columns = []
    for key, fact in columns.items():
        source = fact.source or "config"
        about_columns.append({"key": key, "title": fact.name, "source": source})
    return {
        "name": parts[0].name,
        "title": parts[0].title,
        "notes": notes,
        "columns": about_columns,
        "rows": [{**dict.fromkeys(columns), **row} for row in rows.values()],
    }
