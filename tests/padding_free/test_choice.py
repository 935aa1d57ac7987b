"""The attention chosen for a model equals plain calls up to rounding, with windows, chunks and soft caps."""

import json
import logging

import numpy as np
import pytest
import torch

from padding_free import PaddingCollator, PaddingFreeCollator, mean_loss, use_padding_free
from padding_free.attention import _padding_free_attention
from padding_free.choice import _dense_mask_bytes
from padding_free.losses import IGNORED
from padding_free.models import Choice, attention_of, choice_of, choose
from tests.padding_free_models import (
    CONFIGS,
    SIZE,
    WINDOW,
    WINDOWED,
    a_model,
    a_windowed_model,
    alone,
    examples_of,
    some_examples,
    token_losses,
    transformers,
)
from tests.refusals import refused

LENGTHS = [9, 2, 2, 12, 5, 2, 40]


def errors(switched, plain):
    """Largest difference of a token's loss: padding-free, with positions only, and padded, from its example alone."""
    examples = some_examples(3, LENGTHS)
    expected = torch.cat([alone(plain, example) for example in examples])
    free, padded = PaddingFreeCollator(switched)(examples), PaddingCollator()(examples)
    assert "attention_mask" not in free
    positions = {name: free[name] for name in ("input_ids", "labels", "position_ids")}
    if hasattr(plain.config, "attention_chunk_size"):
        with refused("chunks", "cu_seq_lens_q"):
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
    with refused("AttentionInterface.*padding way"):
        use_padding_free(model)
    assert attention_of(model) == before


def test_what_was_chosen_before_stays_where_nothing_else_is_right():
    model = a_model()
    use_padding_free(model)
    chosen = Choice(attention_of(model), "cu_seq_lens", seq_idx=True)
    choose(model, chosen)
    with refused("nonsense", "padding way"):
        use_padding_free(model, attention="nonsense")
    assert choice_of(model) == chosen


ENCODERS = {  # family: its settings, and the position of an example's first token
    "Bert": ({}, 0),
    "Albert": ({"embedding_size": 8}, 0),
    "DistilBert": ({"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}, 0),
    "Electra": ({"embedding_size": 8}, 0),
    "EuroBert": ({"num_key_value_heads": 1, "pad_token_id": 1}, 0),
    "ModernBert": ({"num_hidden_layers": 4, "local_attention": 2 * WINDOW, "pad_token_id": 1}, 0),
    "Roberta": ({"pad_token_id": 1}, 2),
    "XLMRoberta": ({"pad_token_id": 1}, 2),
}


def an_encoder(kind):
    settings = {**SIZE, "max_position_embeddings": 80, **ENCODERS[kind][0]}
    special = {"bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**settings, **special)
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * 0.1)
    return model


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="their code took no other attention")
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_are_right(kind):
    """They attend to both sides; ModernBERT in a window, which the examples exceed; RoBERTa's positions begin at 2."""
    switched, plain = an_encoder(kind), an_encoder(kind)
    assert use_padding_free(switched, longest=60, row=120) == ("padding_free", "cu_seq_lens", False)
    examples = examples_of([np.arange(2, 2 + length) % 50 for length in (9, 2, 1, 40, 12)])
    inputs = PaddingFreeCollator(switched)(examples)
    assert int(inputs["position_ids"].min()) == ENCODERS[kind][1]
    ids = torch.as_tensor(examples[3]["input_ids"])[None].expand(2, -1)
    padding = {"attention_mask": torch.ones_like(ids)}
    padding["attention_mask"][1, 30:] = 0
    words = torch.cat([torch.as_tensor(each["input_ids"]) for each in examples])
    labels = torch.where(torch.arange(64) % 9 == 0, words, IGNORED)  # of the tokens themselves, first ones too
    own = zip(examples, labels.split([len(each["input_ids"]) for each in examples]))
    inputs = PaddingFreeCollator(switched)([{**each, "labels": masked.numpy()} for each, masked in own])
    with torch.no_grad():
        expected = torch.cat([plain(torch.as_tensor(each["input_ids"])[None]).logits[0] for each in examples])
        loss = torch.nn.functional.cross_entropy(expected, labels)
        assert mean_loss(switched, [inputs]) == pytest.approx(float(loss), rel=1e-6)
        found = switched(**{name: value for name, value in inputs.items() if name != "labels"}).logits[0]
        padded = [model(ids, **padding).logits for model in (switched, plain)]
    most = 1e-6 * float(expected.abs().max())
    assert float((found - expected).abs().max()) <= most and float((padded[0] - padded[1]).abs().max()) <= most
    with refused("attends to both sides.*omit slots"):
        PaddingFreeCollator(switched, slots=80)


def test_a_model_that_gives_no_words_is_refused_and_stays_as_it_was():
    model = transformers.BertForTokenClassification(transformers.BertConfig(**SIZE, num_labels=3))
    with refused("3 logits per token for 50 words"):
        use_padding_free(model, longest=16, row=32)
    assert attention_of(model) == "sdpa" and choice_of(model).boundaries == "position_ids"


def test_ctrl_c_leaves_the_model_as_it_was(monkeypatch):
    def stopped(model, **_):
        raise KeyboardInterrupt

    model = a_model()
    monkeypatch.setattr("padding_free.choice.check_no_leak", stopped)
    with pytest.raises(KeyboardInterrupt):
        use_padding_free(model)
    assert attention_of(model) == "sdpa" and choice_of(model).boundaries == "position_ids" and model.config.use_cache


def given_positions(model, lengths=(9, 5, 12)):
    inputs = PaddingFreeCollator(model)(some_examples(5, lengths))
    return {name: inputs[name] for name in ("input_ids", "position_ids")}, inputs


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_positions_that_begin_again_beside_a_cache_are_refused_and_a_mask_of_ones_is_removed(kind):
    """The library would look for no boundaries then, and let examples see each other."""
    model = a_model(kind)
    use_padding_free(model)
    positions, inputs = given_positions(model)
    ones = torch.ones_like(positions["input_ids"])
    with torch.no_grad():
        for before in (False, True):  # what a call before found right says nothing about this one
            expected = model(**positions).logits if before else None
            with refused("position_ids restart.*use_cache=False"):
                model(**positions, use_cache=True)
        assert torch.equal(model(**positions, attention_mask=ones).logits, expected)
    other = torch.tensor([0, 8, 14, 26], dtype=torch.int32)
    with refused("cu_seq_lens_q", "position_ids"):
        model(**{**inputs, "cu_seq_lens_q": other, "cu_seq_lens_k": other}, use_cache=False)


def test_plain_batches_and_generation_are_not_taken_for_rows_of_examples():
    """Padding on either side, positions as generation counts them, a cache, one new token."""
    switched, plain = a_model(), a_model()
    use_padding_free(switched)
    ids = torch.arange(3, 27).view(2, 12)
    for mask in (torch.tensor([[1] * 12, [1] * 7 + [0] * 5]), torch.tensor([[1] * 12, [0] * 5 + [1] * 7])):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        for use_cache in (False, True):
            given = {"attention_mask": mask, "position_ids": positions, "use_cache": use_cache}
            found, expected = (model(ids, **given).logits[mask.bool()] for model in (switched, plain))
            assert torch.allclose(found, expected, rtol=0, atol=1e-9 * float(expected.detach().abs().max()))
    generated = [
        model.generate(ids[:, :5], max_new_tokens=6, do_sample=False, use_cache=True) for model in (switched, plain)
    ]
    assert torch.equal(*generated)


def test_an_autocast_inside_forward_is_measured_in_its_type():
    """Accelerate wraps `forward` after a bf16 evaluation: our attention is chosen, and no dense mask."""
    model = a_model(dtype=torch.float32)
    inner = model.forward

    def forward(*args, **keywords):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = inner(*args, **keywords)
        output.logits = output.logits.float()
        return output

    model.forward = forward
    assert use_padding_free(model) == ("padding_free", "cu_seq_lens", False)


def test_a_dense_mask_is_taken_where_it_is_asked_for_and_told_with_its_memory(caplog):
    """GPT-J's code takes no attention from Transformers: only a mask keeps its examples apart."""
    config = transformers.GPTJConfig(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64, rotary_dim=4, bos_token_id=1, eos_token_id=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with refused("MiB", "64 tokens", 'attention="eager"'):
        use_padding_free(model, longest=64)
    with caplog.at_level(logging.WARNING, logger="ipu_packed_bert"):
        assert use_padding_free(model, longest=64, attention="eager") == use_padding_free(model, longest=64)
    assert "mask of all tokens by all tokens" in caplog.text and "MiB a layer in a row of 64 tokens" in caplog.text
    assert _dense_mask_bytes(model, 1000) == 1000 * 1000 * 4 * (1 + 2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="ipu_packed_bert"):
        use_padding_free(a_model())
    assert not caplog.text


def test_the_saved_configuration_keeps_its_cache_and_calls_have_none(tmp_path):
    """Unless they ask for it, as `generate` does."""
    model = a_model()
    use_padding_free(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True
    positions, _ = given_positions(model)
    assert model(**positions).past_key_values is None
    assert model(positions["input_ids"], use_cache=True).past_key_values is not None


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="its configuration was another one")
def test_positions_of_several_axes_that_begin_anew_need_boundaries():
    """M-RoPE of Qwen2-VL: nothing derives boundaries from them, with or without a mask of ones."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**SIZE, "num_key_value_heads": 1, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 1}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    words = dict(zip(["vision_start", "vision_end", "vision", "image", "video"], range(45, 50)))
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, **{f"{name}_token_id": word for name, word in words.items()}
    )
    model = transformers.Qwen2VLForConditionalGeneration(config).double().eval()
    use_padding_free(model, longest=16, row=32)
    ids, boundaries = torch.arange(1, 9)[None], torch.tensor([0, 3, 8], dtype=torch.int32)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(3, 1, -1)
    for more in ({}, {"attention_mask": torch.ones_like(ids)}):
        with refused("position_ids", "3, 1, 8", "cu_seq_lens_q"):
            model(ids, position_ids=axes, **more)
    with torch.no_grad():
        found = model(ids, position_ids=axes, cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries).logits[:, 3:]
        padded = model(ids.expand(2, -1), attention_mask=torch.tensor([[1] * 8, [1] * 3 + [0] * 5])).logits
        assert torch.allclose(found, model(ids[:, 3:]).logits, rtol=0, atol=1e-9)
        assert torch.allclose(padded[1, :3], padded[0, :3], rtol=0, atol=1e-9)
    heads = torch.zeros(1, 2, 8, 4)
    with refused("position_ids", "3, 1, 8"):
        _padding_free_attention(torch.nn.Identity(), heads, heads, heads, position_ids=axes)
