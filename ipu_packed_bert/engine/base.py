"""The seam between training and devices: an engine takes a global batch and a learning rate, and makes one update."""

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
    """What one update, or one evaluated batch, tells the run log."""

    metrics: Mapping[str, float]  # the task's, `loss` first, each normalised over the whole update
    seconds: float  # wall clock of the call
    cycles: Optional[int] = None  # device cycles of the call, None where the device has no counter
    gradient_norm: Optional[float] = None  # of all parameters, before clipping; None where it is not known
    counts: Optional[Counts] = None  # of all processes' parts of the batch; None where it is whole

    @property
    def loss(self) -> float:
        """Of the update, as its task normalises it."""
        return self.metrics["loss"]

    @property
    def finite(self) -> bool:
        """Whether loss and gradients, as far as they are known, are finite."""
        return math.isfinite(self.loss) and (self.gradient_norm is None or math.isfinite(self.gradient_norm))


class Gradients(NamedTuple):
    """What an update on a batch would follow."""

    result: StepResult  # its seconds are those of the forward and backward passes
    by_name: Dict[str, torch.Tensor]  # copies, by the names of the parameters


def micro_batches(task: Task, batch: Batch, micro_batch: int, fields: Optional[Tuple[str, ...]] = None) -> int:
    """Micro-batches of a global batch.

    Raises ValueError where one of `fields`, by default all of the task's, is missing or the packs do not divide into
    micro-batches.
    """
    task.check(batch, fields)
    packs = batch["input_ids"].shape[0]
    if packs == 0 or packs % micro_batch:
        raise ValueError(
            f"the batch holds {packs} packs, not a multiple of batch.micro_batch {micro_batch}; fill it with empty "
            f"packs"
        )
    return packs // micro_batch


def build_network(task: Task, seed: int, *, attention: str = "eager") -> PackedBert:
    """The task's network with its initial weights, drawn from `run.seed`: the same on every engine."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change the generators of GPUs too
        return task.network(attention)


def saved_by(state: Mapping[str, Any]) -> List[int]:
    """The `streams` of the engine that took this state; in others dropout draws anew. Empty: not of IPUs."""
    return [int(each) for each in state.get("ipu_random_of", ())]


class Engine(abc.ABC):
    """One device, or many behaving as one. One training compilation serves the whole data set."""

    task: Task
    processes: Processes = ONE  # that make each update together; each calls the methods here in the same order
    # Of IPUs, which keep a random state: processes, replicas of each, IPUs a replica, 1 on the IPU Model.
    streams: Sequence[int] = ()

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
        """The metrics of one batch without dropout; changes nothing."""

    def gradients(self, batch: Batch, *, alone: bool = False, dropout: bool = False) -> Optional[Gradients]:
        """The gradients of an update on this batch; changes nothing, random streams included.

        alone: every row holds one sequence at most, so that the mask may be BERT's own, of the padding alone.
        The batch may have other shapes than those of training. None where that needs another program on the device.
        """
        return None

    def predict(self, batch: Batch) -> np.ndarray:
        """What the network predicts for each row of a batch, [rows, ...], without dropout; changes nothing."""
        raise ValueError(f"{self.description}: has no prediction; use --engine host")

    @abc.abstractmethod
    def state(self) -> Dict[str, Any]:
        """Copies of all that training changes, as tensors on the CPU and plain values.

            {"model": {name: float32 tensor, Hugging Face names},
             "optimizer": {"step": int, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}, ...}

        Any engine loads "model" and "optimizer" of any other; further keys are the engine's own.
        """

    def weights(self) -> Dict[str, torch.Tensor]:
        """The part "model" of `state`; other processes need not call it too."""
        return self.state()["model"]

    def join_state(self) -> None:
        """What the other processes do while rank 0 takes the `state` that it saves."""

    @abc.abstractmethod
    def load_state(self, state: Dict[str, Any]) -> None:
        """Continue from what `state` returned. Raises ValueError where names or shapes are not this model's."""

    def _summed(self, totals: Sequence[float], batch: Batch) -> Tuple[Dict[str, float], Counts]:
        """The outputs of a batch by name, and what it holds, summed over the processes."""
        own = self.task.count(batch)
        found = self.processes.summed([*totals, *own.values()])
        counts = {name: int(count) for name, count in zip(own, found[len(self.task.outputs) :])}
        return dict(zip(self.task.outputs, found)), counts

    @property
    def share(self) -> Tuple[int, int]:
        """(index, parts): which part of each global batch this process reads; `loader.GlobalBatches` takes it."""
        return self.processes.rank, self.processes.size

    def feed(self, batches: GlobalBatches) -> Iterator[Batch]:
        """The same batches, read in the way that suits the device."""
        return batches

    def close(self) -> None:
        """Let go of the device."""
