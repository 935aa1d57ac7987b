"""Packs against Hugging Face's BERT without packs at its best: forward and backward pass of the same sequences.

The rival is that of `packed-bert benchmark`: the sequences of an update sorted by length. All sides are timed in turn
in one process, each round on other packs. The fastest of its batches counts, so the claim needs every one to pass.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch

from evidence.runner import Cell, Row, Runner
from evidence.statistics import CONFIDENCE, LEVEL, Interval, above, ratio
from evidence.writer import CellText, Part, Shown, Table, TableColumn
from ipu_packed_bert.benchmarks.layouts import LAYOUTS, HuggingFaceSide
from ipu_packed_bert.benchmarks.packed import accumulated, host_engine
from ipu_packed_bert.benchmarks.work import BenchmarkWork, config_of, draw_work
from ipu_packed_bert.engine.host.attention import dense_attention
from ipu_packed_bert.engine.host.devices import clock_of
from ipu_packed_bert.engine.timing import rounds_in_turn
from ipu_packed_bert.settings.config import fast_micro_batch
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.memory import keep_buffers
from pack_data.cli.timing import timed
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.store.packs import default_predictions

LEAST = 1.05  # time of the rival over that of packs, at least
LOSSES = 0.02  # most relative difference of losses of the same sequences; dropout differs
_DEPTH = 3
_SHORTEST = 5  # tokens, in the paper's lengths

# Attention of Transformers, and most slots of a batch.
RIVALS = {
    "sdpa_512": ("sdpa", 512),
    "sdpa_1024": ("sdpa", 1024),
    "sdpa_2048": ("sdpa", 2048),
    "eager_1024": ("eager", 1024),
}


class RivalSize(NamedTuple):
    """The size of the experiment."""

    model: str
    vocabulary_size: int
    slots: Tuple[int, ...]  # of a row
    packs: int  # of an update


SIZES = {
    "quick": RivalSize(model="tiny", vocabulary_size=50, slots=(64,), packs=4),
    "default": RivalSize(model="small", vocabulary_size=8192, slots=(128, 512), packs=24),
}
SUMMARY = (
    "Time of Hugging Face's BERT without packs, at its best, over that of packs: forward and backward pass of the\n"
    "same sequences on one CPU core in float32. Needs Transformers; --seeds is the number of draws of packs.\n\n"
    "default: the small BERT at 128 and 512 slots, 9 minutes of processor time."
)


def add_arguments(parser: Any) -> None:
    parser.set_defaults(seeds=8)


def settings(options: Any) -> Dict[str, Any]:
    size = SIZES[options.size]
    return {"size": options.size, **size._asdict(), "draws": options.seeds, "rivals": RIVALS}


# ---- timing ----------------------------------------------------------------------------------------------------------


def draw_works(size: RivalSize, slots: int, number: int) -> List[BenchmarkWork]:
    """Draw updates of packs, by the seeds 0, 1, ...; lengths are the paper's, divided for rows below 512 slots."""
    published = LengthHistogram.published("wikipedia_512")
    divisor = published.max_sequence_length // slots
    lengths = -(-np.arange(len(published.counts)) // divisor)
    lengths = np.maximum(lengths, _SHORTEST)
    counts = np.zeros(slots + 1, dtype=np.int64)
    np.add.at(counts, lengths, published.counts)
    packing = get_packer("optimal")(LengthHistogram(counts), max_sequences_per_pack=_DEPTH)
    draw = partial(
        draw_work,
        packing,
        packs=size.packs,
        micro_batch=fast_micro_batch(size.packs, slots),
        vocabulary=size.vocabulary_size,
        max_predictions=default_predictions(slots),
    )
    return [draw(seed=seed) for seed in range(number)]


def measure(size: RivalSize, slots: int, draws: int) -> List[Row]:
    """Time all sides in turn; a row for each draw, the first of which warms up and is left out."""
    works = draw_works(size, slots, draws + 1)
    rows = fast_micro_batch(size.packs, slots)
    host = EngineConfig(kind="host", device="cpu", precision="float32", threads=1)
    config = config_of(size.model, works[0], host, micro_batch=rows)
    device = torch.device("cpu")
    clock = clock_of(device, of_process=True)
    engine = host_engine(config, works[0])
    masked = host_engine(config, works[0], dense_attention("float32", device))
    weights = engine.weights()

    def packed(number: int) -> Tuple[float, float]:
        return timed(partial(accumulated, engine, works[number]), clock)

    def alone(by: Any, number: int) -> Tuple[float, float]:
        """Time a quarter of the unpacked rows, which all have the same shape, and count it for all."""
        work = works[number]
        few = max(rows, work.sequences // 4)
        part = {name: values[:few] for name, values in work.unpacked.items()}
        quarter = work._replace(packed=part)
        seconds, loss = timed(partial(accumulated, by, quarter), clock)
        return seconds * work.sequences / few, loss

    def rival(side: HuggingFaceSide, most: int, number: int) -> Tuple[float, float]:
        side.forwards = LAYOUTS["sorted"].lay_out(works[number].unpacked, most)
        return timed(side, clock)

    sides: Dict[str, Callable[[int], Tuple[float, float]]] = {"packed": packed, "again": packed}
    for name, (attention, most) in RIVALS.items():
        side = HuggingFaceSide(config, weights, [], device, attention)
        sides[name] = partial(rival, side, most)
    sides["alone"] = partial(alone, engine)
    sides["padded"] = partial(alone, masked)

    measured: List[Row] = []
    for number, results in rounds_in_turn(sides, draws):
        _, loss = results["packed"]
        apart = [abs(results[name][1] / loss - 1.0) for name in RIVALS]
        work = works[number]
        row: Row = {
            "draw": number,
            "sequences": work.sequences,
            "packs": size.packs,
            "tokens": work.tokens,
            "losses_apart": max(apart),
        }
        for name, (seconds, _) in results.items():
            row[f"{name}_s"] = round(seconds, 6)
        measured.append(row)
    return measured[1:]


def run(options: Any, runner: Runner) -> int:
    size = SIZES[options.size]
    keep_buffers()
    torch.set_num_threads(1)
    import transformers

    versions = f"Transformers {transformers.__version__}"
    runner.keep_facts({"clock": "processor seconds", "rival": versions})
    cells = [Cell(f"{slots} slots", 1) for slots in size.slots]
    slots_of = dict(zip(cells, size.slots))
    runner.run(cells, lambda cell: measure(size, slots_of[cell], options.seeds))
    return runner.show(shown(runner.path), plot=options.plot)


# ---- results ---------------------------------------------------------------------------------------------------------


class RivalTimings(NamedTuple):
    """The draws of one row length."""

    name: str
    rows: Sequence[Row]

    def over(self, side: str, other: str = "packed") -> List[float]:
        """Return the time of a side over that of another, for each draw."""
        return [row[f"{side}_s"] / row[f"{other}_s"] for row in self.rows]

    @property
    def fastest(self) -> str:
        """The name of the rival's fastest batches over all draws."""
        return min(RIVALS, key=lambda name: ratio(self.over(name)).mean)

    @property
    def best(self) -> Interval:
        """The time of the fastest rival over that of packs."""
        return ratio(self.over(self.fastest))

    @property
    def again(self) -> Interval:
        """A/A: the same packs twice."""
        return ratio(self.over("again"))

    @property
    def control(self) -> Interval:
        """The fastest rival over our rows of one sequence with padding."""
        return ratio(self.over(self.fastest, "padded"))

    @property
    def p(self) -> float:
        """P value of the claim for all batches of the rival."""
        return max(above(self.over(name), LEAST) for name in RIVALS)

    def why_nothing(self) -> str:
        """Return the reason why these timings show nothing, or "" if they show something."""
        if not 1 / LEAST < self.again.low <= self.again.high < LEAST:
            return "the same packs timed twice differ"
        if not self.control.high < LEAST:
            return "padded rows pass as well"
        if not max(row["losses_apart"] for row in self.rows) <= LOSSES:
            return "the sides computed other sequences"
        return ""

    def words(self) -> str:
        """Describe the result."""
        best = self.best.words(".2f")
        again = self.again.words(".2f")
        control = self.control.words(".2f")
        words = f"{self.name} {best}, A/A {again}, control {control}"
        reason = self.why_nothing()
        if reason:
            words += f", shows nothing: {reason}"
        return words


class RivalShown(Shown):
    """The results in a run's file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        finished = {cell.variant: rows for cell, rows in self.cells.items()}
        names = [f"{slots} slots" for slots in self.settings["slots"]]
        self.timings = [RivalTimings(name, finished[name]) for name in names if name in finished]

    @property
    def draws(self) -> int:
        """The number of draws of every row length; 0 if one is not finished."""
        if len(self.timings) < len(self.settings["slots"]):
            return 0
        return min(len(timings.rows) for timings in self.timings)

    @property
    def all_pass(self) -> bool:
        """True if every row length shows something and passes its test."""
        return all(not timings.why_nothing() and timings.p < LEVEL for timings in self.timings)

    @property
    def p(self) -> float:
        """P value of the claim: the largest of all row lengths."""
        return max(timings.p for timings in self.timings)

    def verdict(self) -> str:
        """Describe the result of each row length."""
        results = [timings.words() for timings in self.timings]
        return "; ".join([f"{self.draws} draws", *results])

    def parts(self) -> List[Part]:
        def times(name: str) -> CellText:
            return lambda timings: ratio(timings.over(name)).words(".3f")

        def seconds(timings: RivalTimings) -> str:
            return f"{np.mean([row['packed_s'] for row in timings.rows]):.2f}"

        def factor(timings: RivalTimings) -> str:
            return f"{np.mean([row['sequences'] / row['packs'] for row in timings.rows]):.2f}"

        columns: List[TableColumn] = [("row", lambda timings: timings.name)]
        for name in (*RIVALS, "alone", "padded", "again"):
            columns.append((name.replace("_", ", "), times(name)))
        columns.append(("packed, s", seconds))
        columns.append(("sequences per pack", factor))
        return [
            Table(columns, self.timings),
            "Times over those of packs; geometric mean over the draws, "
            f"{CONFIDENCE:.0%} interval in brackets (Student's t of the logarithms), {self.facts['clock']}. *sdpa*, "
            "*eager*: Hugging Face's BERT on sorted sequences, by attention and most slots of a batch. *alone*: our "
            "rows of one sequence, with padding skipped. *padded*: the same with a mask (control). *again*: the same "
            "packs (A/A).",
            f"{self.facts['machine']}, {self.facts['rival']}.",
        ]


shown = RivalShown
