"""How far back the attention of a model reaches, read from its configuration."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from ipu_packed_bert.padding_free.models import base_of, choice_of, text_config


class Reach(NamedTuple):
    """The smallest window or chunk of all layers."""

    tokens: int
    setting: str  # its name in the configuration


def ignored_reach(model: Any) -> Optional[Reach]:
    """The smallest window or chunk that a padding-free batch ignores; None where there is none.

    One mask for all layers has no windows or chunks.  Flash attention gets no mask, and its kernel applies windows.
    """
    choice = choice_of(model)
    if "flash" in choice.attention:
        return attention_reach(text_config(model), windows=False)
    return attention_reach(text_config(model)) if choice.boundaries == "attention_mask" else None


def too_long(model: Any, reach: Reach, what: str, way_out: str) -> ValueError:
    """The error for examples that exceed `reach`.  what: their length; way_out: what else to do about it."""
    return ValueError(
        f"{type(base_of(model)).__name__}: {what}, {reach.setting} is {reach.tokens}, and this padding-free batch "
        f"ignores it; call use_padding_free(model), which finds an attention that applies windows and chunks, "
        f"{way_out}, or use a padding way, such as RandomSampling+Padding"
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


def row_settings(config: Any) -> List[str]:
    """Settings by which a model treats a token by its place in the row, whatever its example: `name = value`.

    Llama 4 scales the queries of its layers without rotary positions; DeepSeek-V4 joins groups of tokens of the row.
    """
    found = []
    rotary = getattr(config, "no_rope_layers", None)  # 1 where a layer has rotary positions
    if getattr(config, "attn_temperature_tuning", None) and not (rotary and all(rotary)):
        found.append("floor_scale")
    found += [name for name, value in vars(config).items() if name.startswith(("compress_ra", "indexer_compress_ra"))]
    return [f"{name} = {getattr(config, name)}" for name in found if getattr(config, name, None)]


# What the attention of an example longer than this may depend on, by the names that configurations use.
_REACHING = ("window", "chunk", "local_attention")
_COUNTS = ("max_window_layers", "num_", "use_")  # numbers of layers and the like, not of tokens


def far_settings(config: Any) -> List[Reach]:
    """Everything that may make examples of more than so many tokens behave otherwise, from near to far.

    Windows and chunks by any name, and the length from which rotary positions of the kinds "dynamic" and "longrope" are
    stretched: for the whole row, if one of its examples is longer.  A setting too many here costs a longer test only.
    """
    found = []
    for name, tokens in vars(config).items():
        reaching = any(word in name for word in _REACHING) and not name.startswith(_COUNTS)
        if reaching and _is_count(tokens):
            found.append(Reach(tokens, name))
    for name in ("rope_parameters", "rope_scaling"):
        for each in _dictionaries(getattr(config, name, None)):
            kind = each.get("rope_type", each.get("type"))
            trained = each.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            trained = trained or getattr(config, "max_position_embeddings", None)
            if kind in ("dynamic", "longrope", "su") and _is_count(trained):
                found.append(Reach(int(trained or 0), f"{name} of the kind {kind}, original_max_position_embeddings"))
    return sorted(set(found))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _dictionaries(value: Any) -> Iterator[Dict[str, Any]]:
    """The dictionary, and those in it."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _dictionaries(each)
