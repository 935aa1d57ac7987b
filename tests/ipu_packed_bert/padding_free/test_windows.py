"""Models with windows or chunks: right up to their length, refused beyond it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ipu_packed_bert.padding_free import collators, probe
from ipu_packed_bert.padding_free.collators import PaddingFreeCollator
from ipu_packed_bert.padding_free.probe import check_no_leak
from ipu_packed_bert.padding_free.windows import Reach, attention_reach
from tests.padding_free_models import SIZE, WINDOW, WINDOWED, a_windowed_model, packed_error, some_examples


@pytest.mark.parametrize("kind", WINDOWED)
def test_examples_up_to_the_window_are_right_and_longer_ones_refused(kind, monkeypatch):
    model = a_windowed_model(kind)
    short, long = some_examples(4, [5, 3, 5, 2]), some_examples(4, [3, 12, 5])
    assert packed_error(model, short) < 1e-4
    with pytest.raises(ValueError, match=f"an example has 12 tokens, .* is {WINDOW}.*padding way") as caught:
        PaddingFreeCollator(model)(long)
    assert "\n" not in str(caught.value)
    # What the refusal prevents: the one mask of all layers has no window.
    monkeypatch.setattr(collators, "ignored_reach", lambda model: None)
    assert packed_error(model, long) > 1e-2


@pytest.mark.parametrize("kind", WINDOWED)
def test_the_probe_refuses_what_exceeds_the_window(kind):
    model = a_windowed_model(kind)
    for longest in (None, WINDOW + 1):
        with pytest.raises(ValueError, match=f"is {WINDOW}, .*use_padding_free.*longest=N") as caught:
            check_no_leak(model, longest=longest)
        assert "\n" not in str(caught.value)
    check_no_leak(model, longest=WINDOW)
    check_no_leak(model, longest=2)


def test_a_window_as_long_as_the_model_is_none():
    check_no_leak(a_windowed_model("mistral", sliding_window=SIZE["max_position_embeddings"]))


def test_flash_kernels_apply_windows_but_no_chunks():
    model = a_windowed_model("mistral")
    model.config._attn_implementation = "flash_attention_2"
    assert PaddingFreeCollator(model)(some_examples(1, [12, 2]))["max_length_q"] == 12
    probe.check_window(model)
    chunked = a_windowed_model("llama4")
    chunked.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attention_chunk_size is 5") as caught:
        PaddingFreeCollator(chunked)(some_examples(1, [12, 2]))
    assert "flash" not in str(caught.value)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 8}, Reach(8, "sliding_window")),
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 3},
            Reach(8, "sliding_window"),
        ),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 3}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, Reach(8, "sliding_window")),
        ({"sliding_window": 8, "attention_chunk_size": 6}, Reach(6, "attention_chunk_size")),
        ({"attention_chunk_size": 6, "layer_types": ["full_attention", "full_attention"]}, None),
        (
            {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"]},
            Reach(6, "attention_chunk_size"),
        ),
    ],
)
def test_which_settings_shorten_the_attention(config, expected):
    assert attention_reach(SimpleNamespace(**config)) == expected
