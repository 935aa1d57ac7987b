"""The training step of a trainer, judged on the examples of a batch.

A step on a row must have the loss and the gradients of the same step on a padded batch of its examples.  Both call the
loss of the trainer, so that labels, autocast and gradient checkpointing are judged as configured.
"""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial
from typing import Any, Callable, ContextManager, Iterator, List, NamedTuple, Tuple

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
from padding_free.leaks.probe import HALF_FACTOR, in_dtype, undisturbed
from padding_free.leaks.randomness import (
    FixedNoise,
    has_dropout,
    with_fixed_noise,
    without_dropout,
)
from padding_free.models import Leak, base_of, is_sharded, text_config

# Largest relative difference of the losses, and of the gradients of all weights together, that rounding may cause.
_LIMIT = 1e-4
_HALF_LIMIT = 0.03
_MOST_PADDING = 2  # slots of the padded batch over the tokens of the row, which limits the time
_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_Loss = Callable[[Any, Inputs], torch.Tensor]


class _TrainingStep(NamedTuple):
    """The loss and the gradients of one step."""

    loss: float
    gradients: List[torch.Tensor]


class _Compared(NamedTuple):
    """A step on a row, the step on its padded batch, and their relative difference."""

    actual: _TrainingStep
    expected: _TrainingStep
    error: float


def check_step(trainer: Any, model: Any, inputs: Inputs, loss_of: _Loss) -> str:
    """Compare the step on the first examples of a row with the step on a padded batch of them.

    Args:
        trainer: A trainer of Hugging Face; its attributes do not change.
        model: The model, as the trainer calls it.
        inputs: A row of examples.
        loss_of: Maps model and inputs to the loss that the trainer minimises.

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

    def compared() -> _Compared:
        expected = _step(model, padded, loss_of)
        actual = _step(model, row, loss_of)
        return _Compared(actual, expected, difference(actual, expected))

    with _kept_attributes(trainer), undisturbed(model), _trained(model):
        try:
            steps = compared()
            if is_half and steps.error > limit:
                in_half = steps
                with in_dtype(model, torch.float32):
                    steps = compared()
                limit = _LIMIT
                own_error = difference(in_half.actual, steps.expected)
                own_rounding = max(difference(in_half.expected, steps.expected), _HALF_LIMIT)
                if own_error > HALF_FACTOR * own_rounding:
                    limit = own_rounding
                    steps = steps._replace(error=own_error)
            is_random = False
            # Training may be random even without dropout, as with NEFTune.
            if steps.error > limit and difference(_step(model, row, loss_of), steps.actual) > limit:
                with FixedNoise(_width_of(model)):
                    steps = compared()
                    again = _step(model, row, loss_of)
                is_random = difference(again, steps.actual) > limit
        except _ERRORS as failure:
            raise ValueError(
                f"the training step fails on a padded batch, so it cannot be judged: {one_line(failure, 120)}; fix "
                "compute_loss, or pass audit=False to train without the check"
            ) from None
    if is_random:
        return "not judged, because it is random"
    text = (
        f"loss {steps.actual.loss:.6g} on a row, {steps.expected.loss:.6g} on its examples in a padded batch; relative "
        f"difference, gradients included, {steps.error:.1e} (rounding: up to {limit:.0e})"
    )
    if steps.error > limit:
        raise Leak(
            f"the training step of {type(trainer).__name__}: {text}; let compute_loss pass all inputs to the model and "
            "divide a sum over tokens by num_items_in_batch"
        )
    return text


def _width_of(model: Any) -> int:
    return int(base_of(model).get_input_embeddings().weight.shape[-1])


def _trained(model: Any) -> ContextManager[None]:
    """Set training mode in the block, with the model's own dropout unless checkpoints compute it again elsewhere."""
    is_recomputed = any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    if is_recomputed or not has_dropout(model):
        return without_dropout(model)
    return with_fixed_noise(model, _width_of(model))


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


def _step(model: Any, inputs: Inputs, loss_of: _Loss) -> _TrainingStep:
    """Compute the loss and the gradients; the gradients of the model do not change."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        loss = loss_of(model, dict(inputs))  # the trainer may remove the labels
        loss.backward()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
    finally:
        for weight, gradient in zip(weights, before):
            weight.grad = gradient
    return _TrainingStep(float(loss.detach()), gradients)


def _difference(trainer: Any, actual: _TrainingStep, expected: _TrainingStep) -> float:
    """Return the larger relative difference of the losses and of all gradients together, the largest of all ranks."""
    if math.isnan(actual.loss) and math.isnan(expected.loss):
        return 0.0  # no token is predicted
    largest = abs(actual.loss - expected.loss) / max(abs(expected.loss), 1e-30)
    pairs = list(zip(actual.gradients, expected.gradients))
    norm = math.hypot(*(float(other.norm()) for _, other in pairs))
    distance = math.hypot(*(float((gradient - other).norm()) for gradient, other in pairs))
    errors = torch.tensor([largest, distance / max(norm, 1e-30)], device=trainer.args.device)
    return float(trainer.accelerator.gather(errors.nan_to_num(nan=math.inf)).max())


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
