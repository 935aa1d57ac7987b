"""What a model is made of: the one inside its wrappers, its configuration, its attention, how boundaries reach it."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from torch.nn.parallel import DataParallel, DistributedDataParallel

from ipu_packed_bert.padding_free.attention import NAME


class Choice(NamedTuple):
    """How the examples of a row are kept apart in a model."""

    attention: str  # the implementation it is set to
    boundaries: str  # the input that tells the examples apart: "cu_seq_lens", "position_ids" or "attention_mask"
    seq_idx: bool = False  # whether the number of the example goes along, for layers that are no attention

    def __str__(self) -> str:
        names = [self.boundaries] + ["seq_idx"] * self.seq_idx
        return f'attn_implementation="{self.attention}" with {" and ".join(names)}'


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


def refuse_first_fsdp(model: Any) -> None:
    """Raises ValueError for a model that the probe cannot know."""
    if in_first_fsdp(model):
        raise ValueError(
            "the model is in FullyShardedDataParallel (FSDP1), in which it is not probed; call use_padding_free(model) "
            "before it is wrapped, or shard it with fully_shard"
        )


def text_config(model: Any) -> Any:
    """The configuration of the language model: the model's own, or the part of it that is about text."""
    config = base_of(model).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_of(model: Any) -> str:
    """The attention implementation a Hugging Face model was loaded with: "eager", "sdpa", "flash_attention_2", ..."""
    return getattr(base_of(model).config, "_attn_implementation", None) or "eager"


def first_position(model: Any) -> int:
    """The position of an example's first token: RoBERTa's family counts from padding_idx + 1, all others from 0."""
    for module in base_of(model).modules():
        padding = getattr(getattr(module, "position_embeddings", None), "padding_idx", None)
        if padding is not None:
            return int(padding) + 1
    return 0


def choice_of(model: Any) -> Choice:
    """What `use_padding_free` chose; else what goes with the attention that the model has."""
    kind, chosen = attention_of(model), chosen_for(model)
    if chosen is not None and chosen.attention == kind:
        return chosen
    if kind == NAME or "flash" in kind:
        return Choice(kind, "cu_seq_lens")
    return Choice(kind, "position_ids" if kind == "flex_attention" else "attention_mask")


def chosen_for(model: Any) -> Optional[Choice]:
    """What `choose` remembers."""
    found: Optional[Choice] = base_of(model).__dict__.get(_PLACE)
    return found


def choose(model: Any, choice: Optional[Choice]) -> None:
    """Remember it, or forget what was chosen."""
    base = base_of(model)
    base.__dict__.pop(_PLACE, None)
    if choice is not None:
        base.__dict__[_PLACE] = choice


_PLACE = "_padding_free_choice"  # an attribute of the model: neither its configuration nor its weights have it


def _heads_of(hidden_size: int) -> int:
    """Attention heads of a new Llama: of 64 dimensions, or a single smaller one."""
    return max(1, hidden_size // 64)


def new_llama(*, hidden_size: int, layers: int, vocabulary_size: int, positions: int) -> Any:
    """A new Llama, for measurements; its attention is sdpa, and torch's seed decides the weights.

    Raises ImportError where there is no Transformers.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=_heads_of(hidden_size),
        intermediate_size=4 * hidden_size,
        max_position_embeddings=positions,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
