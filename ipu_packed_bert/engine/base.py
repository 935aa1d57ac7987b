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
    # Norm over all parameters before clipping; None if the device does not return it.
    gradient_norm: Optional[float] = None
    counts: Optional[Counts] = None  # of the parts of all processes; None if the batch is whole

    @property
    def loss(self) -> float:
        """Loss of the update, normalised by its task."""
        return self.metrics["loss"]

    @property
    def finite(self) -> bool:
        """True if the loss and, if known, the gradients are finite."""
        return math.isfinite(self.loss) and (
            self.gradient_norm is None or math.isfinite(self.gradient_norm)
        )


class Gradients(NamedTuple):
    """Gradients of an update that is not made."""

    result: StepResult  # its seconds are those of the forward and backward passes
    by_name: Dict[str, torch.Tensor]  # copies, by parameter name


def micro_batches(
    task: Task, batch: Batch, micro_batch: int, fields: Optional[Tuple[str, ...]] = None
) -> int:
    """Return the number of micro-batches of a global batch.

    Args:
        task: what is trained.
        batch: the global batch.
        micro_batch: rows of a micro-batch.
        fields: fields that the batch must have; by default all of the task.

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
        task: what is trained.
        seed: `run.seed`, from which the weights are drawn.
        attention: "eager" or "sdpa".
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed would change the generators of GPUs too
        return task.network(attention)


def saved_by(state: Mapping[str, Any]) -> List[int]:
    """Return the `Engine.streams` of the engine that saved a state; empty if it was not of IPUs."""
    return [int(number) for number in state.get("ipu_random_of", ())]


class Engine(abc.ABC):
    """One device, or several that act as one. One training program serves the whole data set."""

    task: Task
    # These processes make each update together; all call the methods here in the same order.
    processes: Processes = ONE
    # IPUs keep a random state: processes, replicas of each, IPUs per replica, 1 on the IPU Model. In a state saved by
    # other streams, dropout draws anew.
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
        """Compute the metrics of one batch without dropout; change nothing."""

    def gradients(
        self, batch: Batch, *, alone: bool = False, dropout: bool = False
    ) -> Optional[Gradients]:
        """Compute the gradients of an update on a batch; change nothing, not even a random state.

        Args:
            batch: a batch, whose shapes may differ from those of training.
            alone: every row has one sequence at most, so that BERT's own mask, of the padding, is enough.
            dropout: whether dropout is on.

        Returns:
            The gradients; None if the device needs another program for them.
        """
        return None

    def predict(self, batch: Batch) -> np.ndarray:
        """Compute the predictions [rows, ...] of a batch without dropout; change nothing."""
        raise ValueError(f"{self.description}: has no prediction; use --engine host")

    @abc.abstractmethod
    def state(self) -> Dict[str, Any]:
        """Return copies of everything that training changes, as tensors on the CPU and plain values.

            {"model": {name: float32 tensor, Hugging Face names},
             "optimizer": {"step": int, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}, ...}

        Every engine loads "model" and "optimizer" of the others; further keys belong to one engine.
        """

    def weights(self) -> Dict[str, torch.Tensor]:
        """Return entry "model" of `state`; other processes need not call this."""
        return self.state()["model"]

    def join_state(self) -> None:
        """Take part, in the other processes, in the `state` that rank 0 saves."""

    @abc.abstractmethod
    def load_state(self, state: Dict[str, Any]) -> None:
        """Continue from what `state` returned; raise ValueError if names or shapes are not those of this model."""

    def _summed(self, totals: Sequence[float], batch: Batch) -> Tuple[Dict[str, float], Counts]:
        """Sum the outputs of a batch, by name, and its counts over the processes."""
        counts = self.task.count(batch)
        sums = self.processes.summed([*totals, *counts.values()])
        outputs = dict(zip(self.task.outputs, sums))
        count_sums = sums[len(self.task.outputs) :]
        return outputs, {name: int(count) for name, count in zip(counts, count_sums)}

    @property
    def share(self) -> Tuple[int, int]:
        """Part of each global batch that this process reads: (index, parts), for `GlobalBatches`."""
        return self.processes.rank, self.processes.size

    def feed(self, batches: GlobalBatches) -> Iterator[Batch]:
        """Return the same batches, read in the way that suits the device."""
        return batches

    def close(self) -> None:
        """Release the device."""
