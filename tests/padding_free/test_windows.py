"""Models that go by the place of a token in the row are refused by their settings."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from padding_free import use_padding_free
from padding_free.leaks.probe import check_no_leak
from padding_free.models import Choice, choose, refuse_unfit
from tests.padding_free_models import SIZE, packed_error, some_examples, transformers
from tests.refusals import refused


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
    choose(model, Choice("sdpa", "position_ids"))
    assert packed_error(model, some_examples(4, [20, 9])) > 1e-2
