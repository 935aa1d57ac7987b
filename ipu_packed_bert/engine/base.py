"""The seam between training and devices: an engine takes a global batch and a learning rate, and makes one update."""

from __future__ import annotations

import abc
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

import numpy as np
import torch

from ipu_packed_bert.config import Config
from ipu_packed_bert.loader import GlobalBatches
from ipu_packed_bert.model.packed import BATCH_FIELDS, PackedBertForPreTraining

Batch = Dict[str, np.ndarray]  # the fields of BATCH_FIELDS, one row for each pack of the update


class StepResult(NamedTuple):
    """What one update, or one evaluated batch, tells the run log."""

    loss: float  # mlm_loss + nsp_loss, each normalised over the whole update
    mlm_loss: float
    nsp_loss: float
    mlm_accuracy: float  # fraction of the masked tokens of the update
    nsp_accuracy: float  # fraction of its sequences
    seconds: float  # wall clock of the call
    cycles: Optional[int]  # device cycles of the call, None where the device has no counter


class BatchCounts(NamedTuple):
    """What a global batch really holds; the empty packs that fill the last one count as nothing."""

    packs: int
    sequences: int
    tokens: int
    masked_tokens: int


def count(batch: Batch) -> BatchCounts:
    real = batch["input_mask"] > 0
    return BatchCounts(
        packs=int(real.any(axis=1).sum()),
        sequences=int((batch["next_sentence_weights"] > 0).sum()),
        tokens=int(real.sum()),
        masked_tokens=int((batch["masked_lm_weights"] > 0).sum()),
    )


def micro_batches(batch: Batch, micro_batch: int) -> int:
    """Micro-batches of a global batch.

    Raises ValueError where a field is missing or the packs do not divide into micro-batches.
    """
    missing = [name for name in BATCH_FIELDS if name not in batch]
    if missing:
        raise ValueError(f"the batch has no {', '.join(missing)}; it needs all of {', '.join(BATCH_FIELDS)}")
    packs = batch["input_ids"].shape[0]
    if packs == 0 or packs % micro_batch:
        raise ValueError(
            f"the batch holds {packs} packs, not a multiple of batch.micro_batch {micro_batch}; fill it with empty packs"
        )
    return packs // micro_batch


def build_model(config: Config, *, attention: str = "eager") -> PackedBertForPreTraining:
    """The configured network with its initial weights, drawn from `run.seed`: the same on every engine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        return PackedBertForPreTraining(config.model, config.loss, attention=attention)


class Engine(abc.ABC):
    """One device, or many behaving as one. One training compilation serves the whole data set."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """One line for people: device, precision, attention."""

    @abc.abstractmethod
    def compile(self, batch: Batch) -> None:
        """Prepare the training program for batches shaped like this one; changes no weight and no random state."""

    @abc.abstractmethod
    def step(self, batch: Batch, learning_rate: float) -> StepResult:
        """One weight update on one global batch. Raises ValueError for a batch of the wrong size."""

    @abc.abstractmethod
    def evaluate(self, batch: Batch) -> StepResult:
        """Loss and accuracies of one batch without dropout; changes nothing."""

    @property
    @abc.abstractmethod
    def compilations(self) -> Dict[str, int]:
        """Programs made so far, {"training": n, "evaluation": n}; a run needs at most one of each."""

    @abc.abstractmethod
    def state(self) -> Dict[str, Any]:
        """Copies of all that training changes, as tensors on the CPU and plain values.

        {"model": {name: float32 tensor, Hugging Face names},
         "optimizer": {"step": int, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}, ...}
        Any engine loads "model" and "optimizer" of any other; further keys are the engine's own.
        """

    @abc.abstractmethod
    def load_state(self, state: Dict[str, Any]) -> None:
        """Continue from what `state` returned. Raises ValueError where names or shapes are not this model's."""

    @property
    def share(self) -> Tuple[int, int]:
        """(index, parts): which part of each global batch this process reads; `loader.GlobalBatches` takes it."""
        return 0, 1

    def feed(self, batches: GlobalBatches) -> Iterator[Batch]:
        """The same batches, read in the way that suits the device."""
        return batches

    def cycles(self) -> Optional[int]:
        """Device cycles of the last step; None where the device has no counter."""
        return None

    def close(self) -> None:
        """Let go of the device."""
