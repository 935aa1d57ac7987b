"""The contract of a task: what engines, loader and training loop know of it.  They know no task by name.

Loads without torch.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Dict, Iterable, Mapping, NamedTuple, Optional, Tuple

from ipu_packed_bert.data.global_batches import Batch, Layout
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig

if TYPE_CHECKING:
    from ipu_packed_bert.model.packed import PackedBert

Counts = Dict[str, int]
_Metrics = Dict[str, float]


class Metric(NamedTuple):
    """A mean over an update: a sum that the network returns, divided by a count of the batch."""

    name: str  # as it is logged
    sum: str  # output of the network
    per: str  # name in Task.counts
    scale: Optional[str] = None  # the field by which the network has multiplied its sum


class Evaluation(NamedTuple):
    """What came of evaluating."""

    counts: Counts
    metrics: Mapping[str, Any]
    seconds: float
    loss: float = 0.0  # not finite where the network's outputs are not
    files: Mapping[str, Any] = {}  # plain values by file name


class Task(abc.ABC):
    """What is trained on packs.

    A batch has constant shapes: S slots, D = max_sequences_per_pack places for sequences, as many rows in every update.
    An empty pack is all zeros; it weighs nothing and is not counted.
    """

    name: str  # of the configuration's task
    architecture: str  # Hugging Face's class of the exported network
    fields: Tuple[str, ...]  # of a batch, in the order in which the network takes them
    prediction_fields: Tuple[
        str, ...
    ] = ()  # those that its `predictions` takes; () where it has none
    outputs: Tuple[str, ...]  # what the network returns, `loss` first
    counts: Mapping[
        str, str
    ]  # name -> the field whose entries above 0 are counted, `sequences` among them
    scales: Mapping[
        str, str
    ]  # field -> count: its value is the micro-batches of an update divided by the update's count
    metrics: Tuple[Metric, ...]
    losses: Tuple[str, ...]  # the metrics that add up to the loss
    model: ModelConfig
    max_sequence_length: int
    max_sequences_per_pack: Optional[
        int
    ]  # None where only a data set that is not there yet knows it

    @property
    @abc.abstractmethod
    def heads(self) -> Tuple[PlacedPart, ...]:
        """The parts of the network that follow the encoder, in the order of the forward pass."""

    @abc.abstractmethod
    def network(self, attention: str) -> PackedBert:
        """Build the network with initial weights from torch's generator.

        Its forward takes `fields` and returns `outputs` by name, sums over the rows of a micro-batch; the loss is such
        that its mean over the micro-batches of an update is the mean over the update.
        """

    @property
    def program_facts(self) -> Mapping[str, Any]:
        """Plain values that decide the network besides `model`; for programs that are compiled beforehand."""
        return {}

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> Optional[Evaluation]:
        """Return the metrics of several batches, as if they were one; None without batches, or without all of them.

        engine: an `engine.base.Engine` of this task.
        """
        parts, seconds = [], 0.0
        for batch in batches:
            result = engine.evaluate(batch)
            parts.append((result.counts or self.count(batch), result.metrics))
            seconds += result.seconds
        if not parts:
            return None
        counts, metrics = self.merged(parts)
        return Evaluation(counts, metrics, seconds, metrics["loss"])

    def export_settings(self) -> Dict[str, Any]:
        """Further keys of the exported config.json."""
        return {}

    # ---- what follows from these -------------------------------------------------------------------------------------

    def check(self, batch: Batch, fields: Optional[Tuple[str, ...]] = None) -> None:
        """Raise ValueError if the batch lacks one of `fields`, by default all of the task's."""
        fields = self.fields if fields is None else fields
        missing = [name for name in fields if name not in batch]
        if missing:
            raise ValueError(
                f"the batch has no {', '.join(missing)}; it needs all of {', '.join(fields)}"
            )

    def count(self, batch: Batch) -> Counts:
        """Count what a batch really holds: packs and tokens, and `counts`."""
        real = batch["input_mask"] > 0
        return {
            "packs": int(real.any(axis=1).sum()),
            "tokens": int(real.sum()),
            **{name: int((batch[field] > 0).sum()) for name, field in self.counts.items()},
        }

    def layout(self, config: Config, packing_factor: float) -> Layout:
        """Return the shape of the global batches of a configuration."""
        return Layout(
            self.carried,
            {field: self.counts[count] for field, count in self.scales.items()},
            config.micro_batches_per_update(packing_factor),
            config.packs_per_update(packing_factor),
        )

    def means(
        self, sums: Mapping[str, float], counts: Counts, scaled: Mapping[str, float]
    ) -> _Metrics:
        """Compute the metrics of a batch.

        scaled: by scale field, the number that divides a sum multiplied by it.
        """
        found: _Metrics = {}
        for metric in self.metrics:
            divisor = max(1, counts[metric.per]) if metric.scale is None else scaled[metric.scale]
            found[metric.name] = sums[metric.sum] / divisor if divisor else 0.0
        return self._with_loss(found)

    def merged(
        self, parts: Iterable[Tuple[Counts, Mapping[str, float]]]
    ) -> Tuple[Counts, _Metrics]:
        """Merge counts and metrics of several batches, as if they were one."""
        totals: Counts = dict.fromkeys(("packs", "tokens", *self.counts), 0)
        sums: _Metrics = {metric.name: 0.0 for metric in self.metrics}
        for counts, metrics in parts:
            totals = {name: total + counts[name] for name, total in totals.items()}
            for metric in self.metrics:
                sums[metric.name] += metrics[metric.name] * counts[metric.per]
        return totals, self._with_loss(
            {metric.name: sums[metric.name] / max(1, totals[metric.per]) for metric in self.metrics}
        )

    def _with_loss(self, metrics: _Metrics) -> _Metrics:
        """Return the metrics after the loss that they add up to."""
        return {"loss": sum(metrics[name] for name in self.losses), **metrics}

    @property
    def carried(self) -> Tuple[str, ...]:
        """`fields`, and what counting needs besides."""
        return tuple(dict.fromkeys((*self.fields, *self.counts.values())))
