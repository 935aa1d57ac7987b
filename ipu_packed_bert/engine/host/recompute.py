"""Activation recomputation: the backward pass computes each encoder layer again from its input."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute_layers(network: Any) -> None:
    """Keep only each layer's input for the backward pass, in place: memory for a third of a forward and backward pass.

    Values, gradients and the stream of random numbers stay the same, bit for bit: dropout draws again what it drew.
    """
    layer: Any
    for layer in network.bert.encoder.layer:
        layer.forward = functools.partial(_recomputed, layer.forward)


def refuse_compiled() -> None:
    """Raise ValueError where this torch cannot compile recomputed layers."""
    if not hasattr(torch, "compiler"):  # before torch 2.1
        raise ValueError(
            f"engine.recompute_layers: true does not go with engine.compile: true in torch {torch.__version__}; switch "
            "one off"
        )


def _recomputed(forward: Any, *inputs: Any) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True)
