"""What the pre-training experiments share: text cut into training and held-out documents, one checkpoint, one run a
cell.

The runs are those of `run_pretraining.py`: the same build, `GlobalBatches`, `HostEngine` and `train`.  An experiment
only chooses the configuration and changes batches before the engine sees them.  Held-out loss is always measured on
unpacked sequences of documents that no training sequence comes from.
"""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from ipu_packed_bert.checkpoint import load_newest
from ipu_packed_bert.config import (
    BatchConfig,
    Config,
    DataConfig,
    EngineConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    RunConfig,
)
from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.experiments.runner import Row, Runner
from ipu_packed_bert.loader import Batch, GlobalBatches, StoredPacks
from ipu_packed_bert.run_folder import CHECKPOINTS
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.tasks.task import Counts, Evaluation
from ipu_packed_bert.train import Log, SilentLog, train
from pack_data.build import BuildOptions, build
from pack_data.files import write_atomically
from pack_data.store import MANIFEST, PackStore
from pack_data.text.corpus import EMBEDDED, documents

DEPTH = 3


class PretrainingSize(NamedTuple):
    """How large an experiment is. A share of the documents' sequences is cut short, which at 192 slots spreads the
    lengths of Wikipedia as they are at 512: nearly half of the slots are padding, and two sequences fit into a pack."""

    max_sequence_length: int
    hidden_size: int
    num_layers: int
    num_heads: int
    vocabulary_size: int  # trained on the training documents
    characters: int  # of text, drawn document by document
    short_sequence_probability: float
    micro_batch: int  # packs
    accumulation: int  # micro-batches in an unpacked update, about
    start_steps: int  # updates before the shared checkpoint, unpacked
    steps: int  # updates of an unpacked run after it
    points: int  # measurements along a run
    held_out: int  # sequences, at most
    learning_rate: float


SIZES = {
    "quick": PretrainingSize(96, 32, 1, 2, 1024, 300_000, 0.9, 2, 6, 10, 6, 3, 32, 1.0e-2),
    "default": PretrainingSize(192, 64, 2, 2, 4096, 8_000_000, 0.9, 6, 8, 240, 192, 8, 160, 1.5e-2),
    "full": PretrainingSize(512, 256, 4, 4, 8192, 40_000_000, 0.1, 8, 32, 4000, 3000, 20, 2048, 5.0e-3),
}


def describe(size: PretrainingSize, seeds: Optional[int] = None) -> str:
    """One line for tables and help."""
    return (
        f"{size.max_sequence_length} slots, hidden {size.hidden_size}, {size.num_layers} "
        f"layer{'' if size.num_layers == 1 else 's'}, "
        f"vocabulary {size.vocabulary_size}, {size.start_steps} updates to the shared checkpoint, then {size.steps} of "
        f"about "
        f"{size.micro_batch * size.accumulation} sequences" + (f", {seeds} seeds" if seeds else "")
    )


class PretrainingSetup:
    """Data sets and the shared checkpoint of one size, in a folder that all experiments of that size use.

    corpus: the folder of JSONL files `wikipedia` in --data-dir, or "embedded".
    """

    def __init__(
        self, folder: Path, size: PretrainingSize, data_dir: Optional[Path], *, progress: Optional[bool] = None
    ) -> None:
        self.folder, self.size, self._progress = Path(folder), size, progress
        self.corpus = EMBEDDED if data_dir is None else str(data_dir / "wikipedia")
        self._settings = {"size": list(size), "corpus": self.corpus}
        with Runner(self.folder, self._settings):
            if not (self.folder / "documents.json").exists():
                split_documents(self.corpus, self.folder, characters=size.characters)
            self._build("unpacked", corpus=self.folder / "training.jsonl")
        # As many micro-batches as make the packed update, a whole number of them too, hold nearly as many sequences.
        factor = self.store("packed").manifest.packing_factor
        around = range(max(2, size.accumulation - 4), size.accumulation + 5)
        self.accumulation = min(
            around, key=lambda number: (-(-number // factor) * factor / number, abs(number - size.accumulation))
        )

    # ---- data --------------------------------------------------------------------------------------------------------

    def store(self, name: str) -> PackStore:
        """`unpacked`, `packed` (optimal, depth 3), `greedy` (in order of arrival), all of the same sequences;
        `held_out`."""
        unpacked = self.folder / "unpacked"
        if name == "packed":
            self._build(name, source=unpacked, packer="optimal", max_sequences_per_pack=DEPTH)
        elif name == "greedy":
            self._build(name, source=unpacked, packer="greedy", max_sequences_per_pack=None)
        elif name == "held_out":
            self._build(name, corpus=self.folder / "held_out.jsonl", vocabulary=unpacked / "vocab.txt")
        store = PackStore.open(self.folder / name)
        if name in ("packed", "greedy"):
            assert store.manifest.digest == PackStore.open(unpacked).manifest.digest, (
                "other sequences than the unpacked ones"
            )
        return store

    def _build(self, name: str, **options: Any) -> None:
        if (self.folder / name / MANIFEST).exists():
            return
        print(f"building the {name.replace('_', ' ')} sequences in {self.folder / name}", flush=True)
        chosen = {
            "packer": "none",
            "max_sequences_per_pack": 1,
            "duplication_factor": 1,
            "vocabulary_size": self.size.vocabulary_size,
            "short_sequence_probability": self.size.short_sequence_probability,
            "max_sequence_length": self.size.max_sequence_length,
            "seed": 5,
            "workers": 1,
            **options,
        }
        if "source" in chosen:
            chosen["vocabulary"] = self.folder / "unpacked" / "vocab.txt"
        build(BuildOptions(out=self.folder / name, **chosen), self._progress).close()

    # ---- runs --------------------------------------------------------------------------------------------------------

    def config(
        self,
        store: str,
        *,
        seed: int,
        steps: int,
        adjustment: str = "accumulation",
        rate: float = 1.0,
        next_sentence: bool = True,
    ) -> Config:
        """`rate` multiplies the learning rate of the size; no dropout, so that seeds differ in the order of the data
        only."""
        size, packed = self.size, store not in ("unpacked", "held_out")
        depth = self.store(store).schema.max_sequences_per_pack if packed else 1
        return Config(
            data=DataConfig(
                directory=str(self.folder / store),
                max_sequence_length=size.max_sequence_length,
                max_predictions_per_sequence=None,
                max_sequences_per_pack=depth,
                packer="optimal" if packed else "none",
                evaluation_directory=str(self.folder / "held_out"),
            ),
            model=ModelConfig(
                vocabulary_size=self.store("unpacked").manifest.vocabulary_size,
                hidden_size=size.hidden_size,
                num_layers=size.num_layers,
                num_heads=size.num_heads,
                intermediate_size=4 * size.hidden_size,
                max_position_embeddings=size.max_sequence_length,
                hidden_dropout=0.0,
            ),
            loss=LossConfig(next_sentence=next_sentence),
            optimizer=OptimizerConfig(
                learning_rate=rate * size.learning_rate, warmup_fraction=0.1, packing_adjustment=adjustment
            ),
            batch=BatchConfig(micro_batch=size.micro_batch, gradient_accumulation=self.accumulation),
            engine=EngineConfig(kind="host"),
            placement=PlacementConfig(layers_per_ipu=(size.num_layers,)),
            run=RunConfig(steps=steps, seed=seed, evaluate_every=max(1, steps // size.points)),
        )

    def run(self, config: Config, change: Callable[[Batch], Batch] = lambda batch: batch) -> List[Row]:
        """Train from the shared checkpoint; a row for each measurement of the held-out sequences, the first before any
        update."""
        state = self.start()
        with PackStore.open(Path(config.data.directory)) as store, self.store("held_out") as held_out:
            factor = store.manifest.packing_factor
            task = Pretraining(config, store.schema)
            engine = HostEngine(config, task, packing_factor=factor)
            own = engine.state()
            # A model without next sentence prediction has fewer weights than the checkpoint.
            engine.load_state({**own, "model": {name: state[name] for name in own["model"]}})
            with closing(all_batches(store, config, factor)) as batches:
                changed = Changed(batches, first_batches(held_out, config, self.size.held_out), change)
                engine.compile(change(batches.first()))
                curve = HeldOutLosses()
                found = task.evaluate(engine, changed.held_out())
                assert found is not None, "there are no held-out sequences"
                curve.evaluation(0, found)
                _train(config, engine, changed, curve)
        return curve.rows

    def start(self) -> Dict[str, Any]:
        """The weights of the shared checkpoint, trained on unpacked sequences when first asked for."""
        checkpoints = self.folder / CHECKPOINTS
        steps = self.size.start_steps
        config = self.config("unpacked", seed=1000, steps=steps)
        if not checkpoints.exists() or load_newest(checkpoints).step < steps:
            with Runner(self.folder, self._settings), PackStore.open(self.folder / "unpacked") as store:
                print(f"training the shared checkpoint, {steps} updates", flush=True)
                engine = HostEngine(config, Pretraining(config, store.schema), packing_factor=1.0)
                with closing(all_batches(store, config, 1.0)) as batches:
                    _train(config, engine, Changed(batches, (), lambda batch: batch), SilentLog(), checkpoints)
        return load_newest(checkpoints).engine["model"]


def setup(options: Any) -> PretrainingSetup:
    """The one that the experiments of this size and corpus beside `options.out` share."""
    corpus = "embedded" if options.data_dir is None else options.data_dir.name
    folder = options.out.parent / f"pretraining_{options.size}_{corpus}"
    return PretrainingSetup(folder, SIZES[options.size], options.data_dir, progress=options.progress)


def settings(options: Any) -> Dict[str, Any]:
    """What decides the cells of an experiment with this setup."""
    return {"size": list(SIZES[options.size]), "corpus": str(options.data_dir or EMBEDDED)}


def split_documents(source: str, folder: Path, *, characters: int, held_out: float = 0.1, seed: int = 5) -> None:
    """Documents drawn at random until they have `characters`; a share of them, whole ones, goes into held_out.jsonl,
    the others into training.jsonl."""
    if source != EMBEDDED and not Path(source).is_dir():
        raise ValueError(
            f"{source}: no such folder; --data-dir names one that has the folder wikipedia, without it the embedded "
            f"corpus is used"
        )
    drawn = list(documents(source))
    draw = random.Random(seed)
    draw.shuffle(drawn)
    parts: Dict[str, List[str]] = {"training.jsonl": [], "held_out.jsonl": []}
    total = 0
    for number, document in enumerate(drawn):
        if total >= characters:
            break
        total += sum(map(len, document.lines))
        name = "held_out.jsonl" if number % round(1 / held_out) == 0 else "training.jsonl"
        parts[name].append(json.dumps({"text": "\n".join(document.lines)}) + "\n")
    for name, lines in parts.items():
        write_atomically(folder / name, "".join(lines).encode())
    write_atomically(
        folder / "documents.json", json.dumps({name: len(lines) for name, lines in parts.items()}).encode()
    )


class Changed:
    """Batches for `train`: those of training, changed on their way, and held-out ones of another data set."""

    def __init__(self, training: GlobalBatches, held_out: Sequence[Batch], change: Callable[[Batch], Batch]) -> None:
        self._training, self._held_out, self._change = training, held_out, change

    def __next__(self) -> Batch:
        return self._change(next(self._training))

    def held_out(self) -> Iterator[Batch]:
        return iter(self._held_out)

    def state(self) -> Dict[str, Any]:
        return self._training.state()


class HeldOutLosses(Log):
    """The held-out losses of a run over what it has processed."""

    def __init__(self) -> None:
        self.rows: List[Row] = []
        self._sequences = self._tokens = 0
        self._seconds = 0.0

    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        self._sequences += counts["sequences"]
        self._tokens += counts["tokens"]
        self._seconds += result.seconds

    def sync(self) -> None:
        pass

    def evaluation(self, step: int, found: Evaluation) -> None:
        self.rows.append(
            {
                "step": step,
                "sequences": self._sequences,
                "tokens": self._tokens,
                "seconds": round(self._seconds, 4),
                **{name: found.metrics[name] for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")},
            }
        )


def first_batches(store: PackStore, config: Config, sequences: int) -> List[Batch]:
    """Batches of the first sequences of an unpacked data set, the same for every seed; each as large as an unpacked
    update."""
    same = replace(
        config, optimizer=replace(config.optimizer, packing_adjustment="none"), run=replace(config.run, seed=0)
    )
    with closing(all_batches(store, same, 1.0)) as batches:
        number = min(batches.updates_per_epoch, -(-sequences // batches.packs_per_update))
        return [next(batches) for _ in range(number)]


def all_batches(store: PackStore, config: Config, packing_factor: float) -> GlobalBatches:
    """Batches of all packs of a data set; the held-out sequences are another data set."""
    return GlobalBatches(
        StoredPacks(store, seed=config.run.seed), Pretraining(config, store.schema).layout(config, packing_factor)
    )


def _train(config: Config, engine: HostEngine, batches: Any, log: Log, checkpoints: Optional[Path] = None) -> None:
    """`train`; interrupted, it ends the experiment, whose unfinished cell is not kept."""
    silent = replace(config, run=replace(config.run, evaluate_every=0)) if isinstance(log, SilentLog) else config
    if train(silent, engine, batches, log, checkpoints).stopped_by:
        raise KeyboardInterrupt


# ---- scales ----------------------------------------------------------------------------------------------------------


def update_scales(batch: Batch, micro_batch: int) -> Batch:
    """The batch with float64 scales that normalise over the whole update: what `GlobalBatches` gives, in double
    precision."""
    rows = len(batch["input_ids"])
    masked, sequences = _counts(batch)
    return {
        **batch,
        "mlm_scale": np.full(rows, rows / micro_batch / max(1, masked.sum())),
        "nsp_scale": np.full(rows, rows / micro_batch / max(1, sequences.sum())),
    }


def micro_batch_means(batch: Batch, micro_batch: int) -> Batch:
    """The batch with the scales of common implementations: every micro-batch is a mean over its own tokens and
    sequences, so that a sequence weighs the less the more others are packed beside it. Types as they are."""

    def scale(counts: np.ndarray, like: np.ndarray) -> np.ndarray:
        sums = counts.reshape(-1, micro_batch).sum(axis=1)
        return np.repeat(1.0 / np.maximum(1, sums), micro_batch).astype(like.dtype)

    masked, sequences = _counts(batch)
    return {**batch, "mlm_scale": scale(masked, batch["mlm_scale"]), "nsp_scale": scale(sequences, batch["nsp_scale"])}


def _counts(batch: Batch):
    """Masked tokens and sequences of every pack."""
    return (batch["masked_lm_weights"] > 0).sum(axis=1), (batch["next_sentence_weights"] > 0).sum(axis=1)
