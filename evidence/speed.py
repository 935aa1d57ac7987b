"""The speed-up by packing, and the packing factor, over row lengths, widths, types and attentions of the host engine.

The comparison of `--compare-unpacked` on real lengths: forward and backward pass of the same sequences, packed and each
alone in its row. All that is compared is timed in turn, round by round, in one process, each round on other packs. Only
one layer is timed, and the embeddings and heads without any: what a whole model takes follows from both, since its
layers do the same work. Packs of one sequence, for which packing can bring nothing, have to fail the claim's test.
"""

from __future__ import annotations

import argparse
import lzma
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from evidence import packed_runs
from evidence.packed_runs import BuiltData, corpus_of
from evidence.runner import FACTS, Cell, Row, Runner, alone
from evidence.speed_shown import EMULATED, LAYERS, PRECISIONS, WHOLE, SpeedShown
from ipu_packed_bert.benchmarks.packed import bfloat16_slowdown
from ipu_packed_bert.data.global_batches import (
    Batch,
    GlobalBatches,
    Layout,
    SameSequences,
    StoredPacks,
)
from ipu_packed_bert.engine.base import Gradients, StepResult
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.engine.host.attention import dense_attention
from ipu_packed_bert.engine.host.devices import clock_of, computes_in, find_device
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import (
    BatchConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
)
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.compare_unpacked import gradient_difference, seconds_of
from pack_data.cli.memory import keep_buffers
from pack_data.cli.timing import Clock, rounds_in_turn, timed
from pack_data.reading.durable import write_atomically
from pack_data.store.data_set import PackStore

shown = SpeedShown
VOCABULARY = Path("vocab", "bert-base-uncased-vocab.txt.xz")  # of --data-dir, where it is there
_DRAWS = 1000


class Width(NamedTuple):
    hidden_size: int
    num_heads: int


WIDTHS = {"base": Width(768, 12), "large": Width(1024, 16), "tiny": Width(32, 2)}


class SpeedSize(NamedTuple):
    """The size of the experiment."""

    # "topics" (topics.py), or "text": wikipedia/ of --data-dir, else the embedded corpus.
    corpus: str
    amount: int  # documents of topics, or characters of text
    rows: Tuple[Tuple[int, int, int], ...]  # slots, packing depth, timed rounds
    slots_at_once: int  # of a micro-batch, which has one row at least
    within_from: int  # slots from which attention within each sequence is timed too
    vocabulary_size: int  # rows of the table
    widths: Tuple[str, ...]
    layers: Optional[int]  # that are timed; None: all of the width, without an estimate
    # Slots, width, type: here the estimate is compared with a whole model.
    whole: Tuple[Tuple[int, str, str], ...]


SIZES = {
    "quick": SpeedSize(
        "topics",
        60,
        ((32, 3, 3), (64, 4, 3)),
        64,
        64,
        512,
        ("tiny",),
        1,
        ((64, "tiny", "float32"),),
    ),
    "default": SpeedSize(
        "text",
        3_000_000,
        (
            (128, 3, 3),
            (256, 3, 3),
            (512, 3, 3),
            (1024, 8, 3),
            (2048, 8, 2),
        ),
        1024,
        512,
        30_522,
        ("base", "large"),
        1,
        ((512, "base", "float32"),),
    ),
    "full": SpeedSize(
        "text",
        10_000_000,
        tuple((slots, 3 if slots <= 512 else 8, 9) for slots in (128, 256, 512, 1024, 2048)),
        8192,
        128,
        30_522,
        ("base", "large"),
        None,
        (),
    ),
}


SUMMARY = (
    "Realised speed-up beside the packing factor, for each row length, width and type: forward and backward pass,\n"
    "packed and unpacked, with a mask over the row and with attention within each sequence. Exit status 1 where a row\n"
    "shows nothing: the same packs timed twice differ, or packs of one sequence are as fast.\n\n"
    "default: rows of 128 to 2,048 slots, base and large, one layer of each; full: whole models, which was never run.\n"
    "default takes 20 minutes of an idle core with AVX-512; --slots, --widths and --types choose cells, each seed\n"
    "draws other packs and adds its rounds."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = sorted({slots for size in SIZES.values() for slots, *_ in size.rows})
    parser.add_argument(
        "--slots", nargs="+", type=int, choices=lengths, metavar="S", help="only these row lengths"
    )
    parser.add_argument(
        "--widths", nargs="+", choices=WIDTHS, metavar="NAME", help="only these: base, large"
    )
    parser.add_argument(
        "--types",
        nargs="+",
        choices=PRECISIONS,
        metavar="NAME",
        help=f"only these: {', '.join(PRECISIONS)}",
    )
    parser.set_defaults(seeds=1)


def settings(options: Any) -> Dict[str, Any]:
    return packed_runs.settings(options, SIZES[options.size])


# ---- data ------------------------------------------------------------------------------------------------------------


class SpeedData(BuiltData):
    """The same documents packed at each row length, next to the directory of the experiment."""

    def __init__(self, options: Any) -> None:
        size: SpeedSize = SIZES[options.size]
        folder = (
            Path(options.out).parent
            / f"data_speed_{options.size}_{corpus_of(size, options.data_dir)}"
        )
        super().__init__(folder, size, options.data_dir)

    def store(self, slots: int) -> PackStore:
        """Open the data set of a row length, which is built if it is missing."""
        with alone(self.folder, "data"):
            folder = self.built(
                f"slots_{slots}",
                corpus=self.documents(),
                vocabulary=self._vocabulary(),
                max_sequence_length=slots,
                max_sequences_per_pack=self._row(slots)[0],
            )
        return PackStore.open(folder)

    def _row(self, slots: int) -> Tuple[int, int]:
        """Return packing depth and rounds of a row length."""
        return {number: (depth, rounds) for number, depth, rounds in self.size.rows}[slots]

    def rounds(self, slots: int) -> int:
        """Return the number of rounds of a row length."""
        return self._row(slots)[1]

    def _vocabulary(self) -> Optional[Path]:
        """Return BERT's vocabulary if --data-dir has it; None: train one for each row length."""
        if self._data_dir is None or self.corpus == "topics":
            return None
        source = self._data_dir / VOCABULARY
        if not source.exists():
            return None
        path = self.folder / "vocab.txt"
        if not path.exists():
            write_atomically(path, lzma.decompress(source.read_bytes()))
        return path

    def facts(self) -> Dict[str, Any]:
        """Return facts of the data sets, and the clock."""
        rows = {}
        for slots, depth, _ in self.size.rows:
            with self.store(slots) as store:
                manifest = store.manifest
            rows[str(slots)] = {
                "packing_factor": round(manifest.packing_factor, 4),
                "depth": depth,
                "mean_length": round(manifest.tokens / manifest.sequences, 2),
                "sequences": manifest.sequences,
            }
        vocabulary = "BERT's vocabulary" if self._vocabulary() else "a vocabulary trained on it"
        is_of_process = _clock(find_device(EngineConfig(kind="host"))) is time.process_time
        clock = "processor seconds" if is_of_process else "seconds"
        return {"rows": rows, "corpus": self.corpus, "vocabulary": vocabulary, "clock": clock}


class ChosenPacks(StoredPacks):
    """Packs of a data set in a given order."""

    def __init__(self, store: PackStore, numbers: np.ndarray):
        super().__init__(store)
        self._numbers = numbers

    def order(self, epoch: int) -> np.ndarray:
        return self._numbers


def typical(store: PackStore, *, updates: int, packs: int, multiple: int, seed: int) -> np.ndarray:
    """Draw packs for some updates, a thousand times; return the draw whose packing factor is nearest to that of all.

    multiple: of the sequences of each update, if a draw has that, so that micro-batches are full unpacked too.
    """
    lengths = store.lengths(np.arange(len(store)))["lengths"].reshape(len(store), -1)
    sequences = np.count_nonzero(lengths, axis=1)
    random = np.random.default_rng(seed)
    few = len(store) < updates * packs
    draws = [random.choice(len(store), updates * packs, replace=few) for _ in range(_DRAWS)]
    full = [
        draw
        for draw in draws
        if not (sequences[draw].reshape(updates, packs).sum(axis=1) % multiple).any()
    ]
    return min(
        full or draws,
        key=lambda draw: abs(float(sequences[draw].mean()) - store.manifest.packing_factor),
    )


# ---- timing ----------------------------------------------------------------------------------------------------------


class TimedEngine(HostEngine):
    """A host engine whose seconds are processor time if one thread computes: other work is not counted."""

    def accumulate(self, batch: Batch, *, dropout: bool = True) -> StepResult:
        work = partial(super().accumulate, batch, dropout=dropout)
        seconds, result = timed(work, _clock(self._device))
        return result._replace(seconds=seconds)


def _clock(device: torch.device) -> Clock:
    """Return the processor's clock if one thread computes: other work on the machine does not count."""
    return clock_of(device, of_process=torch.get_num_threads() == 1)


class Side(NamedTuple):
    """A side that is timed in turn with others."""

    engine: HostEngine
    batch: Batch
    unpacked: bool  # each sequence alone in its row, under BERT's own mask
    times: float = 1.0  # its seconds count so many times: it holds a part of the sequences


class Timed:
    """One cell: engines of equal weights, and the batches of each round."""

    def __init__(
        self,
        size: SpeedSize,
        store: PackStore,
        slots: int,
        width: str,
        precision: str,
        *,
        whole: bool,
        seed: int,
    ) -> None:
        self._size, self._store, self._slots = size, store, slots
        self._width, self._precision = WIDTHS[width], precision
        self._rows = max(1, size.slots_at_once // slots)
        self._seed = seed
        layers = LAYERS[width] if whole or size.layers is None else size.layers
        device = find_device(EngineConfig(kind="host"))
        dense = dense_attention(precision, device)
        self._engines = {"dense": self._engine(layers, dense)}
        self._extra = not whole
        if not whole and slots >= size.within_from:
            self._engines["within"] = self._engine(layers, "varlen")
        if not whole and size.layers is not None:
            self._engines["heads"] = self._engine(0, dense)

    def _engine(self, layers: int, attention: str) -> HostEngine:
        config = self._config(layers, attention)
        return TimedEngine(config, Pretraining(config, self._store.schema), packing_factor=1.0)

    def _config(self, layers: int, attention: str) -> Config:
        hidden = self._width.hidden_size
        return Config(
            data=DataConfig(
                max_sequence_length=self._slots,
                max_sequences_per_pack=self._store.schema.max_sequences_per_pack,
            ),
            model=ModelConfig(
                vocabulary_size=self._size.vocabulary_size,
                hidden_size=hidden,
                num_layers=layers,
                num_heads=self._width.num_heads,
                intermediate_size=4 * hidden,
                max_position_embeddings=self._slots,
                hidden_dropout=0.0,
            ),
            optimizer=OptimizerConfig(packing_adjustment="none"),
            batch=BatchConfig(micro_batch=self._rows, gradient_accumulation=1),
            engine=EngineConfig(kind="host", precision=self._precision, attention=attention),
            placement=PlacementConfig(layers_per_ipu=(layers,)),
        )

    def rows(self, rounds: int) -> List[Row]:
        config = self._config(0, "sdpa")
        layout = Pretraining(config, self._store.schema).layout(config, 1.0)
        numbers = typical(
            self._store,
            updates=rounds,
            packs=self._rows,
            multiple=self._rows if "within" in self._engines else 1,
            seed=self._seed,
        )
        with closing(GlobalBatches(ChosenPacks(self._store, numbers), layout)) as batches:
            pairs = list(batches.same_sequences(rounds))
        for engine in self._engines.values():  # warm up
            time_one(Side(engine, pairs[0].packed, False))

        sides = [self._sides(pair, layout) for pair in pairs]
        turns = {name: partial(_turn, sides, name) for name in sorted(sides[0])}
        # All rounds count: the engines are warm.
        return [
            _row(number, pairs[number], results)
            for number, results in rounds_in_turn(turns, rounds - 1)
        ]

    def _sides(self, pair: SameSequences, layout: Layout) -> Dict[str, Side]:
        """Return the sides of a round, by name."""
        sides = {}
        for name, engine in self._engines.items():
            sides[f"packed_{name}"] = Side(engine, pair.packed, False)
            sides[f"unpacked_{name}"] = Side(engine, pair.unpacked, True)
        if self._extra:
            sides["again"] = Side(self._engines["dense"], pair.packed, False)
            one = packs_of_one(pair, self._rows, layout)
            sequences = int(pair.packed["input_mask"].max(axis=1).sum())
            sides["one"] = Side(self._engines["dense"], one, False, sequences / self._rows)
        return sides


_Turn = Tuple[float, Optional[Gradients]]  # seconds, and in the first round the gradients


def _turn(sides: Sequence[Mapping[str, Side]], name: str, number: int) -> _Turn:
    """Time a side in round `number`; gradients are the same in all rounds, so the first is enough."""
    side = sides[number][name]
    gradients = time_one(side)
    seconds = side.times * seconds_of(gradients, side.batch)
    is_kept = number == 0 and name.endswith(("dense", "within"))
    return round(seconds, 6), gradients if is_kept else None


def _row(number: int, pair: SameSequences, results: Mapping[str, _Turn]) -> Row:
    mask = pair.packed["input_mask"]
    row: Row = {
        "round": number,
        "sequences": int(mask.max(axis=1).sum()),
        "packs": len(mask),
        "tokens": int((mask > 0).sum()),
        **{f"{name}_s": seconds for name, (seconds, _) in results.items()},
    }
    for kind in ("dense", "within"):
        _, packed = results.get(f"packed_{kind}", (0.0, None))
        _, unpacked = results.get(f"unpacked_{kind}", (0.0, None))
        if packed is not None and unpacked is not None:
            row[f"{kind}_gradients"] = gradient_difference(packed, unpacked)
    return row


def time_one(side: Side) -> Gradients:
    """Time a side whose gradients are added to zeros, as in all micro-batches of an update but the first."""
    for parameter in side.engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return side.engine.gradients(side.batch, alone=side.unpacked)


def packs_of_one(pair: SameSequences, rows: int, layout: Layout) -> Batch:
    """Return the first unpacked rows of an update as packs: a factor of 1, in the shape of the other packs."""
    scales = set(layout.scales)
    few = {name: values[:rows] for name, values in pair.unpacked.items() if name not in scales}
    return layout.filled(few, like=pair.packed)


# ---- the experiment --------------------------------------------------------------------------------------------------


def cells_of(options: Any) -> List[Cell]:
    """List the cells that the options choose; whole models come last."""
    size = SIZES[options.size]
    every = [
        (slots, width, precision)
        for slots, *_ in size.rows
        for width in size.widths
        for precision in PRECISIONS
        if slots in (options.slots or [slots])
        and width in (options.widths or [width])
        and precision in (options.types or [precision])
    ]
    if not every:
        raise ValueError(f"--slots, --widths and --types leave no cell of the size {options.size}")
    names = [" ".join(map(str, each)) for each in every]
    names += [f"{' '.join(map(str, each))}{WHOLE}" for each in size.whole if each in every]
    return [Cell(name, seed) for seed in range(1, options.seeds + 1) for name in names]


def measure(data: SpeedData, cell: Cell) -> List[Row]:
    name, whole = cell.variant.replace(WHOLE, ""), cell.variant.endswith(WHOLE)
    slots_text, width, precision = name.split()
    slots = int(slots_text)
    device = find_device(EngineConfig(kind="host"))
    if not computes_in(precision, device):
        return [{EMULATED: True}]
    if precision == "bfloat16" and device.type == "cpu":
        slowdown = bfloat16_slowdown()
        if slowdown > 1.5:  # where it is native it is faster
            return [{EMULATED: True, "slowdown": round(slowdown, 2)}]
    with data.store(slots) as store:
        timed = Timed(data.size, store, slots, width, precision, whole=whole, seed=cell.seed)
        return timed.rows(2 if whole else data.rounds(slots))


def run(options: Any, runner: Runner) -> int:
    cells = cells_of(options)
    if find_device(EngineConfig(kind="host")).type == "cpu":
        keep_buffers()
    data = SpeedData(options)
    if not (runner.folder / FACTS).exists():
        runner.keep_facts(data.facts())
    runner.run(cells, lambda cell: measure(data, cell))
    return runner.show(shown(runner.folder), plot=options.plot)
