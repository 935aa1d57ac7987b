"""A training mode whose dropout and noise do not depend on the shape of the batch."""

from __future__ import annotations

import contextlib
import random
from typing import Any, Dict, Iterator, Optional, Tuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from padding_free.models import changed, kept_modes

# Random numbers are replaced by their mean plus or minus this part of the range of a uniform distribution, or of the
# deviation of another one, so noise whose size depends on the row changes the result.
_UNIFORM = 0.3
_NORMAL = 0.7
_EXPONENTIAL = 0.5


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

    The schema of an operation tells whether it is random.  Generators of the model are not used, so they keep their
    states.

    Args:
        width: Features of a token.  Their constants have alternating signs, because norms remove equal ones.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **named)
        if "generator" in named:
            named["generator"] = None
        name = function._schema.name.split("::")[1]
        if name == "native_dropout":  # on GPUs
            values, rate = args[:2]
            kept = values / (1 - rate) if rate < 1 else values * 0
            return kept, torch.ones_like(values, dtype=torch.bool)
        if name == "multinomial":
            return args[0].topk(args[1]).indices
        result = function(*args, **named)
        if not torch.is_tensor(result):
            return result  # a fused kernel, whose output has no constants
        return self._fill(result, *_constants(name, function._overloadname, args))

    def _fill(self, result: torch.Tensor, mean: Any, offset: Any) -> torch.Tensor:
        if not result.is_floating_point():
            return result.fill_(mean)
        signs = torch.ones_like(result)
        if result.dim() and result.shape[-1] == self._width:
            signs[..., 1::2] = -1
        return result.copy_(mean + signs * offset)


def _constants(name: str, overload: str, args: Tuple[Any, ...]) -> Tuple[Any, Any]:
    """Return the mean of a random operation, and the offset from it; a whole number is the least one."""
    kind = name.rstrip("_").replace("_like", "")
    arguments = list(args[1:] if name.endswith("_") else args)
    defaults = (0.0, 1.0)
    first, second = (*arguments, *defaults[len(arguments) :])[:2]
    if kind == "uniform":
        return (first + second) / 2, _UNIFORM * (second - first)
    if kind == "rand":
        return 0.5, _UNIFORM
    if kind == "randn":
        return 0.0, _NORMAL
    if kind == "normal":
        return first, _NORMAL * second
    if kind == "exponential":
        rate = arguments[0] if arguments else 1.0
        return 1 / rate, _EXPONENTIAL / rate
    if kind == "randint" and overload.startswith("low"):
        return first, 0.0
    if kind in ("randint", "random", "randperm"):
        return 0, 0.0
    return 1.0, 0.0  # dropout keeps a value


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


@contextlib.contextmanager
def in_training(model: Any, width: Optional[int], *, has_dropout: bool = True) -> Iterator[None]:
    """Set training mode in the block, with the model's own dropout, which keeps and scales all values.

    width: features of a token, as for `FixedNoise`; None for a model without noise.  has_dropout: False sets every
    rate of dropout and noise to 0, because compiled code draws its own numbers.
    """
    with contextlib.ExitStack() as stack:
        if not has_dropout:
            stack.enter_context(changed(_rates(model), 0.0))
        kernels: Any = getattr(getattr(torch, "nn", None), "attention", None)
        if torch.cuda.is_available() and hasattr(kernels, "sdpa_kernel"):
            # Fused kernels on GPUs draw their dropout themselves.
            stack.enter_context(kernels.sdpa_kernel(kernels.SDPBackend.MATH))
        stack.enter_context(kept_modes(model))
        model.train()
        stack.enter_context(seeded())
        if width is not None:
            stack.enter_context(FixedNoise(width))
        yield


class KeptBuffers:
    """The buffers of a model, which a training forward may move."""

    def __init__(self, model: Any) -> None:
        self._kept: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
        for buffer in model.buffers():
            self._kept[id(buffer)] = (buffer, buffer.clone())

    def __call__(self) -> None:
        """Give changed buffers their values of before."""
        with torch.no_grad():
            for buffer, before in self._kept.values():
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
