"""Padding-free batches of causal models: every token's loss is the padded one's, by every way, rank and epoch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence.batching_report import collate
from pack_data.batching.plans import WAYS, BatchOptions
from padding_free import check_no_leak, use_padding_free
from padding_free.collators import PaddingCollator, PaddingFreeCollator, inputs_for
from padding_free.update import accumulate, mean_loss
from tests.padding_free_models import CONFIGS, SIZE, a_model, alone, some_examples, token_losses, transformers
from tests.refusals import refused
from tests.tolerances import relative_error


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_every_token_has_the_loss_of_the_padded_batch(kind, seed, lengths):
    model, examples = a_model(kind, "padding_free"), some_examples(seed, lengths + [3])
    with torch.no_grad():
        free, padded = (
            token_losses(model, PaddingFreeCollator(model)(examples)),
            token_losses(a_model(kind), PaddingCollator()(examples)),
        )
    assert len(free) == len(padded) == sum(lengths) + 3 - len(lengths) - 1
    assert float((free - padded).abs().max()) <= 1e-9 * float(padded.abs().max())


def test_slots_without_a_token_have_the_padding_token():
    model, examples = a_model("llama", "padding_free"), some_examples(4, [3, 2])
    for options, token in (({}, 0), ({"pad_id": 7}, 7)):
        inputs = PaddingFreeCollator(model, slots=8, **options)(examples)
        assert inputs["input_ids"][0, 5:].tolist() == [token] * 3
        assert inputs["labels"][0, 5:].tolist() == [-100] * 3


def test_in_eager_code_up_to_its_float32_softmax():
    model, examples = a_model(attention="eager"), some_examples(4, [9, 2, 12, 5])
    assert use_padding_free(model, attention="eager") == ("eager", "position_ids", False)
    with torch.no_grad():
        free, padded = (
            token_losses(model, PaddingFreeCollator(model)(examples)),
            token_losses(model, PaddingCollator()(examples)),
        )
    assert float((free - padded).abs().max()) <= 1e-5 * float(padded.abs().max())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_gradients_are_those_of_the_padded_batch_also_with_padding_behind_each_example(kind):
    found = []
    for multiple_of, collator in ((1, PaddingFreeCollator), (8, PaddingFreeCollator), (8, PaddingCollator)):
        model = a_model(kind, "padding_free" if collator is PaddingFreeCollator else "sdpa")
        given = () if collator is PaddingCollator else (model,)
        batch = collator(*given, multiple_of=multiple_of)(some_examples(3, [9, 2, 16, 5]))
        assert batch["input_ids"].shape[1] % multiple_of == 0
        accumulate(model, [batch])
        # The gradient of a bias of the keys is zero but for rounding.
        found.append([parameter.grad for parameter in model.parameters() if float(parameter.grad.norm()) > 1e-9])
    for padded in found[1:]:
        assert relative_error(padded, found[0]) <= 1e-9


def test_flash_kernels_get_the_boundaries_and_no_mask():
    model = a_model()
    model.config._attn_implementation = "flash_attention_2"
    inputs = PaddingFreeCollator(model)(some_examples(1, [4, 2, 3]))
    names = "input_ids labels position_ids cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k"
    assert set(inputs) == set(names.split())
    assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 6, 9] and inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 4


@pytest.mark.parametrize("attention", ["sdpa", "padding_free"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_of_one_shape_have_the_same_losses(kind, attention):
    """Padded to 40 slots, with tensors of one row only, as Accelerate can join and cut them."""
    model = a_model(kind, attention)
    if attention == "sdpa":
        use_padding_free(model, attention="sdpa")
    for lengths in ([9, 2, 12, 5], [30, 10], [1]):
        examples = some_examples(4, lengths)
        inputs = PaddingFreeCollator(model, slots=40)(examples)
        assert all(value.shape[0] == 1 and value.shape[-1] == 40 for value in inputs.values())
        with torch.no_grad():
            found, padded = token_losses(model, inputs), token_losses(model, PaddingCollator()(examples))
        assert len(found) == len(padded) == sum(lengths) - len(lengths)
        assert torch.allclose(found, padded, rtol=0, atol=1e-9 * float(padded.abs().max()) if len(padded) else 0)
    with refused("41 tokens", "slots is 40"):
        PaddingFreeCollator(model, slots=40)(some_examples(4, [30, 11]))


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_has_the_same_loss_by_every_way_that_keeps_examples_whole(way):
    """Over an epoch every example is seen once, whatever shares its batch; broken or mixed ones give another loss."""
    model, dataset = a_model(attention="padding_free"), some_examples(7, [9, 4, 12, 5, 2, 7, 11, 3, 6])
    alone = mean_loss(a_model(), [PaddingCollator()([example]) for example in dataset])
    plan = WAYS[way].plan([len(example["input_ids"]) for example in dataset], BatchOptions(2, 12, seed=3))
    batches = [collate(WAYS[way], plan.batch(step, 0), dataset) for step in range(plan.steps)]
    found = mean_loss(model, [inputs_for(model, batch) for batch in batches])
    if way.startswith("FixedLengthPacking"):
        assert abs(found - alone) > 1e-3 * alone
    else:
        assert found == pytest.approx(alone, rel=1e-12)


def test_padding_behind_the_last_example_is_no_part_of_it():
    """Megatron-LM #5541: 13 tokens padded to 16."""
    model, plain = a_model(attention="padding_free"), a_model()
    for lengths in ([13], [5, 13]):
        examples = some_examples(1, lengths)
        inputs = PaddingFreeCollator(model, multiple_of=16)(examples)
        assert inputs["input_ids"].shape[1] == 16 * len(lengths)
        expected = torch.cat([alone(plain, example) for example in examples])
        assert relative_error([token_losses(model, inputs)], [expected]) <= 1e-9


def test_the_loss_of_a_router_is_that_of_the_tokens_and_the_check_sees_padding_in_it():
    """torchtitan #4594: a mixture of experts with 60 % of padding, and without."""
    settings = {"num_key_value_heads": 1, "num_local_experts": 4, "output_router_logits": True}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**SIZE, **settings))
    use_padding_free(model, longest=20, row=40)
    examples = some_examples(0, [20, 2, 3, 5])
    with torch.no_grad():
        free, padded = (
            float(model(**collate(examples)).aux_loss) for collate in (PaddingFreeCollator(model), PaddingCollator())
        )
    assert free == pytest.approx(padded, rel=1e-6)
    with refused("MixtralForCausalLM", "auxiliary loss"):
        check_no_leak(model, longest=20, row=40, collator=PaddingFreeCollator(model, multiple_of=8))
