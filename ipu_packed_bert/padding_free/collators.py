"""The collators and batches of `pack_data.batching` for torch and Hugging Face models.

    batches = Batches("OptimalPacking+PosID", dataset, BatchOptions(batch_size=4, max_sequence_length=4096), model)
    check_no_leak(model, longest=4096)
    for inputs in batches:
        loss = model(**inputs, use_cache=False).loss

With a Trainer of one's own: `Trainer(model, data_collator=PaddingFreeCollator(model), train_dataset=dataset, ...)`, and
`model.config.use_cache = False`; the Trainer then groups the examples, and the collator lays each group end to end.
"""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ipu_packed_bert.padding_free.windows import attention_reach, text_config
from pack_data.batching import collators as arrays
from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import BatchSampler

Inputs = Dict[str, Any]  # keyword arguments of a model's forward pass


def same_example(position_ids: torch.Tensor) -> torch.Tensor:
    """position_ids [1, tokens] of examples laid end to end -> bool [1, 1, tokens, tokens]: same example, and not later.

    Where positions do not go up by one, another example begins.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    example = begins.cumsum(dim=1)
    same = example.unsqueeze(2) == example.unsqueeze(1)
    return same.tril().unsqueeze(1)


def attention_of(model: Any) -> str:
    """The attention implementation that a Hugging Face model was loaded with: "eager", "sdpa", "flash_attention_2", ..."""
    return getattr(model.config, "_attn_implementation", None) or "eager"


def inputs_for(model: Any, batch: Mapping[str, Any]) -> Inputs:
    """A batch of `pack_data.batching` as the arguments with which this model keeps examples apart.

    Padded: input_ids, attention_mask, labels, position_ids [rows, longest].
    Padding-free: input_ids, labels, position_ids [1, tokens], and for flash attention the cumulative lengths its kernel
    reads (cu_seq_lens_q, cu_seq_lens_k int32 [examples + 1]; max_length_q, max_length_k), else a mask [1, 1, tokens, tokens]:
    bool for sdpa, additive for eager code, which would add a bool.  The mask is written out although Transformers can find
    boundaries in position_ids: it only does so without a cache of keys, and says nothing where it does not.
    Every layer gets the same mask, in place of one with its own window or chunks.  ValueError where that makes a difference:
    an example is longer than one of them, and the model was not loaded with flash attention, whose kernel knows the window.
    """
    tensors = {name: torch.as_tensor(values) for name, values in batch.items()}
    if "cumulative_lengths" not in tensors:
        return tensors
    boundaries, longest = tensors.pop("cumulative_lengths"), int(tensors.pop("max_length"))
    kind = attention_of(model)
    if "flash" in kind:
        return {**tensors, "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}
    reach = attention_reach(text_config(model))
    if reach is not None and longest > reach.tokens:
        raise ValueError(
            f"{type(model).__name__}: an example has {longest} tokens, {reach.setting} is {reach.tokens}, and the mask of a padding-free batch "
            f"knows no window; shorten the examples, load the model with attn_implementation=\"flash_attention_2\", or use a padding way")
    mask = same_example(tensors["position_ids"])
    if kind == "eager":
        # Not the type's least number, to which scores could not be added.
        mask = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min / 2)
    return {**tensors, "attention_mask": mask}


class PaddingFreeCollator:
    """Examples (mappings with input_ids and, where they differ, labels) -> the inputs of one padding-free batch of a model."""

    def __init__(self, model: Any, *, pad_id: int = 0, ignore_index: int = -100) -> None:
        self._model, self._collate = model, arrays.PaddingFreeCollator(pad_id, ignore_index)

    def __call__(self, examples: Sequence[arrays.Example]) -> Inputs:
        return inputs_for(self._model, self._collate(examples))


class PaddingCollator:
    """The same examples padded to the longest, one a row: what padding-free batches are compared with."""

    def __init__(self, *, pad_id: int = 0, ignore_index: int = -100) -> None:
        self._collate = arrays.PaddingCollator(pad_id, ignore_index)

    def __call__(self, examples: Sequence[arrays.Example]) -> Inputs:
        return {name: torch.as_tensor(values) for name, values in self._collate(examples).items()}


_NO_LOADER = ("Batches are whole batches of one rank, and a DataLoader, its workers or Accelerate would repeat or drop some of them; "
              "iterate over them directly: for inputs in batches")


class Batches:
    """The batches of one rank by one of the nine ways, as inputs of a model; an epoch an iteration, `state()` to go on later.

    For a loop of its own, `for inputs in batches`, in each rank's process.  No data set for a DataLoader, which refuses it:
    its workers would each make all batches in the order of the first epoch, and Accelerate would take a share of a share.
    """

    def __init__(self, way: str, dataset: Sequence[arrays.Example], options: BatchOptions, model: Any, *, rank: int = 0, pad_id: int = 0) -> None:
        lengths = np.array([len(example["input_ids"]) for example in dataset])
        self.sampler = BatchSampler(way, lengths, options, rank)
        self._dataset, self._model, self._pad_id = dataset, model, pad_id

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: Any) -> Inputs:
        """ValueError: this is where a DataLoader begins to read."""
        raise ValueError(_NO_LOADER)

    def __iter__(self) -> Iterator[Inputs]:
        if get_worker_info() is not None:
            raise ValueError(_NO_LOADER)
        for batch in self.sampler:
            yield inputs_for(self._model, arrays.collate(self.sampler.way, batch, self._dataset, self._pad_id))

    def state(self) -> Dict[str, Any]:
        return self.sampler.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state(dict(state))


def examples_of(ids: Sequence[Sequence[int]]) -> List[Dict[str, np.ndarray]]:
    """Token ids of each example, all of which are to be predicted, as the mappings that collators take."""
    return [{"input_ids": np.asarray(each, np.int64)} for each in ids]
