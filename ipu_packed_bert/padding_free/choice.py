"""Which attention keeps the examples of a padding-free row apart in a given model: tried out, not looked up."""

from __future__ import annotations

from typing import Any, Optional

from ipu_packed_bert.padding_free.attention import NAME, REGISTERED
from ipu_packed_bert.padding_free.probe import check_no_leak
from ipu_packed_bert.padding_free.windows import attention_of


def use_padding_free(model: Any, *, longest: Optional[int] = None) -> str:
    """Switch a loaded model, in place, to an attention that keeps examples apart.  Returns the attention's name.

    longest: tokens of the longest example in training, as for `check_no_leak`.
    Ours comes first, then the one that the model was loaded with.  Raises ValueError where neither is right; the model
    then stays as it was.
    """
    loaded = attention_of(model)
    refusals = []
    for kind in dict.fromkeys([NAME, loaded]):
        try:
            switch(model, kind)
            check_no_leak(model, longest=longest)
            return kind
        except ValueError as error:
            refusals.append(f'with attn_implementation="{kind}": {error}')
            switch(model, loaded)
    raise ValueError("; ".join(refusals))


def switch(model: Any, kind: str) -> None:
    """Give a model another attention.  Raises ValueError where its code takes none from Transformers."""
    if attention_of(model) == kind:
        return
    if kind == NAME and not REGISTERED:
        raise ValueError(f"{type(model).__name__}: Transformers 4.57 or newer is needed: pip install -U transformers")
    model.set_attn_implementation(kind)
    if attention_of(model) != kind:
        raise ValueError(f"{type(model).__name__} does not take its attention from Transformers' AttentionInterface")
