"""One update of a causal model: the mean loss over the supervised tokens of the whole update, however it is cut up.

Micro-batches and ranks hold different numbers of tokens, so a mean of their means is another objective: it weighs a token
by the company it keeps.  Here every micro-batch contributes its sum, divided by the count of all of them on all ranks.
"""
from __future__ import annotations

import contextlib
from typing import Any, List, NamedTuple, Optional, Sequence

import torch
from torch import distributed
from torch.nn import functional as F

from ipu_packed_bert.padding_free.collators import Inputs

IGNORED = -100


class UpdateResult(NamedTuple):
    """Of one update over all ranks; `loss` is its mean over supervised tokens."""

    loss: float
    supervised_tokens: int


def supervised(labels: torch.Tensor) -> int:
    """How many tokens are predicted: labels [rows, tokens] but for each row's first, which nothing stands before."""
    return int((labels[:, 1:] != IGNORED).sum())


def loss_sum(model: Any, inputs: Inputs) -> torch.Tensor:
    """Sum of the cross-entropies of the predicted tokens of one micro-batch, a scalar, in float32 at least."""
    arguments = {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**arguments, use_cache=False).logits[:, :-1]
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def accumulate(model: Any, micro_batches: Sequence[Inputs]) -> UpdateResult:
    """Add the gradients of an update to the model's; the same result on every rank, whatever each one's share.

    micro_batches: this rank's share, at least one; the number may differ between ranks only without
    DistributedDataParallel.  model: plain, or in DistributedDataParallel, whose mean over ranks is undone here.
    An update without any supervised token, such as one of the last piece of a stream, adds nothing: loss 0 of 0 tokens.
    """
    parallel = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    device = next(model.parameters()).device
    count = torch.tensor(sum(supervised(inputs["labels"]) for inputs in micro_batches), dtype=torch.float64, device=device)
    if parallel:
        distributed.all_reduce(count)
    if not count:
        return UpdateResult(0.0, 0)
    averaged = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    factor = (distributed.get_world_size() if averaged else 1) / float(count)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number, inputs in enumerate(micro_batches, start=1):
        # Gradients cross the ranks once an update, with its last micro-batch.
        waits = averaged and number < len(micro_batches)
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = loss_sum(model, inputs)
            (loss * factor).backward()
        total += loss.detach()
    if parallel:
        distributed.all_reduce(total)
        if not averaged:
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)
    return UpdateResult(float(total / count), int(count))


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def mean_loss(model: Any, batches: Sequence[Inputs], device: Optional[torch.device] = None) -> float:
    """Mean cross-entropy over the predicted tokens of all batches, without gradients and dropout."""
    training = model.training
    model.eval()
    sums: List[float] = []
    tokens = 0
    with torch.no_grad():
        for inputs in batches:
            inputs = to_device(inputs, device) if device is not None else inputs
            sums.append(float(loss_sum(model, inputs)))
            tokens += supervised(inputs["labels"])
    model.train(training)
    return sum(sums) / tokens
