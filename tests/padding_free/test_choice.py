"""The attention chosen for a model equals plain calls up to rounding, with windows, chunks and soft caps."""

import json
import logging

import numpy as np
import pytest
import torch

from padding_free import PaddingCollator, PaddingFreeCollator, mean_loss, use_padding_free
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
    with_large_weights,
)
from tests.refusals import refused
from tests.tiers import slow

NEWEST = int(transformers.__version__.split(".")[0]) >= 5


def assert_right(switched, plain, allowed):
    """Each token's loss is that of its example alone: padding-free, with positions only, and padded."""
    examples = some_examples(3, [9, 2, 2, 12, 5, 2, 40])
    expected = torch.cat([alone(plain, example) for example in examples])
    free = PaddingFreeCollator(switched)(examples)
    assert "attention_mask" not in free
    batches = [free, PaddingCollator()(examples)]
    if not hasattr(plain.config, "attention_chunk_size"):  # chunks need boundaries
        batches.append({name: free[name] for name in ("input_ids", "labels", "position_ids")})
    for batch in batches:
        with torch.no_grad():
            error = (token_losses(switched, batch) - expected).abs().max()
        assert float(error) <= allowed


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_switched_and_right(kind):
    switched = a_model(kind)
    assert use_padding_free(switched, longest=16) == ("padding_free", "cu_seq_lens", False)
    assert_right(switched, a_model(kind), 1e-12)


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_chunks_and_soft_caps_are_obeyed(kind):
    switched = a_windowed_model(kind)
    use_padding_free(switched, longest=16)
    assert attention_of(switched) == "padding_free"
    assert_right(switched, a_windowed_model(kind), 1e-5)


def test_what_was_chosen_before_stays_where_nothing_else_is_right(monkeypatch):
    """After a refusal, and after Ctrl-C."""

    def stopped(model, **_):
        raise KeyboardInterrupt

    model = a_model()
    use_padding_free(model, longest=16)
    chosen = Choice(attention_of(model), "cu_seq_lens", seq_idx=True)
    choose(model, chosen)
    with refused("nonsense", "padding way"):
        use_padding_free(model, attention="nonsense")
    assert choice_of(model) == chosen
    monkeypatch.setattr("padding_free.choice.check_no_leak", stopped)
    with pytest.raises(KeyboardInterrupt):
        use_padding_free(model, attention="sdpa")
    assert choice_of(model) == chosen and model.config.use_cache


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


USUAL_ENCODERS = {"Bert", "ModernBert", "Roberta"}


def an_encoder(kind):
    settings = {**SIZE, "max_position_embeddings": 80, **ENCODERS[kind][0]}
    special = {"bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**settings, **special)
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
    return with_large_weights(model.double().eval(), 0.1)


@pytest.mark.skipif(not NEWEST, reason="their code took no other attention")
@pytest.mark.parametrize("kind", [kind if kind in USUAL_ENCODERS else slow(kind) for kind in ENCODERS])
def test_encoders_are_right(kind):
    """They attend to both sides; ModernBERT in a window, which the examples exceed; RoBERTa's positions begin at 2."""
    switched = an_encoder(kind)
    plain = an_encoder(kind)
    assert use_padding_free(switched, longest=24, row=40) == ("padding_free", "cu_seq_lens", False)
    # A label of a token itself, of a first one too, in every ninth place of the row.
    examples = examples_of([np.arange(2, 2 + length) % 50 for length in (9, 2, 1, 40, 12)])
    begin = 0
    for example in examples:
        places = np.arange(begin, begin + len(example["input_ids"]))
        example["labels"] = np.where(places % 9 == 0, example["input_ids"], IGNORED)
        begin += len(places)
    inputs = PaddingFreeCollator(switched)(examples)
    assert int(inputs["position_ids"].min()) == ENCODERS[kind][1]
    labels = inputs.pop("labels")
    with torch.no_grad():
        expected = torch.cat([plain(torch.as_tensor(each["input_ids"])[None]).logits[0] for each in examples])
        row = switched(**inputs).logits[0]
        loss = torch.nn.functional.cross_entropy(expected, labels[0])
        assert mean_loss(switched, [{**inputs, "labels": labels}]) == pytest.approx(float(loss), rel=1e-6)
        # A padded batch has the result of the library's attention.
        ids = torch.as_tensor(examples[3]["input_ids"])[None].expand(2, -1)
        mask = torch.ones_like(ids)
        mask[1, 30:] = 0
        padded, of_library = (model(ids, attention_mask=mask).logits for model in (switched, plain))
    largest = float(expected.abs().max())
    assert torch.allclose(row, expected, rtol=0, atol=1e-6 * largest)
    assert torch.allclose(padded, of_library, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_positions_that_begin_again_beside_a_cache_are_refused_and_a_mask_of_ones_is_removed(kind):
    """The library would look for no boundaries then, and let examples see each other."""
    model = a_model(kind)
    use_padding_free(model, longest=16)
    inputs = PaddingFreeCollator(model)(some_examples(5, (9, 5, 12)))
    positions = {name: inputs[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        expected = model(**positions).logits
        with refused("position_ids restart.*use_cache=False"):
            model(**positions, use_cache=True)
        ones = torch.ones_like(positions["input_ids"])
        assert torch.equal(model(**positions, attention_mask=ones).logits, expected)


def test_plain_batches_and_generation_are_not_taken_for_rows_of_examples():
    """Padding on either side, positions as generation counts them, a cache, one new token."""
    models = [a_model(), a_model()]
    use_padding_free(models[0], longest=16)
    ids = torch.arange(3, 27).view(2, 12)
    padded = torch.ones_like(ids)
    padded[1, 7:] = 0
    for mask in (padded, padded.flip(1)):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        for use_cache in (False, True):
            given = {"attention_mask": mask, "position_ids": positions, "use_cache": use_cache}
            with torch.no_grad():
                logits, expected = (model(ids, **given).logits[mask.bool()] for model in models)
            largest = float(expected.abs().max())
            assert torch.allclose(logits, expected, rtol=0, atol=1e-9 * largest)
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    generated = [model.generate(ids[:, :5], **options) for model in models]
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
    assert use_padding_free(model, longest=16) == ("padding_free", "cu_seq_lens", False)


def test_a_dense_mask_is_taken_where_it_is_asked_for_and_told_with_its_memory(caplog):
    """GPT-J's code takes no attention from Transformers: only a mask keeps its examples apart."""
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4}
    config = transformers.GPTJConfig(**sizes, bos_token_id=1, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with refused("MiB", "512 tokens", 'attention="eager"'):
        use_padding_free(model, longest=16, row=512)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="padding_free"):
        assert use_padding_free(a_model(), longest=16).attention == "padding_free"
        assert not caplog.text
        for options in ({"attention": "eager"}, {}):
            use_padding_free(model, longest=16, row=512, **options)
    # A mask and the scores of two heads, in float32: 512 * 512 * 4 * 3 bytes.
    assert "3 MiB a layer in a row of 512 tokens" in caplog.text


def test_the_saved_configuration_keeps_its_cache_and_calls_have_none(tmp_path):
    """Unless they ask for it, as `generate` does."""
    model = a_model()
    use_padding_free(model, longest=16)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True
    ids = torch.arange(1, 9)[None]
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None


@pytest.mark.skipif(not NEWEST, reason="its configuration was another one")
@pytest.mark.parametrize("is_switched", [True, False])
def test_positions_of_several_axes_that_begin_anew_are_boundaries(is_switched):
    """M-RoPE of Qwen2-VL, switched or loaded by name: three axes or one, with or without a mask of ones."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**SIZE, "num_key_value_heads": 1, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 1}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    words = dict(zip(["vision_start", "vision_end", "vision", "image", "video"], range(45, 50)))
    tokens = {f"{name}_token_id": word for name, word in words.items()}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    if not is_switched:
        for part in (config, config.text_config, config.vision_config):
            part._attn_implementation = "padding_free"
    model = with_large_weights(transformers.Qwen2VLForConditionalGeneration(config).double().eval())
    if is_switched:
        use_padding_free(model, longest=16, row=32)
    ids = torch.arange(1, 9)[None]
    boundaries = torch.tensor([0, 3, 8], dtype=torch.int32)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(3, 1, -1)
    stated = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    with torch.no_grad():
        second = model(ids[:, 3:]).logits
        for more in (stated, {}, {"attention_mask": torch.ones_like(ids)}):
            for positions in (axes, axes[0]):
                row = model(ids, position_ids=positions, **more).logits
                assert torch.allclose(row[:, 3:], second, rtol=0, atol=1e-9)
        with refused("position_ids restart in a batch of several rows"):
            model(ids.expand(2, -1), position_ids=axes.expand(3, 2, -1))
        mask = torch.ones(2, 8, dtype=torch.long)
        mask[1, 3:] = 0
        whole, padded = model(ids.expand(2, -1), attention_mask=mask).logits
        assert torch.allclose(padded[:3], whole[:3], rtol=0, atol=1e-9)
