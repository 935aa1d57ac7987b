"""Pre-training: masked tokens and, if configured, next-sentence prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Tuple

from ipu_packed_bert.data.data_sets import check_schema
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import PlacedPart, pretraining_heads
from ipu_packed_bert.tasks.task import Metric, Task
from pack_data.store.packs import FIELDS, PackSchema

if TYPE_CHECKING:
    from ipu_packed_bert.model.packed import PackedBertForPreTraining


class Pretraining(Task):
    """The pre-training task of a configuration.

    Args:
        config: settings of the run.
        schema: schema of the data set; without one the configuration limits the sequences per pack.

    Raises:
        ConfigError: schema and configuration contradict each other.
    """

    name = "pretraining"
    fields = FIELDS + ("mlm_scale", "nsp_scale")
    outputs = ("loss", "mlm_loss", "nsp_loss", "mlm_correct", "nsp_correct")
    counts = {"sequences": "next_sentence_weights", "masked_tokens": "masked_lm_weights"}
    losses: Tuple[str, ...] = ("mlm_loss", "nsp_loss")

    def __init__(self, config: Config, schema: Optional[PackSchema] = None):
        if schema is not None:
            check_schema(config, schema)
        self._loss = config.loss
        self.model = config.model
        self.max_sequence_length = config.data.max_sequence_length
        self.max_sequences_per_pack = schema.max_sequences_per_pack if schema else config.data.depth
        masked = "masked_tokens" if config.loss.normalisation == "token" else "sequences"
        self.scales = {"mlm_scale": masked, "nsp_scale": "sequences"}
        self.metrics = (
            Metric("mlm_loss", "mlm_loss", masked, "mlm_scale"),
            Metric("nsp_loss", "nsp_loss", "sequences", "nsp_scale"),
            Metric("mlm_accuracy", "mlm_correct", "masked_tokens"),
            Metric("nsp_accuracy", "nsp_correct", "sequences"),
        )
        if not config.loss.next_sentence:
            self.metrics = self.metrics[::2]
            self.losses = self.losses[:1]
        self.architecture = "BertForPreTraining" if config.loss.next_sentence else "BertForMaskedLM"

    @property
    def heads(self) -> Tuple[PlacedPart, ...]:
        """Modules after the last layer, each of which a placement may move."""
        return pretraining_heads(next_sentence=self._loss.next_sentence)

    def network(self, attention: str) -> PackedBertForPreTraining:
        from ipu_packed_bert.model.packed import PackedBertForPreTraining

        return PackedBertForPreTraining(self.model, self._loss, attention=attention)
