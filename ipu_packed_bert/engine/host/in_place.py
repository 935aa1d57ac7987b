"""Linear layers and embeddings that add their gradients to `.grad` in the backward pass, for one process on a CPU.

Autograd writes the gradient of each micro-batch to new memory and then adds it to that of the earlier ones. Here the
product adds to it directly, and embeddings add the rows of their tokens only. Values differ by the order of summation
only. Measured on an AMD EPYC (AVX-512, hidden 256, 512 slots, medians of 11 rounds): an update in float32 takes 0.97 of
autograd's time. In bfloat16, for which no product adds to float32, linear layers in place gain nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import VocabularyProduct


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, zeros if it has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _Linear(torch.autograd.Function):
    """`F.linear` of inputs [T, X] with a weight [Y, X] and a bias [Y]."""

    @staticmethod
    def forward(ctx: Any, inputs_TX, weight_YX, bias_Y) -> torch.Tensor:
        ctx.save_for_backward(inputs_TX)
        ctx.parameters = weight_YX, bias_Y
        return F.linear(inputs_TX, weight_YX, bias_Y)

    @staticmethod
    def backward(ctx: Any, gradient_TY) -> Tuple[Optional[torch.Tensor], ...]:
        weight_YX, bias_Y = ctx.parameters
        (inputs_TX,) = ctx.saved_tensors
        if weight_YX.requires_grad:
            _gradient(weight_YX).addmm_(gradient_TY.t(), inputs_TX)
        if bias_Y.requires_grad:
            _gradient(bias_Y).add_(gradient_TY.sum(0))
        inputs_gradient = gradient_TY @ weight_YX if ctx.needs_input_grad[0] else None
        return inputs_gradient, None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding` of ids of any shape with a table [V, H]."""

    @staticmethod
    def forward(ctx: Any, table_VH, ids) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table_VH
        return F.embedding(ids, table_VH)

    @staticmethod
    def backward(ctx: Any, gradient) -> Tuple[None, None]:
        (ids,) = ctx.saved_tensors
        _gradient(ctx.table).index_add_(0, ids.flatten(), gradient.flatten(0, -2))
        return None, None


def _linear(inputs, weight, bias) -> torch.Tensor:
    outputs_TY = _Linear.apply(inputs.flatten(0, -2), weight, bias)
    return outputs_TY.view(*inputs.shape[:-1], -1)


def accumulate_in_place(network: nn.Module, *, products: bool) -> None:
    """Replace the forward passes of embeddings, linear layers and the vocabulary product of a network, in place.

    Args:
        network: a network whose linear layers have biases and whose embeddings have no options.
        products: also replace linear layers and the vocabulary product.
    """
    part: Any
    for part in network.modules():
        if isinstance(part, nn.Embedding):
            part.forward = partial(_Embedding.apply, part.weight)  # type: ignore[method-assign]
        elif products and isinstance(part, nn.Linear):
            in_place = partial(_linear, weight=part.weight, bias=part.bias)
            part.forward = in_place  # type: ignore[method-assign]
        elif products and isinstance(part, VocabularyProduct):
            part.forward = _linear  # type: ignore[method-assign,assignment]
