"""Batches of `pack_data.batching` as inputs of Hugging Face models.

With a Hugging Face Trainer: set `model.config.use_cache = False`, then use
`Trainer(model, data_collator=PaddingFreeCollator(model), train_dataset=dataset, ...)`.  The Trainer chooses the
examples of a batch, and the collator joins them into one row.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Mapping, Optional, Sequence

import torch

from pack_data.batching.collators import Example, padded_batch, padding_free_batch
from padding_free.attention import first_position
from padding_free.models import base_of, choice_of

Inputs = Dict[str, Any]  # keyword arguments of a model's forward pass


def inputs_for(model: Any, batch: Mapping[str, Any]) -> Inputs:
    """Return the arguments with which `model` keeps the examples of a batch of `pack_data.batching` apart.

    A padded batch: input_ids, attention_mask, labels, position_ids [rows, longest].
    A padding-free batch: input_ids, labels, position_ids [1, tokens], and the input that separates the examples:

    - for our attention and for flash attention their boundaries: cu_seq_lens_q, cu_seq_lens_k int32 [examples + 1],
      max_length_q, max_length_k;
    - none if `use_padding_free` chose so: Transformers finds the boundaries in position_ids, but only without a key
      cache, and it does not warn.  The choice switches the cache off;
    - seq_idx int32 [1, tokens], the number of the example, if `use_padding_free` detected layers that need it.

    Args:
        model: A Hugging Face model.
        batch: A batch of `pack_data.batching.collators`.

    Returns:
        Keyword arguments of the model, and its labels.

    Raises:
        ValueError: The model has an attention that `use_padding_free` has not chosen.
    """
    tensors = {name: torch.as_tensor(values) for name, values in batch.items()}
    tensors["position_ids"] = tensors["position_ids"] + first_position(model)
    if "cumulative_lengths" not in tensors:
        return tensors
    boundaries = tensors.pop("cumulative_lengths")
    longest = int(tensors.pop("max_length"))
    # Models do not take the boundaries for context parallelism.
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        tensors.pop(name, None)
    choice = choice_of(model, tried=True)
    more: Inputs = {}
    if choice.boundaries == "cu_seq_lens":
        more = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
        more.update(max_length_q=longest, max_length_k=longest)
    if choice.seq_idx:
        lengths = boundaries.diff()
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        more["seq_idx"] = torch.repeat_interleave(numbers, lengths)[None]
    return {**tensors, **more}


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Move the tensors of the inputs to `device`."""
    moved = dict(inputs)
    for name, value in inputs.items():
        if torch.is_tensor(value):
            moved[name] = value.to(device)
    return moved


def attends_both_ways(model: Any) -> bool:
    """Return True if tokens see later tokens, as in BERT, by the `is_causal` of the attention layers."""
    modules = base_of(model).modules()
    causal = [module.is_causal for module in modules if hasattr(module, "is_causal")]
    return bool(causal) and not any(causal)


class PaddingFreeCollator:
    """Examples -> the inputs of one padding-free batch of `model`.

    An example is a mapping with input_ids and, if they differ from them, labels.

    Args:
        model: The model that gets the inputs.
        pad_id: Token of the padding.
        slots: Pad the row to this number of tokens, so that all batches have one shape.  Accelerate needs that if it
            dispatches batches.  The inputs then have no boundaries: the model finds them in position_ids, so call it
            with use_cache=False.  Models that attend to both sides do not support it.
        multiple_of: Begin each example, and end the row, at a multiple of this number of tokens, as context parallelism
            or FP8 require.

    Raises:
        ValueError: `slots` is a number and the model attends to both sides.
    """

    def __init__(
        self, model: Any, *, pad_id: int = 0, slots: Optional[int] = None, multiple_of: int = 1
    ) -> None:
        self._model = model
        self._slots = slots
        if slots is not None and attends_both_ways(model):
            raise ValueError(
                f"{type(base_of(model)).__name__} attends to both sides, and such models find no boundaries in "
                "position_ids; omit slots"
            )
        self._collate = partial(
            padding_free_batch,
            pad_id=pad_id,
            slots=slots,
            multiple_of=multiple_of,
            causal=not attends_both_ways(model),
        )

    def __call__(self, examples: Sequence[Example]) -> Inputs:
        inputs = inputs_for(self._model, self._collate(examples))
        if self._slots is None:
            return inputs
        # Boundaries have one dimension or none.
        return {name: value for name, value in inputs.items() if torch.as_tensor(value).dim() > 1}


class PaddingCollator:
    """Examples -> a batch with one row for each, padded to the longest, to compare padding-free batches with.

    Args:
        pad_id: Token of the padding.
        multiple_of: Pad rows to a multiple of this number of tokens.
    """

    def __init__(self, *, pad_id: int = 0, multiple_of: int = 1) -> None:
        self._collate = partial(padded_batch, pad_id=pad_id, multiple_of=multiple_of)

    def __call__(self, examples: Sequence[Example]) -> Inputs:
        return {name: torch.as_tensor(values) for name, values in self._collate(examples).items()}
