"""Conversion of the optimiser's state between device and checkpoint. Loads without the SDK."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Tuple

import torch

from ipu_packed_bert.model.optimizer import MOMENTS

_Tensors = Dict[str, torch.Tensor]  # by name


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor as a plain torch.Tensor of at least float32; parameters of PopTorch are of another class."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    array = tensor.detach().to(dtype).numpy()
    return torch.from_numpy(array.copy())


# PopART names an optimiser's tensor by this prefix, three underscores and the weight's name in the compiled model.
_MOMENTS = dict(zip(("Accl1", "Accl2"), MOMENTS))


def _split_key(key: str, names: Iterable[str]) -> Tuple[str, Optional[str]]:
    """Split "Accl1___model.network.bert.x" into ("Accl1", "bert.x"); None if no suffix is a parameter's name."""
    prefix, _, name = key.partition("___")
    while name not in names:
        _, separator, name = name.partition(".")
        if not separator:
            return prefix, None
    return prefix, name


def moments(device: _Tensors, parameters: _Tensors) -> Dict[str, _Tensors]:
    """Convert the optimiser tensors of the device to {"exp_avg": {name: float32}, "exp_avg_sq": {name: float32}}."""
    state: Dict[str, _Tensors] = {moment: {} for moment in MOMENTS}
    for key, tensor in device.items():
        prefix, name = _split_key(key, parameters)
        if prefix in _MOMENTS and name is not None:
            moment = _MOMENTS[prefix]
            shape = parameters[name].shape
            state[moment][name] = plain(tensor).reshape(shape)

    for moment, tensors in state.items():
        missing = sorted(parameters.keys() - tensors.keys())
        if missing:
            raise ValueError(
                f"the device returned no {moment} of {missing[0]} and {len(missing) - 1} others, so the optimiser's"
                f" state cannot be saved; it returned {sorted(device)[:3]} ..."
            )
    return state


def fill(device: _Tensors, state: Dict[str, Any]) -> None:
    """Overwrite the device's optimiser tensors with an engine-neutral state, in place."""
    for key, tensor in list(device.items()):
        prefix, name = _split_key(key, state["exp_avg"])
        if name is None:
            continue
        if prefix in _MOMENTS:
            moment = state[_MOMENTS[prefix]][name]
            moment = moment.to(tensor.dtype).reshape(tensor.shape)
            device[key] = moment.clone()
        elif prefix == "Step":
            device[key] = torch.full_like(tensor, state["step"])
