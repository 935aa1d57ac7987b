"""The network against `transformers`: same names, same weights, same losses and gradients, unpacked and packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ipu_packed_bert.model.hugging_face import bert_settings
from ipu_packed_bert.model.packed import BATCH_FIELDS, PackedBertForPreTraining
from ipu_packed_bert.settings.schema import LossConfig
from tests.packed_examples import lay_out, random_packs, random_sequences, with_scales
from tests.tiny_runs import TINY
from tests.tolerances import assert_same

transformers = pytest.importorskip("transformers", reason="the outside reference: pip install transformers")

SLOTS = 32
LENGTHS = [5, 32, 17, 9, 1, 21, 12, 8]
MODEL = replace(
    TINY,
    vocabulary_size=97,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    intermediate_size=64,
    max_position_embeddings=SLOTS,
)
TIED = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


def reference():
    config = transformers.BertConfig(**{**bert_settings(MODEL), "initializer_range": 0.1}, hidden_act="gelu")
    torch.manual_seed(2)
    return transformers.BertForPreTraining(config).train()


BOTH_HEADS = LossConfig()


def ours(theirs, loss=BOTH_HEADS):
    network = PackedBertForPreTraining(MODEL, loss)
    network.load_state_dict({name: value for name, value in theirs.state_dict().items() if name not in TIED})
    return network


def test_names_and_shapes_are_theirs():
    theirs = reference()
    expected = {name: value.shape for name, value in theirs.named_parameters()}
    actual = {name: value.shape for name, value in ours(theirs).named_parameters()}
    assert {name: shape for name, shape in expected.items() if name not in TIED} == actual
    # Without next sentence prediction: the names of BertForMaskedLM.
    masked = transformers.BertForMaskedLM(theirs.config)
    without = PackedBertForPreTraining(MODEL, LossConfig(next_sentence=False))
    assert {n for n, _ in without.named_parameters()} == {n for n, _ in masked.named_parameters() if n not in TIED}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_are_theirs(dtype):
    theirs = reference().to(dtype)
    rng = np.random.default_rng(4)
    examples = random_sequences(rng, lengths=LENGTHS, vocabulary=MODEL.vocabulary_size)
    unpacked = lay_out([[index] for index in range(len(LENGTHS))], examples, slots=SLOTS, depth=1, predictions=5)

    # Theirs: labels by slot, -100 where nothing is asked; the mean over masked tokens and over sequences.
    labels = np.full((len(LENGTHS), SLOTS), -100, dtype=np.int64)
    for row, example in enumerate(examples):
        labels[row, example.masked_positions] = example.masked_ids
    output = theirs(
        input_ids=torch.from_numpy(unpacked["input_ids"]).long(),
        attention_mask=torch.from_numpy(unpacked["input_mask"]).long(),
        token_type_ids=torch.from_numpy(unpacked["segment_ids"]).long(),
        labels=torch.from_numpy(labels),
        next_sentence_label=torch.from_numpy(unpacked["next_sentence_labels"]).long(),
    )
    output.loss.backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters() if name not in TIED}

    packs = random_packs(rng, LENGTHS, slots=SLOTS, depth=3)
    packed = lay_out(packs, examples, slots=SLOTS, depth=3, predictions=8)
    assert len(packs) < len(LENGTHS)
    scale_type = np.float64 if dtype == torch.float64 else np.float32
    for batch in (unpacked, packed):
        network = ours(theirs).to(dtype)
        scaled = with_scales(batch, micro_batches=1, normalisation="token", dtype=scale_type)
        actual = network(*(torch.from_numpy(scaled[name]) for name in BATCH_FIELDS))
        actual.loss.backward()
        assert actual.loss.item() == pytest.approx(output.loss.item(), rel=1e-5 if dtype == torch.float32 else 1e-12)
        gradients = dict(network.named_parameters())
        names = [name for name in expected if not name.endswith("key.bias")]
        assert_same(
            found=[gradients[name].grad for name in names], expected=[expected[name] for name in names], dtype=dtype
        )
