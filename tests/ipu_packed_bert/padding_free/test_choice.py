"""What is chosen for a model is right to rounding against plain calls; windows, chunks, soft caps and all."""

from __future__ import annotations

import pytest
import torch

from ipu_packed_bert.padding_free import PaddingCollator, PaddingFreeCollator, use_padding_free
from ipu_packed_bert.padding_free.models import Choice, attention_of, choice_of, choose
from tests.padding_free_models import (
    CONFIGS,
    WINDOWED,
    a_model,
    a_windowed_model,
    alone,
    some_examples,
    token_losses,
    transformers,
)

LENGTHS = [9, 2, 2, 12, 5, 2, 40]


def errors(switched, plain):
    """Largest difference of a token's loss: padding-free, with positions only, and padded, from its example alone."""
    examples = some_examples(3, LENGTHS)
    expected = torch.cat([alone(plain, example) for example in examples])
    free, padded = PaddingFreeCollator(switched)(examples), PaddingCollator()(examples)
    assert "attention_mask" not in free
    positions = {name: free[name] for name in ("input_ids", "labels", "position_ids")}
    if hasattr(plain.config, "attention_chunk_size"):
        with pytest.raises(ValueError, match="attends in chunks; give the model cu_seq_lens_q"):
            token_losses(switched, positions)
        positions = free
    with torch.no_grad():
        return [float((token_losses(switched, each) - expected).abs().max()) for each in (free, positions, padded)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_switched_and_right(kind):
    switched = a_model(kind)
    assert use_padding_free(switched) == ("padding_free", "cu_seq_lens", False)
    assert max(errors(switched, a_model(kind))) <= 1e-12


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_chunks_and_soft_caps_are_obeyed(kind):
    switched = a_windowed_model(kind)
    assert use_padding_free(switched).attention == attention_of(switched) == "padding_free"
    assert max(errors(switched, a_windowed_model(kind))) <= 1e-5


def test_what_takes_no_attention_is_refused_and_stays_as_it_was():
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = attention_of(model)
    with pytest.raises(ValueError, match="AttentionInterface.*padding way") as caught:
        use_padding_free(model)
    assert "\n" not in str(caught.value) and attention_of(model) == before


def test_what_was_chosen_before_stays_where_nothing_else_is_right():
    model = a_model()
    use_padding_free(model)
    chosen = Choice(attention_of(model), "cu_seq_lens", seq_idx=True)
    choose(model, chosen)
    with pytest.raises(ValueError, match="padding way"):
        use_padding_free(model, attention="nonsense")
    assert choice_of(model) == chosen
