"""Limits on the cost of judging a large model: one layer of each kind in place of all, and shorter examples."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Optional, Set

import torch

from padding_free.models import (
    base_of,
    far_settings,
    is_compiled,
    is_sharded,
    most_positions,
    text_config,
)

_LEAST_PARAMETERS = 2**26  # smaller models are judged with all layers and at all lengths
_USUAL_LONGEST = 2048  # default length of the longest example of a larger model, in tokens
# Attributes of a module that are not its settings: its contents, and its number in the model.
_OTHERS = ("_parameters", "_buffers", "_modules", "layer_idx", "layer_id", "layer_number")


def _is_large(model: Any) -> bool:
    return sum(map(torch.numel, model.parameters())) >= _LEAST_PARAMETERS


def usual_longest(model: Any, row: Optional[int]) -> Optional[int]:
    """Return the default length of the longest example for a large model, or None for the limit of the model itself.

    It covers twice the largest window, since a window is what makes long examples differ from short ones.
    """
    config = text_config(model)
    most = most_positions(config)
    if most is None or not _is_large(model):
        return None
    windows = [2 * reach.tokens for reach in far_settings(config)]
    usual = max([_USUAL_LONGEST, row or 0, *windows])
    return usual if usual < most else None


@contextlib.contextmanager
def one_of_each_kind(model: Any, all_layers: bool) -> Iterator[int]:
    """Let layers of the kind and settings of an earlier one return their inputs in the block; return their number.

    all_layers: let no layer do so.
    """
    with contextlib.ExitStack() as stack:
        layers = [] if all_layers else _repeated_layers(model)
        for layer in layers:
            stack.callback(vars(layer).pop, "forward")
            layer.forward = _return_input
            for parameter in layer.parameters():
                stack.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(False)
        yield len(layers)


def _return_input(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def _repeated_layers(model: Any) -> List[Any]:
    """Return the layers of a large model that an earlier one represents."""
    if is_sharded(model) or is_compiled(model) or not _is_large(model):
        return []
    kinds: Set[str] = set()
    repeated: List[Any] = []

    def note(layer: Any, inputs: Any, output: Any) -> None:
        is_hidden = len(inputs) > 0 and torch.is_tensor(output) and output.dim() == 3
        if not is_hidden or inputs[0].shape != output.shape:
            return
        if settings[layer] in kinds:
            repeated.append(layer)
        kinds.add(settings[layer])

    settings = {}
    with contextlib.ExitStack() as stack:
        for layers in base_of(model).modules():
            if isinstance(layers, torch.nn.ModuleList):
                for place, layer in enumerate(layers):
                    at_place = _settings_at(text_config(model), place, len(layers))
                    settings[layer] = at_place + _settings_of(layer)
                    stack.callback(layer.register_forward_hook(note).remove)
        ids = torch.ones(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad(), contextlib.suppress(Exception):  # the probe reports errors
            model(ids)
    return repeated


def _settings_of(layer: Any) -> str:
    """Describe the modules of a layer: their classes, attributes, hooks, and the shapes of their weights."""
    parts = []
    for name, module in layer.named_modules():
        parts.append(f"{name} {type(module)}")
        for key, value in vars(module).items():
            if key not in _OTHERS:
                # The configuration is one object, with a long text.
                parts.append(f"{key} {id(value) if hasattr(value, 'to_dict') else repr(value)}")
    weights = layer.state_dict(keep_vars=True).items()
    parts += [f"{name} {weight.shape} {weight.dtype}" for name, weight in weights]
    return "\n".join(parts)


def _settings_at(config: Any, place: int, layers: int) -> str:
    """Describe the settings of one layer in a configuration that has lists of them."""
    lists = [value for value in vars(config).values() if isinstance(value, (list, tuple))]
    return repr([values[place] for values in lists if len(values) == layers])
