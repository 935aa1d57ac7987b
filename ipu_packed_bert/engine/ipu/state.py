"""The optimiser's state on the device and in a checkpoint, each from the other.  Loads without the SDK."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Tuple

import torch

from ipu_packed_bert.model.optimizer import MOMENTS


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor as a plain torch.Tensor of at least float32; PopTorch's parameters have a class of their own."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.from_numpy(tensor.detach().to(wide).numpy().copy())


# PopART's names of an optimiser's tensors: a prefix, three underscores and the weight's name in the compiled model.
_MOMENTS = dict(zip(("Accl1", "Accl2"), MOMENTS))


def _weight_of(key: str, names: Iterable[str]) -> Tuple[str, Optional[str]]:
    """Split "Accl1___model.network.bert.x" into ("Accl1", "bert.x"); None if the rest ends in no parameter's name."""
    prefix, _, path = key.partition("___")
    parts = path.split(".")
    candidates = (".".join(parts[first:]) for first in range(len(parts)))
    return prefix, next((name for name in candidates if name in names), None)


def moments(
    device: Dict[str, torch.Tensor], parameters: Dict[str, torch.Tensor]
) -> Dict[str, Dict[str, torch.Tensor]]:
    """Convert the optimiser tensors of the device to {"exp_avg": {name: float32}, "exp_avg_sq": {name: float32}}."""
    found: Dict[str, Dict[str, torch.Tensor]] = {moment: {} for moment in _MOMENTS.values()}
    for key, tensor in device.items():
        prefix, name = _weight_of(key, parameters)
        if prefix in _MOMENTS and name is not None:
            found[_MOMENTS[prefix]][name] = plain(tensor).reshape(parameters[name].shape)
    for moment, tensors in found.items():
        missing = sorted(set(parameters) - set(tensors))
        if missing:
            raise ValueError(
                f"the device returned no {moment} of {missing[0]} and {len(missing) - 1} others, so the optimiser's "
                f"state"
                f" cannot be saved; it has {sorted(device)[:3]} ..."
            )
    return found


def fill(device: Dict[str, torch.Tensor], state: Dict[str, Any]) -> None:
    """Overwrite the device's optimiser tensors with an engine-neutral state, in place."""
    for key, tensor in list(device.items()):
        prefix, name = _weight_of(key, state["exp_avg"])
        if name is None:
            continue
        if prefix in _MOMENTS:
            device[key] = (
                state[_MOMENTS[prefix]][name].to(tensor.dtype).reshape(tensor.shape).clone()
            )
        elif prefix == "Step":
            device[key] = torch.full_like(tensor, state["step"])
