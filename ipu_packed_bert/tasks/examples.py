"""Tasks that train on files of examples, which are packed when the task is created."""

from __future__ import annotations

import abc
import math
import re
import time
from dataclasses import replace
from itertools import chain
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
)

import numpy as np

from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import TaskConfig
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.files import ExampleSource, Faults
from ipu_packed_bert.tasks.inputs import ExamplePacks, Tokenizer, pack_inputs
from ipu_packed_bert.tasks.inputs import Inputs as Inputs  # tasks of users import it from here
from ipu_packed_bert.tasks.task import Counts, Evaluation, Metric, Task
from pack_data.reading.account import Account
from pack_data.reading.fields import named, shown

if TYPE_CHECKING:
    import torch

_FILES = ("training", "evaluation")
_EVALUATION_SEED = 0  # runs with other seeds are scored on the same examples


class LossAndCorrect(NamedTuple):
    """The scalars that a network returns for a micro-batch."""

    loss: torch.Tensor  # sum over its sequences, or labelled tokens, times the scale
    correct: torch.Tensor  # number of correct ones; 0 for regression


class Scored(NamedTuple):
    """The scores and predictions computed from outputs of the network."""

    metrics: Dict[str, Any]  # empty if the file has no labels
    files: Dict[str, Any]  # JSON values by file name, predictions.json among them
    answers: List[Dict[str, Any]]  # JSON values, one per record of the file, in file order


class Asked(NamedTuple):
    """A file of records to predict, which replaces the files of the configuration."""

    source: ExampleSource
    labels: bool = False  # True: read labels, to score the predictions


class _Predicted(NamedTuple):
    """The predictions for each sequence, in order: [length, ...] for its slots, or [...] for the sequence."""

    outputs: Optional[List[np.ndarray]]  # None if an interruption ended the batches
    counts: Counts
    seconds: float


class ExampleTask(Task):
    """A task with a file to train on and a file to evaluate, `training` and `evaluation`, None without a file.

    Besides fields of slots, batches have cls_positions (slot of each sequence's [CLS]) and sequence_numbers (1-based
    index of the sequence in the data; 0 for none) [B, D], then the targets and `scale`.

    Args:
        config: The configuration, which names the files.
        tokenizer: Splits texts into tokens.
        model: The sizes of the network.
        labels: The labels of a checkpoint that is already a classifier.
        asked: A file to predict, which becomes `evaluation`; the files of the configuration are then not read.
    """

    counts = {"sequences": "sequence_numbers"}
    scales = {"scale": "sequences"}
    outputs: Tuple[str, ...] = ("loss", "correct")
    metrics: Tuple[Metric, ...] = (
        Metric("loss", "loss", "sequences", "scale"),
        Metric("accuracy", "correct", "sequences"),
    )
    losses = ("loss",)
    prediction_fields: Tuple[str, ...] = ("input_ids", "input_mask", "segment_ids", "positions")
    settings: Type[TaskConfig] = TaskConfig  # class of the section `task`, for a user's task
    of_slots: bool  # True: predictions [B, S, ...] per slot; False: [B, D, ...] per sequence

    labels: Optional[List[str]]  # of a classifier, by class; None for other tasks
    training: Optional[Inputs] = None
    evaluation: Optional[Inputs] = None
    training_packs: Optional[ExamplePacks] = None
    evaluation_packs: Optional[ExamplePacks] = None

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        model: ModelConfig,
        labels: Optional[Sequence[str]] = None,
        asked: Optional[Asked] = None,
    ):
        self.config = config
        self.name = config.task.name
        self.tokenizer = tokenizer
        self.model = model
        self.asked = asked
        self.max_sequence_length = config.data.max_sequence_length
        self.notes: List[str] = []  # facts about the data for users, one line each
        self.sources: Dict[str, ExampleSource] = {}
        if asked:
            source = replace(asked.source, predicted=True, unlabelled=[], skipped=[])
            self.sources["evaluation"] = source
        else:
            for what in _FILES:
                name = getattr(config.data, what)
                if name is not None:
                    self.sources[what] = ExampleSource.of(name)
        with_labels = asked is None or asked.labels
        read = {}
        self.accounts: Dict[str, Dict[str, Account]] = {what: {} for what in self.sources}
        # The records of each file that are not used, by reason.
        self.left_out: Dict[str, Dict[str, int]] = {what: {} for what in self.sources}
        for what, source in self.sources.items():
            read[what] = self.read(source, config, labels=with_labels)
        came_in = {what: len(examples) for what, examples in read.items()}
        self.labels = self.begin(read, labels)

        self.examples: List[Any] = []  # of `evaluation`
        for what, examples in read.items():
            examples = self._sample(examples, what)
            inputs = self.inputs(examples, what)
            setattr(self, what, inputs)
            self.examples = examples if what == "evaluation" else []
            records = len(inputs) if inputs.records is None else inputs.records
            account = Account(came_in[what], records, self.left_out[what])
            self.accounts[what] = {"records": account, **self.accounts[what]}
            self.notes.append(self._account_text(examples, what))
        if with_labels and self.examples:
            self._count_scored()
        self.notes += tokenizer.spelling.remarks()
        self._pack()

    def _account_text(self, examples: Sequence[Any], what: str) -> str:
        """Describe what came in from a file, what goes out, and why the rest does not."""
        parts = [account.text(unit) for unit, account in self.accounts[what].items()]
        empty = sum(not all(map(str.strip, self.texts_of(example))) for example in examples)
        if empty:
            parts.append(f"{empty:,} of the records have an empty text")
        skipped = len(self.sources[what].skipped)
        if skipped:
            parts.append(f"{skipped:,} multiword ranges and empty nodes skipped")
        return f"{what}: {', '.join(parts)}"

    def _count_scored(self) -> None:
        """Count the records of `evaluation` with labels, and the reasons of the others."""
        count = len(self.examples)
        invalid = self.sources["evaluation"].unlabelled
        without = count - len(self.scored) - len(invalid)
        reasons = {"without a label": without, "; ".join(["invalid", *invalid[:2]]): len(invalid)}
        scored = Account(count, len(self.scored), reasons)
        if scored.goes_out < count:
            self.notes.append(f"scores of {scored.text('records')}")
        self.accounts["evaluation"]["scored"] = scored

    @classmethod
    @abc.abstractmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[Any]:
        """Return the examples of a file, in file order; read their labels if ``labels`` is True."""

    def begin(
        self, read: Dict[str, List[Any]], labels: Optional[Sequence[str]]
    ) -> Optional[List[str]]:
        """Return the labels of a classifier from all examples by file; may replace examples in ``read``."""
        return None

    @abc.abstractmethod
    def inputs(self, examples: Sequence[Any], what: str) -> Inputs:
        """Return the sequences of examples; ``what`` is `training` or `evaluation`."""

    @property
    def program_facts(self) -> Mapping[str, Any]:
        return {} if self.labels is None else {"task.name": self.name, "labels": len(self.labels)}

    def _pack(self) -> None:
        """Pack both files with the same number of places for sequences, so that their batches have equal shapes."""
        data = self.config.data
        packings = {}
        for what in self.sources:
            packings[what] = pack_inputs(
                getattr(self, what),
                max_sequence_length=data.max_sequence_length,
                packer=data.packer,
                max_sequences_per_pack=data.depth,
            )
        depth = max(packing.largest_depth for packing in packings.values())
        self.max_sequences_per_pack = depth
        for what, packing in packings.items():
            seed = self.config.run.seed if what == "training" else 0
            packs = ExamplePacks(getattr(self, what), packing, seed=seed, depth=depth)
            setattr(self, f"{what}_packs", packs)

    @property
    def packs(self) -> ExamplePacks:
        """Packs of `training`, or of `evaluation` without training."""
        packs = self.training_packs or self.evaluation_packs
        assert packs is not None  # a configuration names at least one file
        return packs

    @staticmethod
    @abc.abstractmethod
    def texts_of(example: Any) -> Sequence[str]:
        """Return the texts of an example that are tokenised."""

    @classmethod
    def texts(cls, config: Config) -> List[str]:
        """Return the distinct texts of the training file, to train a vocabulary on."""
        examples = cls.read(ExampleSource.of(str(config.data.training)), config, labels=True)
        return list(dict.fromkeys(chain.from_iterable(map(cls.texts_of, examples))))

    @property
    @abc.abstractmethod
    def scores(self) -> Tuple[str, ...]:
        """Names of the metrics of `score`, which are percentages except for correlations and errors."""

    @staticmethod
    def has_label(example: Any) -> bool:
        """Return True if an example has a label that was read; scores leave out the other examples."""
        return example.labels is not None

    @property
    def scored(self) -> List[int]:
        """Indices of the records of `evaluation` that scores are computed for."""
        pairs = enumerate(self.examples)
        return [number for number, example in pairs if self.has_label(example)]

    @property
    def scorable(self) -> bool:
        """True if records of `evaluation` have labels that were read."""
        return bool(self.scored)

    @abc.abstractmethod
    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        """Compute scores and predictions from the outputs of all sequences."""

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> Optional[Evaluation]:
        """Score the network's outputs for all sequences of `evaluation`; None if an interruption ended the batches."""
        outputs, counts, seconds = self.predict(engine, batches)
        if outputs is None:
            return None
        if not all(np.isfinite(values).all() for values in outputs):
            return Evaluation(counts, {"loss": math.nan}, seconds, math.nan)
        metrics, files, _ = self.score(outputs)
        return Evaluation(counts, metrics, seconds, files=files)

    def predict(self, engine: Any, batches: Iterable[Batch]) -> _Predicted:
        """Compute the outputs of all sequences, over all processes."""
        outputs: Dict[int, np.ndarray] = {}
        batch_counts: List[Counts] = []
        start = time.perf_counter()
        for batch in batches:
            outputs.update(self.outputs_of(engine.predict(batch), batch))
            batch_counts.append(self.count(batch))
        for part in engine.processes.gathered(outputs):
            outputs.update(part)
        batch_counts = list(chain.from_iterable(engine.processes.gathered(batch_counts)))
        seconds = time.perf_counter() - start

        counts = {}
        for name in ("packs", "tokens", *self.counts):
            counts[name] = sum(count[name] for count in batch_counts)
        if self.evaluation is None or len(outputs) < len(self.evaluation):
            return _Predicted(None, counts, seconds)
        in_order = [outputs[number] for number in range(len(outputs))]
        return _Predicted(in_order, counts, seconds)

    def outputs_of(self, predictions: np.ndarray, batch: Batch) -> Iterator[Tuple[int, np.ndarray]]:
        """Yield the index and outputs of each sequence of a batch: its slots [B, S, ...] or place [B, D, ...]."""
        for row, place in zip(*np.nonzero(batch["sequence_numbers"])):
            index = batch["input_mask"][row] == place + 1 if self.of_slots else place
            yield int(batch["sequence_numbers"][row, place]) - 1, predictions[row, index]

    def _sample(self, examples: List[Any], what: str) -> List[Any]:
        """Return a random sample in file order, of the size that the configuration sets for the file."""
        data = self.config.data
        number = data.evaluation_examples
        seed = _EVALUATION_SEED
        if what == "training":
            number = data.training_examples
            seed = data.seed
        if self.asked is not None or number is None or number >= len(examples):
            return examples
        self.left_out[what]["in the sample"] = len(examples) - number
        chosen = np.sort(np.random.default_rng(seed).choice(len(examples), number, replace=False))
        return [examples[index] for index in chosen]


class LabelTask(ExampleTask):
    """A classification task.

    Its examples are named tuples with the fields `labels`, None for a record without, and `where`, file and line for
    messages.
    """

    label_setting: str  # the setting that names the column of the labels

    def begin(self, read: Dict[str, List[Any]], labels: Optional[Sequence[str]]) -> List[str]:
        for what, examples in read.items():
            faults = Faults(self.sources[what])
            for example in examples if self.asked is None else ():
                with faults.of_record():
                    if (example.labels is None) != (examples[0].labels is None):
                        raise ValueError(
                            f"{example.where}: some records have labels and some have none; label all of them, or none"
                        )
            faults.refuse()
        if "training" in read:
            if read["training"][0].labels is None:
                raise ValueError(
                    f"{self.sources['training']}: has no labels; name their column with --set "
                    f"task.{self.label_setting}=..."
                )
            training_labels = set(
                chain.from_iterable(example.labels for example in read["training"])
            )
            # The order of a checkpoint that was trained on these labels is kept, as its head is.
            if not labels or not training_labels <= set(labels):
                labels = sorted(training_labels, key=_in_order)
        if labels is None:
            raise ValueError(
                f"{self.config.start.checkpoint}: its config.json has no labels (id2label); pass a checkpoint that was "
                "fine-tuned for this task"
            )
        self._numbers = {label: number for number, label in enumerate(labels)}
        if self.asked is not None:
            read["evaluation"] = list(map(self._with_known_labels, read["evaluation"]))
        return list(labels)

    def _with_known_labels(self, example: Any) -> Any:
        """Return a record to predict, without its labels if the model does not have all of them."""
        source = self.sources["evaluation"]
        labels = example.labels or ()
        known = source.label(lambda: [self.number_of(label, example.where) for label in labels])
        return example if known is not None else example._replace(labels=None)

    def number_of(self, label: str, where: str) -> int:
        """Return the class of a label; raise ValueError if the training file does not have it."""
        if label not in self._numbers:
            names = list(self._numbers)
            known = ", ".join(map(named, names[:5]))
            if len(names) > 5:
                known += ", ..."
            raise ValueError(
                f"{where}: label {shown(label)} is not one of the {len(names)} of the training file ({known}); correct "
                "or remove the record"
            )
        return self._numbers[label]

    def export_settings(self) -> Dict[str, Any]:
        """Return the keys of config.json that name the classes; regression has one."""
        names = self.labels or ["number"]
        return {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }


def _in_order(label: str) -> Tuple[int, int, str]:
    """Return a sort key that puts integers first, by value, then texts."""
    if re.fullmatch(r"[+-]?\d{1,18}", label):
        return (0, int(label), "")
    return (1, 0, label)
