"""The attention that keeps the examples of a padding-free row apart in a model, found by tests of that model."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Dict, List, Optional, Sequence, Tuple

from pack_data.reading.fields import one_line
from padding_free.attention import NAME, REGISTERED, setting_of, watch
from padding_free.leaks.probe import Probed, check_no_leak
from padding_free.models import (
    WAY_OUT,
    Choice,
    Leak,
    attention_of,
    base_of,
    choice_of,
    choose,
    refuse_unfit,
    text_config,
)

_logger = logging.getLogger(__name__)


def use_padding_free(
    model: Any,
    *,
    longest: Optional[int] = None,
    row: Optional[int] = None,
    attention: Optional[str] = None,
) -> Choice:
    """Switch a loaded model, in place, to an attention that keeps examples apart.

    The order of the tests: flash attention if the model was loaded with it; ours; the attention of the model, for which
    the library finds boundaries in position_ids.  The last two are tested without and with seq_idx, which layers other
    than attention may use.  Calls without use_cache get use_cache=False, because with a key cache the library finds no
    boundaries; the configuration does not change.

    The library's masks of all tokens by all tokens are accepted only if `attention` names eager or sdpa, now or before;
    a warning states their memory.

    Args:
        model: A loaded Hugging Face model.
        longest: Tokens of the longest example in training, as for `check_no_leak`, which tests every choice.
        row: Tokens of a training row, as for `check_no_leak`.
        attention: Test only this implementation.

    Returns:
        The chosen attention, and the inputs that separate the examples.

    Raises:
        ValueError: No choice is correct; the model is then unchanged.
    """
    return find_choice(model, longest=longest, row=row, attention=attention)[0]


def find_choice(
    model: Any,
    *,
    longest: Optional[int] = None,
    row: Optional[int] = None,
    attention: Optional[str] = None,
    all_layers: bool = False,
) -> Tuple[Choice, Probed]:
    """Switch a model in the same way as `use_padding_free`; also return the probed rows."""
    refuse_unfit(model)
    base = base_of(model)
    loaded = attention_of(model)
    before = choose(model, None)
    use_cache = getattr(base.config, "use_cache", None)
    refusals: List[Tuple[str, Exception]] = []  # by an attention
    is_chosen = False
    try:
        if use_cache:
            base.config.use_cache = False
        for choice in _candidates(loaded, attention):
            try:
                switch(model, choice.attention)
                choose(model, choice)
                probed = check_no_leak(model, longest=longest, row=row, all_layers=all_layers)
            except (AssertionError, ValueError) as error:  # the model's code may have assertions
                refusals.append((choice.attention, error))
                continue
            if _dense_mask_bytes(model, 1):
                is_accepted = attention is not None or choice == before
                _check_dense(model, choice, row or longest or 4096, is_accepted)
            is_chosen = True
            return choice, probed
    finally:
        if use_cache:
            base.config.use_cache = use_cache
        if is_chosen:
            _prepare_calls(base)
        else:
            choose(model, before)
            if attention_of(model) != loaded:
                base.set_attn_implementation(loaded)
    raise _refusal(f"{type(base).__name__}, loaded with {loaded}", refusals)


def _refusal(name: str, refusals: Sequence[Tuple[str, Exception]]) -> ValueError:
    """Return the first leak if no other reason comes before it, else an error with all other reasons."""
    leaks = [error for _, error in refusals if isinstance(error, Leak)]
    if leaks and refusals[0][1] is leaks[0]:
        return leaks[0]
    reasons: Dict[str, str] = {}
    for attention, error in refusals:
        if not isinstance(error, Leak):
            reason = str(error) or "its code does not accept the boundaries"
            reasons.setdefault(reason, f"with {attention}: {reason}")
    text = one_line(f"{name}: {'; '.join(reasons.values())}", 300 - len(WAY_OUT) - 2)
    text = f"{text}; {WAY_OUT}"
    return Leak(text, leaks[0].first) if leaks else ValueError(text)


def _prepare_calls(base: Any) -> None:
    """Let calls without use_cache use no key cache, and make boundaries explicit; the configuration stays as it is."""
    inner = getattr(base, "base_model", base)
    for module in {base, inner}:
        watch(module, attention_of(base))
    if "use_cache" not in inspect.signature(inner.forward).parameters:
        base.config.use_cache = False
    elif _without_cache not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(model: Any, inputs: Any, named: Dict[str, Any]) -> Any:
    if named.get("use_cache") is None and named.get("past_key_values") is None:
        return inputs, {**named, "use_cache": False}
    return None


def _dense_mask_bytes(model: Any, tokens: int) -> int:
    """Return the memory of the mask and the scores of one layer in a row; 0 without a mask of all tokens."""
    kind = attention_of(model)
    if choice_of(model).boundaries == "cu_seq_lens" or kind == "flex_attention":
        return 0
    if kind == "sdpa":
        return tokens * tokens
    heads = setting_of(text_config(model), "num_attention_heads") or 1
    width = next(base_of(model).parameters()).element_size()
    return tokens * tokens * width * (1 + heads)


def _check_dense(model: Any, choice: Choice, tokens: int, is_accepted: bool) -> None:
    """Warn of the memory of a mask of all tokens; raise ValueError if the caller has not accepted it."""
    mebibytes = _dense_mask_bytes(model, tokens) / 2**20
    text = (
        f"{type(base_of(model)).__name__}: {choice} keeps examples apart by a mask of all tokens by all tokens, "
        f"{mebibytes:,.0f} MiB a layer in a row of {tokens:,} tokens, four times as much in one twice as long"
    )
    if not is_accepted:
        raise ValueError(
            f'{text}; use_padding_free(model, attention="{choice.attention}") accepts it'
        )
    _logger.warning("%s", text)


def _candidates(loaded: str, attention: Optional[str]) -> List[Choice]:
    """List the choices in the order of their tests."""
    candidates = []
    if "flash" in loaded:
        candidates.append(Choice(loaded, "cu_seq_lens"))
    ways = [(NAME, "cu_seq_lens")]
    for kind in dict.fromkeys([attention or loaded, "eager"]):
        if kind != NAME and "flash" not in kind:
            ways.append((kind, "position_ids"))
    for kind, boundaries in ways:
        candidates.append(Choice(kind, boundaries))
        candidates.append(Choice(kind, boundaries, seq_idx=True))
    return [choice for choice in candidates if attention in (None, choice.attention)]


def switch(model: Any, kind: str) -> None:
    """Set the attention of a model; raise ValueError if its code does not use that of Transformers."""
    base = base_of(model)
    if attention_of(base) == kind:
        return
    if kind == NAME and not REGISTERED:
        raise ValueError("it needs Transformers 4.57 or newer; pip install -U transformers")
    try:
        base.set_attn_implementation(kind)
    except (AttributeError, ImportError, KeyError) as error:
        raise ValueError(f"{type(base).__name__} cannot be switched to it: {error}") from None
    if attention_of(base) != kind:
        raise ValueError(
            f"{type(base).__name__} does not take its attention from Transformers' AttentionInterface"
        )
