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
from tests.padding_free_models import CONFIGS, SIZE, a_model, some_examples, token_losses, transformers
from tests.refusals import refused
from tests.tolerances import relative_error


def assert_padded_losses(model, padded_model, examples, allowed=1e-9, **options):
    """Each predicted token has the loss of the padded batch; return the inputs of the padding-free batch."""
    inputs = PaddingFreeCollator(model, **options)(examples)
    with torch.no_grad():
        free = token_losses(model, inputs)
        padded = token_losses(padded_model, PaddingCollator()(examples))
    predicted = sum(len(example["input_ids"]) - 1 for example in examples)
    assert len(free) == len(padded) == predicted
    if predicted:
        error = (free - padded).abs().max()
        assert error <= allowed * padded.abs().max()
    return inputs


SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=5)
MULTIPLES = st.sampled_from([1, 1, 8, 16])


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=8)
@given(seed=SEEDS, lengths=LENGTHS, multiple_of=MULTIPLES)
def test_every_token_has_the_loss_of_the_padded_batch(kind, seed, lengths, multiple_of):
    """Also with padding behind each example, which is no part of it (Megatron-LM #5541)."""
    model = a_model(kind, "padding_free")
    examples = some_examples(seed, [*lengths, 3])
    inputs = assert_padded_losses(model, a_model(kind), examples, multiple_of=multiple_of)
    assert inputs["input_ids"].shape[1] % multiple_of == 0


def test_in_eager_code_up_to_its_float32_softmax():
    model = a_model(attention="eager")
    assert use_padding_free(model, attention="eager", longest=16) == ("eager", "position_ids", False)
    assert_padded_losses(model, model, some_examples(4, [9, 2, 12, 5]), allowed=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "padding_free"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_of_one_shape_have_the_same_losses(kind, attention):
    """Padded to 40 slots, with tensors of one row only, as Accelerate can join and cut them."""
    model = a_model(kind, attention)
    if attention == "sdpa":
        use_padding_free(model, attention="sdpa", longest=16)
    for lengths in ([9, 2, 12, 5], [30, 10], [1]):
        inputs = assert_padded_losses(model, model, some_examples(4, lengths), slots=40, pad_id=7)
        for value in inputs.values():
            assert len(value) == 1
            assert value.shape[-1] == 40
        tokens = sum(lengths)
        assert (inputs["input_ids"][0, tokens:] == 7).all()
        assert (inputs["labels"][0, tokens:] == -100).all()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_gradients_are_those_of_the_padded_batch_also_with_padding_behind_each_example(kind):
    gradients = []
    for multiple_of in (1, 8, 0):
        model = a_model(kind, "padding_free" if multiple_of else "sdpa")
        collator = PaddingFreeCollator(model, multiple_of=multiple_of) if multiple_of else PaddingCollator()
        batch = collator(some_examples(3, [9, 2, 16, 5]))
        accumulate(model, [batch])
        of_weights = [weight.grad for weight in model.parameters()]
        # The gradient of a bias of the keys is zero but for rounding.
        gradients.append([gradient for gradient in of_weights if gradient.norm() > 1e-9])
    for padding_free in gradients[:2]:
        assert relative_error(padding_free, gradients[2]) <= 1e-9


def test_flash_kernels_get_the_boundaries_and_no_mask():
    model = a_model()
    model.config._attn_implementation = "flash_attention_2"
    inputs = PaddingFreeCollator(model)(some_examples(1, [4, 2, 3]))
    names = "input_ids labels position_ids cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k"
    assert set(inputs) == set(names.split())
    boundaries = inputs["cu_seq_lens_q"]
    assert boundaries.tolist() == [0, 4, 6, 9]
    assert boundaries.dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 4


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_has_the_same_loss_by_every_way_that_keeps_examples_whole(way):
    """Over an epoch every example is seen once, whatever shares its batch; broken or mixed ones give another loss."""
    model = a_model(attention="padding_free")
    dataset = some_examples(7, [9, 4, 12, 5, 2, 7, 11, 3, 6])
    single = [PaddingCollator()([example]) for example in dataset]
    alone = mean_loss(a_model(), single)
    lengths = [len(example["input_ids"]) for example in dataset]
    plan = WAYS[way].plan(lengths, BatchOptions(2, 12, seed=3))
    batches = []
    for step in range(plan.steps):
        batch = collate(WAYS[way], plan.batch(step, 0), dataset)
        batches.append(inputs_for(model, batch))
    epoch = mean_loss(model, batches)
    if way.startswith("FixedLengthPacking"):
        assert abs(epoch - alone) > 1e-3 * alone
    else:
        assert epoch == pytest.approx(alone, rel=1e-12)


def test_the_loss_of_a_router_is_that_of_the_tokens_and_the_check_sees_padding_in_it():
    """torchtitan #4594: a mixture of experts with 60 % of padding, and without."""
    settings = {"num_key_value_heads": 1, "num_local_experts": 4, "output_router_logits": True}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**SIZE, **settings))
    use_padding_free(model, longest=20, row=40)
    examples = some_examples(0, [20, 2, 3, 5])
    with torch.no_grad():
        free = model(**PaddingFreeCollator(model)(examples)).aux_loss
        padded = model(**PaddingCollator()(examples)).aux_loss
    assert float(free) == pytest.approx(float(padded), rel=1e-6)
    with refused("MixtralForCausalLM", "auxiliary loss"):
        check_no_leak(model, longest=20, row=40, collator=PaddingFreeCollator(model, multiple_of=8))
