"""Models with windows or chunks: right up to their length, refused beyond it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ipu_packed_bert.padding_free import collators, use_padding_free
from ipu_packed_bert.padding_free.collators import PaddingFreeCollator
from ipu_packed_bert.padding_free.models import Reach, ignored_reach, refuse_unfit
from ipu_packed_bert.padding_free.probe import check_no_leak
from tests.padding_free_models import (
    SIZE,
    WINDOW,
    WINDOWED,
    a_windowed_model,
    packed_error,
    some_examples,
    transformers,
)
from tests.refusals import refused


@pytest.mark.parametrize("kind", WINDOWED)
def test_examples_up_to_the_window_are_right_and_longer_ones_refused(kind, monkeypatch):
    model = a_windowed_model(kind)
    short, long = some_examples(4, [5, 3, 5, 2]), some_examples(4, [3, 12, 5])
    assert packed_error(model, short) < 1e-4
    with refused(f"an example has 12 tokens, .* is {WINDOW}.*padding way"):
        PaddingFreeCollator(model)(long)
    # What the refusal prevents: the one mask of all layers has no window.
    monkeypatch.setattr(collators, "ignored_reach", lambda model: None)
    assert packed_error(model, long) > 1e-2


@pytest.mark.parametrize("kind", WINDOWED)
def test_the_probe_refuses_what_exceeds_the_window(kind):
    model = a_windowed_model(kind)
    for longest in (None, WINDOW + 1):
        with refused(f"is {WINDOW}, .*use_padding_free.*longest=N"):
            check_no_leak(model, longest=longest)
    check_no_leak(model, longest=WINDOW)
    check_no_leak(model, longest=2)


def test_a_window_as_long_as_the_model_is_none():
    check_no_leak(a_windowed_model("mistral", sliding_window=SIZE["max_position_embeddings"]))


def test_flash_kernels_apply_windows_but_no_chunks():
    model = a_windowed_model("mistral")
    model.config._attn_implementation = "flash_attention_2"
    assert PaddingFreeCollator(model)(some_examples(1, [12, 2]))["max_length_q"] == 12
    assert ignored_reach(model) is None
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
    model = SimpleNamespace(config=SimpleNamespace(**config))
    assert ignored_reach(model) == expected


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, ""),
        ({"attn_temperature_tuning": True, "floor_scale": 64, "no_rope_layers": [1, 1, 0]}, "floor_scale = 64"),
        ({"attn_temperature_tuning": True, "floor_scale": 64, "no_rope_layers": [1, 1, 1]}, ""),
        ({"attn_temperature_tuning": False, "floor_scale": 64, "no_rope_layers": [0]}, ""),
        ({"compress_rates": {"heavily_compressed_attention": 128}}, ".*128"),
        ({"compress_rates": None, "indexer_compress_ratio": None}, ""),
        ({"compress_rope_theta": 160000.0}, ""),
        ({"indexer_compress_ratio": 4}, "indexer_compress_ratio = 4"),
    ],
)
def test_which_settings_go_by_the_place_in_the_row(config, expected):
    model = SimpleNamespace(config=SimpleNamespace(**config), modules=list)
    with refused(f"place of a token in the row .{expected}") if expected else contextlib.nullcontext():
        refuse_unfit(model)


def test_a_model_that_scales_by_the_place_in_the_row_is_refused_in_one_line():
    config = transformers.Llama4TextConfig(
        **{**SIZE, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        intermediate_size_mlp=32,
        floor_scale=8,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for refuse in (use_padding_free, check_no_leak):
        with refused("place of a token in the row .floor_scale = 8.*padding way"):
            refuse(model, longest=64)
    # What the refusal prevents: an example changes with those before it.
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    assert packed_error(model, some_examples(4, [20, 9])) > 1e-2
