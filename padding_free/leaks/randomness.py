"""A training mode whose dropout and noise do not depend on the shape of the batch."""

from __future__ import annotations

import contextlib
import random
from typing import Any, Iterator, Tuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from padding_free.models import changed, kept_modes

# Random numbers are replaced by their mean plus or minus this part of the range of a uniform distribution, or of the
# standard deviation of a normal one, so noise whose size depends on the row changes the result.
_UNIFORM = 0.3
_NORMAL = 0.7


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed the generators of Python, NumPy and PyTorch in the block, and restore them after it."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class FixedNoise(TorchDispatchMode):
    """Random operations return constants in the block, so that a row and its examples alone get equal noise.

    Args:
        width: Features of a token.  Their constants have alternating signs, because norms remove equal ones.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if name == "native_dropout" and args[1] < 1:  # on GPUs
            values, rate = args[:2]
            return values / (1 - rate), torch.ones_like(values, dtype=torch.bool)
        result = function(*args, **(kwargs or {}))
        if name in ("bernoulli", "bernoulli_"):
            return result.fill_(1.0)
        if name in ("uniform_", "rand", "rand_like"):
            low, high = args[1:3] if name == "uniform_" and len(args) > 2 else (0.0, 1.0)
            return self._fill(result, (low + high) / 2, _UNIFORM * (high - low))
        if name in ("randn", "randn_like"):
            return self._fill(result, 0.0, _NORMAL)
        if name in ("normal", "normal_"):
            mean, deviation = [*args[int(name == "normal_") :], 0.0, 1.0][:2]
            return self._fill(result, mean, _NORMAL * deviation)
        return result

    def _fill(self, result: torch.Tensor, mean: Any, offset: Any) -> torch.Tensor:
        signs = torch.ones_like(result)
        if result.dim() and result.shape[-1] == self._width:
            signs[..., 1::2] = -1
        return result.copy_(mean + signs * offset)


def _rates(model: Any) -> Iterator[Tuple[Any, str]]:
    """Iterate over the rates of dropout and noise of all modules, except 0: the module and its attribute."""
    for module in model.modules():
        names = [name for name in vars(module) if "drop" in name or "jitter" in name]
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            names.append("p")
        for name in names:
            rate = getattr(module, name)
            if isinstance(rate, float) and rate:
                yield module, name


def has_dropout(model: Any) -> bool:
    """Return True if training mode drops values."""
    return any(_rates(model))


@contextlib.contextmanager
def _training(model: Any) -> Iterator[None]:
    """Set training mode in the block."""
    with kept_modes(model):
        model.train()
        yield


@contextlib.contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Set training mode in the block, with every dropout and noise rate of 0."""
    with changed(_rates(model), 0.0), _training(model):
        yield


@contextlib.contextmanager
def with_fixed_noise(model: Any, width: int) -> Iterator[None]:
    """Set training mode in the block, with the model's own dropout, which keeps and scales all values.

    width: features of a token, as for `FixedNoise`.
    """
    with contextlib.ExitStack() as stack:
        kernels: Any = getattr(getattr(torch, "nn", None), "attention", None)
        if torch.cuda.is_available() and hasattr(kernels, "sdpa_kernel"):
            # Fused kernels on GPUs draw their dropout themselves.
            stack.enter_context(kernels.sdpa_kernel(kernels.SDPBackend.MATH))
        stack.enter_context(_training(model))
        stack.enter_context(FixedNoise(width))
        yield
