"""What keeps the examples of a padding-free row apart in a given model: tried out, not looked up."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Tuple

from ipu_packed_bert.padding_free.attention import NAME, REGISTERED, setting_of
from ipu_packed_bert.padding_free.models import (
    WAY_OUT,
    Choice,
    FirstDifference,
    Leak,
    attention_of,
    base_of,
    choice_of,
    choose,
    refuse_masks,
    refuse_unfit,
    text_config,
)
from ipu_packed_bert.padding_free.probe import check_no_leak, keeps_apart_with_mask
from ipu_packed_bert.padding_free.rows import Probed

_logger = logging.getLogger(__name__)


def use_padding_free(
    model: Any, *, longest: Optional[int] = None, row: Optional[int] = None, attention: Optional[str] = None
) -> Choice:
    """Switch a loaded model, in place, to an attention that keeps examples apart.  Returns what was chosen.

    longest: tokens of the longest example in training, and row: those that a batch joins, as for `check_no_leak`, which
    every choice passes.
    attention: only this implementation.  By default flash attention if the model was loaded with it, then ours, then
    the library's own way with the attention the model has: boundaries found in position_ids.  Ours and the library's
    are tried without seq_idx and with it, which layers other than attention may use.
    The model's key cache is switched off, as with it the library looks for no boundaries.
    The library's masks of all tokens by all tokens are taken only where `attention` names eager or sdpa, now or before;
    a warning says what memory that takes.

    Raises ValueError where nothing is right; the model then stays as it was.
    """
    return find_choice(model, longest=longest, row=row, attention=attention)[0]


def find_choice(
    model: Any, *, longest: Optional[int] = None, row: Optional[int] = None, attention: Optional[str] = None
) -> Tuple[Choice, Probed]:
    """`use_padding_free`, and what was probed."""
    refuse_unfit(model)
    base, loaded, before = base_of(model), attention_of(model), choose(model, None)
    cached = getattr(base.config, "use_cache", None)
    refusals: Dict[str, str] = {}
    first: Optional[FirstDifference] = None
    chosen = False
    try:
        for choice in _candidates(loaded, attention):
            try:
                switch(model, choice.attention)
                choose(model, choice)
                base.config.use_cache = False
                probed = check_no_leak(model, longest=longest, row=row)
                if choice.boundaries == "cu_seq_lens" and not keeps_apart_with_mask(model):
                    refuse_masks(model)
                if _dense_mask_bytes(model, 1):
                    _say_dense(model, choice, row or longest or 4096, attention is not None or choice == before)
                chosen = True
                return choice, probed
            except (AssertionError, ValueError) as error:  # an assertion: of the model's own code
                refusals[str(choice)] = str(error) or f"{type(base).__name__} does not take {choice.boundaries}"
                first = first or getattr(error, "first", None)
    finally:
        if not chosen:
            choose(model, before)
            base.config.use_cache = cached
            if attention_of(model) != loaded:
                base.set_attn_implementation(loaded)
    # The first, and those of another kind: a package that is missing, a setting.
    reasons = {reason: choice for choice, reason in reversed(list(refusals.items()))}
    texts = [f"with {choice}: {reason}" for reason, choice in reversed(list(reasons.items()))]
    raise Leak(f"{type(base).__name__} is not right in padding-free batches {'; '.join(texts[:3])}; {WAY_OUT}", first)


def _dense_mask_bytes(model: Any, tokens: int) -> int:
    """Memory of the mask and the scores of one layer in a row of so many tokens; 0 where no such mask is made."""
    kind = attention_of(model)
    if choice_of(model).boundaries == "cu_seq_lens" or kind == "flex_attention":
        return 0
    heads = setting_of(text_config(model), "num_attention_heads") or 1
    width = next(base_of(model).parameters()).element_size()
    return tokens * tokens * (1 if kind == "sdpa" else width * (1 + heads))


def _say_dense(model: Any, choice: Choice, tokens: int, asked: bool) -> None:
    """A warning; ValueError where nobody asked for it."""
    text = (
        f"{type(base_of(model)).__name__}: {choice} keeps examples apart by a mask of all tokens by all tokens, "
        f"{_dense_mask_bytes(model, tokens) / 2**20:,.0f} MiB a layer in a row of {tokens:,} tokens, four times as "
        "much in one twice as long"
    )
    if not asked:
        raise ValueError(f'{text}; use_padding_free(model, attention="{choice.attention}") takes it')
    _logger.warning("%s", text)


def _candidates(loaded: str, attention: Optional[str]) -> List[Choice]:
    """In the order in which they are tried."""
    flash = [Choice(loaded, "cu_seq_lens")] if "flash" in loaded else []
    ours = [Choice(NAME, "cu_seq_lens"), Choice(NAME, "cu_seq_lens", seq_idx=True)]
    library = []
    for kind in dict.fromkeys([attention or loaded, "eager"]):
        if kind != NAME and "flash" not in kind:
            library += [Choice(kind, "position_ids"), Choice(kind, "position_ids", seq_idx=True)]
    return [choice for choice in flash + ours + library if attention in (None, choice.attention)]


def switch(model: Any, kind: str) -> None:
    """Give a model another attention.  Raises ValueError where its code takes none from Transformers."""
    base = base_of(model)
    if attention_of(base) == kind:
        return
    if kind == NAME and not REGISTERED:
        raise ValueError("it needs Transformers 4.57 or newer: pip install -U transformers")
    try:
        base.set_attn_implementation(kind)
    except (AttributeError, ImportError, KeyError) as error:
        raise ValueError(f"{type(base).__name__} cannot be switched to it: {error}") from None
    if attention_of(base) != kind:
        raise ValueError(f"{type(base).__name__} does not take its attention from Transformers' AttentionInterface")
