"""Families of models: right to 1e-5 or refused.  `docs/families.py` measures all.

These have one of each: windows, chunks, soft caps, sinks, experts, latent keys, learned and rotary positions, no
attention of Transformers, recurrent layers, encoders whose positions begin at 0 and at 2.
"""

import copy
import json

import pytest
import torch

from padding_free import PaddingFreeCollator, choice, use_padding_free
from tests.padding_free_models import families, some_examples, transformers
from tests.refusals import refused
from tests.tiers import sample
from tests.tolerances import relative_error

RIGHT = ["mistral", "llama4_text, chunks", "gpt2", "deepseek_v3", "gpt_oss", "gemma2", "llama", "qwen2, window"]
RIGHT += ["qwen3_moe", "phi", "olmo3", "mixtral", "cohere2", "deepseek_v2", "gpt_neox", "exaone4", "opt"]
RIGHT += ["bert, masked", "roberta, masked", "xlm-roberta, masked"]
REFUSED = ["lfm2", "qwen3_5_text", "bloom", "mamba", "llama, dynamic positions", "llama4_text"]


@pytest.mark.parametrize("family", sample(RIGHT, 6) + sample(REFUSED, 2))
def test_a_family_is_right_or_refused(family):
    if family not in families.families():
        pytest.skip(f"Transformers {transformers.__version__} does not have it")
    found = families.measure(family, ("eager", "padding_free"))
    assert not any(each.wrong(attention) for attention, each in found.items())
    assert found["padding_free"].plain == ("right" if family in RIGHT else "refused")
    assert all(each.why and "\n" not in each.why for each in found.values())


def named(family):
    """A model and its copy that is loaded by the name of our attention."""
    plain = families.build(family)
    config = copy.deepcopy(plain.config)
    config._attn_implementation = "padding_free"
    model = type(plain)(config).eval()
    model.load_state_dict(plain.state_dict())
    return plain, model


# Three axes of positions are made in the model; layers get none; our function is not called, some with a cache only.
UNREACHED = [
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "bloom",
    "openai-gpt",
    "llama4_text",
    "gpt_bigcode",
    "ctrl",
    "mpt",
    "xglm",
]


@pytest.mark.parametrize("family", [*UNREACHED, "llama", "gpt2", "qwen2, window"])
def test_a_family_loaded_by_name_is_right_or_refused(family):
    """Boundaries reach our function in every call of a row, or the call fails."""
    if family not in families.families():
        pytest.skip(f"Transformers {transformers.__version__} does not have it")
    plain, model = named(family)
    examples = [torch.as_tensor(example["input_ids"]) for example in some_examples(0, [3, 5, 7])]
    expected = torch.cat([plain(ids[None]).logits[0] for ids in examples])
    positions = torch.cat([torch.arange(len(ids)) for ids in examples])[None]
    ends = torch.tensor([0, 3, 8, 15], dtype=torch.int32)
    boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    rights = 0
    for inputs in (None, {}, {"use_cache": False}, {**boundaries, "use_cache": False}):
        try:
            if inputs is None:  # a plain batch
                found = model(examples[2][None]).logits[0]
            else:
                found = model(input_ids=torch.cat(examples)[None], position_ids=positions, **inputs).logits[0]
        except (AttributeError, TypeError, ValueError) as error:
            assert "\n" not in str(error)
            continue
        assert relative_error([found.detach()], [expected[-len(found) :].detach()]) <= 1e-5, inputs
        rights += 1
    assert rights == 4 or family in UNREACHED


def test_every_family_that_is_built_is_tiny():
    """Every fifth of them: few parameters, and the vocabulary that the examples are drawn from."""
    built, left_out = 0, []
    for name in list(families.families())[::5]:
        try:
            model = families.build(name)
        except families.LeftOut as error:
            left_out.append(f"{name}: {error}")
            continue
        built += 1
        assert sum(each.numel() for each in model.parameters()) < 100_000, name
        assert model.config.get_text_config().vocab_size == families.VOCABULARY, name
    assert built >= 40 and len(left_out) <= built // 8, left_out


def test_what_is_wrong_without_an_error_is_status_1(monkeypatch, capsys):
    """Without the probe, a hybrid model would be taken."""
    monkeypatch.setattr(choice, "check_no_leak", lambda model, **options: None)
    assert families.main(["lfm2", "llama"]) == 1
    text = capsys.readouterr().out
    assert "| wrong, wrong | " in text and "wrong without an error: 3" in text


def test_the_page_counts_families_of_two_versions(tmp_path, capsys):
    """Families without a model are left out; verdicts of another version stand beside them."""
    kept = tmp_path / "older.json"
    assert families.main(["llama", "rwkv", "bart, masked", "mistral, no window", "--out", str(kept)]) == 0
    printed = capsys.readouterr()
    version = transformers.__version__
    assert f"| {version} " in printed.out and "2 of 3" in printed.out and "- bart, masked: encoder and " in printed.out
    assert printed.out.count("right, right") == 6 and "right, wrong" not in printed.out
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "version": "4.0"}))
    assert families.main(["llama", "--with", str(kept)]) == 0
    text = capsys.readouterr().out
    assert "| 4.0 " in text and "1 of 1" in text and f"ours, {version}" in text and text.count("right, right") == 9


def test_a_mask_of_ones_is_removed_and_one_with_zeros_refused():
    """GPT-2 of Transformers 4.57: the boundaries do not reach the layers, and an all-ones mask hides them."""

    class Dropping(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, attention_mask=None, position_ids=None, **others):
            if attention_mask is None or position_ids is None:
                return super().forward(input_ids, position_ids=position_ids, **others)
            places = self.transformer.wpe
            embedded = self.transformer.wte(input_ids) + places(position_ids)
            embedded = embedded - places(torch.arange(input_ids.shape[1]))[None]
            return super().forward(inputs_embeds=embedded, attention_mask=attention_mask, use_cache=False)

    model = Dropping(families.build("gpt2").config)
    use_padding_free(model)
    inputs = PaddingFreeCollator(model)(some_examples(0, [3, 5]))
    found, ones = model(**inputs).logits, torch.ones_like(inputs["input_ids"])
    few = {name: inputs[name] for name in ("input_ids", "position_ids")}
    for given in (inputs, few):
        assert torch.equal(model(**given, attention_mask=ones).logits, found)
        with refused("attention_mask", "zeros"):
            model(**given, attention_mask=ones.triu(1))
    model(input_ids=few["input_ids"], attention_mask=ones, position_ids=torch.arange(8)[None])
    assert torch.equal(model(**inputs).logits, found)
