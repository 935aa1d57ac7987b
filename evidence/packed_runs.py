"""The common part of the pre-training experiments: data with held-out documents, and a run per cell.

The runs are those of `run_pretraining.py`: the same build, `GlobalBatches`, `HostEngine` and `train`.  An experiment
only chooses the configuration and changes batches before the engine gets them.  Held-out losses are always those of
unpacked sequences of documents without a training sequence.
"""

from __future__ import annotations

import json
import math
import random
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np
import torch

from evidence.runner import Row, as_json, refuse_other
from evidence.topics import topic_documents
from ipu_packed_bert.data.constant_baseline import unigram_baseline
from ipu_packed_bert.data.global_batches import Batch, GlobalBatches, Layout, Packs, StoredPacks
from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.hugging_face import Weights, load_into, read_folder, write_folder
from ipu_packed_bert.model.loss import correct, cross_entropy
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import (
    BatchConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    RunConfig,
)
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.tasks.task import Counts, Evaluation
from ipu_packed_bert.training.loop import Log, train
from pack_data.building.command import BuildOptions, build
from pack_data.building.held_out import held_out_folder
from pack_data.reading.durable import replacing_folder, write_atomically
from pack_data.reading.files import locked
from pack_data.store.data_set import MANIFEST, PackStore
from pack_data.store.packs import FIELDS, disassemble
from pack_data.store.sequences import Sequences
from pack_data.text.corpus import documents
from pack_data.text.corpus_files import EMBEDDED
from pack_data.text.vocabulary import load_either, vocabulary_in

SCORED = 2048  # most held-out sequences, the same in all runs
_BUILD_SEED = 5
_SCORED_ROWS = 32  # rows of a batch of held-out sequences
_SLOTS = ("input_ids", "input_mask", "segment_ids", "positions")
_MASKED = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
_OF_DATA = (
    "amount",
    "held_out",
    "max_sequence_length",
    "short_sequence_probability",
    "depth",
    "vocabulary_size",
)

Change = Callable[[Batch], Batch]  # applied to a batch before the engine gets it
# From the sequences and their numbers in each update of packs to their numbers in other updates.
Regroup = Callable[[List[np.ndarray], Sequences], List[np.ndarray]]


class Size(NamedTuple):
    """The size of an experiment."""

    # "topics" (topics.py), or "text": wikipedia/ of --data-dir, else the embedded corpus.
    corpus: str
    amount: int  # documents of topics, or characters of text
    held_out: float  # share of the documents
    max_sequence_length: int
    short_sequence_probability: float
    depth: int
    vocabulary_size: int  # largest, trained on the training documents
    hidden_size: int
    num_layers: int
    num_heads: int
    micro_batch: int  # rows
    accumulation: int  # micro-batches in an unpacked update, about
    sequences: int  # of a run, about
    points: int  # measurements along a run
    learning_rate: float
    precision: str = "float32"  # of the engine; a run may have another


TOPICS = Size(
    corpus="topics",
    amount=12_000,
    held_out=0.08,
    max_sequence_length=64,
    short_sequence_probability=0.9,
    depth=4,
    vocabulary_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    micro_batch=4,
    accumulation=8,
    sequences=32_000,
    points=8,
    learning_rate=2.0e-3,
)
QUICK = TOPICS._replace(
    amount=160,
    held_out=0.1,
    hidden_size=32,
    num_layers=1,
    accumulation=4,
    sequences=200,
    points=2,
)
WIKIPEDIA = Size(
    corpus="text",
    amount=10**9,
    held_out=0.03,
    max_sequence_length=192,
    short_sequence_probability=0.9,
    depth=3,
    vocabulary_size=4096,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    micro_batch=6,
    accumulation=8,
    sequences=96_000,
    points=10,
    learning_rate=1.0e-3,
)


class PretrainingSetup:
    """The data sets of one size, each built once, in a directory that all experiments of that size use.

    checkpoint: a directory of trained weights, with the vocabulary of the data and the sizes of the network.
    """

    def __init__(
        self,
        folder: Path,
        size: Size,
        data_dir: Optional[Path],
        *,
        checkpoint: Optional[Path] = None,
    ) -> None:
        self.folder = Path(folder)
        self.size = size
        self.corpus = corpus_of(size, data_dir)
        self.pretrained = None if checkpoint is None else read_folder(checkpoint)
        with self._alone():
            origin = {"corpus": self.corpus, **{name: getattr(size, name) for name in _OF_DATA}}
            options = {"corpus": self._documents(data_dir), "held_out": size.held_out}
            if checkpoint is not None and self.pretrained is not None:
                vocabulary = self.pretrained.vocabulary
                origin.update(Identity.of(vocabulary).recorded)
                options.update(_vocabulary_option(vocabulary_in(checkpoint)))
                if "vocabulary" in options:  # a tokenizer.json includes it
                    options["lower_case"] = bool(vocabulary.lower_case)
            self._settle(origin)
            self._build("unpacked", packer="none", depth=1, **options)

        # The number of micro-batches for which the packed update, also in whole micro-batches, has the nearest number
        # of sequences.
        factor = self.packing_factor("packed")

        def excess(number: int) -> Tuple[float, int]:
            return -(-number // factor) * factor / number, abs(number - size.accumulation)

        near = range(max(2, size.accumulation - 4), size.accumulation + 5)
        self.accumulation = min(near, key=excess)

    # ---- data --------------------------------------------------------------------------------------------------------

    def _alone(self) -> ContextManager[None]:
        """Hold the lock of the directory, after the process that builds there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"{self.folder}: another process builds the data for more than an hour"
        return locked(self.folder / "lock", busy, patience=3600)

    def _documents(self, data_dir: Optional[Path]) -> Path:
        """Return the JSONL file of the documents, which is written if it is missing."""
        path = self.folder / "documents.jsonl"
        if not path.exists():
            source = self.corpus
            if data_dir is not None and source == "wikipedia":
                source = str(data_dir / source)
            lines = []
            for text in drawn_documents(source, amount=self.size.amount):
                lines.append(json.dumps({"text": text}) + "\n")
            write_atomically(path, "".join(lines).encode())
        return path

    def _settle(self, origin: Mapping[str, Any]) -> None:
        """Store the origin of the data; raise ValueError if the directory has data of another origin."""
        path = self.folder / "settings.json"
        wanted = as_json(origin)
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            refuse_other(stored, wanted, self.folder, "data made")
        write_atomically(path, f"{json.dumps(wanted, indent=1)}\n".encode())

    def store(self, name: str) -> PackStore:
        """Open `unpacked`, `packed` (optimal, the size's depth) or `held_out`."""
        unpacked = self.folder / "unpacked"
        if name == "held_out":
            return PackStore.open(held_out_folder(unpacked))
        if name == "packed":
            options = _vocabulary_option(self.vocabulary)
            with self._alone():
                self._build(
                    name, packer="optimal", depth=self.size.depth, source=unpacked, **options
                )
        return PackStore.open(self.folder / name)

    @property
    def vocabulary(self) -> Path:
        """The file of the vocabulary, with the data."""
        return vocabulary_in(self.folder / "unpacked")

    def packing_factor(self, name: str) -> float:
        """Return the packing factor of a data set."""
        with self.store(name) as store:
            return store.manifest.packing_factor

    def _build(self, name: str, *, packer: str, depth: int, **options: Any) -> None:
        """Build a data set if it is missing; the caller holds the lock."""
        out = self.folder / name
        if (out / MANIFEST).exists():
            return
        print(f"building the {name} sequences in {out}", flush=True)
        built = BuildOptions(
            out=out,
            packer=packer,
            max_sequences_per_pack=depth,
            max_sequence_length=self.size.max_sequence_length,
            short_sequence_probability=self.size.short_sequence_probability,
            duplication_factor=1,
            seed=_BUILD_SEED,
            vocabulary_size=self.size.vocabulary_size,
            workers=1,
            **options,
        )
        build(built).close()

    def facts(self) -> Dict[str, Any]:
        """Return facts of the data, with the scores of constant predictions."""
        with self.store("unpacked") as training, self.store("held_out") as held_out:
            manifest = training.manifest
            baseline = unigram_baseline(training, held_out, vocabulary=manifest.vocabulary_size)
            scored = min(SCORED, len(held_out))
        right = baseline["most_frequent_next_sentence_accuracy"]
        terms = [share * math.log(share) for share in (right, 1 - right) if share > 0]
        return {
            "baseline": {
                "mlm_loss": round(baseline["unigram_loss"], 6),
                "mlm_accuracy": round(baseline["most_frequent_token_accuracy"], 6),
                "nsp_accuracy": round(right, 6),
                "nsp_loss": round(-sum(terms), 6),
            },
            "sequences": {"training": manifest.sequences, "held_out": scored},
            "packing_factor": round(self.packing_factor("packed"), 4),
        }

    # ---- runs --------------------------------------------------------------------------------------------------------

    def config(
        self,
        store: str,
        *,
        seed: int,
        adjustment: str = "accumulation",
        rate: float = 1.0,
        attention: str = "auto",
    ) -> Config:
        """Configure a run over the sequences of the size; `rate` multiplies its learning rate.

        There is no dropout, so seeds differ in the initial weights and in the order of the data.
        """
        size = self.size
        packed = store != "unpacked"
        with self.store(store) as data:
            depth = data.schema.max_sequences_per_pack if packed else 1
            factor = data.manifest.packing_factor
            vocabulary = data.manifest.vocabulary_size
        config = Config(
            data=DataConfig(
                directory=str(self.folder / store),
                max_sequence_length=size.max_sequence_length,
                max_predictions_per_sequence=None,
                max_sequences_per_pack=depth,
                packer="optimal" if packed else "none",
                evaluation_directory=str(held_out_folder(self.folder / "unpacked")),
            ),
            model=self._model(vocabulary),
            optimizer=OptimizerConfig(
                name="adamw",
                learning_rate=rate * size.learning_rate,
                warmup_fraction=0.1,
                packing_adjustment=adjustment,
            ),
            batch=BatchConfig(
                micro_batch=size.micro_batch, gradient_accumulation=self.accumulation
            ),
            engine=EngineConfig(
                kind="host", device="auto", threads=1, attention=attention, precision=size.precision
            ),
            placement=PlacementConfig(layers_per_ipu=(size.num_layers,)),
            run=RunConfig(seed=seed),
        )
        steps = max(1, round(size.sequences / config.expected_sequences_per_update(factor)))
        every = math.ceil(steps / size.points)
        return config.changed("run", steps=steps, evaluate_every=every)

    def _model(self, vocabulary: int) -> ModelConfig:
        if self.pretrained is not None:
            return replace(self.pretrained.model, hidden_dropout=0.0, attention_dropout=0.0)
        size = self.size
        return ModelConfig(
            vocabulary_size=vocabulary,
            hidden_size=size.hidden_size,
            num_layers=size.num_layers,
            num_heads=size.num_heads,
            intermediate_size=4 * size.hidden_size,
            max_position_embeddings=size.max_sequence_length,
            hidden_dropout=0.0,
        )

    def run(
        self,
        config: Config,
        change: Change = lambda batch: batch,
        *,
        alone: bool = False,
        regroup: Optional[Regroup] = None,
        double: bool = False,
        weights: Optional[Weights] = None,
        along: Optional[int] = None,
        keep: Optional[Path] = None,
    ) -> List[Row]:
        """Train; return a row for each measurement of held-out sequences.

        Args:
            config: The configuration of the run.
            change: Changes each batch.
            alone: Each update has the sequences of its packs, each alone in its row.
            regroup: Groups the same sequences differently in the same number of updates.
            double: Weights, moments and arithmetic are float64.
            weights: Initial weights; missing parameters are drawn from the seed.
            along: The number of sequences that are scored along the run.  All of them are scored at its end, under
                `all_` and the name in the last row.
            keep: A Hugging Face directory for the final weights, with their vocabulary.
        """
        with ExitStack() as stack:
            store = stack.enter_context(self.store(Path(config.data.directory).name))
            held_out = stack.enter_context(self.store("held_out"))
            factor = store.manifest.packing_factor
            task = ScoredPretraining(config, store.schema)
            engine = HostEngine(config, task, packing_factor=factor)
            if double:
                engine.model.double()
                engine.optimizer = build_optimizer(
                    engine.model, config.optimizer, betas=config.betas(factor)
                )

            # Batches.
            layout = task.layout(config, factor)
            log = HeldOutLosses()
            packs = StoredPacks(store, seed=config.run.seed)
            if regroup is not None:
                updates = updates_of(packs, layout.packs_per_update, config.run.steps)
                packs = Regrouped(store, config.run.seed, updates, regroup)
                layout = layout._replace(micro_batches_per_update=1, packs_per_update=1)
            width = self.size.micro_batch if alone or regroup is not None else None
            scored = list(trimmed(held_out, along))

            with closing(ChangedBatches(packs, layout, scored, change, alone=width)) as batches:
                if weights is not None:
                    load_into(engine.model, weights)
                engine.compile(change(batches.first()))
                end = train(config, engine, batches, log, None, steps=config.run.steps)
                # An interrupted run ends the experiment.
                if end.stopped_by:
                    raise KeyboardInterrupt

                rows = log.rows
                if along is not None:
                    evaluation = task.evaluate(engine, trimmed(held_out))
                    for name, value in rounded(evaluation.metrics).items():
                        rows[-1][f"all_{name}"] = value
                if keep is not None:
                    self._keep(engine, task, keep)
            rows[-1]["updates"] = config.run.steps
        return rows

    def _keep(self, engine: HostEngine, task: Pretraining, folder: Path) -> None:
        """Write the weights as a Hugging Face directory, whole or not at all."""
        trained = self.pretrained
        vocabulary = trained.vocabulary if trained else load_either(self.vocabulary)
        with replacing_folder(folder) as partial:
            write_folder(
                partial, task.model, engine.weights(), vocabulary, architecture=task.architecture
            )


def _vocabulary_option(vocabulary: Path) -> Dict[str, Any]:
    """Return a vocabulary as an option of a build."""
    return {"tokenizer" if vocabulary.suffix == ".json" else "vocabulary": vocabulary}


def corpus_of(size: Any, data_dir: Optional[Path]) -> str:
    """Return the name of the corpus."""
    if size.corpus == "topics":
        return "topics"
    return EMBEDDED if data_dir is None else "wikipedia"


def setup(options: Any, size: Size, checkpoint: Optional[Path] = None) -> PretrainingSetup:
    """Return the setup that the experiments of this size and corpus share, next to `options.out`."""
    folder = options.out.parent / f"data_{options.size}_{corpus_of(size, options.data_dir)}"
    return PretrainingSetup(folder, size, options.data_dir, checkpoint=checkpoint)


def settings(options: Any, size: Any) -> Dict[str, Any]:
    """Return all settings that determine the cells of an experiment of this size."""
    return {"size": options.size, **size._asdict(), "corpus": corpus_of(size, options.data_dir)}


def drawn_documents(source: str, *, amount: int) -> Iterable[str]:
    """Return `amount` synthetic documents, or random documents of about `amount` characters."""
    if source == "topics":
        return topic_documents(amount, seed=_BUILD_SEED)
    if source != EMBEDDED and not Path(source).is_dir():
        raise ValueError(
            f"{source}: no such directory; pass --data-dir DIR with DIR/wikipedia, or no --data-dir for the embedded "
            "corpus"
        )
    drawn = list(documents(source))
    random.Random(_BUILD_SEED).shuffle(drawn)
    texts = []
    total = 0
    for document in drawn:
        if total >= amount:
            break
        total += sum(map(len, document.lines))
        texts.append("\n".join(document.lines))
    return texts


# ---- scoring ---------------------------------------------------------------------------------------------------------


def trimmed(store: PackStore, number: Optional[int] = None) -> Iterator[Batch]:
    """Iterate over the scored rows in batches of about equal lengths, cut to the longest row and most masked tokens.

    number: return only this number of rows, evenly over all lengths.
    """
    rows = np.sort(np.random.default_rng(_BUILD_SEED).permutation(len(store))[:SCORED])
    lengths = store.lengths(rows)["lengths"].reshape(len(rows), -1)[:, 0]
    order = np.argsort(lengths, kind="stable")
    if number is not None and number < len(order):
        order = order[np.linspace(0, len(order) - 1, number).round().astype(np.int64)]
    for first in range(0, len(order), _SCORED_ROWS):
        numbers = order[first : first + _SCORED_ROWS]
        batch = store.batch(rows[numbers])
        longest = int(lengths[numbers].max())
        masked = max(1, int((batch["masked_lm_weights"] > 0).sum(axis=1).max()))
        for name in _SLOTS:
            batch[name] = batch[name][:, :longest]
        for name in _MASKED:
            batch[name] = batch[name][:, :masked]
        yield batch


class ScoredPretraining(Pretraining):
    """Pre-training whose evaluation adds up the scores of the batches of `trimmed` in float64."""

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> Evaluation:
        """Score batches of `trimmed`."""
        start = time.perf_counter()
        engine.model.eval()
        device = next(engine.model.parameters()).device
        sums = np.zeros(6)
        for batch in batches:
            fields = {}
            for name in FIELDS:
                fields[name] = torch.from_numpy(np.ascontiguousarray(batch[name])).to(device)
            with torch.no_grad():
                sums += _scores(engine.model, fields)

        sequences, masked, mlm, right, nsp, nsp_right = sums.tolist()
        counts = {"sequences": int(sequences), "masked_tokens": int(masked)}
        mlm_loss = mlm / masked
        nsp_loss = nsp / sequences
        metrics = {
            "loss": mlm_loss + nsp_loss,
            "mlm_loss": mlm_loss,
            "mlm_accuracy": right / masked,
            "nsp_loss": nsp_loss,
            "nsp_accuracy": nsp_right / sequences,
        }
        return Evaluation(counts, metrics, time.perf_counter() - start, metrics["loss"])


def rounded(metrics: Mapping[str, float]) -> Row:
    """Round to 15 digits: float64 runs are compared to one part in 1e12."""
    return {name: float(f"{value:.15g}") for name, value in metrics.items()}


def _scores(model: Any, fields: Dict[str, torch.Tensor]) -> List[float]:
    """Return the sums of the scores of a batch of rows with one sequence each.

    They are the sequences, the masked tokens, the sum of their losses, their correct predictions, and the loss and the
    correctness of the next sentence.
    """
    logits = model.logits(
        *(fields[name] for name in _SLOTS),
        fields["masked_lm_positions"],
        fields["next_sentence_positions"],
    )
    is_masked = fields["masked_lm_weights"] > 0
    scores = [float(len(is_masked)), float(is_masked.sum())]
    for compute in (cross_entropy, correct):
        values = compute(logits.mlm_BPV, fields["masked_lm_ids"]).double()
        scores.append(float((is_masked * values).sum()))
    for compute in (cross_entropy, correct):
        values = compute(logits.nsp_BD2, fields["next_sentence_labels"]).double()
        scores.append(float(values[:, 0].sum()))
    return scores


class HeldOutLosses(Log):
    """The held-out losses along a run."""

    def __init__(self) -> None:
        self.rows: List[Row] = []
        self._sequences = 0

    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        self._sequences += counts["sequences"]

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Add a row."""
        metrics = rounded(evaluation.metrics)
        self.rows.append({"step": step, "sequences": self._sequences, **metrics})


def updates_of(packs: StoredPacks, size: int, updates: int) -> List[np.ndarray]:
    """Return the packs of the first updates of `size` packs, over epochs, in the order of `GlobalBatches`."""
    chosen: List[np.ndarray] = []
    epoch = 0
    while len(chosen) < updates:
        order = packs.order(epoch)
        chosen += np.split(order, range(size, len(order), size))
        epoch += 1
    return chosen[:updates]


class Regrouped(StoredPacks):
    """The sequences of a run's packs in other updates; "pack" number k stands for update k."""

    def __init__(
        self, store: PackStore, seed: int, updates: List[np.ndarray], regroup: Regroup
    ) -> None:
        super().__init__(store, seed=seed)
        numbers = np.concatenate(updates)
        self._sequences = disassemble(store.schema, store.records(numbers))
        counts = (store.lengths(numbers)["lengths"] > 0).reshape(len(numbers), -1).sum(axis=1)
        last_packs = np.cumsum([len(packs) for packs in updates]) - 1
        ends = np.cumsum(counts)[last_packs]
        by_packs = np.split(np.arange(len(self._sequences)), ends[:-1])
        self._updates = regroup(by_packs, self._sequences)

    def __len__(self) -> int:
        return len(self._updates)

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(len(self._updates))

    def alone(self, numbers: np.ndarray, epoch: int) -> Batch:
        return self._rows_of(self._sequences.take(self._updates[int(numbers[0])]))


class ChangedBatches(GlobalBatches):
    """All packs of a data set, in changed batches, and held-out batches of another data set.

    alone: rows of a micro-batch, for batches with the sequences of these packs, each alone in its row.
    """

    def __init__(
        self,
        packs: StoredPacks,
        layout: Layout,
        held_out: Sequence[Batch],
        change: Change,
        *,
        alone: Optional[int] = None,
    ) -> None:
        self._scored = held_out
        self._change = change
        self._alone = alone
        super().__init__(packs, layout)

    def __next__(self) -> Batch:
        return self._change(super().__next__())

    def _load(self, packs: Packs, numbers: np.ndarray, epoch: int) -> Batch:
        if self._alone is None:
            return super()._load(packs, numbers, epoch)
        batch = packs.alone(numbers, epoch)
        shape = self.layout._replace(micro_batch=self._alone).of_packs(len(batch["input_ids"]))
        return shape.filled(batch)

    def held_out(self) -> Iterator[Batch]:
        return iter(self._scored)


# ---- scales ----------------------------------------------------------------------------------------------------------


def update_scales(batch: Batch, micro_batch: int) -> Batch:
    """Return the batch with the scales of `GlobalBatches`, which normalise over the whole update, in float64."""
    rows = len(batch["input_ids"])
    masked, sequences = _counts(batch)
    return {
        **batch,
        "mlm_scale": np.full(rows, rows / micro_batch / max(1, masked.sum())),
        "nsp_scale": np.full(rows, rows / micro_batch / max(1, sequences.sum())),
    }


def micro_batch_means(batch: Batch, micro_batch: int) -> Batch:
    """Return the batch with the scales of common implementations, in the same types.

    Every micro-batch is a mean over its tokens and sequences, so the weight of a sequence falls with the number of
    sequences in its pack.
    """

    def scale(counts: np.ndarray, like: np.ndarray) -> np.ndarray:
        sums = counts.reshape(-1, micro_batch).sum(axis=1)
        return np.repeat(1.0 / np.maximum(1, sums), micro_batch).astype(like.dtype)

    masked, sequences = _counts(batch)
    return {
        **batch,
        "mlm_scale": scale(masked, batch["mlm_scale"]),
        "nsp_scale": scale(sequences, batch["nsp_scale"]),
    }


def _counts(batch: Batch):
    """Count masked tokens and sequences of every pack."""
    masked = (batch["masked_lm_weights"] > 0).sum(axis=1)
    return masked, (batch["next_sentence_weights"] > 0).sum(axis=1)
