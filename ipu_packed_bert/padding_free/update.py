"""One update of a causal model: its loss is the mean over all predicted tokens of the update.

Micro-batches and ranks hold different numbers of predicted tokens.  A mean of their means would give the tokens of a
small micro-batch more weight.  Here each micro-batch adds its sum, divided by the number of predicted tokens in all
micro-batches on all ranks.  So the update does not depend on how it is cut into micro-batches.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, NamedTuple, Optional, Sequence

import torch
from torch import distributed
from torch.nn import functional as F

from ipu_packed_bert.padding_free.collators import Inputs

IGNORED = -100  # the label of a token that is not predicted


class UpdateResult(NamedTuple):
    """What one update did, summed over all ranks."""

    loss: float  # mean over the predicted tokens, natural logarithm
    supervised_tokens: int  # predicted tokens


def supervised(labels: torch.Tensor) -> torch.Tensor:
    """Number of predicted tokens, a scalar where the labels are, so that a device is not waited for.

    labels: [rows, tokens].  The first token of a row is never predicted, as no token stands before it.
    """
    return (labels[:, 1:] != IGNORED).sum()


def without_labels(inputs: Inputs) -> Inputs:
    """The arguments of a forward pass that computes no loss of its own."""
    return {name: value for name, value in inputs.items() if name != "labels"}


def loss_sum(model: Any, inputs: Inputs) -> torch.Tensor:
    """Sum of the cross-entropies of the predicted tokens of one micro-batch: a scalar, in float32 or float64."""
    logits = model(**without_labels(inputs), use_cache=False).logits[:, :-1]
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    labels = inputs["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def accumulate(model: Any, micro_batches: Sequence[Inputs]) -> UpdateResult:
    """Add the gradients of one update to those of the model.  The result is the same on every rank.

    model: plain, or in DistributedDataParallel, whose mean over ranks is undone here.
    micro_batches: this rank's share, at least one.  With DistributedDataParallel all ranks have the same number.
    An update without any predicted token adds nothing: its loss is 0 over 0 tokens.
    """
    parallel = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    device = next(model.parameters()).device
    predicted = torch.stack([supervised(inputs["labels"]) for inputs in micro_batches]).sum()
    count = predicted.to(device, torch.float64)
    if parallel:
        distributed.all_reduce(count)
    tokens = int(count)
    if not tokens:
        return UpdateResult(0.0, 0)
    averaged = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    factor = (distributed.get_world_size() if averaged else 1) / float(tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number, inputs in enumerate(micro_batches, start=1):
        # The ranks exchange gradients once an update, in the backward pass of its last micro-batch.
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
    return UpdateResult(float(total) / tokens, tokens)


def take_step(
    model: Any, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Inputs], learning_rate: float
) -> UpdateResult:
    """One whole update: gradients as in `accumulate`, a step of the optimizer, gradients cleared."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    result = accumulate(model, micro_batches)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The same inputs with their tensors on `device`."""
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def mean_loss(model: Any, batches: Iterable[Inputs], device: Optional[torch.device] = None) -> float:
    """Mean cross-entropy over the predicted tokens of all batches, without gradients and without dropout.

    device: where the model is, if the batches are elsewhere.  Raises ValueError where no token is predicted.
    """
    training = model.training
    model.eval()
    sums, counts = [], []
    with torch.no_grad():
        for inputs in batches:
            moved = inputs if device is None else to_device(inputs, device)
            sums.append(loss_sum(model, moved).double())
            counts.append(supervised(moved["labels"]))
    model.train(training)
    tokens = int(torch.stack(counts).sum()) if counts else 0
    if not tokens:
        raise ValueError(f"no token of these batches is predicted: every label is {IGNORED} or the first of its row")
    return float(torch.stack(sums).sum()) / tokens
