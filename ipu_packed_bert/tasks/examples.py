"""Tasks that learn from files of examples: their sequences in memory, packed by the packers and the pack layout of
`pack_data`.
"""

from __future__ import annotations

import abc
import math
import re
import time
import zlib
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
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

from ipu_packed_bert.data.global_batches import Batch, Packs
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import TaskConfig
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.files import ExampleSource, Faults
from ipu_packed_bert.tasks.task import Counts, Evaluation, Metric, Task
from pack_data.building.assignment import assign
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import named, shown
from pack_data.store.packs import SEQUENCE, SLOT, PackSchema, StoredColumn, assemble, decode, disassemble, smallest_type
from pack_data.store.sequences import Sequences, ragged_index
from pack_data.text.vocabulary import AnyVocabulary

if TYPE_CHECKING:
    import torch

_FILES = ("training", "evaluation")
_EVALUATION_SEED = 0  # runs with other seeds are scored on the same examples


class Tokens(NamedTuple):
    """The tokens of one text."""

    ids: np.ndarray  # int32 [n]
    spans: np.ndarray  # int64 [n, 2]: first character, and the one after the last


class Tokenizer:
    """No special tokens are added. read: told of texts, as many as were cut into tokens since its last call."""

    def __init__(self, vocabulary: AnyVocabulary, *, read: Callable[[int], Any] = int):
        self._read = read
        self.vocabulary = vocabulary
        self.first, self.separator, _ = vocabulary.special

    def encode(self, texts: Sequence[str]) -> List[Tokens]:
        found: List[Tokens] = []
        for start in range(0, len(texts), 1024):  # what the library returns is large
            part = texts[start : start + 1024]
            for each in self.vocabulary.cut(part):
                found.append(Tokens(np.array(each.ids, np.int32), np.array(each.offsets, np.int64).reshape(-1, 2)))
            self._read(len(part))
        return found

    def joined(self, parts: Sequence[np.ndarray]) -> Tuple[np.ndarray, np.ndarray]:
        """[CLS] first [SEP] second [SEP]: input ids and segment ids."""
        ids = [np.array([self.first], np.int32)]
        segments = [np.zeros(1, np.int32)]
        for number, part in enumerate(parts):
            ids += [part, np.array([self.separator], np.int32)]
            segments.append(np.full(len(part) + 1, number, np.int32))
        return np.concatenate(ids), np.concatenate(segments)


class LossAndCorrect(NamedTuple):
    """What a network returns of a micro-batch: scalars."""

    loss: torch.Tensor  # sum over its sequences, or labelled tokens, times the scale
    correct: torch.Tensor  # how many of them are right; 0 for regression


@dataclass(frozen=True, eq=False)
class Inputs:
    """n sequences of a task.

    lengths [n]; input_ids, segment_ids and `slots` flat, one sequence after another; slot_targets: name -> place in the
    sequence [n]; targets: name -> anything else that is learnt [n, ...].
    """

    lengths: np.ndarray
    input_ids: np.ndarray
    segment_ids: np.ndarray
    slot_targets: Mapping[str, np.ndarray] = field(default_factory=dict)
    targets: Mapping[str, np.ndarray] = field(default_factory=dict)
    slots: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, ids: Sequence[np.ndarray], segment_ids: np.ndarray, **further: Mapping[str, np.ndarray]) -> Inputs:
        """ids: those of each sequence."""
        return cls(np.array([len(each) for each in ids], np.int64), np.concatenate(ids), segment_ids, **further)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def sequences(self) -> Sequences:
        columns = {
            "cls_positions": np.zeros(len(self), np.int64),
            **self.slot_targets,
            "sequence_numbers": np.arange(1, len(self) + 1, dtype=np.int64),
        }
        return Sequences.of_tokens(
            self.lengths, {"input_ids": self.input_ids, "segment_ids": self.segment_ids, **self.slots}, columns
        )


class ExamplePacks(Packs):
    """The sequences in packs, dealt out anew in each epoch: every epoch has other packs of the same lengths.

    depth: places for sequences in a row, at least as many as the deepest pack has; None: these.
    Raises ValueError where a sequence is too long.
    """

    def __init__(self, inputs: Inputs, packing: Packing, *, seed: int = 0, depth: Optional[int] = None):
        self.inputs, self.packing, self.seed = inputs, packing, seed
        self.digest = zlib.crc32(inputs.input_ids.tobytes())
        for _, learnt in sorted({**inputs.targets, **inputs.slot_targets, **inputs.slots}.items()):
            self.digest = zlib.crc32(np.ascontiguousarray(learnt).tobytes(), self.digest)
        self.schema = _schema_of(inputs, packing.max_sequence_length, max(1, packing.largest_depth, depth or 1))
        self._epoch: Tuple[int, np.ndarray] = (-1, np.zeros(0, self.schema.record_dtype))

    def __len__(self) -> int:
        return self.packing.packs

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(len(self))  # they are shuffled as they are dealt out

    def again(self) -> Callable[[], Packs]:
        return partial(
            ExamplePacks, self.inputs, self.packing, seed=self.seed, depth=self.schema.max_sequences_per_pack
        )

    def batch(self, numbers: np.ndarray, epoch: int) -> Batch:
        return self._decoded(self._records(numbers, epoch))

    def alone(self, numbers: np.ndarray, epoch: int) -> Batch:
        """The sequences of these packs, each alone in its row: what packing is compared with."""
        sequences = disassemble(self.schema, self._records(numbers, epoch))
        rows = len(sequences)
        return self._decoded(assemble(self.schema, sequences, np.arange(rows), np.zeros(rows, np.int64), rows))

    def _records(self, numbers: np.ndarray, epoch: int) -> np.ndarray:
        if self._epoch[0] != epoch:
            place = assign(self.inputs.lengths, self.packing, (self.seed, epoch))
            self._epoch = (epoch, assemble(self.schema, self.inputs.sequences, place.pack, place.slot, len(self)))
        return self._epoch[1][numbers]

    def _decoded(self, records: np.ndarray) -> Batch:
        return _fields(self.inputs, self.schema, records)


def _schema_of(inputs: Inputs, slots: int, depth: int) -> PackSchema:
    """Of rows of so many slots and places for sequences."""
    return PackSchema.of_tokens(
        slots,
        depth,
        (
            StoredColumn("input_ids", SLOT, smallest_type(int(inputs.input_ids.max(initial=0)))),
            StoredColumn("segment_ids", SLOT, "|u1"),
            *(
                StoredColumn(name, SLOT, smallest_type(int(values.max(initial=0))))
                for name, values in inputs.slots.items()
            ),
            *(
                StoredColumn(name, SEQUENCE, smallest_type(slots), slot_index=True)
                for name in ("cls_positions", *inputs.slot_targets)
            ),
            StoredColumn("sequence_numbers", SEQUENCE, smallest_type(len(inputs))),
        ),
    )


def rows_of(inputs: Inputs, rows: Sequence[Sequence[int]], slots: int) -> Batch:
    """The fields of rows of so many slots that hold these sequences, by their numbers from 0; without scales.

    A row has as many places for sequences as the fullest one needs. Raises ValueError where a row does not fit.
    """
    counts = np.array([len(row) for row in rows], np.int64)
    numbers = np.array([number for row in rows for number in row], np.int64)
    schema = _schema_of(inputs, slots, max(1, int(counts.max(initial=0))))
    row, place = np.repeat(np.arange(len(rows)), counts), ragged_index(np.zeros(len(rows), np.int64), counts)
    return _fields(inputs, schema, assemble(schema, inputs.sequences.take(numbers), row, place, len(rows)))


def _fields(inputs: Inputs, schema: PackSchema, records: np.ndarray) -> Batch:
    batch = decode(schema, records)
    for name, values in inputs.targets.items():
        # A sequence that is not there gets the first one's target; it weighs nothing.
        batch[name] = values[np.maximum(batch["sequence_numbers"], 1) - 1]
    return batch


def pack_inputs(
    inputs: Inputs, *, max_sequence_length: int, packer: str, max_sequences_per_pack: Optional[int]
) -> Packing:
    """One packing, which serves every epoch."""
    histogram = LengthHistogram.from_lengths(inputs.lengths, max_sequence_length)
    packing = get_packer(packer)(histogram, max_sequences_per_pack=max_sequences_per_pack)
    packing.check(histogram)
    return packing


class Scored(NamedTuple):
    """What a task makes of the network's outputs."""

    metrics: Dict[str, Any]  # empty where the file has no labels
    files: Dict[str, Any]  # plain values by file name, predictions.json among them
    answers: List[Dict[str, Any]]  # plain values, one for each record of the file, in their order


class Asked(NamedTuple):
    """A file whose records are all to be answered, in place of the configuration's files."""

    source: ExampleSource
    labels: bool = False  # read, to be scored by


class _Predicted(NamedTuple):
    """What the network predicts for each sequence, in their order: [length, ...] of its slots, or [...] of itself."""

    outputs: Optional[List[np.ndarray]]  # None where not all batches came
    counts: Counts
    seconds: float


class ExampleTask(Task):
    """A task that learns from one file and is scored on another: `training` and `evaluation`, None without a file.

    labels: of a classifier that the checkpoint already is. asked: what is answered without learning anything; it is
    `evaluation` then, and the configuration's files are not read.

    Fields of a batch besides those of the slots: cls_positions (slot of each sequence's [CLS]) and sequence_numbers
    (which sequence of the data, from 1; 0 where the row has none) [B, D], then the targets and `scale`.
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
    settings: Type[TaskConfig] = TaskConfig  # of a task of one's own: those of its section `task`
    of_slots: bool  # whether predictions are of slots [B, S, ...] or of sequences [B, D, ...]

    labels: Optional[List[str]]  # of a classifier, by their numbers; other tasks have none
    training: Optional[Inputs] = None
    evaluation: Optional[Inputs] = None

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        model: ModelConfig,
        labels: Optional[Sequence[str]] = None,
        asked: Optional[Asked] = None,
    ):
        self.asked, self.name = asked, config.task.name
        self.notes: List[str] = []  # what a user should know about the data, one line each
        self.config, self.tokenizer, self.model = config, tokenizer, model
        self.max_sequence_length = config.data.max_sequence_length
        self.training_packs: Optional[ExamplePacks] = None
        self.evaluation_packs: Optional[ExamplePacks] = None
        files = {"evaluation": asked.source} if asked else {name: getattr(config.data, name) for name in _FILES}
        self.sources = {what: ExampleSource.of(name) for what, name in files.items() if name is not None}
        told = asked is None or asked.labels
        read = {what: self.read(source, config, labels=told) for what, source in self.sources.items()}
        self.labels = self.begin(read, labels)
        self.examples: List[Any] = []  # those of `evaluation`
        for what, found in read.items():
            found = self._drawn(found, what)
            setattr(self, what, self.inputs(found, what))
            self.examples = found if what == "evaluation" else []
        self._pack()

    @classmethod
    @abc.abstractmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[Any]:
        """The examples of a file, in their order. labels: False leaves them unread."""

    def begin(self, read: Dict[str, List[Any]], labels: Optional[Sequence[str]]) -> Optional[List[str]]:
        """The labels of a classifier, from all examples of `training` and `evaluation`; these may be replaced."""
        return None

    @abc.abstractmethod
    def inputs(self, examples: Sequence[Any], what: str) -> Inputs:
        """The sequences of examples; what: `training` or `evaluation`."""

    @property
    def program_facts(self) -> Mapping[str, Any]:
        return {} if self.labels is None else {"task.name": self.name, "labels": len(self.labels)}

    def _pack(self) -> None:
        """Pack both files, with as many places for sequences in both: one shape serves training and evaluation."""
        data, found = self.config.data, {}
        for what, inputs in (("training", self.training), ("evaluation", self.evaluation)):
            if inputs is not None:
                found[what] = (
                    inputs,
                    pack_inputs(
                        inputs,
                        max_sequence_length=data.max_sequence_length,
                        packer=data.packer,
                        max_sequences_per_pack=data.max_sequences_per_pack,
                    ),
                )
        depth = self.max_sequences_per_pack = max([1, *(packing.largest_depth for _, packing in found.values())])
        if "training" in found:
            self.training_packs = ExamplePacks(*found["training"], seed=self.config.run.seed, depth=depth)
        if "evaluation" in found:
            self.evaluation_packs = ExamplePacks(*found["evaluation"], depth=depth)

    @property
    def packs(self) -> ExamplePacks:
        """What is learnt from, or what is scored where nothing is learnt."""
        found = self.evaluation_packs if self.training_packs is None else self.training_packs
        assert found is not None  # a configuration names at least one file
        return found

    @staticmethod
    @abc.abstractmethod
    def texts_of(example: Any) -> Sequence[str]:
        """What of an example is cut into tokens."""

    @classmethod
    def texts(cls, config: Config) -> List[str]:
        """All that is read in training, each text once: what a vocabulary is learnt from."""
        read = cls.read(ExampleSource.of(str(config.data.training)), config, labels=True)
        return list(dict.fromkeys(text for example in read for text in cls.texts_of(example)))

    @property
    @abc.abstractmethod
    def scores(self) -> Tuple[str, ...]:
        """What `score` gives where there are labels, in percent but for correlations and errors."""

    @property
    @abc.abstractmethod
    def scorable(self) -> bool:
        """Whether every record of `evaluation` has a label that was read."""

    @abc.abstractmethod
    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        """What comes of `Predicted.outputs`."""

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> Optional[Evaluation]:
        """The network's outputs for every sequence of `evaluation`, what is made of them, and its score."""
        outputs, counts, seconds = self.predict(engine, batches)
        if outputs is None:
            return None
        if not all(np.isfinite(each).all() for each in outputs):
            return Evaluation(counts, {"loss": math.nan}, seconds, math.nan)
        metrics, files, _ = self.score(outputs)
        return Evaluation(counts, metrics, seconds, files=files)

    def predict(self, engine: Any, batches: Iterable[Batch]) -> _Predicted:
        found: Dict[int, np.ndarray] = {}
        parts, start = [], time.perf_counter()
        for batch in batches:
            found.update(self.outputs_of(engine.predict(batch), batch))
            parts.append(self.count(batch))
        found = {number: outputs for part in engine.processes.gathered(found) for number, outputs in part.items()}
        parts = [part for each in engine.processes.gathered(parts) for part in each]
        seconds = time.perf_counter() - start
        whole = self.evaluation is not None and len(found) == len(self.evaluation)
        counts = {name: sum(part[name] for part in parts) for name in ("packs", "tokens", *self.counts)}
        return _Predicted([found[number] for number in range(len(found))] if whole else None, counts, seconds)

    def outputs_of(self, predictions: np.ndarray, batch: Batch) -> Iterator[Tuple[int, np.ndarray]]:
        """The number (from 0) and the outputs of each sequence of a batch: its slots of [B, S, ..], or its place of
        [B, D, ..].
        """
        for row, place in zip(*np.nonzero(batch["sequence_numbers"])):
            own = batch["input_mask"][row] == place + 1 if self.of_slots else place
            yield int(batch["sequence_numbers"][row, place]) - 1, predictions[row, own]

    def _drawn(self, examples: List[Any], what: str) -> List[Any]:
        """As many of them at random, in their order, as the configuration wants for `training` or `evaluation`."""
        data = self.config.data
        number, seed = (
            (data.training_examples, data.seed) if what == "training" else (data.evaluation_examples, _EVALUATION_SEED)
        )
        if self.asked is not None or number is None or number >= len(examples):
            return examples
        chosen = np.sort(np.random.default_rng(seed).choice(len(examples), number, replace=False))
        return [examples[each] for each in chosen]


class LabelTask(ExampleTask):
    """A task that gives labels; its examples have `labels`, None where the file does not tell, and `where`, for
    messages.
    """

    label_setting: str  # names the column of the labels

    def begin(self, read: Dict[str, List[Any]], labels: Optional[Sequence[str]]) -> List[str]:
        for what, found in read.items():
            faults = Faults(self.sources[what])
            for example in found:
                with faults.of_record():
                    if (example.labels is None) != (found[0].labels is None):
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
            learnt = {label for example in read["training"] for label in example.labels}
            # A checkpoint that was trained on these keeps their order, as it keeps its head.
            labels = labels if labels and learnt <= set(labels) else sorted(learnt, key=_in_order)
        if labels is None:
            raise ValueError(
                f"{self.config.start.checkpoint}: its config.json names no labels (id2label); evaluate a checkpoint "
                "that was trained on them"
            )
        self._numbers = {label: number for number, label in enumerate(labels)}
        return list(labels)

    def number_of(self, label: str, where: str) -> int:
        """ValueError for a label that was not learnt."""
        if label not in self._numbers:
            names = list(self._numbers)
            known = ", ".join(map(named, names[:5])) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"{where}: label {shown(label)} is none of the {len(names)} of the training file ({known})"
            )
        return self._numbers[label]

    @property
    def scorable(self) -> bool:
        return bool(self.examples) and self.examples[0].labels is not None

    def export_settings(self) -> Dict[str, Any]:
        """Keys of config.json that name the classes; a number has one."""
        names = dict(enumerate(self.labels or ["number"]))
        return {
            "id2label": {str(number): name for number, name in names.items()},
            "label2id": {name: number for number, name in names.items()},
        }


def _in_order(label: str) -> Tuple[int, int, str]:
    """Numbers first, in their order; then texts in theirs."""
    return (0, int(label), "") if re.fullmatch(r"[+-]?\d{1,18}", label) else (1, 0, label)
