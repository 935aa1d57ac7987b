"""The interface of a task, which engines, loader and training loop use without naming any task. Loads without torch."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Dict, Iterable, Mapping, NamedTuple, Optional, Tuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig

if TYPE_CHECKING:
    from ipu_packed_bert.data.global_batches import Batch, Layout
    from ipu_packed_bert.model.packed import PackedBert

Counts = Dict[str, int]
_Metrics = Dict[str, float]


class Metric(NamedTuple):
    """A mean over an update: an output of the network divided by a count of the batch."""

    name: str  # in logs
    sum: str  # output of the network, a sum
    per: str  # name in Task.counts
    scale: Optional[str] = None  # field that the network has multiplied the sum by


class Evaluation(NamedTuple):
    """Result of an evaluation."""

    counts: Counts
    metrics: Mapping[str, Any]
    seconds: float
    loss: float = 0.0  # not finite if outputs of the network are not
    files: Mapping[str, Any] = {}  # plain values by file name


class Task(abc.ABC):
    """A task that is trained on packs.

    The shapes of batches are constant: S slots, D = max_sequences_per_pack places for sequences, and the rows of an
    update. An empty pack is all zeros; its weight is 0 and it is not counted.
    """

    name: str  # `task.name` of the configuration
    architecture: str  # Hugging Face class of the exported network
    fields: Tuple[str, ...]  # fields of a batch, in the order of the network's arguments
    prediction_fields: Tuple[
        str, ...
    ] = ()  # arguments of the network's `predictions`, if it has it
    outputs: Tuple[str, ...]  # names of the network's outputs, `loss` first
    counts: Mapping[str, str]  # name -> field whose positive entries are counted; has `sequences`
    # Field -> name in counts. The value of the field is micro-batches / count, both of an update.
    scales: Mapping[str, str]
    metrics: Tuple[Metric, ...]
    losses: Tuple[str, ...]  # names of the metrics that add up to the loss
    model: ModelConfig
    max_sequence_length: int
    max_sequences_per_pack: Optional[int]  # None until a data set exists that determines it

    @property
    @abc.abstractmethod
    def heads(self) -> Tuple[PlacedPart, ...]:
        """Parts of the network after the encoder, in the order of the forward pass."""

    @abc.abstractmethod
    def network(self, attention: str) -> PackedBert:
        """Build the network with initial weights from torch's generator.

        Its forward takes `fields` and returns `outputs` by name, as sums over the rows of a micro-batch. The loss is
        scaled so that its mean over the micro-batches of an update is the mean over the update.
        """

    @property
    def program_facts(self) -> Mapping[str, Any]:
        """Plain values that determine the network besides `model`, for programs that are compiled beforehand."""
        return {}

    def evaluate(self, engine: Any, batches: Iterable[Batch]) -> Optional[Evaluation]:
        """Compute the metrics of all batches together with an `engine.base.Engine`; return None without batches."""
        parts = []
        seconds = 0.0
        for batch in batches:
            result = engine.evaluate(batch)
            parts.append((result.counts or self.count(batch), result.metrics))
            seconds += result.seconds
        if not parts:
            return None
        counts, metrics = self._merged(parts)
        return Evaluation(counts, metrics, seconds, metrics["loss"])

    def export_settings(self) -> Dict[str, Any]:
        """Return further keys of the exported config.json."""
        return {}

    # ---- derived from the above --------------------------------------------------------------------------------------

    def check(self, batch: Batch, fields: Optional[Tuple[str, ...]] = None) -> None:
        """Raise ValueError if a batch lacks one of ``fields``, by default those of the task."""
        fields = self.fields if fields is None else fields
        missing = [name for name in fields if name not in batch]
        if missing:
            raise ValueError(f"the batch has no {', '.join(missing)}; it needs {', '.join(fields)}")

    def count(self, batch: Batch) -> Counts:
        """Count the packs and tokens of a batch, without padding, and the task's `counts`."""
        mask = batch["input_mask"] > 0
        counts = {"packs": int(mask.any(axis=1).sum()), "tokens": int(mask.sum())}
        for name, field in self.counts.items():
            counts[name] = int((batch[field] > 0).sum())
        return counts

    def layout(self, config: Config, packing_factor: float) -> Layout:
        """Return the shape of the global batches of a configuration."""
        from ipu_packed_bert.data.global_batches import Layout

        # The fields of the network, and those that are only counted.
        fields = dict.fromkeys((*self.fields, *self.counts.values()))
        return Layout(
            tuple(fields),
            {field: self.counts[count] for field, count in self.scales.items()},
            config.batch.micro_batch,
            config.micro_batches_per_update(packing_factor),
            config.packs_per_update(packing_factor),
        )

    def means(
        self, sums: Mapping[str, float], counts: Counts, scaled: Mapping[str, float]
    ) -> _Metrics:
        """Compute the metrics of a batch from the network's outputs.

        ``scaled`` has the divisors of sums that the network has scaled, by scale field.
        """
        metrics: _Metrics = {}
        for metric in self.metrics:
            divisor: float = max(1, counts[metric.per])
            if metric.scale is not None:
                divisor = scaled[metric.scale]
            metrics[metric.name] = sums[metric.sum] / divisor if divisor else 0.0
        return self._with_loss(metrics)

    def _merged(
        self, parts: Iterable[Tuple[Counts, Mapping[str, float]]]
    ) -> Tuple[Counts, _Metrics]:
        """Merge counts and metrics of several batches into those of all together."""
        totals: Counts = dict.fromkeys(("packs", "tokens", *self.counts), 0)
        sums: _Metrics = dict.fromkeys([metric.name for metric in self.metrics], 0.0)
        for counts, metrics in parts:
            for name in totals:
                totals[name] += counts[name]
            for metric in self.metrics:
                sums[metric.name] += metrics[metric.name] * counts[metric.per]
        for metric in self.metrics:
            sums[metric.name] /= max(1, totals[metric.per])
        return totals, self._with_loss(sums)

    def _with_loss(self, metrics: _Metrics) -> _Metrics:
        """Return the metrics with the loss, their sum, as the first."""
        return {"loss": sum(metrics[name] for name in self.losses), **metrics}
