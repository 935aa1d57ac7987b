"""How far back the attention of a model reaches, read from its configuration."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from ipu_packed_bert.padding_free.attention import NAME


class Reach(NamedTuple):
    """The smallest window or chunk of all layers."""

    tokens: int
    setting: str  # its name in the configuration


def text_config(model: Any) -> Any:
    """The configuration of the language model: the model's own, or the part of it that is about text."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def attention_of(model: Any) -> str:
    """The attention implementation a Hugging Face model was loaded with: "eager", "sdpa", "flash_attention_2", ..."""
    return getattr(model.config, "_attn_implementation", None) or "eager"


def ignored_reach(model: Any) -> Optional[Reach]:
    """The smallest window or chunk that a padding-free batch ignores; None where there is none.

    All layers get one mask, without windows or chunks.  Flash attention gets no mask, and its kernel applies windows.
    """
    kind = attention_of(model)
    return None if kind == NAME else attention_reach(text_config(model), windows="flash" not in kind)


def too_long(model: Any, reach: Reach, what: str, way_out: str) -> ValueError:
    """The error for examples that exceed `reach`.  what: their length; way_out: the first thing to do about it."""
    flash = 'load the model with attn_implementation="flash_attention_2" or '
    other = flash if reach.setting == "sliding_window" else ""
    return ValueError(
        f"{type(model).__name__}: {what}, {reach.setting} is {reach.tokens}, and the mask of a padding-free batch has "
        f"no windows or chunks; {way_out}, or else {other}use a padding way, such as RandomSampling+Padding"
    )


def attention_reach(config: Any, *, windows: bool = True) -> Optional[Reach]:
    """The smallest window or chunk of all layers; None where every layer attends to all earlier tokens.

    For an example of at most so many tokens, windows and chunks make no difference.  windows: whether windows count.
    """
    used = {
        "sliding_window": windows and _has_layers(config, "sliding") and _windows_are_on(config),
        "attention_chunk_size": _has_layers(config, "chunk"),
    }
    sizes = {setting: getattr(config, setting, None) for setting, in_use in used.items() if in_use}
    found = [Reach(tokens, setting) for setting, tokens in sizes.items() if isinstance(tokens, int) and tokens > 0]
    return min(found, default=None)


def _has_layers(config: Any, kind: str) -> bool:
    """Whether some layer is of this kind, for example "sliding_attention".  Without layer_types every layer may be."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or any(kind in each for each in kinds)


def _windows_are_on(config: Any) -> bool:
    """False where the configuration has a window that no layer uses.

    The layers from number max_window_layers on have a window.  layer_types, where there is one, says it already.
    """
    if getattr(config, "layer_types", None) is not None:
        return True
    first, layers = getattr(config, "max_window_layers", None), getattr(config, "num_hidden_layers", None)
    none_left = isinstance(first, int) and isinstance(layers, int) and first >= layers
    return getattr(config, "use_sliding_window", None) is not False and not none_left
