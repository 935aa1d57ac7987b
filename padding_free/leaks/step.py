"""The training step of a trainer, judged on the examples of a batch.

A step on a row must have the loss and the gradients of the same step on a padded batch of its examples.  Both call the
loss of the trainer, so that labels, the number of items, autocast and checkpoints are judged as configured.
"""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial
from typing import Any, Callable, Iterator, Tuple

import numpy as np
import torch

from pack_data.batching.collators import padding_free_batch
from pack_data.reading.fields import one_line
from pack_data.store.boundaries import sequences_in
from padding_free.collators import (
    Inputs,
    PaddingCollator,
    attends_both_ways,
    inputs_for,
    to_device,
)
from padding_free.leaks.compare import GRADIENT_FACTOR, Values, errors_of
from padding_free.leaks.randomness import KeptBuffers, in_training, seeded
from padding_free.leaks.subject import MODEL_ERRORS, in_dtype, undisturbed
from padding_free.models import Leak, base_of, is_sharded, text_config

# Largest relative difference of the losses, and of the gradients over their factor, that rounding may cause.
_LIMIT = 2e-5
_HALF_LIMIT = 0.03
_ROUNDING_FACTOR = 2.0  # error of the row over the error of the padded batch in the same dtype
_MOST_PADDING = 2  # slots of the padded batch over the tokens of the row, which limits the time

_Loss = Callable[[Any, Inputs, Any], torch.Tensor]


def check_step(trainer: Any, model: Any, inputs: Inputs, loss_of: _Loss) -> str:
    """Compare the step on the first examples of a row with the step on a padded batch of them.

    Args:
        trainer: A trainer of Hugging Face; its attributes do not change.
        model: The model, as the trainer calls it.
        inputs: A row of examples.
        loss_of: Maps model, inputs and the number of items in the batch to the loss that the trainer minimises.

    Returns:
        The result, in words.

    Raises:
        ValueError: The steps differ, or the padded one fails.
    """
    # Without DistributedDataParallel the gradients are those of one rank.
    model = getattr(model, "module", model)
    if is_sharded(model):
        return "not judged, because the weights are sharded"
    row, padded = _both_batches(model, inputs)
    bits = torch.finfo(next(model.parameters()).dtype).bits
    is_half = bits < 32 or trainer.accelerator.mixed_precision != "no"
    limit = _HALF_LIMIT if is_half else _LIMIT
    difference = partial(_difference, trainer)
    step = partial(_step, trainer, model, loss_of, KeptBuffers(model))
    is_random = False
    width = int(base_of(model).get_input_embeddings().weight.shape[-1])
    with _kept_attributes(trainer), undisturbed(model), in_training(model, width):
        try:
            expected = step(padded)
            actual = step(row)
            error = difference(actual, expected)
            if error > limit:
                is_random = difference(step(row), actual) > limit
                # The error of the padded batch in this dtype is the yardstick.
                with in_dtype(model, torch.float32 if is_half else torch.float64):
                    exact = step(padded)
                    error = difference(step(row), exact)
                rounding = _ROUNDING_FACTOR * max(difference(expected, exact), limit)
                own_error = difference(actual, exact)
                error = max(error, own_error if own_error > rounding else 0.0)
                limit = _LIMIT
        except MODEL_ERRORS as failure:
            raise ValueError(
                f"the training step fails on a padded batch, so it cannot be judged: {one_line(failure, 120)}; fix "
                "compute_loss, or pass audit=False to train without the check"
            ) from None
    if is_random:
        return "not judged, because it is random"
    text = (
        f"loss {actual.loss:.6g} on a row, {expected.loss:.6g} on its examples in a padded batch; relative "
        f"difference, gradients included, {error:.1e} (rounding: up to {limit:.0e})"
    )
    if error > limit:
        raise Leak(
            f"the training step of {type(trainer).__name__}: {text}; let compute_loss pass all inputs to the model and "
            "divide a sum over tokens by num_items_in_batch"
        )
    return text


def _both_batches(model: Any, inputs: Inputs) -> Tuple[Inputs, Inputs]:
    """Return the first examples of a row as a row, and as a padded batch."""
    names = ("input_ids", "labels", "position_ids")
    example = {name: inputs[name][0].cpu() for name in names}
    _, lengths = sequences_in(example, "the batch")
    slots = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
    number = np.count_nonzero(slots <= _MOST_PADDING * lengths.sum())
    tokens = int(lengths[:number].sum())
    examples = [{name: values[:tokens] for name, values in example.items()}]

    is_causal = not attends_both_ways(model)
    row = inputs_for(model, padding_free_batch(examples, causal=is_causal))
    pad_id = getattr(text_config(model), "pad_token_id", None) or 0
    padded = PaddingCollator(pad_id=pad_id)(examples)
    del padded["position_ids"]  # the model derives them
    if "use_cache" in inputs:
        row["use_cache"] = padded["use_cache"] = False
    device = inputs["input_ids"].device
    return to_device(row, device), to_device(padded, device)


def _step(trainer: Any, model: Any, loss_of: _Loss, buffers: KeptBuffers, inputs: Inputs) -> Values:
    """Compute the loss and the gradients; the gradients of the model do not change."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    buffers()
    try:
        with seeded():
            # The number of items is that of this batch, as the trainer counts it.
            _, number = trainer.get_batch_samples(iter([dict(inputs)]), 1, trainer.args.device)
            loss = loss_of(model, dict(inputs), number)  # the trainer may remove the labels
            loss.backward()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
    finally:
        for weight, gradient in zip(weights, before):
            weight.grad = gradient
    return Values(weights=gradients, loss=float(loss.detach()))


def _difference(trainer: Any, actual: Values, expected: Values) -> float:
    """Return the largest relative difference of the losses and of the gradients of a weight on all ranks."""
    errors = errors_of(actual, expected, (), (0.0, 0.0), typical=False)
    largest = max(errors.loss, errors.weights / GRADIENT_FACTOR)
    if math.isnan(actual.loss or 0.0) and math.isnan(expected.loss or 0.0):
        largest = 0.0  # no token is predicted
    on_device = torch.tensor([largest], device=trainer.args.device)
    return float(trainer.accelerator.gather(on_device).max())


@contextlib.contextmanager
def _kept_attributes(trainer: Any) -> Iterator[None]:
    """Restore the attributes of the trainer after the block; only the lists of its metrics may change in it."""
    attributes = dict(vars(trainer))
    if "_metrics" in attributes:
        trainer._metrics = copy.deepcopy(trainer._metrics)
    try:
        yield
    finally:
        vars(trainer).update(attributes)
