"""How far back a model's attention reaches, read from its configuration."""
from __future__ import annotations

from typing import Any, NamedTuple, Optional


class Reach(NamedTuple):
    """The shortest stretch of tokens that some layer attends to, and the setting that says so."""

    tokens: int
    setting: str


def text_config(model: Any) -> Any:
    """The configuration of a Hugging Face model's language model, which is its own or a part of it."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def attention_reach(config: Any) -> Optional[Reach]:
    """The least of the windows and chunks of the layers, or None where every layer attends to all earlier tokens.

    An example of at most so many tokens is scored as without windows and chunks.  Where `layer_types` does not say which
    layers have one, `use_sliding_window` and `max_window_layers` (the first layer with one) do, and else all layers have it.
    """
    kinds = getattr(config, "layer_types", None)
    layers = getattr(config, "num_hidden_layers", None)
    found = []
    for setting, kind in (("sliding_window", "sliding"), ("attention_chunk_size", "chunk")):
        tokens = getattr(config, setting, None)
        if not isinstance(tokens, int) or tokens < 1:
            continue
        if kinds is not None:
            used = any(kind in each for each in kinds)
        elif kind == "sliding":
            first = getattr(config, "max_window_layers", None)
            used = getattr(config, "use_sliding_window", None) is not False and not (
                isinstance(first, int) and isinstance(layers, int) and first >= layers)
        else:
            used = True
        if used:
            found.append(Reach(tokens, setting))
    return min(found, default=None)
