"""The loss in blocks of tokens is that of whole logits, and so are its gradients."""

import pytest
import torch

from padding_free import losses as module
from padding_free.collators import PaddingCollator
from padding_free.losses import IGNORED, cross_entropy_sum, logits_of, loss_sum, output_layer
from tests.padding_free_models import a_model, some_examples, transformers, with_large_weights
from tests.tolerances import relative_error

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL.update(intermediate_size=16, vocab_size=50, head_dim=8, pad_token_id=0, max_position_embeddings=32)
FAMILIES = {
    "Llama": {},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 4.0},
    "Gemma2": {"final_logit_softcapping": 2.0},
}


def made(family, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES.get(family, {}), **changes})
    return with_large_weights(getattr(transformers, f"{family}ForCausalLM")(config).double())


def batch():
    inputs = PaddingCollator()(some_examples(3, [9, 2, 12]))
    inputs["labels"][0, 2:6] = IGNORED
    return inputs


def both(model, dtype=torch.float64):
    """Loss and gradients, of whole logits and in blocks."""
    found = []
    for loss in (
        lambda inputs: cross_entropy_sum(logits_of(model, inputs), inputs["labels"]),
        lambda i: loss_sum(model, i),
    ):
        model.zero_grad(set_to_none=True)
        total = loss(batch())
        (total / 7).backward()
        found.append((total.detach(), [each.grad for each in model.parameters() if each.grad is not None]))
    return found


@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_gradients_of_known_changes(family, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 5 * 50)
    monkeypatch.setitem(module.NUMBERS_AT_ONCE, "cpu", 2 * 50)
    model = made(family)
    assert output_layer(model) is not None and output_layer(model).asked
    (expected, of_whole), (found, in_blocks) = both(model)
    assert float(found) == pytest.approx(float(expected), rel=1e-12)
    assert relative_error(in_blocks, of_whole) <= 1e-12
    with torch.no_grad():
        assert float(loss_sum(model, batch())) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_and_a_bias(autocast):
    model = made("Llama")
    model.lm_head = torch.nn.Linear(16, 50)
    model = model.float() if autocast else model.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        (expected, of_whole), (found, in_blocks) = both(model)
    assert found.dtype == torch.float32 and float(found) == pytest.approx(float(expected), rel=5e-3)
    assert relative_error(in_blocks, of_whole) <= 2e-2
    assert [each.dtype for each in in_blocks] == [each.dtype for each in of_whole]


def test_a_part_that_is_frozen_gets_no_gradient():
    model = made("Llama")
    model.lm_head.weight.requires_grad_(False)
    (_, of_whole), (_, in_blocks) = both(model)
    assert len(in_blocks) == len(of_whole) and relative_error(in_blocks, of_whole) <= 1e-12


def test_what_is_not_known_keeps_whole_logits():
    """A cap that the configuration does not name, a hook, a second call of the layer, a compiled model."""
    model = a_model()
    assert output_layer(model) is not None
    hooked = a_model()
    hooked.get_output_embeddings().register_forward_hook(lambda layer, given, output: output * 2)
    assert output_layer(hooked) is None
    capped = made("Llama")
    inner = capped.forward

    def forward(*given, **named):
        output = inner(*given, **named)
        output.logits = 50 * torch.tanh(output.logits / 50)
        return output

    capped.forward = forward
    assert output_layer(capped) is None
    parallel = torch.nn.Module()
    parallel.module, parallel.find_unused_parameters = model, True
    assert output_layer(parallel) is None


def test_no_label_and_no_token_that_is_predicted():
    model = made("Llama")
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], IGNORED)
    total = loss_sum(model, inputs)
    total.backward()
    assert float(total.detach()) == 0 and all(
        not each.grad.any() for each in model.parameters() if each.grad is not None
    )
