"""The interface between training and devices: an engine makes one update from a global batch and a learning rate."""

from __future__ import annotations

import abc
import math
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches
from ipu_packed_bert.model.packed import PackedBert
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.tasks.task import Counts, Task


class StepResult(NamedTuple):
    """Result of one update, or of one evaluated batch."""

    metrics: Mapping[str, float]  # of the task, `loss` first, each normalised over the whole update
    seconds: float  # wall clock of the call
    cycles: Optional[int] = None  # device cycles of the call; None if the device has no counter
    # L2 norm of all gradients before clipping; None if the device does not return it.
    gradient_norm: Optional[float] = None
    counts: Optional[Counts] = None  # summed over all processes; None if one process has all rows

    @property
    def loss(self) -> float:
        """Loss of the update, normalised by its task."""
        return self.metrics["loss"]

    @property
    def finite(self) -> bool:
        """True if the loss and, if known, the gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm or 0.0)


class Gradients(NamedTuple):
    """Gradients of a batch, without the weight update."""

    result: StepResult  # `seconds` covers the forward and backward passes
    by_name: Dict[str, torch.Tensor]  # copies, by parameter name


def micro_batches(
    task: Task, batch: Batch, micro_batch: int, fields: Optional[Tuple[str, ...]] = None
) -> int:
    """Return the number of micro-batches of a global batch.

    Args:
        task: the task, which checks the batch.
        batch: the global batch.
        micro_batch: rows of a micro-batch.
        fields: fields that the batch must have; all fields of the task by default.

    Raises:
        ValueError: a field is missing, or the packs do not divide into micro-batches.
    """
    task.check(batch, fields)
    packs = batch["input_ids"].shape[0]
    if packs == 0 or packs % micro_batch:
        raise ValueError(
            f"the batch has {packs} packs, not a multiple of batch.micro_batch {micro_batch}; fill it with empty packs"
        )
    return packs // micro_batch


def build_network(task: Task, seed: int, *, attention: str = "eager") -> PackedBert:
    """Build the network of a task with initial weights, which are the same on every engine.

    Args:
        task: the task to train.
        seed: `run.seed`, which determines the weights.
        attention: "eager" or "sdpa".
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would change the generators of GPUs too.
        torch.default_generator.manual_seed(seed)
        return task.network(attention)


def saved_by(state: Mapping[str, Any]) -> List[int]:
    """Return the `Engine.streams` of the engine that saved a state; empty if the host engine saved it."""
    return [int(number) for number in state.get("ipu_random_of", ())]


class Engine(abc.ABC):
    """One device, or several that act as one. One training program serves the whole data set."""

    task: Task
    # These processes make each update together; all of them call the methods below in the same order.
    processes: Processes = ONE
    # Layout of the random streams on IPUs: processes, replicas per process, IPUs per replica, 1 on the IPU Model. If a
    # state was saved with another layout, dropout starts new streams.
    streams: Sequence[int] = ()

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """One line for users: device, precision, attention."""

    @abc.abstractmethod
    def compile(self, batch: Batch) -> None:
        """Prepare the training program for batches of this shape, without changing weights or random state."""

    @abc.abstractmethod
    def step(self, batch: Batch, learning_rate: float) -> StepResult:
        """Make one weight update on one global batch; raise ValueError if it has the wrong size."""

    @abc.abstractmethod
    def evaluate(self, batch: Batch) -> StepResult:
        """Compute the metrics of one batch without dropout, without side effects."""

    def gradients(
        self, batch: Batch, *, alone: bool = False, dropout: bool = False
    ) -> Optional[Gradients]:
        """Compute the gradients of a batch without side effects, even on random states.

        Args:
            batch: the batch; its shapes may differ from those of training.
            alone: every row has at most one sequence, so that BERT's padding mask suffices.
            dropout: enable dropout.

        Returns:
            The gradients; None if the device would need another program.
        """
        return None

    def predict(self, batch: Batch) -> np.ndarray:
        """Compute the predictions [rows, ...] of a batch without dropout, without side effects."""
        raise ValueError(f"{self.description}: cannot predict; use --engine host")

    @abc.abstractmethod
    def state(self) -> Dict[str, Any]:
        """Return copies of everything that training changes, as tensors on the CPU and plain values.

            {"model": {name: float32 tensor, Hugging Face names},
             "optimizer": {"step": int, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}, ...}

        Every engine can load "model" and "optimizer" of the others; other keys are specific to one engine.
        """

    def weights(self) -> Dict[str, torch.Tensor]:
        """Return entry "model" of `state`; may be called in one process only."""
        return self.state()["model"]

    def join_state(self) -> None:
        """Take part in `state` while rank 0 calls it; all other processes must call this."""

    @abc.abstractmethod
    def load_state(self, state: Dict[str, Any]) -> None:
        """Load a result of `state`; raise ValueError if names or shapes do not match this model."""

    def _summed(self, totals: Sequence[float], batch: Batch) -> Tuple[Dict[str, float], Counts]:
        """Sum the outputs of a batch, by name, and its counts over the processes."""
        counts = self.task.count(batch)
        sums = self.processes.summed([*totals, *counts.values()])
        count_sums = map(int, sums[len(self.task.outputs) :])
        return dict(zip(self.task.outputs, sums)), dict(zip(counts, count_sums))

    @property
    def share(self) -> Tuple[int, int]:
        """Share of each global batch that this process reads, (index, number of shares), for `GlobalBatches`."""
        return self.processes.rank, self.processes.size

    def feed(self, batches: GlobalBatches) -> Iterator[Batch]:
        """Return the same batches, read ahead if that suits the device."""
        return batches

    def close(self) -> None:
        """Release the device."""
