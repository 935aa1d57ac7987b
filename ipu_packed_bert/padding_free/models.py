"""What a model is made of: the one inside its wrappers, its configuration, its attention, how boundaries reach it."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from torch.nn.parallel import DataParallel, DistributedDataParallel

from ipu_packed_bert.padding_free.attention import NAME, layer_configs

WAY_OUT = "use a padding way for it, such as RandomSampling+Padding"


class Choice(NamedTuple):
    """How the examples of a row are kept apart in a model."""

    attention: str  # the implementation it is set to
    boundaries: str  # the input that tells the examples apart: "cu_seq_lens" or "position_ids"
    seq_idx: bool = False  # whether the number of the example goes along, for layers that are no attention

    def __str__(self) -> str:
        names = [self.boundaries] + ["seq_idx"] * self.seq_idx
        return f'attn_implementation="{self.attention}" with {" and ".join(names)}'


class FirstDifference(NamedTuple):
    """The first token of a row that scores otherwise than alone."""

    example: int  # its number in the row
    token: int  # in its example
    place: int  # in the row
    difference: float  # of its logits, over the largest

    def __str__(self) -> str:
        return (
            f"example {self.example}, its token {self.token}, place {self.place:,} of the row: "
            f"{self.difference:.1e} of the largest logit"
        )


class Leak(ValueError):
    """A model that is not right in padding-free batches.  first: where that begins, if it is in the logits."""

    def __init__(self, text: str, first: Optional[FirstDifference] = None) -> None:
        super().__init__(text)
        self.first = first


def unwrapped(model: Any) -> Any:
    """The model that computes the same on this process alone: without DistributedDataParallel and torch.compile."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        else:
            return model


def base_of(model: Any) -> Any:
    """The Hugging Face model inside, which has the configuration: also without FSDP and PEFT."""
    while True:
        model = unwrapped(model)
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ == "FullyShardedDataParallel":
            model = model.module
        else:
            return model


def in_first_fsdp(model: Any) -> bool:
    """Whether the model or a part of it is in FSDP1, which runs on no CPU: nothing of it can be tested here."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def refuse_unfit(model: Any) -> None:
    """Raises ValueError for a model that the probe cannot know, or whose layers count tokens from the row's begin."""
    if in_first_fsdp(model):
        raise ValueError(
            "the model is in FullyShardedDataParallel (FSDP1), in which it is not probed; call use_padding_free(model) "
            "before it is wrapped, or shard it with fully_shard"
        )
    found = _row_settings(text_config(model))
    if found:
        raise ValueError(
            f"{type(base_of(model)).__name__} attends by the place of a token in the row ({', '.join(found)}), so that "
            f"an example depends on those before it; {WAY_OUT}"
        )


def text_config(model: Any) -> Any:
    """The configuration of the language model: the model's own, or the part of it that is about text."""
    config = base_of(model).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_of(model: Any) -> str:
    """The attention implementation a Hugging Face model was loaded with: "eager", "sdpa", "flash_attention_2", ..."""
    return getattr(base_of(model).config, "_attn_implementation", None) or "eager"


def choice_of(model: Any, *, tried: bool = False) -> Choice:
    """What `use_padding_free` chose; else what goes with the attention that the model has.

    tried: raise ValueError where nobody has tried whether that keeps examples apart.
    """
    kind, chosen = attention_of(model), base_of(model).__dict__.get(_PLACE)
    if chosen is not None and chosen.attention == kind:
        return Choice(*chosen)
    if kind == NAME or "flash" in kind:
        return Choice(kind, "cu_seq_lens")
    if tried:
        raise ValueError(
            f'{type(base_of(model)).__name__}: nobody has tried whether attn_implementation="{kind}" keeps the '
            "examples of a row apart; call use_padding_free(model) before"
        )
    return Choice(kind, "position_ids")


def choose(model: Any, choice: Optional[Choice]) -> Optional[Choice]:
    """Remember it, or forget what was chosen.  Returns what was."""
    base = base_of(model)
    before: Optional[Choice] = base.__dict__.pop(_PLACE, None)
    if choice is not None:
        base.__dict__[_PLACE] = choice
    return before


_PLACE = "_padding_free_choice"  # an attribute of the model: neither its configuration nor its weights have it


class Reach(NamedTuple):
    """A window or the like."""

    tokens: int
    setting: str  # its name in the configuration


def _row_settings(config: Any) -> List[str]:
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
    for name, tokens in (setting for each in layer_configs(config) for setting in vars(each).items()):
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


# Settings after which a model may treat an example, a token or a row otherwise, by parts of their names.
_MATTERING = (*_REACHING, "scale", "rate", "capacity", "cache", "block", "stride", "kernel", "group", "length")


def lengths_of_config(config: Any, most: int) -> List[int]:
    """Numbers of the configuration that may be lengths in tokens, from 2 to `most`."""
    found = {each.tokens for each in far_settings(config)}
    for name, value in vars(config).items():
        if any(word in name for word in _MATTERING) and not name.startswith(_COUNTS):
            found |= {each for each in (value if isinstance(value, (list, tuple)) else [value]) if _is_count(each)}
    return sorted(each for each in found if 2 <= each <= most)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _dictionaries(value: Any) -> Iterator[Dict[str, Any]]:
    """The dictionary, and those in it."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _dictionaries(each)
