"""One update of a model, with the mean loss over all predicted tokens of the update.

Micro-batches and ranks have different numbers of predicted tokens.  A mean of their means would give the tokens of a
small micro-batch more weight.  Here each micro-batch adds its sum, divided by the number of predicted tokens in all
micro-batches on all ranks.  So the update does not depend on the division into micro-batches.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import distributed

from padding_free.collators import Inputs, to_device
from padding_free.losses import IGNORED, loss_sum, supervised
from padding_free.models import in_first_fsdp, kept_modes


class UpdateResult(NamedTuple):
    """The result of one update, summed over all ranks."""

    loss: float  # mean over the predicted tokens, natural logarithm
    supervised_tokens: int  # predicted tokens


def accumulate(model: Any, micro_batches: Sequence[Inputs]) -> UpdateResult:
    """Add the gradients of one update to the gradients of the model.

    An update without predicted tokens adds nothing: its loss is 0 over 0 tokens.

    Args:
        model: Plain, in DistributedDataParallel, or sharded by torch's `fully_shard` (FSDP2), with different examples
            on every process.  The mean over ranks of the last two is undone here.
        micro_batches: The share of this rank.

    Returns:
        The loss and the predicted tokens, the same on every rank.

    Raises:
        ValueError: The ranks have different numbers of micro-batches and the model is not plain (raised on every rank),
            or the model is sharded in part or by FSDP1.
    """
    ranks = 1
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
    device = next(model.parameters()).device
    is_averaged = _is_averaged(model)
    tokens, number, squares = _totals(model, micro_batches, ranks, device)
    # Ranks with different numbers of micro-batches would wait for one another forever.
    is_equal = ranks * squares == number**2
    if is_averaged and not is_equal:
        raise ValueError(
            f"this rank has {len(micro_batches)} micro-batches, all {ranks} ranks together {number}; pass the same "
            "number on each rank, with empty ones at the end, as the plans of pack_data.batching do"
        )
    if not tokens:
        return UpdateResult(0.0, 0)

    factor = (ranks if is_averaged else 1) / float(tokens)
    summed = []  # parameters with gradients to add up over ranks
    if ranks > 1 and not is_averaged:
        summed = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Existing gradients are not part of the sum over ranks.
    before = [parameter.grad for parameter in summed]
    for parameter in summed:
        parameter.grad = None

    total = torch.zeros((), dtype=torch.float64, device=device)
    for place, inputs in enumerate(micro_batches, start=1):
        # The ranks exchange gradients once per update, in the backward pass of its last micro-batch.
        is_last = place == len(micro_batches)
        with contextlib.nullcontext() if is_last else _without_exchange(model):
            loss = loss_sum(model, inputs)
            (loss * factor).backward()
        total += loss.detach()
    if ranks > 1:
        distributed.all_reduce(total)
    _sum_over_ranks(summed, before)
    return UpdateResult(float(total) / tokens, tokens)


def _sum_over_ranks(parameters: Sequence[Any], before: Sequence[Optional[torch.Tensor]]) -> None:
    """Add up the gradients of all ranks, and add the earlier gradients of this rank."""
    for parameter, existing in zip(parameters, before):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad)
        if existing is not None:
            parameter.grad += existing


def _totals(
    model: Any,
    micro_batches: Sequence[Inputs],
    ranks: int,
    device: torch.device,
) -> Tuple[int, int, int]:
    """Sum over ranks: predicted tokens, micro-batches, and the squares of the numbers of micro-batches."""
    number = len(micro_batches)
    totals = torch.tensor([0.0, number, number**2], dtype=torch.float64, device=device)
    if micro_batches:
        counts = [supervised(model, inputs["labels"]) for inputs in micro_batches]
        totals[0] = torch.stack(counts).sum()
    if ranks > 1:
        distributed.all_reduce(totals)
    tokens, numbers, squares = (int(value) for value in totals.tolist())
    return tokens, numbers, squares


def _shards(model: Any) -> List[Any]:
    """Return the modules that torch's `fully_shard` was applied to."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def _is_averaged(model: Any) -> bool:
    """Return True if the backward pass leaves the mean over the ranks in every gradient.

    Raise ValueError for a model that is sharded in part or by FSDP1.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return True
    if in_first_fsdp(model):
        raise ValueError(
            "accumulate does not support FullyShardedDataParallel (FSDP1); shard the model with fully_shard"
        )
    if not _shards(model):
        return False
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "placements"):
            raise ValueError(
                f"{name} is not sharded, but other parameters are; call fully_shard on the whole model too"
            )
    return True


@contextlib.contextmanager
def _without_exchange(model: Any) -> Iterator[None]:
    """Let backward passes in the block add to the gradients of this rank only."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
        return
    shards = _shards(model)
    for shard in shards:
        shard.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for shard in shards:
            shard.set_requires_gradient_sync(True, recurse=False)


def take_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Inputs],
    learning_rate: float,
) -> UpdateResult:
    """Make one update: gradients as in `accumulate`, a step of the optimizer, cleared gradients.

    Args:
        model: As for `accumulate`.
        optimizer: The optimizer of the model.
        micro_batches: The share of this rank.
        learning_rate: The learning rate of this update, for all groups of the optimizer.

    Returns:
        The loss and the predicted tokens, the same on every rank.

    Raises:
        ValueError: As in `accumulate`.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    result = accumulate(model, micro_batches)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


def mean_loss(
    model: Any, batches: Iterable[Inputs], device: Optional[torch.device] = None
) -> float:
    """Compute the mean cross-entropy over the predicted tokens of all batches, without gradients and dropout.

    Args:
        model: The model; its mode is the same afterwards.
        batches: Inputs of the model, with labels.
        device: The device of the model, if it is not that of the batches.

    Returns:
        The mean, in nats.

    Raises:
        ValueError: No token is predicted.
    """
    sums = []
    counts = []
    with kept_modes(model), torch.no_grad():
        model.eval()
        for inputs in batches:
            moved = inputs if device is None else to_device(inputs, device)
            sums.append(loss_sum(model, moved).double())
            counts.append(supervised(model, moved["labels"]))
    tokens = int(torch.stack(counts).sum()) if counts else 0
    if not tokens:
        raise ValueError(
            f"no token of these batches is predicted: each label is {IGNORED}, or first in a causal row"
        )
    return float(torch.stack(sums).sum()) / tokens
