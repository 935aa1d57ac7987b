"""Hugging Face's BERT on the sequences of a benchmark: sorted by length and padded, or concatenated without padding.

It has our weights and our loss: sums over masked tokens and over sequences, divided by their numbers. Like ours, its
vocabulary projection computes masked tokens only, so that layouts and not heads are compared. The weight update is left
out, because it is the same on all sides.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch.nn import functional as F

from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.host.devices import autocast, numerics_of
from ipu_packed_bert.model.hugging_face import bert_settings
from ipu_packed_bert.model.loss import at_least_float32
from ipu_packed_bert.settings.config import Config


class _Forward(NamedTuple):
    """Inputs of a forward pass of Hugging Face's model with Q sequences and K masked tokens."""

    inputs: Dict[str, Any]  # of the encoder
    masked: torch.Tensor  # int64 [K], slots in the flattened rows
    first: torch.Tensor  # int64 [Q], slots of [CLS]
    ids: torch.Tensor  # int64 [K]
    labels: torch.Tensor  # int64 [Q]


class HuggingFaceSide:
    """BertForPreTraining of Transformers on prepared forward passes."""

    def __init__(
        self,
        config: Config,
        weights: Any,
        forwards: Sequence[_Forward],
        device: torch.device,
        attention: str,
    ):
        import transformers

        self._model = transformers.BertForPreTraining._from_config(
            transformers.BertConfig(**bert_settings(config.model)), attn_implementation=attention
        )
        self._model.load_state_dict(weights, strict=False)
        self._model.to(device).train()
        self.forwards = forwards
        self._device = device
        self._engine = config.engine

    def __call__(self) -> float:
        """Compute all forward and backward passes, clear the gradients, and return the mean loss."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        tokens = sum(len(forward.masked) for forward in self.forwards)
        sequences = sum(len(forward.first) for forward in self.forwards)
        with numerics_of(self._engine, self._device):
            for forward in self.forwards:
                # As in the feed of the host engine: from pinned memory, while the host continues.
                moved = [self._moved(value) for value in forward[1:]]
                inputs = {name: self._moved(value) for name, value in forward.inputs.items()}
                with autocast(self._engine.precision, self._device):
                    mlm_sum, nsp_sum = self._losses(inputs, *moved)
                    loss = mlm_sum / tokens + nsp_sum / sequences
                loss.backward()
                total += loss.detach()
        self._model.zero_grad(set_to_none=True)
        return float(total)

    def _moved(self, value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        if self._device.type == "cuda":
            value = value.pin_memory()
        return value.to(self._device, non_blocking=True)

    def _losses(self, inputs, masked, first, ids, labels) -> Tuple[torch.Tensor, torch.Tensor]:
        """Compute the sums of both losses."""
        model = self._model
        hidden_TH = model.bert(**inputs)[0].flatten(0, 1)
        mlm = at_least_float32(model.cls.predictions(hidden_TH[masked]))
        # The pooler takes the first slot of each row.
        pooled = model.bert.pooler(hidden_TH[first].unsqueeze(1))
        nsp = at_least_float32(model.cls.seq_relationship(pooled))
        mlm_sum = F.cross_entropy(mlm, ids, reduction="sum")
        nsp_sum = F.cross_entropy(nsp, labels, reduction="sum")
        return mlm_sum, nsp_sum


def _sorted_by_budget(unpacked: Batch, slots: int) -> List[_Forward]:
    """Sort sequences by length and pad them to the longest of each forward pass, which has at most ``slots`` slots."""
    lengths = (unpacked["input_mask"] > 0).sum(axis=1)
    groups: List[List[int]] = [[]]
    for row in np.argsort(lengths, kind="stable").tolist():
        if (len(groups[-1]) + 1) * lengths[row] > slots:
            groups.append([])
        groups[-1].append(row)
    forwards = []
    for group in groups:
        longest = int(lengths[group].max())
        forwards.append(_padded(unpacked, np.array(group), longest))
    return forwards


def _padded(unpacked: Batch, chosen: np.ndarray, slots: int) -> _Forward:
    """Truncate the chosen rows to ``slots``; rows without padding get no mask, which is faster."""
    inputs = {
        "input_ids": unpacked["input_ids"][chosen, :slots],
        "token_type_ids": unpacked["segment_ids"][chosen, :slots],
    }
    mask = unpacked["input_mask"][chosen, :slots]
    if not mask.all():
        inputs["attention_mask"] = mask
    return _forward(unpacked, chosen, inputs, np.arange(len(chosen)) * slots)


def _without_padding(unpacked: Batch, slots: int) -> List[_Forward]:
    """Concatenate sequences to rows of at most ``slots`` tokens, in order, with boundaries."""
    lengths = (unpacked["input_mask"] > 0).sum(axis=1)
    forwards = []
    start = 0
    while start < len(lengths):
        fitting = np.searchsorted(np.cumsum(lengths[start:]), slots, side="right")
        end = start + max(1, int(fitting))
        chosen = np.arange(start, end)
        bounds = np.concatenate([[0], np.cumsum(lengths[chosen])])
        longest = int(lengths[chosen].max())
        mask = unpacked["input_mask"][chosen] > 0
        inputs: Dict[str, Any] = {
            "cu_seq_lens_q": bounds.astype(np.int32),
            "cu_seq_lens_k": bounds.astype(np.int32),
            "max_length_q": longest,
            "max_length_k": longest,
        }
        columns = {
            "input_ids": "input_ids",
            "token_type_ids": "segment_ids",
            "position_ids": "positions",
        }
        for name, column in columns.items():
            inputs[name] = unpacked[column][chosen][mask][None]
        forwards.append(_forward(unpacked, chosen, inputs, bounds[:-1]))
        start = end
    return forwards


def _forward(
    unpacked: Batch,
    chosen: np.ndarray,
    inputs: Dict[str, Any],
    first: np.ndarray,
) -> _Forward:
    """Add the inputs of the heads; ``first`` has the slot of [CLS] of each chosen sequence."""
    used = unpacked["masked_lm_weights"][chosen] > 0
    slots = unpacked["masked_lm_positions"][chosen] + first[:, None]
    ids = unpacked["masked_lm_ids"][chosen]
    labels = unpacked["next_sentence_labels"][chosen][:, 0]
    return _Forward(
        {name: _tensor(name, value) for name, value in inputs.items()},
        _tensor("masked", slots[used]),
        _tensor("first", first),
        _tensor("ids", ids[used]),
        _tensor("labels", labels),
    )


def _tensor(name: str, values: Any) -> Any:
    """Convert an array to int64, boundaries to int32; return numbers unchanged."""
    if isinstance(values, int):
        return values
    dtype = np.int32 if "cu_seq" in name else np.int64
    return torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))


class RivalLayout(NamedTuple):
    """A layout without packs, and its attention."""

    lay_out: Callable[[Batch, int], List[_Forward]]  # takes unpacked rows, and slots per pass
    attention: str  # of Transformers


LAYOUTS = {
    "sorted": RivalLayout(_sorted_by_budget, "sdpa"),
    "flash": RivalLayout(_without_padding, "flash_attention_2"),
}
