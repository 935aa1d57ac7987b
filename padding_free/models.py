"""The parts of a model: the model inside its wrappers, its configuration, its attention, the input of boundaries."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from padding_free.attention import CHOICE, NAME, layer_configs

WAY_OUT = "use a padding way (RandomSampling+Padding)"


@contextlib.contextmanager
def kept_modes(model: Any) -> Iterator[None]:
    """Restore training and evaluation mode of all modules after the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


@contextlib.contextmanager
def changed(places: Iterable[Tuple[Any, str]], value: Any) -> Iterator[None]:
    """Set attributes of objects to one value in the block."""
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, _ in before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, earlier in before:
            setattr(owner, name, earlier)


class Choice(NamedTuple):
    """The attention and the inputs that keep the examples of a row apart in a model."""

    attention: str  # the implementation
    boundaries: str  # the input that separates the examples: "cu_seq_lens" or "position_ids"
    seq_idx: bool = False  # also pass the number of the example, for layers other than attention

    def __str__(self) -> str:
        names = [self.boundaries] + ["seq_idx"] * self.seq_idx
        return f'attn_implementation="{self.attention}" with {" and ".join(names)}'


class FirstDifference(NamedTuple):
    """The first token of a row with other logits than alone."""

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
    """A model that is not correct in padding-free batches; `first` is the first token with other logits."""

    def __init__(self, text: str, first: Optional[FirstDifference] = None) -> None:
        super().__init__(text)
        self.first = first


def unwrapped(model: Any) -> Any:
    """Return the model without DataParallel and torch.compile, which computes the same in one process."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        else:
            return model


def is_compiled(model: Any) -> bool:
    """Return True if calls of the model run a compiled graph."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def base_of(model: Any) -> Any:
    """Return the Hugging Face model with the configuration, without all wrappers, FSDP and PEFT."""
    while True:
        model = unwrapped(model)
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ == "FullyShardedDataParallel":
            model = model.module
        else:
            return model


def in_first_fsdp(model: Any) -> bool:
    """Return True if the model or a part is in FSDP1, which does not run on a CPU and is not tested here."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def is_sharded(model: Any) -> bool:
    """Return True if the model holds a part of a weight only."""
    parameters = model.parameters()
    return any(hasattr(each, "placements") or not each.numel() for each in parameters)


def refuse_unfit(model: Any) -> None:
    """Raise ValueError for a model that cannot be probed, or that counts tokens from the begin of the row."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; pass a loaded torch.nn.Module")
    if in_first_fsdp(model):
        raise ValueError(
            "the model is in FullyShardedDataParallel (FSDP1), which cannot be probed; call use_padding_free(model) "
            "before you wrap it, or shard it with fully_shard"
        )
    settings = _row_settings(text_config(model))
    if settings:
        raise ValueError(
            f"{type(base_of(model)).__name__} attends by the place of a token in the row ({', '.join(settings)}), so "
            f"an example depends on earlier ones; {WAY_OUT}"
        )


def text_config(model: Any) -> Any:
    """Return the configuration of the language model, which may be a part of the model's, or empty."""
    config: Any = getattr(base_of(model), "config", None)
    if isinstance(config, dict):
        return SimpleNamespace(**config)
    if not hasattr(config, "__dict__"):
        return SimpleNamespace()
    return config.get_text_config() if hasattr(config, "get_text_config") else config


# Names of the most positions that a model supports, in Transformers and in models without it.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "block_size",
    "max_seq_len",
    "context_length",
)


def most_positions(config: Any) -> Optional[int]:
    """Return the most positions that a configuration allows; None if it states no limit."""
    for name in _POSITIONS:
        positions: Any = getattr(config, name, None)
        if _is_count(positions):  # XLNet: -1
            return int(positions)
    return None


def attention_of(model: Any) -> str:
    """Return the attention implementation of a Hugging Face model: "eager", "sdpa", "flash_attention_2", ..."""
    config = getattr(base_of(model), "config", None)
    return getattr(config, "_attn_implementation", None) or "eager"


def choice_of(model: Any, *, tried: bool = False) -> Choice:
    """Return the choice of `use_padding_free`, or else the choice for the model's attention.

    Args:
        model: The model.
        tried: Raise ValueError unless this attention is known to keep examples apart.
    """
    kind = attention_of(model)
    chosen = base_of(model).__dict__.get(CHOICE)
    if chosen is not None and chosen.attention == kind:
        return Choice(*chosen)
    if kind == NAME or "flash" in kind:
        return Choice(kind, "cu_seq_lens")
    if tried:
        raise ValueError(
            f'{type(base_of(model)).__name__}: attn_implementation="{kind}" is not tested to keep the examples of a '
            "row apart; call use_padding_free(model) first"
        )
    return Choice(kind, "position_ids")


def choose(model: Any, choice: Optional[Choice]) -> Optional[Choice]:
    """Store a choice in the model, or remove it; return the earlier one."""
    base = base_of(model)
    before: Optional[Choice] = base.__dict__.pop(CHOICE, None)
    if choice is not None:
        base.__dict__[CHOICE] = choice
    return before


class Reach(NamedTuple):
    """A window, a chunk, or another length that changes attention."""

    tokens: int
    setting: str  # its name in the configuration


def _row_settings(config: Any) -> List[str]:
    """List the settings, `name = value`, with which the place of a token in the row changes its result.

    Llama 4 scales the queries of its layers without rotary positions; DeepSeek-V4 joins groups of tokens of the row.
    """
    names = []
    rotary = getattr(config, "no_rope_layers", None)  # for each layer, 1: rotary positions
    if getattr(config, "attn_temperature_tuning", None) and not (rotary and all(rotary)):
        names.append("floor_scale")
    names += [
        name for name in vars(config) if name.startswith(("compress_ra", "indexer_compress_ra"))
    ]
    return [f"{name} = {getattr(config, name)}" for name in names if getattr(config, name, None)]


# Parts of the names of settings on which the attention of a longer example may depend.
_REACHING = ("window", "chunk", "local_attention")
_COUNTS = ("max_window_layers", "num_", "use_")  # numbers of layers and the like, not of tokens


def far_settings(config: Any) -> List[Reach]:
    """List the settings that may change examples of more than a number of tokens, from near to far.

    They are windows and chunks of any name, and the length above which rotary positions of the kinds "dynamic" and
    "longrope" are stretched, for the whole row if one of its examples is longer.  An unrelated setting in the list only
    makes the test longer.
    """
    reaches = []
    for layer in layer_configs(config):
        for name, tokens in vars(layer).items():
            is_reaching = any(word in name for word in _REACHING) and not name.startswith(_COUNTS)
            if is_reaching and _is_count(tokens):
                reaches.append(Reach(tokens, name))
    for name in ("rope_parameters", "rope_scaling"):
        for rope in _dictionaries(getattr(config, name, None)):
            kind = rope.get("rope_type", rope.get("type"))
            trained = rope.get("original_max_position_embeddings") or _trained_positions(config)
            if kind in ("dynamic", "longrope", "su") and _is_count(trained):
                setting = f"{name} of the kind {kind}, original_max_position_embeddings"
                reaches.append(Reach(trained, setting))
    return sorted(set(reaches))


def _trained_positions(config: Any) -> Any:
    original = getattr(config, "original_max_position_embeddings", None)
    return original or getattr(config, "max_position_embeddings", None)


# Parts of the names of settings that may be a length above which the result of an example or a row changes.
_MATTERING = (
    *_REACHING,
    "scale",
    "rate",
    "capacity",
    "cache",
    "block",
    "stride",
    "kernel",
    "group",
    "length",
)


def lengths_of_model(model: Any, most: int) -> List[int]:
    """List the numbers of a model that may be lengths in tokens, from 2 to `most`.

    They are in its configuration and, if it is no model of Transformers, in its modules.
    """
    config = text_config(model)
    lengths = {reach.tokens for reach in far_settings(config)}
    places = [config]
    if not hasattr(base_of(model), "set_attn_implementation"):
        places += base_of(model).modules()
    for place in places:
        for name, value in vars(place).items():
            if any(word in name for word in _MATTERING) and not name.startswith(_COUNTS):
                values = value if isinstance(value, (list, tuple)) else [value]
                lengths.update(filter(_is_count, values))
    return sorted(length for length in lengths if 2 <= length <= most)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _dictionaries(value: Any) -> Iterator[Dict[str, Any]]:
    """Iterate over a dictionary and the dictionaries in it."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _dictionaries(inner)
