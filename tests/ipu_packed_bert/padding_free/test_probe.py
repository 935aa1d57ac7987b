"""The probe: models that keep examples apart pass, whatever leaks or stands at a wrong position is refused."""

from __future__ import annotations

import pytest
import torch

from ipu_packed_bert.padding_free import probe
from ipu_packed_bert.padding_free.collators import inputs_for
from ipu_packed_bert.padding_free.probe import check_no_leak
from tests.padding_free_models import CONFIGS, SIZE, a_model, transformers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_models_that_keep_examples_apart_pass(kind, dtype):
    model = a_model(kind, dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_no_leak(model)
    assert model.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_eager_models_pass():
    check_no_leak(a_model(attention="eager"))


def test_the_probe_has_a_reference_of_its_own(monkeypatch):
    """A mask that is wrong for an example alone as well, as that without a window is."""

    def one_token_is_all_you_see(model, batch):
        inputs = inputs_for(model, batch)
        return {**inputs, "attention_mask": torch.eye(inputs["input_ids"].shape[1], dtype=torch.bool)[None, None]}

    monkeypatch.setattr(probe, "inputs_for", one_token_is_all_you_see)
    with pytest.raises(ValueError, match="otherwise than alone"):
        check_no_leak(a_model())


MIXTURES = {
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 1, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_key_value_heads": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
        },
    ),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_experts_pass_whatever_their_weights(kind):
    """Other tokens in front send others to the same expert, whose sums then round anew: not equal bits, and no leak."""
    name, settings_ = MIXTURES[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"this Transformers has no {name}")
    for seed in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZE, **settings_)).to(
                dtype
            )
            check_no_leak(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, dtype=dtype) * 0.3)
            check_no_leak(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_leak_is_refused_in_any_type(dtype):
    """A new LFM2's convolution changes the next example's logits by a hundredth: less than bfloat16's tolerance."""
    if not hasattr(transformers, "Lfm2Config"):
        pytest.skip("this Transformers has no Lfm2Config")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Lfm2Config(
            **{**SIZE, "hidden_size": 64}, num_key_value_heads=1, layer_types=["conv", "full_attention"]
        )
    )
    with pytest.raises(ValueError, match="change with the example before it"):
        check_no_leak(model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_attention_across_examples_is_refused(dtype):
    def without_mask(model, inputs):
        return model(
            input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]
        ).logits  # with a cache: no boundaries

    with pytest.raises(ValueError, match="change with the example before it.*use_cache=False") as caught:
        check_no_leak(a_model(dtype=dtype), forward=without_mask)
    assert "\n" not in str(caught.value)


def test_ignored_position_ids_are_refused():
    def without_positions(model, inputs):
        return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits

    model = a_model("gpt2")  # absolute positions: what is not reset is wrong
    with pytest.raises(ValueError, match="position_ids are ignored.*padding way"):
        check_no_leak(model, forward=without_positions)
    # Rotary positions are relative, and the mask keeps the examples apart: nothing is wrong then.
    check_no_leak(a_model("llama"), forward=without_positions)


def test_positions_made_elsewhere_are_refused():
    def shifted(model, inputs):
        stretched = inputs["position_ids"] + (inputs["position_ids"] > 2) * inputs["input_ids"].shape[1]
        return model(
            input_ids=inputs["input_ids"],
            position_ids=stretched,
            attention_mask=inputs["attention_mask"],
            use_cache=False,
        ).logits

    with pytest.raises(ValueError, match="do not follow from position_ids alone"):
        check_no_leak(a_model(), forward=shifted)


def test_a_model_without_position_ids_is_refused_in_one_line():
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="BloomForCausalLM: .*padding way") as caught:
        check_no_leak(model)
    assert "\n" not in str(caught.value)
