"""Families of models: right to 1e-5 or refused.  `docs/families.py` measures all.

These have one of each: windows, chunks, soft caps, sinks, experts, latent keys, learned and rotary positions, no
attention of Transformers, recurrent layers, encoders whose positions begin at 0 and at 2.
"""

import copy

import pytest
import torch

from padding_free import PaddingFreeCollator, use_padding_free
from tests.padding_free_models import families, some_examples, transformers
from tests.refusals import refused
from tests.tiers import sample
from tests.tolerances import relative_error

RIGHT = [
    "mistral",
    "llama4_text, chunks",
    "gpt2",
    "deepseek_v3",
    "gpt_oss",
    "gemma2",
    "llama",
    "qwen2, window",
]
RIGHT += [
    "qwen3_moe",
    "phi",
    "olmo3",
    "mixtral",
    "cohere2",
    "deepseek_v2",
    "gpt_neox",
    "exaone4",
    "opt",
]
RIGHT += ["bert, masked", "roberta, masked", "xlm-roberta, masked"]
REFUSED = ["lfm2", "qwen3_5_text", "bloom", "mamba", "llama, dynamic positions", "llama4_text"]


@pytest.mark.parametrize("family", sample(RIGHT, 4) + sample(REFUSED, 1))
def test_a_family_is_right_or_refused(family):
    if family not in families.families():
        pytest.skip(f"Transformers {transformers.__version__} does not have it")
    measured = families.measure(family, ("eager", "padding_free"))
    for attention, verdict in measured.items():
        assert not verdict.wrong(attention)
        assert verdict.why
        assert "\n" not in verdict.why
    expected = "right" if family in RIGHT else "refused"
    assert measured["padding_free"].plain == expected


# Loaded by name, with a cache or without.
REACHED = ["llama4_text", "gpt_bigcode", "ctrl"]
REACHED += ["llama", "gpt2", "qwen2, window", "bert, masked"]
# Our function is not called, or other layers mix the examples too; positions count through the row, or begin at 2.
UNREACHED = [
    "bloom",
    "openai-gpt",
    "mpt",
    "xglm",
    "lfm2",
    "jamba",
    "falcon_h1",
    "bailing_hybrid",
    "kimi_linear",
]
UNREACHED += ["roberta, masked", "bart", "megatron-bert", "rembert"]


def loaded_by_name(family):
    """Return a plain model, and one with its weights that was loaded with our attention."""
    if family not in families.families():
        pytest.skip(f"Transformers {transformers.__version__} does not have it")
    plain = families.build(family)
    config = copy.deepcopy(plain.config)
    config._attn_implementation = "padding_free"
    model = type(plain)(config).eval()
    model.load_state_dict(plain.state_dict())
    return plain, model


@pytest.mark.parametrize("family", [*REACHED, *UNREACHED])
def test_a_family_loaded_by_name_is_right_or_refused(family):
    """Boundaries reach our function in every call of a row, or the call fails."""
    plain, model = loaded_by_name(family)
    examples = [torch.as_tensor(example["input_ids"]) for example in some_examples(0, [3, 5, 7])]
    with torch.no_grad():
        expected = torch.cat([plain(ids[None]).logits[0] for ids in examples])
    positions = [torch.arange(len(ids)) for ids in examples]
    row = {"input_ids": torch.cat(examples)[None], "position_ids": torch.cat(positions)[None]}
    without_cache = {**row, "use_cache": False}
    ends = torch.tensor([0, 3, 8, 15], dtype=torch.int32)
    with_boundaries = {**without_cache, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    plain_batch = {"input_ids": examples[2][None]}
    rights = 0
    for inputs in (plain_batch, row, without_cache, with_boundaries):
        try:
            with torch.no_grad():
                logits = model(**inputs).logits[0]
        except (AttributeError, TypeError, ValueError) as error:
            assert "\n" not in str(error)
            continue
        right = expected[-len(logits) :]
        assert relative_error([logits], [right]) <= 1e-5, inputs
        rights += 1
    assert rights == 4 if family in REACHED else rights <= 1
    if family in ("llama", "qwen2, window"):  # their third argument is position_ids
        with torch.no_grad():
            positional = model(row["input_ids"], None, row["position_ids"]).logits[0]
        assert relative_error([positional], [expected]) <= 1e-5


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
    use_padding_free(model, longest=16)
    inputs = PaddingFreeCollator(model)(some_examples(0, [3, 5]))
    logits = model(**inputs).logits
    ones = torch.ones_like(inputs["input_ids"])
    few = {name: inputs[name] for name in ("input_ids", "position_ids")}
    for given in (inputs, few):
        assert torch.equal(model(**given, attention_mask=ones).logits, logits)
        with refused("attention_mask", "zeros"):
            model(**given, attention_mask=ones.triu(1))
    model(input_ids=few["input_ids"], attention_mask=ones, position_ids=torch.arange(8)[None])
    assert torch.equal(model(**inputs).logits, logits)
