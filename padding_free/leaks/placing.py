"""The tokens of each example in the batch of a collator, which may reorder the examples or change them at random."""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np
import torch

from padding_free.collators import Inputs
from padding_free.losses import IGNORED, at_least_float32

Example = Dict[str, np.ndarray]


class PlacedRow(NamedTuple):
    """A collated batch, its examples, and the places of their tokens in the flattened input_ids."""

    inputs: Inputs
    examples: List[Example]
    places: List[torch.Tensor]  # of each example: int64 [its tokens]
    is_changed: bool = False  # the collator changed tokens, so the examples are those of the batch

    @property
    def lengths(self) -> List[int]:
        """The tokens of each example."""
        return [len(example["input_ids"]) for example in self.examples]

    def select(self, *parts: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the examples, [tokens, width] of parts of a batch, [..., width] each.

        A part is the whole batch, or some of its rows, which may leave out the padding.
        """
        places = torch.cat(self.places)
        slots = self.inputs["input_ids"].numel()
        whole = [part.flatten(0, -2) for part in parts if part.shape[:-1].numel() == slots]
        flat = (
            sum(whole[1:], whole[0])
            if whole
            else torch.cat([part.flatten(0, -2) for part in parts])
        )
        if len(flat) != slots:
            if len(flat) != len(places):
                raise ValueError(
                    f"the model embeds {len(flat):,} tokens of a batch of {len(places):,}; embed each token once"
                )
            places = places.argsort().argsort()
        if not torch.equal(places, torch.arange(len(flat))):
            flat = flat[places.to(flat.device)]
        return at_least_float32(flat)


def place(examples: Sequence[Example], inputs: Inputs) -> PlacedRow:
    """Find the tokens of each example in a batch.

    A collator may reorder examples.  If it changes tokens but keeps the lengths of the examples, as those of masked
    models do, the examples of the batch are returned.

    Args:
        examples: The examples that the collator got.
        inputs: The batch that it returned.

    Raises:
        ValueError: The batch has other examples.
    """
    ids = torch.as_tensor(inputs["input_ids"]).cpu()
    flat = ids.flatten()
    in_order: List[torch.Tensor] = []
    begin = 0
    for example in examples:
        tokens_in_batch = _next_place(flat, torch.as_tensor(example["input_ids"]), begin)
        if tokens_in_batch is None:
            break
        in_order.append(tokens_in_batch)
        begin = int(tokens_in_batch[-1]) + 1
    if len(in_order) == len(examples):
        return PlacedRow(inputs, list(examples), in_order)

    segments = list(_segments(ids, inputs))
    reordered = _match(examples, flat, segments)
    if reordered is not None:
        return PlacedRow(inputs, list(examples), reordered)
    lengths = sorted(len(example["input_ids"]) for example in examples)
    if sorted(map(len, segments)) == lengths:
        return PlacedRow(inputs, examples_in(inputs), segments, is_changed=True)
    number = len(in_order)
    tokens = len(examples[number]["input_ids"])
    raise ValueError(
        f"example {number} of {tokens} tokens is not in the collator's batch; let the collator keep all examples and "
        "their lengths, and return their boundaries"
    )


def _next_place(flat: torch.Tensor, ids: torch.Tensor, begin: int) -> Optional[torch.Tensor]:
    """Return the first place of the tokens `ids` from `begin` on."""
    tokens = len(ids)
    for first in range(begin, len(flat) - tokens + 1):
        if torch.equal(flat[first : first + tokens], ids):
            return torch.arange(first, first + tokens)
    return None


def _segments(ids: torch.Tensor, inputs: Inputs) -> Iterator[torch.Tensor]:
    """Iterate over the places of the examples according to the boundaries, the positions or the rows of a batch."""
    places = torch.arange(ids.numel())
    bounds = inputs.get("cu_seq_lens_q")
    positions = inputs.get("position_ids")
    if bounds is not None:
        yield from places.tensor_split(torch.as_tensor(bounds).cpu().long()[1:-1])
        return

    begins = torch.zeros(ids.shape, dtype=torch.bool)
    begins[:, 0] = True
    if torch.is_tensor(positions) and positions.shape == ids.shape:
        begins[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1).cpu()
    is_real = torch.ones(ids.shape, dtype=torch.bool)
    mask = inputs.get("attention_mask")
    if torch.is_tensor(mask) and mask.shape == ids.shape:
        is_real = mask.cpu().bool()
    for segment in places.tensor_split(begins.flatten().nonzero()[1:, 0]):
        real = segment[is_real.flatten()[segment]]
        if len(real):
            yield real


def _match(
    examples: Sequence[Example], flat: torch.Tensor, segments: Sequence[torch.Tensor]
) -> Optional[List[torch.Tensor]]:
    """Return the places of examples in another order, as a multiset; None if the tokens differ."""
    free: Dict[bytes, List[torch.Tensor]] = {}
    for segment in segments:
        free.setdefault(flat[segment].numpy().tobytes(), []).append(segment)
    places = []
    for example in examples:
        equal = free.get(np.asarray(example["input_ids"], np.int64).tobytes())
        if not equal:
            return None
        places.append(equal.pop(0))
    return places


def examples_in(inputs: Inputs) -> List[Example]:
    """Return the examples of a batch, according to its boundaries, positions or rows.

    Args:
        inputs: The batch, with input_ids [rows, tokens].
    """
    ids = torch.as_tensor(inputs["input_ids"]).cpu()
    flat = ids.flatten()
    labels = torch.as_tensor(inputs.get("labels", flat)).cpu().flatten()
    if len(labels) != len(flat):
        labels = torch.full_like(flat, IGNORED)
    return [
        {"input_ids": flat[segment].numpy(), "labels": labels[segment].numpy()}
        for segment in _segments(ids, inputs)
    ]
