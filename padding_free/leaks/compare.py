"""The comparison of a row with its examples alone: logits, loss and gradients, token by token and weight by weight.

It is the same for every way of calling a model (evaluation, training, compiled, the trainer's step) and every dtype.  A
difference above the limit of the dtype is compared with the yardstick: the error of the same example alone in the same
dtype, which is its change when its embeddings are perturbed by rounding, as at a tie between two experts.
"""

from __future__ import annotations

import math
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from padding_free.losses import at_least_float32
from padding_free.models import FirstDifference

GRADIENT_FACTOR = 5.0  # limit of gradients over the limit of logits
_EXPLAINED = 2.0  # largest error of a row over the yardstick that explains it
_CERTAIN = (
    50.0  # over the limit, an error without an explanation is a leak: no other dtype is asked
)
_SMALL_GRADIENT = (
    0.05  # of the largest gradient: a weight with smaller ones is compared with this share
)
_BLOCK = 2**22  # values that are compared at once
_TYPICAL = 0.75  # quantile of the tokens of an example


class Values(NamedTuple):
    """Results of some examples, of which a call may have only a part."""

    logits: Optional[torch.Tensor] = None  # [tokens of all examples, words]
    gradients: Optional[torch.Tensor] = None  # of the loss at the embeddings, [tokens, width]
    weights: Sequence[torch.Tensor] = ()  # gradients of the parameters
    loss: Optional[float] = None


class Errors(NamedTuple):
    """Differences of two `Values`, relative to the largest value."""

    logits: torch.Tensor  # float64 [tokens]
    gradients: torch.Tensor  # float64 [tokens]
    weights: float = 0.0
    loss: float = 0.0


class Fault(NamedTuple):
    """A difference above its limit."""

    what: str
    error: float
    number: int = -1  # of the example
    first: Optional[FirstDifference] = None
    is_certain: bool = False  # too large for rounding


Scales = Tuple[float, float]  # the largest logit and the largest gradient
Yardstick = Callable[[List[int], Scales], List[Errors]]  # examples -> the errors of perturbed ones


# ---- errors


def _scales_of(values: Values) -> Scales:
    """Return the magnitudes that differences are relative to."""
    logits, gradients = (
        0.0 if part is None else _largest(part) for part in (values.logits, values.gradients)
    )
    return logits, gradients


def errors_of(
    actual: Values, expected: Values, lengths: Sequence[int], scales: Scales, typical: bool
) -> Errors:
    """Return the differences of two results of examples with these lengths."""
    pairs = ((actual.logits, expected.logits), (actual.gradients, expected.gradients))
    of_tokens = []
    for (values, others), scale in zip(pairs, scales):
        if values is None or others is None:
            of_tokens.append(torch.zeros(sum(lengths), dtype=torch.float64))
            continue
        errors = _token_errors(values, others, scale)
        of_tokens.append(_typical(errors, lengths) if typical else errors)
    loss = 0.0
    if actual.loss is not None and expected.loss is not None:
        loss = _relative(actual.loss, expected.loss)
    weights = _weight_error(actual.weights, expected.weights)
    return Errors(of_tokens[0], of_tokens[1], weights, loss)


def largest_error(actual: torch.Tensor, expected: torch.Tensor, typical: bool = False) -> float:
    """Return the largest difference of two tensors [..., tokens, width], relative to the largest expected value.

    The result is infinite if a value is not finite.  typical: ignore the worst quarter of the tokens of each example.
    """
    errors = _token_errors(actual.flatten(0, -2), expected.flatten(0, -2), _largest(expected))
    if typical:
        tokens = actual.shape[-2]
        errors = _typical(errors, [tokens] * (len(errors) // tokens))
    return float(errors.max()) if errors.numel() else 0.0


def _largest(values: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    lowest, highest = values.aminmax()  # without a copy of the values
    return max(float(highest), -float(lowest))


def _token_errors(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the largest difference of each token, float64 [tokens] of [tokens, width]; infinite if not a number."""
    errors = []
    step = max(1, _BLOCK // max(1, actual.shape[-1]))
    for block, expected_block in zip(actual.split(step), expected.split(step)):
        difference = (at_least_float32(block) - at_least_float32(expected_block)).abs_()
        errors.append(difference.amax(-1).double())
    relative = torch.cat(errors) / max(scale, 1e-30)
    return relative.nan_to_num(nan=math.inf).cpu()


def _typical(errors: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Replace the errors of the tokens of each example by a quantile of them."""
    quantiles = []
    for of_example in errors.split(list(lengths)):
        quantile = torch.quantile(of_example, _TYPICAL).nan_to_num(nan=math.inf)
        quantiles.append(quantile.expand(len(of_example)))
    return torch.cat(quantiles)


def _weight_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative difference of the gradient of a parameter."""
    largest = max(map(_largest, [*actual, *expected]), default=0.0)
    worst = 0.0
    for row_gradient, alone_gradient in zip(actual, expected):
        scale = max(_largest(alone_gradient), _SMALL_GRADIENT * largest, 1e-30)
        error = _largest(row_gradient - alone_gradient) / scale
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def _relative(value: float, expected: float) -> float:
    if math.isnan(value) and math.isnan(expected):
        return 0.0  # no token is predicted
    error = abs(value - expected) / max(abs(expected), 1e-30)
    return math.inf if math.isnan(error) else error


def _of_tokens(errors: Errors) -> torch.Tensor:
    """Return the larger of both errors of each token, those of gradients over their factor."""
    return torch.maximum(errors.logits, errors.gradients / GRADIENT_FACTOR)


# ---- faults


def compare(
    row: Values,
    alone: Values,
    lengths: Sequence[int],
    limit: float,
    yardstick: Yardstick,
    *,
    typical: bool = False,
) -> List[Fault]:
    """Return the differences of a row from its examples alone that are above the limit.

    Args:
        row: Values of the call in the row, in the order of the examples.
        alone: Values of the calls of its examples alone.
        lengths: Tokens of the examples.
        limit: Largest error of logits; that of gradients is GRADIENT_FACTOR times as large.
        yardstick: Computes the errors of examples alone, token by token; called only for examples above the limit.
        typical: Compare the typical error of each example.  In half precision, rounding may route single tokens to
            other experts, but a wrong mask changes most tokens.
    """
    scales = _scales_of(alone)
    errors = errors_of(row, alone, lengths, scales, typical)
    of_tokens = _of_tokens(errors)
    suspects = _numbers_above(of_tokens, lengths, limit)
    tolerance = torch.full_like(errors.logits, limit)
    if suspects:
        places = _places_of(lengths, suspects)
        for perturbed in yardstick(suspects, scales):
            effect = _EXPLAINED * _of_tokens(perturbed)
            tolerance[places] = torch.maximum(tolerance[places], effect)
    unexplained = of_tokens > tolerance
    if typical and not bool(unexplained.any()):
        suspects = []
    is_certain = bool((unexplained & (of_tokens > _CERTAIN * limit)).any())
    faults = []
    if suspects:
        for values, name, factor in (
            (errors.logits, "scores otherwise than alone", 1.0),
            (errors.gradients, "has other gradients than alone", GRADIENT_FACTOR),
        ):
            worst = float(values.max())
            if not worst <= limit * factor:
                fault = _fault(values, name, lengths, limit * factor)
                faults.append(fault._replace(is_certain=is_certain))
    # A tie moves weights as well.
    is_certain = not suspects and errors.weights > _CERTAIN * limit * GRADIENT_FACTOR
    if not errors.weights <= limit * GRADIENT_FACTOR:
        text = "the gradients of the weights are not those of its examples"
        faults.append(Fault(text, errors.weights, is_certain=is_certain))
    if not errors.loss <= limit:
        text = f"the loss is {row.loss:.6g}, and that of its examples is {alone.loss:.6g}"
        is_certain = not suspects and errors.loss > _CERTAIN * limit
        faults.append(Fault(text, errors.loss, is_certain=is_certain))
    return faults


def _numbers_above(errors: torch.Tensor, lengths: Sequence[int], limit: float) -> List[int]:
    """Return the numbers of the examples with an error above the limit."""
    above = []
    for number, of_example in enumerate(errors.split(list(lengths))):
        if not float(of_example.max()) <= limit:
            above.append(number)
    return above


def _places_of(lengths: Sequence[int], numbers: Sequence[int]) -> torch.Tensor:
    """Return the places of the tokens of some examples among those of all, int64 [tokens]."""
    ends = np.cumsum(lengths)
    return torch.cat(
        [torch.arange(ends[number] - lengths[number], ends[number]) for number in numbers]
    )


def _fault(errors: torch.Tensor, name: str, lengths: Sequence[int], limit: float) -> Fault:
    """Describe the example with the largest error, and the first token above the limit."""
    number, token = _locate(lengths, int(errors.argmax()))
    begin = sum(lengths[:number])
    of_example = errors[begin : begin + lengths[number]]
    first_token = int((of_example > limit).float().argmax())
    text = f"example {number} of {lengths[number]:,} tokens {name} from its token {first_token} on"
    index = int((errors > limit).float().argmax())
    first_number, token = _locate(lengths, index)
    first = FirstDifference(first_number, token, index, float(errors[index]))
    return Fault(text, float(errors.max()), number, first)


def _locate(lengths: Sequence[int], index: int) -> Tuple[int, int]:
    """Return the example that has token `index` of all examples, and the place of the token in it."""
    ends = np.cumsum(lengths)
    number = int(np.searchsorted(ends, index, side="right"))
    begin = ends[number] - lengths[number]
    return number, int(index - begin)
