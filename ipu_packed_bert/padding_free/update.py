"""One update of a model: its loss is the mean over all predicted tokens of the update.

Micro-batches and ranks hold different numbers of predicted tokens.  A mean of their means would give the tokens of a
small micro-batch more weight.  Here each micro-batch adds its sum, divided by the number of predicted tokens in all
micro-batches on all ranks.  So the update does not depend on how it is cut into micro-batches.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch import distributed

from ipu_packed_bert.padding_free.collators import Inputs
from ipu_packed_bert.padding_free.losses import IGNORED, loss_sum, supervised
from ipu_packed_bert.padding_free.models import in_first_fsdp


class UpdateResult(NamedTuple):
    """What one update did, summed over all ranks."""

    loss: float  # mean over the predicted tokens, natural logarithm
    supervised_tokens: int  # predicted tokens


def accumulate(model: Any, micro_batches: Sequence[Inputs]) -> UpdateResult:
    """Add the gradients of one update to those of the model.  The result is the same on every rank.

    model: plain, in DistributedDataParallel, or sharded by torch's `fully_shard` (FSDP2).  The mean over ranks that the
    last two take is undone here.  Every process holds examples of its own.
    micro_batches: this rank's share.  Unless the model is plain, all ranks must have the same number:
    ValueError otherwise, on every rank.
    An update without any predicted token adds nothing: its loss is 0 over 0 tokens.
    """
    ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    device = next(model.parameters()).device
    averaged = _is_averaged(model)
    own = torch.tensor([0.0, len(micro_batches), len(micro_batches) ** 2], dtype=torch.float64, device=device)
    if micro_batches:  # a rank without any must take part, or the others would wait for it for ever
        own[0] = torch.stack([supervised(model, inputs["labels"]) for inputs in micro_batches]).sum()
    if ranks > 1:
        distributed.all_reduce(own)
    tokens, number, squares = (int(value) for value in own.tolist())
    if averaged and ranks * squares != number**2:  # the numbers differ, and ranks would wait for each other for ever
        raise ValueError(
            f"this rank has {len(micro_batches)} micro-batches, all {ranks} ranks together {number}; give each rank as "
            "many, empty ones where there is nothing left, as the plans of pack_data.batching do"
        )
    if not tokens:
        return UpdateResult(0.0, 0)
    factor = (ranks if averaged else 1) / float(tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    summed = [each for each in model.parameters() if each.requires_grad] if ranks > 1 and not averaged else []
    before = [each.grad for each in summed]  # what is there already is no part of the sum over ranks
    for each in summed:
        each.grad = None
    for number, inputs in enumerate(micro_batches, start=1):
        # The ranks exchange gradients once an update, in the backward pass of its last micro-batch.
        with _without_exchange(model) if number < len(micro_batches) else contextlib.nullcontext():
            loss = loss_sum(model, inputs)
            (loss * factor).backward()
        total += loss.detach()
    if ranks > 1:
        distributed.all_reduce(total)
    for parameter, own in zip(summed, before):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad)
        if own is not None:
            parameter.grad += own
    return UpdateResult(float(total) / tokens, tokens)


def _shards(model: Any) -> List[Any]:
    """The modules that torch's `fully_shard` was applied to."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def _is_averaged(model: Any) -> bool:
    """Whether the backward pass leaves the mean over the ranks in every gradient.

    Raises ValueError for a model that is sharded in part, or in the older way.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return True
    if in_first_fsdp(model):
        raise ValueError("accumulate does not know FullyShardedDataParallel (FSDP1); shard the model with fully_shard")
    if not _shards(model):
        return False
    plain = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "placements")]
    if plain:
        raise ValueError(
            f"{plain[0]} is not sharded, though other parameters are; call fully_shard on the whole model too"
        )
    return True


@contextlib.contextmanager
def _without_exchange(model: Any) -> Iterator[None]:
    """Backward passes in this block add to the gradients of this rank only."""
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
            counts.append(supervised(model, moved["labels"]))
    model.train(training)
    tokens = int(torch.stack(counts).sum()) if counts else 0
    if not tokens:
        raise ValueError(f"no token of these batches is predicted: each label is {IGNORED}, or first in a causal row")
    return float(torch.stack(sums).sum()) / tokens
